"""Claims about the table that stands beside EQuARX's: its rows are theirs, and a row that drifts is called out."""

from importlib import import_module

import pytest

from tests.labs.allreduce_simulator import measured

script = import_module("labs.allreduce_table.__main__")


def test_their_numbers_are_those_that_were_published() -> None:
    assert script.ERRORS == measured.EQUARX_MSE
    assert script.SPEEDUPS == measured.EQUARX_SPEEDUP
    assert script.PREFILL_MS == measured.EQUARX_PREFILL_MS


def test_every_row_agrees_as_far_as_it_says() -> None:
    rows = [*script.errors(1 << 16), *script.times()]
    assert len(rows) == 2 * 3 + 1 + 4 + 3
    for row in rows:
        assert row.deviation == pytest.approx(row.ours / row.theirs - 1)
        assert (row.agrees == "as printed") is (abs(row.ours - row.theirs) < 0.5 * 10.0 ** -digits(row.kind, row.row))
    assert sum(row.agrees == "as printed" for row in rows) >= 8


def digits(kind: str, row: str) -> int:
    """What they print after the point."""
    return {"mse": 2 if row.startswith("ring-cast") else 4, "speedup": 1, "saved_ms": 2}[kind]
