"""A run that is stopped anywhere, also by kill -9, ends with the bytes of one that nobody stopped."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import ptqpipe
from ptqpipe.cli import main
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.transform import learn as learning
from ptqpipe.conversion.transform.transformation import Transformation
from ptqpipe.conversion.unit_job import QuantizeUnit
from ptqpipe.errors import AlreadyComplete, UsageError, WrongOutput
from ptqpipe.pipeline import check_stages, data_stages
from ptqpipe.pipeline.tune import layer_codes
from ptqpipe.recipe.options import PipelineOptions
from tests.pipeline.runs import few, files_of, made, ran, stops, work_of

STAGES = [  # in their order: each goes on where the one before was stopped
    (data_stages, "calibrate", 1),  # with pairs
    (data_stages, "find_factors", 1),
    (Transformation, "learn", 1),
    (learning, "_entry", 2),
    (data_stages, "read_json_object", 1),
    (data_stages, "calibrate", 1),  # of the rotated model
    (data_stages, "find_factors", 1),
    (Transformation, "fold", 2),
    (data_stages, "calibrate", 1),  # of the transformed model
    (layer_codes, "follow", 2),
    (QuantizeUnit, "run", 5),
    (Conversion, "record", 1),
    (check_stages, "verify", 1),
    (check_stages.evaluation, "evaluate", 1),
    (check_stages, "make_report", 1),
]


@pytest.mark.slow
def test_a_run_that_was_stopped_in_every_stage_ends_with_the_same_bytes(
    model: Path, text: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(text, eval=(str(text),), report=True)
    for where, name, at in STAGES:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, stops(getattr(where, name), at=at))
            print(f"until call {at} of {name}")
            with pytest.raises(KeyboardInterrupt):
                made(model, tmp_path / "out", work, "nvfp4_w4a4", mode="resume")
    made(model, tmp_path / "out", work, "nvfp4_w4a4", mode="resume")
    assert files_of(tmp_path / "out") == whole
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.eval.json", "out.report.html"}


KILLED = """
import os, signal, sys
from ptqpipe.cli import main
from ptqpipe.conversion.consume import Consumed

real = Consumed._remove


