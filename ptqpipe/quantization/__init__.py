"""Algorithms that choose the codes of a unit of weights, one file each; their table is
``ptqpipe.recipe.options.ALGORITHMS``.

    unit.py        their common arguments and results
    driver.py      the loop over a unit's weights, the global scale, sums of errors; codes that tune has learned
    rtn.py, gptq.py   the algorithms
    calibrated.py  what algorithms with statistics share: weighted scales, and a check against round to nearest

To add one: a file with ``quantize`` and a row in the table.
"""

from collections.abc import Callable
from importlib import import_module

from ptqpipe.quantization.activation_scale import fp8_scale, nvfp4_scale, static_amax
from ptqpipe.quantization.metric import memory_bytes, output_error
from ptqpipe.quantization.unit import (
    CHUNK_ELEMENTS,
    LoadedWeight,
    RowWriter,
    Task,
    UnitResult,
    Weight,
    WeightError,
    check_decode,
    gathered_bytes,
    joined,
    quantize_rows,
    total_error,
)
from ptqpipe.recipe.options import Algorithm


def quantizer(algorithm: Algorithm) -> Callable[[Task], UnitResult]:
    """The function ``quantize`` of a row's file: it quantizes the weights of a unit and sends their rows to the task's
    sink. Raises NumericsError for unusable weights or moments."""
    function: Callable[[Task], UnitResult] = import_module(algorithm.module).quantize
    return function
