"""Claims about the reproduction of the block-size paradox, on a small set of weights."""

import sys
from functools import partial
from importlib import import_module
from typing import Any

import pytest

paradox = import_module("labs.block_size_paradox.__main__")


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    """A small run."""
    sets = {"normal": partial(paradox.normal, 0.01), "t5": paradox.outlier_columns}
    return [
        row for name, draw in sets.items() for row in paradox.study(name, paradox.synthetic(1 << 15, draw), (4, 16, 64))
    ]


def by_rule(rows: list[Any], scales: str) -> dict[str, tuple[float, ...]]:
    return {row.rule: row.relative_mse for row in rows if row.scales == scales and row.weights == "normal"}


@pytest.mark.slow
def test_abs_max_without_a_global_scale_gets_worse_as_blocks_shrink(rows: list[Any]) -> None:
    """2.56e-2, 1.57e-2, 1.26e-2 of 2^20 weights in blocks of 4, 16, 64; a block in fifty is lost, so 2^15 vary more."""
    mse = by_rule(rows, "e4m3")["absmax"]
    assert mse == pytest.approx((2.56e-2, 1.57e-2, 1.26e-2), rel=0.08)
    assert mse[0] > mse[1] > mse[2]


@pytest.mark.slow
def test_exact_scales_get_better_as_blocks_shrink_in_every_row(rows: list[Any]) -> None:
    exact = [row for row in rows if row.rule == "exact"]
    assert len(exact) == 2 * 5
    assert all(row.monotone for row in exact)
    assert by_rule(rows, "e4m3")["exact"] == pytest.approx((6.61e-3, 1.004e-2, 1.185e-2), rel=0.03)


def test_no_rule_is_below_the_exact_one(rows: list[Any]) -> None:
    for scales in ("e4m3", "e4m3/global", "ue5m3", "ue5m3/global", "e8m0"):
        found = by_rule(rows, scales)
        for rule, mse in found.items():
            assert all(a <= b * (1 + 1e-6) for a, b in zip(found["exact"], mse, strict=True)), (scales, rule)


def test_a_row_that_is_not_monotone_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = paradox.Row("w", "e4m3", "exact", (4, 8), (0.2, 0.1))
    equal = paradox.Row("w", "e4m3", "exact", (4, 8), (0.1 * (1 + 1e-8), 0.1))
    assert not worse.monotone
    assert equal.monotone
    for row, code in ((worse, 1), (equal, 0)):
        monkeypatch.setattr(paradox, "study", lambda *_, row=row: iter([row]))
        monkeypatch.setattr(sys, "argv", ["block_size_paradox.py", "--elements", "2048"])
        assert paradox.main() == code
        assert ("exact is worse for a smaller block: w, e4m3" in capsys.readouterr().err) is bool(code)
