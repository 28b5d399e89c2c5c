"""What setup.py compiles again: the sources that changed, and those that include what changed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = '[project]\nname = "small"\nversion = "1"\n[tool.setuptools]\npackages = []\n'
FILES = {
    "one.cpp": '#include "common.h"\n#include "own.h"\nstatic int one() { return COMMON + OWN; }\n',
    "two.cpp": '#include "common.h"\nint two() { return COMMON; }\n',
    "three.cpp": '#define AGAIN 1\n  #  include "one.cpp"\n',
    "own.h": '#include "inner.h"\n#define OWN INNER\n',
    "inner.h": "#define INNER 1\n",
    "common.h": "#define COMMON 1\n",
    "alone.h": "#define ALONE 1\n",
}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """setup.py with small sources, compiled once."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "small"\nversion = "1"\n[tool.setuptools]\npackages = []\n'
    )
    csrc = tmp_path / "ptqpipe/numerics/kernels/csrc"
    csrc.mkdir(parents=True)
    for name, text in FILES.items():
        (csrc / name).write_text(text)
    assert compiled(tmp_path) == {"one.cpp", "two.cpp", "three.cpp"}
    return tmp_path


def compiled(tree: Path) -> set[str]:
    """The sources that a build compiles."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, check=True)
    assert (tree / "ptqpipe/numerics/kernels/_cpu.so").is_file(), done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("kernels ")]
    return {line.split()[2] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("one.cpp", {"one.cpp", "three.cpp"}),
        ("two.cpp", {"two.cpp"}),
        ("common.h", {"one.cpp", "two.cpp", "three.cpp"}),
        ("own.h", {"one.cpp", "three.cpp"}),
        ("inner.h", {"one.cpp", "three.cpp"}),
        ("alone.h", set()),
    ],
)
def test_only_what_includes_a_changed_file_is_compiled_again(tree: Path, changed: str, again: set[str]) -> None:
    path = tree / "ptqpipe/numerics/kernels/csrc" / changed
    before = path.read_text()
    path.write_text(before + "// changed\n")
    assert compiled(tree) == again
    assert compiled(tree) == set()
    path.write_text(before)
    assert compiled(tree) == set()  # the objects of before are still there


@pytest.mark.slow
def test_no_file_is_missed_that_the_compiler_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels themselves."""
    monkeypatch.setattr("setuptools.setup", lambda **given: None)
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), names)
    included = names["included"]
    assert callable(included)
    for source in sorted((ROOT / "ptqpipe/numerics/kernels/csrc").glob("*.cpp")):
        command = ["g++", "-MM", "-std=c++17", str(source)]
        rule = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        read = set(rule.replace("\\\n", " ").split()[1:])
        assert read <= {str(path) for path in included(source)}, source.name