def remove(self, file):
    real(self, file)
    print(*sorted(os.listdir(self._codes.path)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


Consumed._remove = remove
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_codes_that_are_written_are_gone_and_a_killed_run_goes_on_without_them(
    model: Path, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """One decoder layer's codes go before the other one's are written; kill -9 comes at that moment."""
    words = ["convert", model, *few(text), "-o", tmp_path / "out"]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sum(f"model.layers.{layer}.safetensors" in done.stdout for layer in (0, 1)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {".out.partial", ".out.stages"}
    refused = CliRunner().invoke(main, [*map(str, words)])
    assert refused.exit_code == 2
    assert "--resume continues it" in refused.output
    ran(*words, "--resume")
    assert files_of(tmp_path / "out") == files_of(undisturbed)
    assert "already complete" in ran(*words, "--resume")
    with pytest.raises(AlreadyComplete):
        made(model, tmp_path / "out", work_of(text), mode="resume")


KILLED_BACKWARDS = """
import os, signal, sys
from ptqpipe.cli import main
from ptqpipe.pipeline.tune import backwards

at, real = int(sys.argv[1]), backwards.run_model_backward
backwards.BASE_BYTES = 8 << 30  # all of the memory: the hidden states lie on disk


def dies(*args, **kwargs):
    number = 0
    for number, found in enumerate(real(*args, **kwargs), 1):
        yield found
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)


backwards.run_model_backward = dies
main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.usefixtures("forks")
def test_kill_9_inside_or_right_behind_the_reverse_pass_and_resume_give_the_bytes_of_an_undisturbed_run(
    layers: int, model: Path, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The pass goes over two decoder layers: it is stopped behind the first, or when its last file is written."""
    words = [*map(str, ["convert", model, *few(text), "-o", tmp_path / "out"])]
    killed = [sys.executable, "-c", KILLED_BACKWARDS, str(layers), *words]
    done = subprocess.run(killed, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "[1/3] tune" in done.stdout or "1 tune" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {".out.stages"}
    ran(*words, "--resume")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert files_of(tmp_path / "out") == files_of(undisturbed)


@pytest.mark.slow
def test_the_call_that_continues_is_told_and_another_one_is_refused(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["convert", model, *few(text), "-o", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["ptqpipe", *map(str, words)])
    with monkeypatch.context() as patch:
        patch.setattr(layer_codes, "follow", stops(layer_codes.follow, at=2))
        stopped = CliRunner().invoke(main, [*map(str, words)])
    assert stopped.exit_code == 130
    assert f"continue with: ptqpipe convert {model}" in stopped.output
    other = CliRunner().invoke(main, [*map(str, words), "--quality", "good", "--resume"])
    assert other.exit_code == 2
    assert "was started with another value of --quality" in other.output
    ran(*words, "--quality", "good", "--overwrite")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.slow
def test_a_run_that_replaces_an_output_goes_on_where_it_was_stopped(
    model: Path, text: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former output is there until the new one is whole; --resume need not say --overwrite again."""
    work = work_of(text)
    ptqpipe.convert(model, format="fp8", out=tmp_path / "out", workers=1)
    former = files_of(tmp_path / "out")
    with pytest.raises(WrongOutput, match="no unfinished run next to it and is no output of this run; overwrite=True"):
        made(model, tmp_path / "out", work, mode="resume")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}  # it is told before any work
    with monkeypatch.context() as patch:
        patch.setattr(layer_codes, "follow", stops(layer_codes.follow, at=2))
        with pytest.raises(KeyboardInterrupt):
            made(model, tmp_path / "out", work, mode="overwrite")
    assert files_of(tmp_path / "out") == former
    with monkeypatch.context() as patch:
        patch.setattr(check_stages, "verify", stops(check_stages.verify, at=1))
        with pytest.raises(KeyboardInterrupt):
            made(model, tmp_path / "out", work, mode="resume")
    made(model, tmp_path / "out", work, mode="resume")
    assert files_of(tmp_path / "out") == files_of(undisturbed)


def test_the_stages_that_another_call_kept_are_not_taken_for_ones_own(model: Path, text: Path, tmp_path: Path) -> None:
    """A recipe that was planned for another budget, a text that another model wrote."""
    kept = str(tmp_path / "kept")
    made(model, tmp_path / "a", PipelineOptions(budget="6.5bits", work_dir=kept))
    recipe = (tmp_path / "kept" / "recipe.yaml").read_bytes()
    with pytest.raises(UsageError, match="has the stages of a run with another value of budget; name another folder"):
        made(model, tmp_path / "b", PipelineOptions(budget="9bits", work_dir=kept))
    made(model, tmp_path / "c", PipelineOptions(budget="6.5bits", work_dir=kept))
    assert (tmp_path / "kept" / "recipe.yaml").read_bytes() == recipe
    with pytest.raises(UsageError, match="has files that no run left there; name an empty folder"):
        made(model, tmp_path / "d", work_of(text, work_dir=str(text.parent)))
    assert {path.name for path in tmp_path.iterdir()} == {"a", "c", "kept"}


def test_a_run_that_fails_before_any_work_leaves_nothing(model: Path, text: Path, tmp_path: Path) -> None:
    short = CliRunner().invoke(main, ["convert", str(model), "--data", str(text), "-o", str(tmp_path / "out")])
    assert short.exit_code == 2
    assert "the data give 216 tokens, 3 windows of 64, expected 128" in short.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("first", [True, False])
def test_a_run_is_not_resumed_with_another_requantize(
    first: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides what a budget chooses from, where the source has weights below 8 bits."""
    source = ptqpipe.convert(model, format="mxfp4", out=tmp_path / "source").path
    assert source is not None
    works = [PipelineOptions(budget="4.6bits", formats=("mxfp4", "nvfp4"), requantize=asked) for asked in (False, True)]
    with monkeypatch.context() as patch:
        patch.setattr(check_stages, "verify", stops(check_stages.verify, at=1))
        with pytest.raises(KeyboardInterrupt):
            made(source, tmp_path / "out", works[first])
    with pytest.raises(UsageError, match="was started with another value of requantize"):
        made(source, tmp_path / "out", works[not first], mode="resume")
    made(source, tmp_path / "out", works[first], mode="resume")
