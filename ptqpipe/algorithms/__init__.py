"""Ways to choose the codes of a unit of weights, one file each; the rows are in ``ptqpipe.options.ALGORITHMS``.

    unit.py        what all of them take and give
    rtn.py, gptq.py, learned.py   the algorithms
    calibrated.py  what algorithms with statistics share: weighted scales, and a check against round to nearest

To add one: a file with ``quantize`` and a row in the table.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from ptqpipe.options import Algorithm as Row

if TYPE_CHECKING:
    from ptqpipe.algorithms.unit import Task, UnitResult


class Algorithm(Protocol):
    """The shape of an algorithm's file."""

    def quantize(self, task: "Task") -> "UnitResult":
        """Quantizes the weights of a unit and sends their rows to ``task.sink``. NumericsError for unusable ones."""


def load(row: Row) -> Algorithm:
    """The file of a row."""
    return cast(Algorithm, import_module(row.module))
