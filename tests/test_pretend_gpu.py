"""The claims of ``pretend_cases.py``, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("pretend_cases.py")


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_no_tensor_stays_behind_on_the_cpu() -> None:
    pytest.importorskip("triton")
    options = ["-q", "-pno:cacheprovider", "-pno:xdist", "-Wignore", "--import-mode=importlib"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(CASES)],
        cwd=CASES.parents[1],
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
