"""Calls that are refused before any work, and what the header says of disk and memory."""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ptqpipe.calibration import pairs
from ptqpipe.cli import main
from ptqpipe.conversion.transform.transformation import Transformation
from ptqpipe.conversion.unit_job import QuantizeUnit
from ptqpipe.errors import OutputError, UsageError
from ptqpipe.models.source import Source
from ptqpipe.pipeline import check_stages, command as stage, data_stages, disk_space, output_stages
from ptqpipe.pipeline.data_stages import pair_samples
from ptqpipe.pipeline.prepare_stages import prepare
from ptqpipe.pipeline.stages import steps_of
from ptqpipe.pipeline.tune import backwards, layer_codes
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions
from tests import tiny
from tests.pipeline.runs import LENGTH, ONE, made, work_of


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n", b'{"input_ids": [3]}\n'])
def test_a_text_to_measure_on_that_cannot_be_read_is_refused_before_any_work(
    content: bytes, model: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    done = CliRunner().invoke(main, [*map(str, ("convert", model, "-o", tmp_path / "out", "--eval", bad))])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "bad.jsonl" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bad.jsonl"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--untie is for the rotations that --quality best learns from data; add --data FILE, or --data self"),
        (("--data", "TEXT"), "and nvfp4 has none; leave --untie out"),
        (
            ("--data", "TEXT", "--format", "fp8", "--quality", "good"),
            "with --quality good has none; leave --untie out",
        ),
        (("--data", "TEXT", "--budget", "6.5bits"), "and --budget 6.5bits has none; leave --untie out"),
    ],
)
def test_a_head_stays_the_embedding_where_nothing_is_rotated(
    words: tuple[str, ...], said: str, model: Path, text: Path, tmp_path: Path
) -> None:
    windows = ["--samples", "8", "--seqlen", str(LENGTH)] if "TEXT" in words else []
    given = [*windows, *(str(text) if word == "TEXT" else word for word in words)]
    done = CliRunner().invoke(main, ["convert", str(model), "-o", str(tmp_path / "out"), "--untie", *given])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvfp4_w4a4", "mxfp4", "nvfp4"])
