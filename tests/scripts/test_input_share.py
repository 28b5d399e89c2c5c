"""Claims about the script that tells what quantized inputs cost apart from quantized weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ptqpipe
from ptqpipe.stages.demo import MODEL

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_float_weights_with_float_inputs_lose_nothing_and_each_part_loses_less_than_both(tmp_path: Path) -> None:
    found = {}
    for name in ("mxfp4", "mxfp4a16"):
        ptqpipe.convert(MODEL, format=name, out=tmp_path / name, workers=1)
        results = tmp_path / f"{name}.jsonl"
        texts = [str(MODEL / "heldout.txt"), "--tokens", "1024", "--results", str(results)]
        done = subprocess.run(
            [sys.executable, "scripts/input_share.py", str(MODEL), str(tmp_path / name), *texts],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        assert [line["format"] for line in lines] == [name] * 3
        found[name] = {line["of"]: line["kl"] for line in lines}
    assert found["mxfp4a16"]["inputs"] == pytest.approx(0, abs=1e-9)
    assert found["mxfp4a16"]["both"] == found["mxfp4a16"]["weights"]
    assert found["mxfp4"]["weights"] == found["mxfp4a16"]["weights"]  # the same codes
    assert max(found["mxfp4"]["weights"], found["mxfp4"]["inputs"]) < found["mxfp4"]["both"]
