"""The claims of ``triton_cases.py``, in a process that interprets Triton, and on a device where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("triton_cases.py")


def run_cases(environment: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", str(CASES)],
        cwd=CASES.parents[2],
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_the_messages_equal_the_reference_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_messages_equal_the_reference_on_the_device() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases({"TRITON_INTERPRET": "0"})
