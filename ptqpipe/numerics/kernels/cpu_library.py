"""The compiled CPU kernels as ctypes sees them: structs, loading, and which instruction set runs.

Mirrors ``csrc/api.h`` field by field; knows addresses and integers, no tensors. Every call releases the interpreter
lock; products and attention run on torch's OpenMP threads as well.
"""

import ctypes
import os
import platform
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path

from ptqpipe.errors import FormatError, one_line

LIBRARY = Path(__file__).with_name("_cpu.so")  # where setup.py puts it
ABI = 20
ISAS = ("avx512", "avx2", "neon", "baseline")  # best first
OK, NOT_FINITE, UNSUPPORTED, NO_MEMORY = 0, 1, 2, 3  # what a call returns

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def struct(name: str, **fields: type) -> type[ctypes.Structure]:
    """A struct of ``csrc/api.h``: its fields in order, with their C types. Tensors that it points into may be kept with
    it as any other attribute."""
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields.items()), "__doc__": f"``struct {name}``."})


Blocks = struct(
    "ptq_blocks",
    w=_POINTER, rows=_LONG, cols=_LONG, row_stride=_LONG, dtype=_INT, block=_INT, element=_INT, scale_kind=_INT,
    scale_bias=_INT, scale_top=_INT, rule=_INT, flush_code=_INT, importance=_POINTER, global_scales=_POINTER,
    n_global=_LONG, data=_POINTER, scales=_POINTER, totals=_POINTER,
)  # fmt: skip
Amax = struct(
    "ptq_amax",
    w=_POINTER, rows=_LONG, cols=_LONG, row_stride=_LONG, dtype=_INT, unused=_INT,
)  # fmt: skip
Decode = struct(
    "ptq_decode",
    data=_POINTER, data_stride=_LONG, rows=_LONG, cols=_LONG, scales=_POINTER, scale_cols=_LONG, block_rows=_LONG,
    block_cols=_LONG, values=_POINTER, scale_values=_POINTER, code_bits=_INT, scale_codes=_INT, out_dtype=_INT,
    w_dtype=_INT, out=_POINTER, w=_POINTER, w_stride=_LONG, sums=_POINTER, other=_POINTER,
    only_compare=_LONG,
)  # fmt: skip
Carry = struct(
    "ptq_carry",
    data=_POINTER, scales=_POINTER, data_stride=_LONG, scale_stride=_LONG, rows=_LONG, cols=_LONG, step=_INT,
    exponent=_INT, places=_POINTER, exponents=_POINTER, block_rows=_LONG, block_cols=_LONG, out=_POINTER,
    out_scales=_POINTER, lost=_POINTER,
)  # fmt: skip
Encode = struct(
    "ptq_encode",
    w=_POINTER, rows=_LONG, cols=_LONG, row_stride=_LONG, scales=_POINTER, scale_cols=_LONG, block_rows=_LONG,
    block_cols=_LONG, dtype=_INT, element=_INT, data=_POINTER,
)  # fmt: skip
Long = struct(
    "ptq_long",
    w=_POINTER, rows=_LONG, cols=_LONG, row_stride=_LONG, block_rows=_LONG, block_cols=_LONG, dtype=_INT,
    element=_INT, rule=_INT, unused=_INT, importance=_POINTER, scales=_POINTER,
)  # fmt: skip
Columns = struct(
    "ptq_columns",
    columns=_LONG, rows=_LONG, kind=_INT, element=_INT, exact=_POINTER, target=_POINTER, s=_POINTER, error=_POINTER,
    slope=_POINTER, matrix=_POINTER, weight=_POINTER, ladder=_POINTER, ladder_size=_LONG, count=_LONG,
    first=_POINTER, codes=_POINTER, scales=_POINTER, cost=_POINTER,
)  # fmt: skip
Pass = struct(
    "ptq_pass",
    columns=_LONG, rows=_LONG, block=_LONG, kind=_INT, element=_INT, exact=_POINTER, s=_POINTER, matrix=_POINTER,
    weight=_POINTER, feedback=_POINTER, inverse=_POINTER, usable=_POINTER, ladder=_POINTER, ladder_size=_LONG,
    below=_LONG, count=_LONG, sweeps=_LONG, error=_POINTER, codes=_POINTER, scales=_POINTER,
    slack=ctypes.c_float, threads=_INT,
)  # fmt: skip
Linear = struct(
    "ptq_linear",
    data=_POINTER, data_stride=_LONG, n=_LONG, k=_LONG, scales=_POINTER, scale_stride=_LONG, scale_rows=_LONG,
    element=_INT, scale_kind=_INT, factor=_POINTER, factor_step=_LONG, x=_POINTER, m=_LONG, bias=_POINTER,
    out=_POINTER, threads=_LONG, panels=_LONG, one_order=_LONG,
)  # fmt: skip
Norm = struct(
    "ptq_norm",
    x=_POINTER, weight=_POINTER, out=_POINTER, rows=_LONG, n=_LONG, threads=_LONG, eps=ctypes.c_float, unused=_INT,
)  # fmt: skip
Collective = struct(
    "ptq_collective",
    step=_INT, dtype=_INT, element=_INT, scale=_INT, block=_INT, hadamard=_INT, group=_INT, unused=_INT,
    elements=_LONG, ranks=_LONG, x=_POINTER, messages=_POINTER, message=_POINTER, out=_POINTER,
)  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
    """The compiled extension, or None when it was not built or is of another version of the sources."""
    extension, abi = _built()
    return extension if abi == ABI else None


