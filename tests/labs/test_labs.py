"""Every study can be started: it imports, says what it takes, and has its question and answer beside it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LABS = ROOT / "labs"
STUDIES = sorted({file.parent.name for file in LABS.glob("*/*.py")})
RESULTS = sorted({file.parent.name for file in LABS.glob("*/*.jsonl")})
PROGRAMS = ("vllm_fills", "sglang_loads", "vllm_loads", "vllm_tensor_parallel")  # of labs/readers
HELP = """import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, (name, end.code)
    else:
        raise AssertionError(f"{name} has no --help")
"""


def test_every_study_says_what_was_asked_and_how_to_run_it() -> None:
    for name in sorted({*STUDIES, *RESULTS}):
        text = (LABS / name / "README.md").read_text(encoding="utf-8")
        assert "python -m labs." in text or "python scripts/" in text, name
        assert len(text.split()) < 400, f"labs/{name}/README.md: half a page"


@pytest.mark.slow
def test_every_study_prints_its_help() -> None:
    """One process for all of them, so that torch and transformers are imported once."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    pytest.importorskip("httpx", reason="needs the extra dev")
    names = [f"labs.{name}" for name in STUDIES if (LABS / name / "__main__.py").exists()]
    names += [f"labs.readers.{name}" for name in PROGRAMS]
    command = [sys.executable, "-c", HELP, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("usage: ") == len(names)
