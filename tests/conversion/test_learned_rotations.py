"""transform --learn end to end: the same logits, what is refused before anything is learned, and killed runs."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.cli import main
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform import learn as learning
from ptqpipe.conversion.transform.command import transform
from ptqpipe.conversion.transform.factors import find_factors
from ptqpipe.errors import CheckpointError, NumericsError, OutputError, OutputExists, UsageError
from ptqpipe.models.folded import encoded
from ptqpipe.models.source import Source
from ptqpipe.quantization.transforms import learn, transform_names
from ptqpipe.run.machine import Machine
from tests import tiny
from tests.calibration.models import make_windows, write_windows
from tests.conversion.test_transform import check_same_logits, run
from tests.quantization.transforms.models import make_model, make_statistics, token_ids

pytest.importorskip("transformers")
OPTIONS = TransformOptions("rotate", learn=4, format="fp8")


def make_pairs(model: Path, out: Path) -> Path:
    """Statistics with pairs of inputs and gradients at them, as calibration collects them."""
    rows = write_windows(out.with_name("rows.jsonl"), make_windows(samples=60))
    options = CalibrateOptions(samples=60, seqlen=24, moments=("diagonal", "pairs"), holdout=0)
    calibrate(model, [str(rows)], out, options=options)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "apply"),
    [
        *((kind, "rotate") for kind in ("llama", "llama_bias", "qwen2", "qwen3", "mixtral", "qwen3_moe")),
        ("llama_tied", "rotate"),
        ("gpt2", "rotate_values"),
        ("gemma2", "rotate_values"),
    ],
)
def test_learned_rotations_keep_the_logits(tmp_path: Path, kind: str, apply: str) -> None:
    model, ids = make_model(tmp_path / "model", kind), token_ids()
    stats = make_pairs(model, tmp_path / "stats")
    options = TransformOptions(apply, rotation_size=32, learn=12, untie=kind == "llama_tied", format="nvfp4_w4a4")
    done = run(model, tmp_path / "out", options, stats)
    learned = done.record["learned"]
    assert learned["steps"] == 12
    assert {one["transform"] for one in learned["rotations"]} >= {"rotate_values"}
    assert sum(one["error"] for one in learned["rotations"]) < sum(one["plain_error"] for one in learned["rotations"])
    check_same_logits(model, tmp_path / "out", ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "apply"),
    [
        *((kind, "rotate") for kind in ("llama", "llama_bias", "llama_heads_of_24", "qwen3", "mixtral", "qwen3_moe")),
        ("llama_tied", "rotate"),
        ("gpt2", "rotate_values"),
    ],
)
def test_a_folder_of_matrices_is_the_model_with_them_folded_in(tmp_path: Path, kind: str, apply: str) -> None:
    """Reading it gives the bytes of the written checkpoint, whatever part is read; embeddings and head, which keep
    their dtype, are its numbers rounded once."""
    model = make_model(tmp_path / "model", kind, dtype=torch.bfloat16)
    stats = make_pairs(model, tmp_path / "stats")
    options = TransformOptions(
        apply, rotation_size=32, learn=12, dtype="fp32", format="fp8", untie=kind == "llama_tied"
    )
    run(model, tmp_path / "out", options, stats)
    found = find_factors(model, tmp_path / "matrices", stats=stats, options=options)
    assert {one["transform"] for one in found.content["foldings"]} == set(transform_names(apply))
    with Source.open(tmp_path / "matrices") as folded, Source.open(tmp_path / "out") as written:
        ours, theirs = folded.reader, written.reader
        assert set(ours.entries) == set(theirs.entries)
        assert ours.config == {**theirs.config, "dtype": "bfloat16"}
        rounded = [name for name, entry in ours.entries.items() if entry.dtype != theirs.entries[name].dtype]
        assert len(rounded) == (0 if kind == "gpt2" else 2)
        for name, entry in ours.entries.items():
            whole = ours.read(name)
            assert torch.equal(whole, theirs.read(name).to(whole.dtype)), name
            raw = ours.read_bytes(name, start=0, stop=entry.nbytes)
            for start, stop in ((0, 3), (entry.nbytes // 3, entry.nbytes // 2 + 5), (entry.nbytes - 7, entry.nbytes)):
                assert ours.read_bytes(name, start=start, stop=stop) == raw[start:stop]


@pytest.mark.slow
def test_matrices_of_another_model_and_damaged_ones_are_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    model, stats = llama
    options = replace(OPTIONS, dtype="fp32", learn=12)
    find_factors(model, tmp_path / "matrices", stats=stats, options=options)
    file = tmp_path / "matrices" / "ptqpipe-folding.json"
    content = json.loads(file.read_text())
    stream = next(one for one in content["foldings"] if one["transform"] == "rotate_residual")
    for wrong, message in (
        ({"matrices": encoded(torch.zeros(4, dtype=torch.float64))}, "matrices of the residual stream are damaged"),
        ({"matrices": stream["matrices"].replace("A", "B")}, "matrices of the residual stream are not"),
        ({"block": 7}, "of a place that"),
        ({"edge": "model.layers.9.value"}, "of a place that"),
    ):
        others = [one for one in content["foldings"] if one is not stream]
        file.write_text(json.dumps({**content, "foldings": [{**stream, **wrong}, *others]}))
        with pytest.raises(CheckpointError, match=message):
            Source.open(tmp_path / "matrices")


@pytest.mark.slow
def test_a_head_that_is_the_embedding_keeps_its_stream_unless_it_becomes_a_tensor_of_its_own(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama_tied")
    options = replace(OPTIONS, dtype="fp32")
    stats = make_pairs(model, tmp_path / "stats")
    with pytest.raises(UsageError, match="the output head is tied to the embedding; untie=True stores"):
        find_factors(model, tmp_path / "matrices", stats=stats, options=options)


@pytest.mark.slow
def test_rotations_are_learned_from_pairs_alone(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    options = TransformOptions("rotate", rotation_size=32, learn=2, format="fp8")
    stats = make_statistics(model, tmp_path / "moments", token_ids())
    with pytest.raises(UsageError, match=r"no pairs of .*moments=.diagonal,pairs"):
        transform(model, tmp_path / "out", stats=stats, options=options)
    stats = make_pairs(model, tmp_path / "stats")
    file = stats / "model.layers.1.pairs.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.pair_gradients"][5, 3] = float("nan")
    save_file(tensors, file)
    content = json.loads((stats / "stats.json").read_text())
    with pytest.raises(CheckpointError, match=r"pairs\.safetensors' is damaged"):
        transform(model, tmp_path / "out", stats=stats, options=options)
    (stats / "stats.json").write_text(json.dumps({**content, "files": {}}))
    with pytest.raises(NumericsError, match=r"NaN or inf for 'model\.layers\.1\.self_attn\.o_proj'"):
        transform(model, tmp_path / "other", stats=stats, options=options)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and statistics with pairs."""
    folder = tmp_path_factory.mktemp("llama")
    model = make_model(folder / "model", "llama")
    return model, make_pairs(model, folder / "stats")


