"""The multiple-choice knapsack: one option for each group, the least total cost within a budget of bytes.

    minimize   sum cost[g][o] x[g][o]     subject to   sum_o x[g][o] = 1,   sum size[g][o] x[g][o] <= budget

Solved by HiGHS through scipy.optimize.milp.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ptqpipe.errors import PtqError, missing_package

GAP = 1e-6  # relative: where the solver may stop
TIME_LIMIT = 60.0  # seconds a program


@dataclass(frozen=True, slots=True)
class Allocation:
    """The option of each group. ``gap`` is (cost - bound) / cost: how far from optimal it could at most be."""

    chosen: tuple[int, ...]
    cost: float
    nbytes: int
    bound: float

    @property
    def gap(self) -> float:
        """Relative; 0 is proven optimal."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost > 0 else 0.0


def require_scipy() -> None:
    """UsageError naming the extra where scipy is missing."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise missing_package("ptqpipe plan", "scipy", "ptqpipe[plan]") from None


def solve(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> Allocation | None:
    """The best choice within ``budget`` bytes; None where even the smallest does not fit.

    Sizes are summed in whole numbers here: the solver's tolerance cannot break the budget.
    """
    smallest = sum(min(row) for row in sizes)
    if smallest > budget:
        return None
    limit = budget
    while True:
        allocation = _milp(costs, sizes, limit)
        if allocation.nbytes <= budget:
            return allocation
        limit -= allocation.nbytes - budget  # a tolerance of the solver: ask for that much less
        if limit < smallest:
            cheapest = tuple(min(range(len(row)), key=lambda o, row=row: row[o]) for row in sizes)  # type: ignore[misc]
            return _priced(cheapest, costs, sizes, 0.0)


def _milp(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> Allocation:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    c = np.array([value for row in costs for value in row], dtype=np.float64)
    scale = float(c.max()) or 1.0
    weight = np.array([value for row in sizes for value in row], dtype=np.float64)
    group = np.array([g for g, row in enumerate(costs) for _ in row])
    count = len(c)
    one = csr_matrix((np.ones(count), (group, np.arange(count))), shape=(len(costs), count))
    size = csr_matrix(weight[None, :] / budget)
    with _quiet():
        result = milp(
            c / scale,
            constraints=[LinearConstraint(one, 1, 1), LinearConstraint(size, -np.inf, 1)],
            integrality=np.ones(count),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": GAP, "time_limit": TIME_LIMIT},
        )
    if result.x is None:
        raise PtqError(f"the integer program was not solved: {result.message}; try another budget or fewer formats")
    start, chosen = 0, []
    for row in costs:
        chosen.append(int(np.argmax(result.x[start : start + len(row)])))
        start += len(row)
    bound = result.mip_dual_bound
    return _priced(tuple(chosen), costs, sizes, 0.0 if bound is None else float(bound) * scale)


@contextmanager
def _quiet() -> Iterator[None]:
    """Standard output goes nowhere meanwhile: HiGHS of scipy 1.17 prints names of its functions there, past Python, and
    they would stand in the middle of JSON."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C has not written yet
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _priced(
    chosen: tuple[int, ...], costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], bound: float
) -> Allocation:
    cost = sum(row[o] for row, o in zip(costs, chosen, strict=True))
    return Allocation(chosen, cost, sum(row[o] for row, o in zip(sizes, chosen, strict=True)), bound)