def why_missing() -> str:
    """Why there are no kernels, in a few words with what to do; "" where there are."""
    extension, abi = _built()
    if extension is None:
        return "not built; install ptqpipe where there is a C++ compiler: pip install ."
    if abi != ABI:
        return f"built for ABI {abi}, expected {ABI}; build them again: pip install ."
    return "" if known_isas() else "built for another processor; build them here: pip install ."


@cache
def _built() -> tuple[ctypes.CDLL | None, int]:
    """(the extension that was built, its version), whichever that is."""
    if not LIBRARY.is_file():
        return None, 0
    try:
        extension = ctypes.CDLL(str(LIBRARY))
        return extension, int(extension.ptq_abi())
    except (OSError, AttributeError):  # built for another platform, or something else of that name
        return None, 0


@cache
def known_isas() -> tuple[str, ...]:
    """The instruction sets of this machine that have kernels, best first."""
    extension = library()
    return () if extension is None else tuple(name for name in ISAS if extension.ptq_has(name.encode()))


def multiplies_bf16() -> bool:
    """Whether the instruction set in use has products of bfloat16 numbers: AVX512-BF16 and VBMI. Attention over more
    than one query has compiled kernels there alone."""
    return _multiplies_bf16(current_isa())


@cache
def _multiplies_bf16(isa: str) -> bool:
    extension = library()
    return extension is not None and bool(extension.ptq_has_bf16(isa.encode()))


def available() -> bool:
    """Whether the extension was built and this CPU runs it."""
    return bool(known_isas())


_forced: str | None = None


def current_isa() -> str:
    """The instruction set in use, "none" without the extension: the best, unless one was forced, by `force_isa` or for
    the whole process by PTQPIPE_ISA. FormatError where that names none of this machine's."""
    return _forced or _of_environment() or (known_isas() or ("none",))[0]


@cache
def _of_environment() -> str | None:
    name = os.environ.get("PTQPIPE_ISA") or None
    if name is not None and name not in known_isas():
        raise FormatError(
            f"PTQPIPE_ISA is {name!r}, this machine has {', '.join(known_isas()) or 'no kernels'}; unset it"
        )
    return name


def force_isa(name: str | None) -> None:
    """Uses the kernels of one instruction set from now on (tests, benchmarks); None restores the best one.

    Raises FormatError for a name that this machine does not run. What is quantized does not depend on it; products with
    packed weights do, in the order of their sums.
    """
    global _forced
    if name is not None and name not in known_isas():
        raise FormatError(f"no kernels for {name!r} here; this machine has {', '.join(known_isas()) or 'none'}")
    _forced = name


def call(function: str, *arguments: object) -> int:
    """The status of an exported function for the current instruction set: OK, NOT_FINITE or UNSUPPORTED.

    Raises MemoryError where the kernel got no memory to work in: what a caller does without a kernel needs more.
    """
    extension = library()
    assert extension is not None, "callers check available()"
    status = int(getattr(extension, function)(current_isa().encode(), *arguments))
    if status == NO_MEMORY:
        raise MemoryError(f"the system has no memory for the working space of the compiled {function}")
    assert status in (OK, NOT_FINITE, UNSUPPORTED), f"{function} returned {status}; build the kernels again"
    return status


def processor() -> tuple[str, set[str]]:
    """What the first processor calls itself, and its flags or features, from /proc; the architecture and none where
    that is not."""
    fields: dict[str, str] = {}
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in takewhile(str.strip, file):
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    flags = fields.get("flags", fields.get("Features", ""))  # the latter on aarch64
    return one_line(fields.get("model name") or platform.machine(), limit=100), set(flags.split())
