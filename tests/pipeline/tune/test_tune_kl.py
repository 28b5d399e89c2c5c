"""tune --method kl: from folder to checkpoint, stopped at any point, refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ptqpipe.api.matrices import load_tensors
from ptqpipe.calibration.data import DataFile, Samples
from ptqpipe.check.evaluate.tokenized_text import SAMPLE
from ptqpipe.checkpoint import Finished
from ptqpipe.cli import main
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import UsageError
from ptqpipe.numerics.formats import get_format
from ptqpipe.pipeline import demo
from ptqpipe.pipeline.tune import codes_folder, command as tune
from ptqpipe.pipeline.tune.kl import end_to_end, judging_text, learn_codes as learn
from ptqpipe.pipeline.tune.kl.descent import DescentResult, Variables
from ptqpipe.pipeline.tune.options import Settings, TuneOptions
from ptqpipe.pipeline.tune.tune_summary import render
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import Machine

DEMO = Path(demo.__file__).resolve().parent.parent / "demo_model"
OPTIONS = TuneOptions(samples=40, seqlen=64, method="kl", metric="output", settings=Settings(steps=8))
FORMAT = RecipeOptions(format="nvfp4_w4a4")
ONE = Machine(workers=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(SAMPLE.read_text(encoding="utf-8")[:30000], encoding="utf-8")
    return path


def run(text: Path, out: Path, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"recipe": FORMAT, "options": OPTIONS, "machine": ONE} | changes
    return dict(tune.tune(DEMO, [str(text)], out, **given).content)


@pytest.mark.parametrize(
    ("scheme", "rate"),
    [("nvfp4_w4a4", 0.01), ("mxfp4", 0.01), ("nvfp4", 0.0015), ("mxfp4a16", 0.0015), ("fp8", 0.0015)],
)
def test_codes_take_larger_steps_where_inputs_have_four_bits(scheme: str, rate: float, tmp_path: Path) -> None:
    options = TuneOptions(method="kl", seed=3)
    with prepare(DEMO, options=RecipeOptions(format=scheme), out=tmp_path / "o", collected=True) as prepared:
        settings = end_to_end.with_rate(prepared, options).settings
    assert settings == Settings(steps=100, rate=rate, seed=3)


class Stop(KeyboardInterrupt):
    """Stands for a kill."""


def stopped(home: Any, name: str, number: int, text: Path, out: Path) -> None:
    """Runs, or goes on, until a function is called for the ``number``-th time."""
    real, calls = getattr(home, name), []

    def stops(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise Stop
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, name, stops)
        with pytest.raises(Stop):
            run(text, out, mode="resume")
    assert not out.exists()


@pytest.fixture(scope="module")
def begun(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run into "codes" was stopped before its descent: GPTQ's codes are there."""
    home = tmp_path_factory.mktemp("begun")
    stopped(learn, "descend", 1, text, home / "codes")
    return home


