"""Compiled kernels for CPU tensors: block scales searched, codes packed, decoded and measured, bit-equal to torch.

The front of ``cpu_search.py``, ``cpu_decode.py``, ``cpu_carry.py`` and ``cpu_columns.py``. The C++ lies in ``csrc/``; a
call releases the interpreter lock and runs on the caller's thread alone: the caller brings the threads. Functions
return None for combinations without a kernel. Knows formats; must not know searches' names, files or containers.
"""

from ptqpipe.numerics.kernels.cpu_carry import fp4_places, fp4_to_e4m3, fp4_to_nvfp4
from ptqpipe.numerics.kernels.cpu_columns import (
    choose_block,
    descend,
    enter_rows,
    feed_forward,
    feed_rows,
    sweep_block_rows,
    sweep_rows,
)
from ptqpipe.numerics.kernels.cpu_decode import code_difference, decode_error, dequantize
from ptqpipe.numerics.kernels.cpu_library import (
    available,
    current_isa as isa,
    force_isa,
    known_isas as isas,
    why_missing,
)
from ptqpipe.numerics.kernels.cpu_search import amax, block_quantize, fp8_encode, score_total, score_totals

__all__ = [
    "amax",
    "available",
    "block_quantize",
    "choose_block",
    "code_difference",
    "decode_error",
    "dequantize",
    "descend",
    "enter_rows",
    "feed_forward",
    "feed_rows",
    "force_isa",
    "fp4_places",
    "fp4_to_e4m3",
    "fp4_to_nvfp4",
    "fp8_encode",
    "isa",
    "isas",
    "score_total",
    "score_totals",
    "sweep_block_rows",
    "sweep_rows",
    "why_missing",
]
