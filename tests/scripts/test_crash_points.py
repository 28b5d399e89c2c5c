"""scripts/crash_points.py: a sample of its points, and what it says where a leftover is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.calibration.models import make_model, make_windows, write_windows

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "crash_points.py"
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
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    call = [sys.executable, str(script), *map(str, inputs), "--work", str(work), *more]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600, env=environment)
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_sample_of_points_ends_with_the_same_bytes(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    status, lines = walked(SCRIPT, inputs, tmp_path / "work", "--only", "overwrite,good,calibrate", "--every", "31")
    assert status == 0, lines
    assert {line["command"]: line["walked"] for line in lines}.keys() == {"overwrite", "good", "calibrate"}
    for line in lines:
        assert line.get("same bytes", 0) + line.get("not begun", 0) == line["walked"]  # type: ignore[operator]
        assert line["walked"] == len(range(1, int(str(line["events"])) + 1, 31))


BROKEN = f"""
import runpy, shutil
from ptqpipe.checkpoint import partial

partial.discard = lambda paths, folder: shutil.rmtree(folder)
partial._refuse_out = lambda paths, *_, **__: partial._refuse_existing(paths)
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_a_clean_up_that_empties_a_folder_under_its_name_is_found(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    status, lines = walked(tmp_path / "broken.py", inputs, tmp_path / "work", "--only", "convert", "--points", "70:")
    assert status == 1
    assert any(line.get("outcome") == "refused" for line in lines)
