"""Claims about the script that shows what calibrate's warning of unlike text goes by."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptqpipe.stages.demo import MODEL

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_model_expects_its_own_kind_of_text_and_not_noise(tmp_path: Path) -> None:
    results = tmp_path / "likeness.jsonl"
    command = [sys.executable, "scripts/likeness_table.py", str(MODEL), f"{MODEL}/heldout.txt"]
    done = subprocess.run(
        [*command, "--results", str(results)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] == lines
    own, shuffled, noise = (line["over"] for line in lines)
    assert own < shuffled < noise
    assert lines[2]["warned"]
