"""convert --data and its kin: the stages of one run give what the commands one by one give, wherever it is stopped."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.cli import main
from ptqpipe.errors import AlreadyComplete, UsageError
from ptqpipe.options import PipelineOptions, RecipeOptions
from ptqpipe.stages.common import Machine
from ptqpipe.stages.convert.run import Conversion
from ptqpipe.stages.pipeline import run as stage
from ptqpipe.stages.tune import run as tune_stage
from tests.calibration.models import make_model, make_windows, write_windows

LENGTH = 24
ONE = Machine(workers=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small", "llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token rows for 8 windows and one that is held out."""
    return write_windows(tmp_path_factory.mktemp("text") / "text.jsonl", make_windows(samples=9, seqlen=LENGTH))


def work_of(text: Path, **more: Any) -> PipelineOptions:
    return PipelineOptions(data=(str(text),), samples=8, seqlen=LENGTH, **more)


def made(model: Path, out: Path, work: PipelineOptions, scheme: str | None = None, **more: Any) -> stage.Made:
    return stage.pipeline(model, recipe=RecipeOptions(scheme), out=out, work=work, machine=ONE, **more)


def ran(*words: object) -> str:
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def weights_of(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def few(text: Path) -> tuple[object, ...]:
    return "--data", text, "--samples", 8, "--seqlen", LENGTH, "--workers", 1


def test_best_is_tune_and_convert_in_one_call_and_leaves_nothing_else(model: Path, text: Path, tmp_path: Path) -> None:
    printed = ran("convert", model, *few(text), "-o", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    for words in ("1 tune: GPTQ in the order of the model", "[1/3] tune", "[3/3] verify", "next: ptqpipe serve"):
        assert words in printed
    ran("tune", model, *few(text), "-o", tmp_path / "codes")
    ran("convert", model, "--rounding", tmp_path / "codes", "-o", tmp_path / "two")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")
    record = json.loads((tmp_path / "out" / "ptqpipe.json").read_text())
    assert record["pipeline"]["quality"] == "best"
    assert record["rounding"]["method"] == "gptq"
    assert ran("verify", tmp_path / "out", "--source", model)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "fp8"])
def test_good_has_the_codes_of_statistics_with_full_moments(
    scheme: str, model: Path, text: Path, tmp_path: Path
) -> None:
    """The moments that are collected block by block are those of calibrate, held-out windows apart."""
    made(model, tmp_path / "out", work_of(text, quality="good"), scheme)
    ran("calibrate", model, *few(text), "-o", tmp_path / "stats")
    ran("convert", model, "--format", scheme, "--stats", tmp_path / "stats", "-o", tmp_path / "two", "--workers", 1)
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "two")


def test_fast_weights_scales_by_small_statistics(model: Path, text: Path, tmp_path: Path) -> None:
    done = made(model, tmp_path / "out", work_of(text, quality="fast", keep_stages=str(tmp_path / "kept")))
    assert {entry["weighting"] for entry in done.record["weights"].values()} == {"diagonal"}
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["statistics"]
    columns = {
        name: t.numel() for file in (tmp_path / "kept").rglob("*.safetensors") for name, t in load_file(file).items()
    }
    assert max(columns.values()) <= 96  # no moment of pairs


@pytest.mark.parametrize("scheme", ["nvfp4_w4a4", "mxfp4"])
def test_four_bit_activations_are_quantized_behind_a_transform(
    scheme: str, model: Path, text: Path, tmp_path: Path
) -> None:
    done = made(model, tmp_path / "out", work_of(text), scheme)
    assert done.record["transformed"]["transform"] == "aqas"
    assert done.record["source"]["name"] == "small"
    assert ("statistics" in done.record) == (scheme == "nvfp4_w4a4")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    told = json.loads(ran("verify", tmp_path / "out", "--source", model, "--json"))
    assert told["faults"] == []
    assert any("aqas was folded into the model" in note["message"] for note in told["notes"])


def test_a_mixture_of_experts_gets_gptq_for_its_experts(text: Path, tmp_path: Path) -> None:
    """They are one stack each while the model runs, and the order of calls says nothing of them."""
    moe = make_model(tmp_path / "moe", "mixtral", dtype=torch.bfloat16)
    made(moe, tmp_path / "out", work_of(text), "fp8")
    ptqpipe.convert(moe, format="fp8", out=tmp_path / "plain", workers=1)
    found, plain = (ptqpipe.load_tensors(tmp_path / name) for name in ("out", "plain"))
    experts = [name for name in plain if "experts" in name and hasattr(plain[name], "codes")]
    assert experts
    assert all(not torch.equal(found[name].codes, plain[name].codes) for name in experts)


def stops(real: Callable[..., Any], *, at: int, how: type[BaseException] = KeyboardInterrupt) -> Callable[..., Any]:
    """The function, which ends the run at its call number ``at``."""
    calls: list[int] = []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise how
        return real(*args, **kwargs)

    return stopping


STAGES = [
    (stage, "calibrate", 1),
    (stage, "transform", 1),
    (stage, "calibrate", 2),
    (tune_stage, "follow", 2),
    (Conversion, "do", 5),
    (Conversion, "configs", 2),
    (stage, "verify", 1),
    (stage.evaluation, "evaluate", 1),
    (stage, "make_report", 1),
]


@pytest.fixture(scope="module")
def whole(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run with all stages gives that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = made(model, out, work_of(text, eval=(str(text),), report=True), "nvfp4_w4a4")
    assert done.report == out.parent / "out.report.html"
    assert done.evaluation is not None
    assert done.evaluation["kl"][0]["mean"] > 0
    return files_of(out)


@pytest.mark.parametrize(("where", "name", "at"), STAGES, ids=[f"{name}-{at}" for _, name, at in STAGES])
def test_a_run_that_was_stopped_in_any_stage_ends_with_the_same_bytes(
    where: Any,
    name: str,
    at: int,
    model: Path,
    text: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = work_of(text, eval=(str(text),), report=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(where, name, stops(getattr(where, name), at=at))
        made(model, tmp_path / "out", work, "nvfp4_w4a4")
    made(model, tmp_path / "out", work, "nvfp4_w4a4", mode="resume")
    assert files_of(tmp_path / "out") == whole
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.eval.json", "out.report.html"}
