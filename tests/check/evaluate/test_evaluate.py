"""Claims about ``ptqpipe eval`` from end to end, on the embedded model and what convert makes of it."""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import ptqpipe
from ptqpipe.check.evaluate import command as stage, harness
from ptqpipe.check.evaluate.eval_file import read_result
from ptqpipe.check.evaluate.verdict import WORDS, verdict
from ptqpipe.cli import main

MODEL = Path(__file__).resolve().parents[3] / "ptqpipe" / "demo_model"
TEXT = MODEL / "heldout.txt"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("converted")
    for name in ("nvfp4", "mxfp4", "fp8"):
        ptqpipe.convert(MODEL, format=name, out=root / name)
    ptqpipe.convert(MODEL, format="nvfp4", out=root / "modelopt", container="modelopt")
    return {path.name: path for path in root.iterdir() if path.is_dir()}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["eval", *map(str, arguments)])


def measured(out: Path, *arguments: object) -> dict[str, Any]:
    result = run(*arguments, "-o", out)
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(out.read_text())
    return content


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def against_float(path: Path, out: Path, cache: Path, *more: object) -> dict[str, Any]:
    return measured(
        out,
        path,
        "--source",
        MODEL,
        "--data",
        TEXT,
        "--seqlen",
        128,
        "--max-tokens",
        2048,
        "--cache-dir",
        cache,
        *more,
    )


@pytest.mark.slow
def test_the_file_says_everything(checkpoints: dict[str, Path], tmp_path: Path, cache: Path) -> None:
    found = against_float(checkpoints["nvfp4"], tmp_path / "a.json", cache)
    record = json.loads((checkpoints["nvfp4"] / "ptqpipe.json").read_text())
    assert found["version"] == 1
    assert found["checkpoint"] == {"name": "nvfp4", "run_id": record["run_id"]}
    assert found["baseline"] == {"name": "demo_model"}
    assert found["settings"]["dtype"] == "float32"
    assert found["settings"]["activations"] == "simulated"
    assert found["tasks"] == []
    (row,) = found["perplexity"]
    assert (row["data"], row["window"], row["stride"]) == (TEXT.name, 128, 128)
    assert row["tokens"] == 2048 - 2048 // 128
    assert row["checkpoint"] == pytest.approx(math.exp(row["nll"]))
    assert row["baseline"] == pytest.approx(math.exp(row["nll_baseline"]))
    assert row["difference"] == pytest.approx(row["checkpoint"] - row["baseline"])
    assert row["interval"][0] < row["difference"] < row["interval"][1]
    (kl,) = found["kl"]
    assert kl["tokens"] == row["tokens"]
    assert kl["interval"][0] < kl["mean"] < kl["interval"][1]
    assert 0 < kl["percentiles"]["50"] < kl["percentiles"]["99.9"] <= kl["max"]
    assert 0.5 < kl["top1_agreement"] < 1


@pytest.mark.slow
def test_the_file_shows_where_the_divergence_lies_and_what_both_models_write(
    checkpoints: dict[str, Path], tmp_path: Path, cache: Path
) -> None:
    (kl,) = (found := against_float(checkpoints["nvfp4"], tmp_path / "a.json", cache, "--samples", 2))["kl"]
    assert sum(kl["histogram"]["counts"]) == kl["tokens"]
    assert sum(row["tokens"] for row in kl["positions"]) == kl["tokens"]
    assert sum(row["tokens"] * row["mean"] for row in kl["positions"]) == pytest.approx(kl["tokens"] * kl["mean"])
    assert len(kl["worst"]) == 10
    assert kl["worst"][0]["kl"] == pytest.approx(kl["max"])
    text = TEXT.read_text().replace("\n", "\\n")
    assert all(row["before"].strip("\ufffd") in text for row in kl["worst"])
    assert len(found["samples"]) == 2
    assert all(row["prompt"].removeprefix("<s>").strip("\ufffd") in text for row in found["samples"])
    assert found["samples"] != [row | {"checkpoint": row["baseline"]} for row in found["samples"]]
    assert {"date", "machine", "command"} <= found["made"].keys()
    assert f"| `{TEXT.name}` | {kl['tokens']:,} |" in (checkpoints["nvfp4"] / "README.md").read_text()
    read = read_result(tmp_path / "a.json", run_id=None)
    assert read["kl"][0]["worst"] == kl["worst"]
    assert [row["checkpoint"] for row in read["samples"]] == [row["checkpoint"] for row in found["samples"]]