def test_no_more_codes_lie_beside_the_output_than_the_header_says_and_no_copy_of_the_model(
    scheme: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at whenever a stage ends, a component has its factors, a layer its gradients or codes, and a unit is
    written. No file is a copy of the model: none is larger than the output, but for what the reverse pass keeps, where
    a model is this small.
    """
    seen: list[dict[str, int]] = []

    def looking(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made_so_far = real(*args, **kwargs)
            files: dict[str, int] = {}
            for folder, _, names in os.walk(tmp_path):  # which ignores what another thread has deleted
                for path in (Path(folder, name) for name in names):
                    with suppress(FileNotFoundError):
                        files[str(path.relative_to(tmp_path))] = path.stat().st_size
            seen.append(files)
            return made_so_far

        return call

    looked_at = [(data_stages, name) for name in ("generate", "calibrate", "find_factors")]
    looked_at += [(output_stages, "tune"), (check_stages, "verify")]
    inside = ((Transformation, "fold"), (QuantizeUnit, "run"), (layer_codes, "follow"), (backwards, "write_tensors"))
    for where, name in (*looked_at, *inside):
        monkeypatch.setattr(where, name, looking(getattr(where, name)))
    said: list[str] = []
    work = PipelineOptions(data=("self",), samples=8, seqlen=LENGTH)
    run = prepare(model, RecipeOptions(scheme), None, tmp_path / "out", work, "new", ONE)
    done = stage.run(run, say=said.append)
    assert any(
        line.startswith("  disk: at most ") and line.endswith(" of codes, until they are in the output")
        for line in said
    )
    peaks = [re.search(r"^\[(\d)/\d\] .* s, peak [\d.]+ [MG]iB$", line) for line in said]
    assert [peak[1] for peak in peaks if peak is not None] == [str(n + 1) for n in range(len(steps_of(run)))]
    output = sum(path.stat().st_size for path in done.out.iterdir())
    assert len(seen) > 10
    codes = [sum(size for name, size in files.items() if name.startswith(".out.stages/codes/")) for files in seen]
    assert run.codes_bytes / 8 < max(codes) <= run.codes_bytes
    small = ("/gradients/", "/slopes/", "pairs.safetensors", "ptqpipe-folding.json", "rotations")
    copies = [size for files in seen for name, size in files.items() if not any(part in name for part in small)]
    assert max(copies) <= output


@pytest.mark.parametrize(
    ("numbers", "samples", "wanted"),
    [(1 << 30, 128, 128), (1 << 30, 40, 40), (1 << 21, 128, 64), (1, 128, 32), (1, 20, 20)],
    ids=["all are kept", "of few", "some are kept", "the least are kept", "of fewer"],
)
def test_rotations_are_learned_from_as_many_rows_as_have_the_tokens_that_are_kept(
    numbers: int, samples: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer whose inputs have 1,024 numbers a token together, and as many are gradients; rows of 16 tokens."""
    monkeypatch.setattr(pairs, "NUMBERS", numbers)
    tiny.save(tmp_path / "model", tiny.llama(layers=1))
    with Source.open(tmp_path / "model") as source:
        assert pair_samples(source, samples=samples, seqlen=16) == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--quality best", "--quality best says how much is computed with data; add --data"),
        ("--formats nvfp4,fp8", "add --budget, or give one --format"),
        ("--samples 8", "--samples 8 says how --data is read; add --data FILE"),
        ("--seqlen 8 --eval TEXT", "--seqlen 8 says how --data is read"),
        ("--budget 5bits --format nvfp4", "--budget chooses the formats, and --format does; give one of them"),
        ("--budget 5", "--budget 5 is a number without a unit; write 5bits"),
        ("--budget 1bits", "--budget 1bits is too small; the smallest possible is"),
        ("--data none.txt", "none.txt does not exist"),
        ("--data EMPTY", "is a folder without .txt, .jsonl, .ndjson, .jsonlines"),
        ("--data self --data TEXT --data self=2", "--data has self twice; give it once, self=2 for twice its share"),
        (
            "--data self --data TEXT --text-field text",
            "--text-field text is not in the rows that --data self generates",
        ),
        ("--data self --data none.txt", "none.txt does not exist"),
        ("--data TEXT --damping 0.1", "--damping is decided by --quality"),
        ("--data TEXT --stats s", "--stats is for a conversion alone"),
        ("--eval none.txt", "none.txt does not exist; give --eval a .txt"),
        ("--eval EMPTY", "is a folder without .txt, .jsonl, .ndjson, .jsonlines"),
        ("--reader vllm --format mxfp4a16", "vllm does not run mxfp4a16; it runs nvfp4, nvfp4_w4a4, mxfp4,"),
        ("--reader sglang --format mxfp8 --data TEXT", "sglang does not run mxfp8"),
        ("--reader trtllm --format nvfp4_w4a4 --container compressed_tensors", "contradicts --reader trtllm"),
        ("--reader sglang --budget 5bits --formats nvfp4,mxfp4", "sglang does not run mxfp4"),
    ],
)
def test_wrong_calls_get_one_line_before_any_work(
    words: str, message: str, model: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    given = [str({"TEXT": text, "EMPTY": tmp_path / "empty"}.get(word, word)) for word in words.split()]
    done = CliRunner().invoke(main, ["convert", str(model), *given, "-o", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert " -> " not in done.output, "a header that says what will be done"
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}


def test_a_disk_that_is_too_small_is_found_before_any_work(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda place: usage)
    with pytest.raises(OutputError, match="has 100 kB free, the output and its codes need"):
        made(model, tmp_path / "out", work_of(text), "nvfp4_w4a4")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_stages_in_the_model_or_the_output_is_refused_before_any_work(
    model: Path, text: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(model, source)
    before = sorted(tmp_path.rglob("*"))
    for kept in (tmp_path / "out", tmp_path / "out" / "kept", tmp_path, source / "kept"):
        with pytest.raises(UsageError, match="overlap; choose another work_dir"):
            made(source, tmp_path / "out", work_of(text, quality="fast", work_dir=str(kept)))
    with pytest.raises(UsageError, match="overlap; choose another out"):
        made(source, source / "out", PipelineOptions(budget="6.5bits"))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_by_a_name_that_leads_up_is_what_is_verified_and_measured(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made(model, Path("absent") / ".." / ".." / "there", PipelineOptions(eval=(str(text),)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there", "there.eval.json"]


@pytest.mark.parametrize("more", [(), ("--eval", "text.jsonl")])
@pytest.mark.parametrize("out", [".", "..", "../here"])
def test_the_working_folder_is_not_replaced(
    out: str, more: tuple[str, ...], model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative names, of texts and of the output itself, would lead nowhere in the middle of the run, and in the shell
    after it."""
    (tmp_path / "here").mkdir()
    shutil.copy(text, tmp_path / "here" / "text.jsonl")
    if not more:
        (tmp_path / "here" / "text.jsonl").unlink()
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(main, ["convert", str(model), "-o", out, *more, "--overwrite"])
    assert done.exit_code == 2, done.output
    assert "is the working folder or holds it" in done.output
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "6.5bits", "--kv-cache", "fp8"), "--kv-cache needs statistics of a text; add --data FILE"),
        (("--eval", "TEXT", "--kv-cache", "fp8"), "--kv-cache needs statistics of a text; add --data FILE"),
        (("--budget", "6.5bits", "--bias-correction"), "--bias-correction needs statistics of a text; add --data"),
        (("--data", "TEXT", "--quality", "fast", "--rotate", "down_proj:32"), "--quality fast weights scales by"),
        (
            ("--data", "TEXT", "--quality", "fast", "--rotate", "down_proj:32", "--budget", "6.5bits"),
            "--quality fast weights scales by",
        ),
    ],
)
def test_what_needs_moments_that_no_stage_collects_is_refused_before_any_work(
    words: tuple[str, ...], said: str, model: Path, text: Path, tmp_path: Path
) -> None:
    given = [str(text) if word == "TEXT" else word for word in words]
    done = CliRunner().invoke(main, ["convert", str(model), "-o", str(tmp_path / "out"), *given])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert f"Error: {said}" in done.stderr
    assert not any(tmp_path.iterdir())
