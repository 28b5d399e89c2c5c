"""scripts/gpu_acceptance.py: a rehearsal of all of its parts, what is not installed, and a part without time."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_acceptance.py"
INTERPRETED = ("search", "attack", "linear", "attention", "columns", "convert", "calibrate", "engine")


def run(out: Path, *options: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    """(exit code, lines) of the script."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rehearse", "--out", str(out), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (out / "results.jsonl").exists(), done.stderr
    return done.returncode, lines_of(out)


def lines_of(out: Path) -> list[dict[str, Any]]:
    """What the script wrote."""
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def results(lines: list[dict[str, Any]]) -> dict[str, str]:
    """How each part ended."""
    return {line["part"]: line["result"] for line in lines if "result" in line}


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_rehearsal_runs_every_part_and_all_of_them_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script runs in this process, so that the process of each part is a fork, with the quick interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--rehearse", "--out", str(tmp_path), "--minutes", "30"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = SimpleNamespace(**runpy.run_path(str(SCRIPT)))

    def command_of(part: Any, *given: Any, **named: Any) -> list[str]:
        python, *words = script.command_of(part, *given, **named)
        return [
            python,
            *(["-m", "tests.numerics.kernels.quick_interpreter"] if part.name in INTERPRETED else []),
            *words,
        ]

    monkeypatch.setitem(script.main.__globals__, "command_of", command_of)
    code, lines = script.main(), lines_of(tmp_path)
    parts = [
        "compile",
        "search",
        "attack",
        "linear",
        "attention",
        "columns",
        "allreduce",
        "convert",
        "calibrate",
        "engine",
        "tests",
    ]
    assert results(lines) == dict.fromkeys(parts, "passed"), (tmp_path / "log.txt").read_text()[-3000:]
    assert code == 0
    said = {part: [line for line in lines if line["part"] == part and "result" not in line] for part in parts}
    assert all(line["local_bytes"] == 0 and line["registers"] > 0 for line in said["compile"])
    assert all(line["equal"] is not False for line in said["search"])
    assert sum(line.get("equal") is True for line in said["search"]) == 3
    assert [line["differing"] for line in said["attack"]] == [0]
    assert all(line["error"] <= 1 for line in said["linear"] + said["attention"] + said["columns"])
    assert said["allreduce"][0]["differences"] == 0
    assert [line["same_bytes"] for line in said["convert"] if "same_bytes" in line] == [True]
    assert [line["same_codes"] for line in said["calibrate"] if "same_codes" in line] == [1.0]
    assert [line["same"] for line in said["engine"] if "greedy" in line] == [4, 4]
    assert all(line["as_alone"] == line["compared"] for line in said["engine"] if "batch" in line)
    table = (tmp_path / "summary.md").read_text()
    assert all(f"| {part} | passed |" in table for part in parts)


def test_what_is_not_installed_is_said_and_what_needs_it_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib import util\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'safetensors' else found(name, package)\n"
    )
    code, lines = run(tmp_path / "out", "--only", "linear", "engine", PYTHONPATH=str(tmp_path))
    assert lines[0]["missing"] == ["safetensors"]
    assert results(lines) == {"linear": "skipped", "engine": "skipped"}
    assert {line["reason"] for line in lines if "reason" in line} == {"not installed: safetensors"}
    assert code == 0


def test_a_part_that_runs_out_of_time_is_ended_and_fails_the_run(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "--only", "engine", "--minutes", "0.000001")
    assert results(lines) == {"engine": "out of time"}
    assert code == 1
