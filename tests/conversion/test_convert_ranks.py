"""Claims about convert with statistics and with learned codes over processes and interruptions: the same bytes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.pipeline import demo
from ptqpipe.pipeline.tune import command as tune
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import Machine
from tests import tiny
from tests.quantization.inputs import inputs_of_llama, write_statistics

DEMO = Path(demo.__file__).resolve().parent.parent / "demo_model"
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ptqpipe"]
pytestmark = pytest.mark.usefixtures("forks")

# Kills this process, hard, when it has done its third unit.
KILLED = """
import os, signal, sys
from ptqpipe.checkpoint.writer import CheckpointWriter
commit, done = CheckpointWriter.commit, []
def killed(self, unit, record):
    commit(self, unit, record)
    self.flush()
    done.append(unit)
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
CheckpointWriter.commit = killed
sys.argv = ["ptqpipe", *sys.argv[1:]]
from ptqpipe.cli import main
main()
"""


def with_statistics(root: Path) -> list[str]:
    """The arguments of a conversion with statistics, held-out ones too."""
    model = tiny.save(root / "model", tiny.llama())
    both = inputs_of_llama(tiny.llama(), tokens=768)
    inputs, held = ({name: x[part] for name, x in both.items()} for part in (slice(512), slice(512, None)))
    stats = write_statistics(root / "stats", model, inputs, held=held)
    return [str(model), "--stats", str(stats), "--format", "nvfp4_w4a4", "--bias-correction"]


def with_codes(root: Path) -> list[str]:
    """The arguments of a conversion with learned codes."""
    text = root / "text.txt"
    text.write_text("\n".join(f"{word} {len(word)}" for word in dir(__builtins__) * 6))
    options = TuneOptions(samples=8, seqlen=32)
    recipe = RecipeOptions(format="nvfp4")
    tune.tune(DEMO, [str(text)], root / "codes", recipe=recipe, options=options, machine=Machine(workers=1))
    return [str(DEMO), "--codes", str(root / "codes"), "--format", "nvfp4"]


def convert(arguments: list[str], out: Path, *how: str, resume: bool = False) -> int:
    """Runs `ptqpipe convert` by the interpreter's arguments ``how``; its exit code."""
    more = ["--resume"] if resume else []
    command = [sys.executable, *how, "convert", *arguments, "-o", str(out), "-q", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, timeout=200, check=False, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-2000:]
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("given", [with_statistics, with_codes])
def test_two_processes_and_a_killed_one_write_the_bytes_of_one(
    given: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    arguments = given(tmp_path)
    alone = CliRunner().invoke(main, ["convert", *arguments, "-o", str(tmp_path / "one"), "-q"])
    assert alone.exit_code == 0, alone.output
    wanted = tiny.bytes_of(tmp_path / "one")
    assert convert(arguments, tmp_path / "two", *RANKS) == 0
    assert tiny.bytes_of(tmp_path / "two") == wanted
    assert convert(arguments, tmp_path / "cut", "-c", KILLED) == -signal.SIGKILL
    assert not (tmp_path / "cut").exists()
    assert convert(arguments, tmp_path / "cut", *RANKS, resume=True) == 0
    assert tiny.bytes_of(tmp_path / "cut") == wanted
