"""A plugin for what runs under Triton's interpreter: a row's products are its own, and little is made twice.

NumPy's matrix products add up a row in an order that its place among the rows decides on some CPUs (OpenBLAS with
AVX2), unlike a GPU's. In float64, rounded once, this is not seen in a float32. Where kernels are compiled nothing
changes.
"""

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
from triton.runtime import interpreter


def product(a: Any, b: Any, dtype: Any = np.float32) -> Any:
    """``a @ b`` in ``dtype``."""
    return np.matmul(a, b, dtype=np.float64).astype(dtype)


if triton.knobs.runtime.interpret:
    interpreter.np = SimpleNamespace(**vars(np) | {"matmul": product})
    if triton.__version__.startswith("3.9."):  # of another one the inner functions may be others
        from tests.numerics.kernels import interpreter_3_9  # noqa: F401
if __name__ == "__main__":  # before the name of a script
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
