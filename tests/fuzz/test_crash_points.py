"""crash_points.py: a sample of its points, and what it says where a leftover is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.calibration.models import make_model, make_windows, write_windows

SCRIPT = Path(__file__).with_name("crash_points.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    model = make_model(folder / "model", "llama", dtype=torch.bfloat16)
    return model, write_windows(folder / "text.jsonl", make_windows(samples=6, seqlen=32))


def walked(script: Path, inputs: tuple[Path, Path], work: Path, *more: str) -> tuple[int, list[dict[str, object]]]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    call = [sys.executable, str(script), *map(str, inputs), "--work", str(work), *more]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600, env=environment)
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("command", "every"), [("overwrite", 24), ("fast", 60), ("calibrate", 50)])
def test_a_sample_of_points_ends_with_the_same_bytes(
    command: str, every: int, inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    status, (line,) = walked(SCRIPT, inputs, tmp_path / "work", "--only", command, "--every", str(every))
    assert status == 0, line
    assert line["walked"] == len(range(1, int(str(line["events"])) + 1, every)) > 1
    assert line.get("same bytes", 0) + line.get("not begun", 0) == line["walked"]  # type: ignore[operator]


BROKEN = f"""
import runpy
from ptqpipe.checkpoint import partial
from ptqpipe.errors import OutputError

def refuse(*args, **kwargs):
    raise OutputError("no")

partial.check_same_run = refuse
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_a_resume_that_is_refused_is_found(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    status, lines = walked(tmp_path / "broken.py", inputs, tmp_path / "work", "--only", "convert", "--points", "40:41")
    assert status == 1
    assert [line.get("outcome") for line in lines] == ["refused", "refused", None]