def no_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("learned although the output may not be written")

    monkeypatch.setattr(learning, "learn", refuse)


def test_nothing_is_learned_for_an_output_that_may_not_be_written(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stats = llama
    no_learning(monkeypatch)
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputExists, match="exists and is not empty"):
        transform(model, out, stats=stats, options=OPTIONS)
    with pytest.raises(OutputError, match="has no unfinished run"):
        transform(model, out, stats=stats, options=OPTIONS, mode="resume")
    with pytest.raises(OutputExists, match=r"has 'notes\.txt'"):
        transform(model, out, stats=stats, options=OPTIONS, mode="overwrite")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match="free some space"):
        transform(model, tmp_path / "full", stats=stats, options=OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_memory_that_does_not_hold_the_pairs_is_refused_before_anything_is_written(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stats = llama
    no_learning(monkeypatch)
    monkeypatch.setattr(learning, "BATCH", 1 << 20)
    with pytest.raises(
        UsageError, match=r"max_memory=.1GiB. is too small for the pairs.*give max_memory=.\d+"
    ) as caught:
        transform(model, tmp_path / "out", stats=stats, options=OPTIONS, machine=Machine(memory_bytes=1 << 30))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from ptqpipe.conversion.transform import learn as learning
from ptqpipe.conversion.transform.factors import find_factors
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.command import transform
real, calls = learning.learn, []
def learn(*args, **options):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **options)
learning.learn = learn
transform(sys.argv[1], Path(sys.argv[3]), stats=Path(sys.argv[2]),
          options=TransformOptions("rotate", learn=4, format="fp8"))
"""


@pytest.mark.usefixtures("forks")
def test_a_killed_run_keeps_what_it_has_learned_and_ends_with_the_same_bytes(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual stream and the values of the first of two layers are learned when it is killed."""
    model, stats = llama
    want = tiny.bytes_of(run(model, tmp_path / "whole", OPTIONS, stats).out)
    out = tmp_path / "out"
    died = subprocess.run([sys.executable, "-c", KILLED, *map(str, (model, stats, out))], timeout=200, check=False)
    assert died.returncode == -9
    assert not out.exists()
    for other in (replace(OPTIONS, learn=5), replace(OPTIONS, rotation_size=16)):
        with pytest.raises(OutputError, match="was started by another run: options changed"):
            transform(model, out, stats=stats, options=other, mode="resume")
    learned: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        learned.append(options["count"])
        return learn(*args, **options)

    monkeypatch.setattr(learning, "learn", counted)
    machine = Machine(workers=3)
    transform(model, out, stats=stats, options=OPTIONS, mode="resume", machine=machine)
    assert len(learned) == 1
    assert tiny.bytes_of(out) == want


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_two_processes_learn_once_and_write_the_same_bytes(llama: tuple[Path, Path], tmp_path: Path) -> None:
    model, stats = llama
    options = replace(OPTIONS, shard_size=60_000)
    want = tiny.bytes_of(run(model, tmp_path / "one", options, stats).out)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    what = ["--transforms", "rotate", "--learn", "4", "--format", "fp8", "--shard-size", "60000", "--stats", str(stats)]
    call = [*launcher, "-m", "ptqpipe", "transform", str(model), *what, "-o", str(tmp_path / "many")]
    done = subprocess.run(call, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert tiny.bytes_of(tmp_path / "many") == want


@pytest.mark.parametrize(
    ("steps", "block", "blocks"), [(1, None, {64, 32}), (1, 16, {16}), (0, None, {32})], ids=["learned", "said", "none"]
)
def test_learned_rotations_are_as_large_as_the_model_lets_them(
    llama: tuple[Path, Path], tmp_path: Path, steps: int, block: int | None, blocks: set[int]
) -> None:
    """A hidden size of 64, and heads of 32 channels."""
    model, stats = llama
    options = TransformOptions("rotate", learn=steps, rotation_size=block, format="fp8")
    record = run(model, tmp_path / "out", options, stats if steps else None).record
    assert {entry["block"] for entry in record["foldings"]} == blocks
    assert record["options"]["block"] == max(blocks)
    assert ("learn" in record["options"]) == (steps > 0)


def test_what_has_no_pairs_does_not_count_and_is_named(llama: tuple[Path, Path], tmp_path: Path) -> None:
    model, stats = llama
    less = tmp_path / "less"
    less.mkdir()
    content = json.loads((stats / "stats.json").read_text())
    for file in stats.glob("*.safetensors"):
        tensors = {name: t for name, t in load_file(file).items() if "layers.1.mlp.gate_proj.pair" not in name}
        save_file(tensors, less / file.name)
    (less / "stats.json").write_text(json.dumps({**content, "files": {}}))
    done = run(model, tmp_path / "out", OPTIONS, less)
    (stream, *values) = done.record["learned"]["rotations"]
    assert stream["without_pairs"] == ["model.layers.1.mlp.gate_proj"]
    assert not any("without_pairs" in entry for entry in values)
    check_same_logits(model, tmp_path / "out", token_ids())


def test_the_command_is_one_line_where_it_refuses(llama: tuple[Path, Path], tmp_path: Path) -> None:
    model, stats = llama
    for what, says in (
        (["--learn", "-1"], r"--learn -1 is no number of steps"),
        (["--learn", "5", "--format", "nvfp4"], r"nvfp4 has none"),
        (["--learn", "5", "--format", "fp8", "--rotation-size", "128"], r"no multiple of the block of 128"),
    ):
        call = [
            "transform",
            str(model),
            "--transforms",
            "rotate",
            "--stats",
            str(stats),
            *what,
            "-o",
            str(tmp_path / "out"),
        ]
        done = CliRunner().invoke(main, call)
        assert done.exit_code == 2
        assert len(done.stderr.splitlines()) == 1
        assert re.search(says, done.stderr)
    assert not list(tmp_path.iterdir())
