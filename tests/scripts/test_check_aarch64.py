"""The kernels compile for aarch64 and run under an emulator, where there are a cross compiler and one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/check_aarch64.py"
TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64")
# A compiler, but quick: every level gives the same bits, and -O3 takes three times as long. Its version says so, for
# setup.py keeps an object for each version of the compiler.
QUICK = """#!/bin/sh
[ "$1" = --version ] && echo "with -O1"
exec {compiler} "$@" -O1
"""


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"without {' or '.join(TOOLS)}")
def test_the_kernels_compile_and_one_of_their_tests_passes(tmp_path: Path) -> None:
    quick = tmp_path / TOOLS[0]
    quick.write_text(QUICK.format(compiler=shutil.which(TOOLS[0])))
    quick.chmod(0o755)
    command = [sys.executable, str(SCRIPT), "-v", "tests/numerics/kernels/test_cpu_norm.py::test_it_is_torchs_norm"]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^kernels: neon of qemu-aarch64 ", done.stdout, re.MULTILINE)
    assert "6 passed" in done.stdout


def test_without_the_tools_it_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "apt-get install g++-aarch64-linux-gnu qemu-user" in done.stderr