@pytest.mark.slow
def test_coarser_formats_diverge_more(checkpoints: dict[str, Path], tmp_path: Path, cache: Path) -> None:
    means = {
        name: against_float(checkpoints[name], tmp_path / f"{name}.json", cache)["kl"][0]["mean"]
        for name in ("fp8", "nvfp4", "mxfp4")
    }
    assert means["fp8"] < 0.3 * means["nvfp4"]
    assert means["nvfp4"] < 0.5 * means["mxfp4"]  # whose activations are quantized, too


def test_two_layouts_of_one_model_measure_the_same(checkpoints: dict[str, Path], tmp_path: Path, cache: Path) -> None:
    first = against_float(checkpoints["nvfp4"], tmp_path / "a.json", cache)
    other = against_float(checkpoints["modelopt"], tmp_path / "b.json", cache)
    assert first["kl"] == other["kl"]
    assert first["perplexity"] == other["perplexity"]


@pytest.mark.slow
def test_the_cache_changes_no_number(
    checkpoints: dict[str, Path], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = against_float(checkpoints["nvfp4"], tmp_path / "a.json", tmp_path / "none", "--cache-size", "0")
    assert not (tmp_path / "none").exists()
    missed = against_float(checkpoints["nvfp4"], tmp_path / "b.json", tmp_path / "fresh")
    loaded: list[Path] = []
    load = stage.load
    monkeypatch.setattr(stage, "load", lambda path, **options: (loaded.append(path), load(path, **options))[1])
    hit = against_float(checkpoints["nvfp4"], tmp_path / "c.json", tmp_path / "fresh")
    assert missed["kl"] == hit["kl"]
    (kept,), (exact,) = hit["kl"], without["kl"]
    assert abs(kept["mean"] - exact["mean"]) < (exact["interval"][1] - exact["interval"][0]) / 100
    assert kept["top1_agreement"] == exact["top1_agreement"]
    assert loaded == [checkpoints["nvfp4"]]


@pytest.mark.slow
def test_the_header_says_what_is_measured_and_stored_and_the_result_comes_in_words_first(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    call = (checkpoints["nvfp4"], "--source", MODEL, "--max-tokens", 1000, "--cache-dir", tmp_path / "cache")
    first = run(*call, "-o", tmp_path / "a.json")
    assert first.exit_code == 0, first.output
    header = first.stderr.splitlines()
    assert header[:3] == [
        "nvfp4 against demo_model, in float32 on cpu",
        "sample text: 1,000 tokens in 4 windows of 256",
        "(the sample text of the package; for a better test give text like yours with --data)",
    ]
    assert f"log-probabilities are cached in {tmp_path / 'cache'}/logits/" in header[3]
    assert "at most 2.04 MB" in header[3]  # 996 tokens x (2 bytes x 1024 words + 4)
    found = json.loads((tmp_path / "a.json").read_text())
    shown = first.stdout.splitlines()
    assert shown[0] == str(verdict(found))
    assert shown[0].endswith(tuple(f": {word}" for word in WORDS))
    tables = shown[: next(i for i, line in enumerate(shown) if line.startswith("written to"))]
    assert max(map(len, tables)) <= 80
    assert found["kl"][0]["data"] == "sample text"
    assert "from an earlier run" in run(*call, "-o", tmp_path / "a.json").stderr
    refused = run(*call, "-o", tmp_path / "a.json", "--cache-size", "1MB").stderr
    assert "both models are loaded at once: 2.04 MB" in refused
    assert run(*call, "-o", tmp_path / "a.json", "--json").stderr == ""


@pytest.mark.slow
def test_without_activations_the_weights_alone_count(checkpoints: dict[str, Path], tmp_path: Path, cache: Path) -> None:
    simulated = against_float(checkpoints["mxfp4"], tmp_path / "a.json", cache)
    weights = against_float(checkpoints["mxfp4"], tmp_path / "b.json", cache, "--activations", "none")
    assert weights["settings"]["activations"] == "none"
    assert weights["kl"][0]["mean"] < simulated["kl"][0]["mean"]


def test_a_shorter_stride_gives_more_context(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    common = (checkpoints["nvfp4"], "--data", TEXT, "--seqlen", 64, "--max-tokens", 1024)
    apart = measured(tmp_path / "a.json", *common)
    overlapping = measured(tmp_path / "b.json", *common, "--stride", 16)
    assert overlapping["perplexity"][0]["tokens"] == 1023
    assert overlapping["perplexity"][0]["checkpoint"] < apart["perplexity"][0]["checkpoint"]
    assert apart["baseline"] is None
    assert apart["kl"] == []
    assert apart["perplexity"][0]["difference"] is None
    assert apart["perplexity"][0]["interval"] is not None


@pytest.fixture(scope="module")
def few_tasks() -> Iterator[None]:
    """Of lm-eval's own tasks PIQA alone: test_harness.py reads the thousands, which takes 9 s of a core."""
    from lm_eval.tasks import TaskManager

    module = sys.modules[TaskManager.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "__file__", str(Path(str(module.__file__)).with_name("piqa") / "manager.py"))
        harness._index.cache_clear()
        yield
    harness._index.cache_clear()


@pytest.mark.slow
def test_tasks_are_compared_with_the_baseline(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    rows = [
        {"query": f"Return the {word}", "choices": ["value", "zebra"], "gold": 0} for word in ("same", "new", "old")
    ]
    (tmp_path / "copa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = measured(
        tmp_path / "a.json", checkpoints["nvfp4"], "--source", MODEL, "--tasks", "local_copa", "--task-data", tmp_path
    )
    (row,) = found["tasks"]
    assert (row["task"], row["metric"], row["samples"], row["higher_is_better"]) == ("local_copa", "acc", 3, True)
    assert row["recovery"] == pytest.approx(100 * row["checkpoint"] / row["baseline"])
    assert row["difference"] == pytest.approx(row["checkpoint"] - row["baseline"])
    assert len(row["interval"]) == 2
    assert found["perplexity"] == found["kl"] == []


@pytest.mark.parametrize("link", [False, True], ids=["folder", "link"])
def test_nothing_is_written_beside_a_model_that_ptqpipe_did_not_write(
    link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lie in a folder of models that this run has no business in."""
    models, here = tmp_path / "models", tmp_path / "here"
    shutil.copytree(MODEL, models / "m")
    here.mkdir()
    (here / "near").symlink_to(models / "m")
    monkeypatch.chdir(here)
    result = run("near" if link else "../models/m", "--data", TEXT, "--seqlen", 32, "--max-tokens", 64, "-q")
    assert result.exit_code == 0, result.output
    assert [path.name for path in models.iterdir()] == ["m"]
    assert {path.name for path in here.iterdir()} == {"near", "near.eval.json" if link else "m.eval.json"}


def test_the_default_name_lies_beside_the_checkpoint(checkpoints: dict[str, Path]) -> None:
    result = run(checkpoints["fp8"], "--data", TEXT, "--seqlen", 32, "--max-tokens", 64, "--json")
    assert result.exit_code == 0, result.output
    written = checkpoints["fp8"].parent / "fp8.eval.json"
    assert json.loads(written.read_text()) == json.loads(result.stdout)
    written.unlink()


@pytest.mark.usefixtures("few_tasks")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "none.txt"], "none.txt does not exist"),
        (["--data", "BINARY"], "is not UTF-8"),
        (["--data", "RANGE"], "token 99999, outside the model's vocabulary"),
        (["--tasks", "pika"], "task 'pika' is unknown; near it are"),
        (["--tasks", "local_piqa"], "with --task-data"),
        (["--data", "TEXT", "--seqlen", "100000"], "positions; choose a smaller one"),
        (["--data", "TEXT", "--seqlen", "8", "--stride", "9"], "--stride 9"),
        (["--data", "TEXT", "--device", "tpu"], "device 'tpu' is unknown"),
        (["--data", "TEXT", "--device", "cuda:99"], "device cuda:99 needs a GPU"),
        (["--data", "TEXT", "--max-tokens", "0"], "--max-tokens 0"),
        (["--data", "TEXT", "--source", "nowhere/at all"], "nowhere/at all"),
        (["--data", "TEXT", "--source", "OTHER"], "vocabulary"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    checkpoints: dict[str, Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "range.jsonl").write_text('{"input_ids": [1, 2, 99999]}\n')
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((MODEL / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 77}))
    (other / "model.safetensors").write_bytes((MODEL / "model.safetensors").read_bytes())
    names = {"BINARY": tmp_path / "binary", "RANGE": tmp_path / "range.jsonl", "TEXT": TEXT, "OTHER": other}
    given = [str(names.get(argument, argument)) for argument in arguments]
    result = run(checkpoints["nvfp4"], *given, "-o", tmp_path / "out.json")
    assert result.exit_code == 2, result.output
    assert result.output.count("\n") == 1
    assert result.output.startswith("Error: ")
    assert message in result.output
    assert not (tmp_path / "out.json").exists()


def test_a_broken_model_writes_nothing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in MODEL.iterdir():
        if file.suffix == ".json":
            (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(MODEL / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    result = run(broken, "--data", TEXT, "--seqlen", 32, "--max-tokens", 64, "-o", tmp_path / "out.json")
    assert result.exit_code == 1
    assert "gives no probability" in result.output
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
@pytest.mark.shared
def test_the_bench_model_has_the_recorded_perplexity(shared_dir: Path, tmp_path: Path) -> None:
    """assets/models/bench-4m/SOURCE.md: 56.05 on the first 24,576 tokens; here on the first 8,192 of them."""
    model, text = shared_dir / "assets/models/bench-4m/hf", shared_dir / "assets/data/wikitext2/wiki.test.raw"
    out = tmp_path / "q"
    ptqpipe.convert(model, format="nvfp4", out=out, scale_search="absmax", global_scale="absmax")
    found = measured(
        tmp_path / "a.json", out, "--source", model, "--data", text, "--seqlen", 256, "--max-tokens", 8192,
        "--cache-dir", tmp_path / "cache",
    )  # fmt: skip
    assert found["baseline"]["name"] == "hf"
    assert found["perplexity"][0]["baseline"] == pytest.approx(56.05, rel=0.15)
    assert found["kl"][0]["mean"] == pytest.approx(0.0080, abs=0.0003)


def test_the_place_of_the_file_is_looked_at_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(stage, "evaluate", never)
    (tmp_path / "notes").write_text("{}")
    for out, words in (
        (tmp_path, "is a folder"),
        (tmp_path / "notes", "not an eval file"),
        ("/proc/x", "is not writable"),
    ):
        refused = run(MODEL, "--data", TEXT, "-o", out)
        assert refused.exit_code in (1, 2)
        assert words in refused.output
        assert "partial" not in refused.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_second_run_that_measures_less_asks_before_it_replaces_the_first(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "a.json"
    little = (MODEL, "--data", TEXT, "--seqlen", 32, "--max-tokens", 64, "-o", out)
    assert run(*little, "--source", MODEL, "--cache-dir", cache).exit_code == 0
    before = json.loads(out.read_text())
    assert run(*little, "--source", MODEL, "--cache-dir", cache).exit_code == 0  # measures as much
    first = out.read_bytes()
    after = json.loads(first)
    assert {**after, "made": None} == {**before, "made": None}  # when it was is there
    refused = run(*little)
    assert refused.exit_code == 2
    assert "holds the KL divergence" in refused.output
    assert out.read_bytes() == first
    done = run(*little, "--overwrite")
    assert f"written to {out}" in done.stdout.splitlines()
    assert json.loads(out.read_text())["kl"] == []


def test_the_tables_are_shown_even_if_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    result = run(MODEL, "--data", TEXT, "--seqlen", 32, "--max-tokens", 64, "-o", tmp_path / "a.json")
    assert result.exit_code == 1
    assert "perplexity" in result.stdout
    assert "free some space" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_given_twice_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """It would count twice, and its interval would be too narrow."""
    (tmp_path / "link.txt").symlink_to(TEXT)
    for other in (TEXT, tmp_path / "link.txt"):
        done = run(next(iter(checkpoints.values())), "--data", TEXT, "--data", other, "-o", tmp_path / "eval.json")
        assert done.exit_code == 2, done.output
        assert f"Error: --data has {other} twice; give it once\n" in done.stderr
    assert not (tmp_path / "eval.json").exists()
