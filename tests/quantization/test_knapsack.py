"""Claims about the solver of the integer program besides its optima, which `tests/pipeline/budget/test_mixed.py`
checks."""

import subprocess
import sys

import pytest

CALL = """
from ptqpipe.recipe.knapsack import solve
costs = [
    [3.215, 1.368, 2.83, 0.1833, 0], [2.431, 1.326, 1.985, 0.1279, 0], [6.453, 3.554, 5.809, 0.3685, 0],
    [1.318, 0.6311, 1.129, 0.06873, 0], [4.899, 2.604, 4.433, 0.2825, 0], [3.438, 1.908, 3.014, 0.1944, 0],
    [7.394, 3.955, 6.049, 0.3834, 0], [1.859, 0.935, 1.634, 0.1109, 0], [6.603, 3.412, 5.847, 0.3703, 0],
    [4.567, 2.443, 3.949, 0.2598, 0], [9.697, 5.108, 8.185, 0.5081, 0], [1.441, 0.6996, 1.287, 0.09323, 0],
    [7.308, 3.903, 6.457, 0.4154, 0], [5.804, 3.133, 5.14, 0.3347, 0], [8.621, 4.547, 7.353, 0.4711, 0],
    [1.717, 0.8969, 1.539, 0.1003, 0],
]
sizes = [
    [104448, 110596, 197120, 202752, 393216], [208896, 221192, 396288, 405504, 786432],
    [69632, 73740, 132096, 135168, 262144], [34816, 36868, 66048, 67584, 131072],
] * 4
print("before")
print(solve(costs, sizes, 2826240).nbytes <= 2826240)
"""


@pytest.mark.slow
def test_the_solver_prints_nothing() -> None:
    """HiGHS of scipy 1.17 writes a line of its own to standard output on this very program."""
    done = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("before\nTrue\n", "")
