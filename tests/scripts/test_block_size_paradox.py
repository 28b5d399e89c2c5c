"""Claims about the reproduction of the block-size paradox, on a small set of weights."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/block_size_paradox.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("block_size_paradox", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["block_size_paradox"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, template_of_forks: Callable[..., None]) -> list[dict[str, object]]:
    """The lines of a small run that also plots."""
    picture = tmp_path_factory.mktemp("paradox") / "plot.png"
    command = [sys.executable, str(SCRIPT), "--sigma", "0.01", "--elements", "32768", "--blocks", "4", "16", "64"]
    pytest.importorskip("matplotlib", reason="needs the extra report")
    root = SCRIPT.parents[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", template_of_forks)
        done = subprocess.run(
            [*command, "--plot", str(picture)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(root)},
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in done.stdout.splitlines()]


def by_rule(rows: list[dict[str, object]], scales: str) -> dict[str, list[float]]:
    return {str(r["rule"]): r["relative_mse"] for r in rows if r["scales"] == scales and "normal" in str(r["weights"])}


@pytest.mark.slow
def test_abs_max_without_a_global_scale_gets_worse_as_blocks_shrink(rows: list[dict[str, object]]) -> None:
    """2.56e-2, 1.57e-2, 1.26e-2 of 2^20 weights in blocks of 4, 16, 64; a block in fifty is lost, so 2^15 vary more."""
    mse = by_rule(rows, "e4m3")["absmax"]
    assert mse == pytest.approx([2.56e-2, 1.57e-2, 1.26e-2], rel=0.08)
    assert mse[0] > mse[1] > mse[2]


@pytest.mark.slow
def test_exact_scales_get_better_as_blocks_shrink_in_every_row(rows: list[dict[str, object]]) -> None:
    exact = [row for row in rows if row["rule"] == "exact"]
    assert len(exact) == 2 * 5
    assert all(row["monotone"] for row in exact)
    assert by_rule(rows, "e4m3")["exact"] == pytest.approx([6.61e-3, 1.004e-2, 1.185e-2], rel=0.03)


def test_no_rule_is_below_the_exact_one(rows: list[dict[str, object]]) -> None:
    for scales in ("e4m3", "e4m3/global", "ue5m3", "ue5m3/global", "e8m0"):
        found = by_rule(rows, scales)
        for rule, mse in found.items():
            assert all(a <= b * (1 + 1e-6) for a, b in zip(found["exact"], mse, strict=True)), (scales, rule)


def test_a_row_that_is_not_monotone_fails_the_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = script.Row("w", "e4m3", "exact", (4, 8), (0.2, 0.1))
    equal = script.Row("w", "e4m3", "exact", (4, 8), (0.1 * (1 + 1e-8), 0.1))
    assert not worse.monotone
    assert equal.monotone
    for row, code in ((worse, 1), (equal, 0)):
        monkeypatch.setattr(script, "study", lambda *_, row=row: iter([row]))
        monkeypatch.setattr(sys, "argv", ["block_size_paradox.py", "--elements", "2048"])
        assert script.main() == code
        assert ("exact is worse for a smaller block: w, e4m3" in capsys.readouterr().err) is bool(code)