@pytest.fixture(scope="module")
def whole(begun: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = copied(begun, tmp_path_factory.mktemp("whole"))
    return out, run(text, out, mode="resume")


def copied(begun: Path, home: Path) -> Path:
    shutil.copytree(begun, home, dirs_exist_ok=True)
    return home / "codes"


@pytest.mark.slow
def test_no_text_gets_worse_and_the_start_stays_where_nothing_is_better(
    whole: tuple[Path, dict[str, Any]], begun: Path
) -> None:
    """Codes that a few steps on 2,048 tokens give, at a rate that moves too many of them; three judgements from half
    of the steps on end it."""
    codes, content = whole
    found = content["end_to_end"]
    assert content["method"] == "kl"
    assert content["settings"]["rate"] == 0.01
    assert found["start"].keys() == {"held-out samples", "sample text"}
    files = {f"{block}.safetensors" for block in content["blocks"]}
    assert {file.name for file in codes.iterdir()} == {"rounding.json", *files}
    assert (found["best"], found["steps"], found["moved"]) == (0, 6, 0.0)
    assert found["result"] == found["start"]
    (start,) = begun.glob("**/start")
    for name in files:
        assert (codes / name).read_bytes() == (start / name).read_bytes()
    told = next(line for line in render(Finished(codes, content, 1.0, 1)).splitlines() if "end to end" in line)
    assert told.startswith(
        "end to end, 6 steps: no codes lowered the KL divergence on both held-out samples and sample"
    )


@pytest.mark.slow
def test_each_of_several_data_is_judged_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lowers the mean of all may make one of them worse."""
    written = SAMPLE.read_text(encoding="utf-8")
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for file, part in zip(files, (written[:20000], written[20000:40000]), strict=True):
        file.write_text(part, encoding="utf-8")
    judged: list[dict[str, float]] = []

    def descend(_variables: Variables, *, judge: Callable[[], dict[str, float]], **_: Any) -> DescentResult:
        judged.append(judge())
        raise Stop

    monkeypatch.setattr(learn, "descend", descend)
    with pytest.raises(Stop):
        tune.tune(DEMO, [str(f) for f in files], tmp_path / "out", recipe=FORMAT, options=OPTIONS, machine=ONE)
    assert judged[0].keys() == {"held-out samples of --data 1", "held-out samples of --data 2", "sample text"}
    assert len(set(judged[0].values())) == 3
    two = (DataFile("one", None, 1, 1), DataFile("two", None, 1, 1))
    origin = torch.tensor([0, 1, 1, 0, 0, 0, 1])
    samples = Samples(torch.zeros(5, 4), torch.zeros(2, 4), "", two, 7, origin=origin)
    of = judging_text.held_out_sources(samples, [1, 3], [2, 2, 1, 2])
    assert {name: windows.tolist() for name, windows in of.items()} == {
        "held-out samples of --data 1": [1, 2],
        "held-out samples of --data 2": [0, 3],
    }


@pytest.mark.slow
def test_the_codes_that_descent_ends_with_are_the_codes_that_are_written(
    begun: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a descent that moves the codes whose weights are the nearest to half a step away."""
    wanted: dict[str, torch.Tensor] = {}

    def descend(variables: Variables, **_: Any) -> DescentResult:
        for key, choice in variables.choices.items():
            wanted[key] = choice.moved((choice.place > 0.45) & (choice.step != 0))
        texts = {"held-out samples": 2e-3, "sample text": 3e-3}
        return DescentResult(dict(wanted), {}, texts, {name: 0.5 * kl for name, kl in texts.items()}, 8, 7, 0.0123)

    monkeypatch.setattr(learn, "descend", descend)
    codes, out = copied(begun, tmp_path / "begun"), tmp_path / "out"
    content = run(text, codes, mode="resume")
    assert (
        "end to end, step 7 of 8: KL divergence x 1000 on held-out samples 2 -> 1, sample text 3 -> 1.5; "
        "1.23% of the codes moved"
    ) in render(Finished(codes, content, 1.0, 1))
    done = CliRunner().invoke(main, ["convert", str(DEMO), "--codes", str(codes), "-o", str(out)])
    assert done.exit_code == 0, done.output
    tensors = load_tensors(out)
    assert wanted.keys() == content["weights"].keys()
    with LearnedCodes.open(codes) as learned:
        for name, entry in content["weights"].items():
            q = learned.of(name, get_format(entry["format"]), shape=tuple(entry["shape"]))
            assert torch.equal(q.codes, wanted[name])
            assert torch.equal(tensors[name].dequantize(), q.dequantize())
    record = json.loads((out / "ptqpipe.json").read_text())
    assert record["rounding"]["end_to_end"] == content["end_to_end"]
    assert CliRunner().invoke(main, ["verify", str(out), "--source", str(DEMO)]).exit_code == 0


@pytest.mark.slow
def test_a_run_that_is_stopped_again_and_again_goes_on_to_the_same_codes(
    begun: Path, whole: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path
) -> None:
    """Before the first step, where a state is written, and between two layers that are written."""
    out = copied(begun, tmp_path / "begun")
    stopped(learn, "save_state", 2, text, out)
    stopped(codes_folder, "write", 2, text, out)
    again = run(text, out, mode="resume")
    assert again["digest"] == whole[1]["digest"]
    assert again["end_to_end"] == whole[1]["end_to_end"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"options": replace(OPTIONS, samples=16)},
            "needs held-out samples.*give samples=33 or more",
        ),
        (
            {"machine": Machine(workers=1, memory_bytes=700 << 20)},
            'max_memory="700MiB" is too small for method="kl".*or method=',
        ),
    ],
    ids=["data", "memory"],
)
def test_what_cannot_be_learned_from_is_one_line(
    changes: dict[str, Any], message: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learn, "_BYTES", 2000)
    with pytest.raises(UsageError, match=message):
        run(text, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_window_longer_than_the_sample_text_is_one_line(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tmp_path / "sample.txt"
    short.write_text("Too short.")
    monkeypatch.setattr(judging_text, "SAMPLE", short)
    with pytest.raises(UsageError, match="less than seqlen=64; lower seqlen"):
        run(text, tmp_path / "out")
