"""Products with a packed weight on a CPU: the compiled kernels behind ``runtime/packed.py``.

Sums are float32. In *panels*, which CPUs with AVX512-BF16 read, the order of a sum depends on K alone (for NVFP4 also
on whether x has more than 16 rows, unless `Operand.keep_order` says otherwise): neither threads nor the other rows of
a call change a bit of a result. Products are those of VDPBF16PS (float32, subnormal inputs taken as zero), elsewhere
float32 products and sums, but for E2M1 on AVX2 and NEON: 16 columns of x as whole numbers over one power of two, whose
sums are exact (``csrc/linear_avx2.cpp`` says what x loses: at most 2^-15 of the largest of the 16, 2^-14 on NEON).

Knows addresses and formats; must not know modules.
"""

import ctypes
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import torch
from torch.nn.functional import pad

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import WHOLE, Format
from ptqpipe.numerics.kernels import cpu_library as lib

MOST_AT_ONCE = 4
_ELEMENTS = {"e2m1": 0, "e4m3": 1, "e2m3": 2, "e3m2": 3}
_BF16 = 4
_NO_SCALES, _E4M3, _E8M0, _FLOAT = 0, 1, 2, 3
_SCALES = {("e4m3", 16): _E4M3, ("e8m0", 32): _E8M0, ("bf16", 128): _FLOAT}
_WORTH_A_THREAD = 1 << 18  # products, below which waking another thread costs more than it brings
_LANES, _UNIT = 16, 64  # rows and columns of a weight that a panel's units have


class Operand:
    """A weight's part of a job for the kernels, made once, and the bytes that it points to."""

    def __init__(self, job: ctypes.Structure, kept: tuple[torch.Tensor | None, ...]) -> None:
        self._job, self._kept = job, kept

    @property
    def kind(self) -> tuple[int, ...]:
        """The key of x's memory layout: columns, element, panels."""
        return int(self._job.k), int(self._job.element), int(self._job.panels)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return int(self._job.n), int(self._job.k)

    def keep_order(self) -> None:
        """From now on a row's result has the same bits whatever other rows x has; NVFP4 takes a little longer.

        Of a weight in panels; of others library products may depend on it.
        """
        self._job.one_order = 1

    def job(self, rows: int) -> ctypes.Structure:
        """For ``rows`` of x, on as many threads as torch uses and are worth it."""
        job = lib.Linear.from_buffer_copy(self._job)
        job.threads = min(torch.get_num_threads(), 1 + job.n * job.k * rows // _WORTH_A_THREAD)
        return job


def operand(
    data: torch.Tensor,
    scales: torch.Tensor | None,
    factor: torch.Tensor | None,
    fmt: Format,
    shape: tuple[int, int],
    *,
    panels: bool,
) -> Operand | None:
    """A weight as `PackedWeight` describes it; None where no kernel is: other formats, strided bytes."""
    kind = _kind(fmt, scales)
    if kind is None or data.device.type != "cpu" or data.stride(-1) != 1 or not limit(panels=panels):
        return None
    numbers = scales.float().contiguous() if kind == _FLOAT and scales is not None else scales
    job = lib.Linear(
        data=data.data_ptr(), data_stride=data.stride(0), n=shape[0], k=shape[1],
        scales=None if numbers is None else numbers.data_ptr(),
        scale_stride=0 if numbers is None else numbers.shape[1],
        scale_rows=fmt.block[0] if kind == _FLOAT else 1,
        element=_ELEMENTS[fmt.element.name], scale_kind=kind, panels=int(panels),
    )  # fmt: skip
    if factor is not None:
        job.factor, job.factor_step = factor.data_ptr(), int(len(factor) > 1)
    return Operand(job, (data, numbers, factor))


def linear(x: torch.Tensor, weight: Operand, bias: torch.Tensor | None) -> torch.Tensor:
    """``[M, N]`` bfloat16: ``x [M, K]`` bfloat16 times a weight, plus ``bias [N]``. MemoryError when there is none."""
    return linear_each(x, [(weight, bias)])[0]


def linear_each(x: torch.Tensor, weights: Sequence[tuple[Operand, torch.Tensor | None]]) -> list[torch.Tensor]:
    """The products of one ``x [M, K]`` with up to `MOST_AT_ONCE` weights of `alike` operands, biases added: one
    parallel pass. FormatError for an x of another width, dtype or device."""
    wanted = weights[0][0].kind[0]
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or x.shape[1] != wanted:
        raise FormatError(f"an input of {x.shape[1]} {x.dtype} on {x.device}, expected {wanted} bfloat16 on the CPU")
    assert len(weights) <= MOST_AT_ONCE
    x = x.contiguous()
    jobs = (lib.Linear * len(weights))()
    outs, kept = [], []
    for i, (weight, bias) in enumerate(weights):
        job = weight.job(x.shape[0])
        out = torch.empty(x.shape[0], job.n, dtype=torch.bfloat16)
        added = None if bias is None else bias.float().contiguous()
        job.x, job.m, job.out = x.data_ptr(), x.shape[0], out.data_ptr()
        job.bias = None if added is None else added.data_ptr()
        jobs[i] = job
        outs.append(out)
        kept.append(added)
    jobs[0].threads = max(job.threads for job in jobs)
    status = lib.call("ptq_linear_rows", jobs, ctypes.c_int64(len(jobs)))
    assert status == lib.OK, f"no kernel of {lib.current_isa()} for these weights"
    return outs


def alike(first: Operand, second: Operand) -> bool:
    """Whether `linear_each` takes them together: the same columns, layout and kind of codes."""
    return first.kind == second.kind


def unpack(weight: Operand, first: int, last: int, *, out: torch.Tensor) -> None:
    """Rows ``[first, last)`` of a weight without its factors, to ``out [last - first, K]`` bfloat16, contiguous.

    The float32 product of code and scale, rounded once: exact but for FP8 in blocks of 128x128. Not from panels.
    """
    job = weight.job(last - first)
    job.out = out.data_ptr()
    status = lib.call("ptq_linear_unpack", ctypes.byref(job), ctypes.c_int64(first), ctypes.c_int64(last))
    assert status == lib.OK


class Bf16Panels:
    """A bfloat16 weight ``[N, K]`` in panels, for products with it and for its rows: a head and an embedding."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._data = to_panels(weight, 2 * _UNIT)
        self._dwords = self._data.view(torch.int32).reshape(-1, self._data.shape[1] // 4, _LANES)

    @staticmethod
    def fastest() -> bool:
        """Whether this machine has a kernel for them, and no faster way: AMX has, for many rows of x."""
        return limit(panels=True) >= 1 << 40

    def operand(self, rows: slice = slice(None)) -> Operand | None:
        """For products with all rows, or with some; None for rows that do not begin a panel."""
        first, last, _ = rows.indices(self.shape[0])
        if first % _LANES:
            return None
        data = self._data[first:]
        job = lib.Linear(
            data=data.data_ptr(), data_stride=data.stride(0), n=last - first, k=self.shape[1], scale_rows=1,
            element=_BF16, scale_kind=_NO_SCALES, panels=1,
        )  # fmt: skip
        return Operand(job, (data,))

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` bfloat16 of an int64 ``[...]``. IndexError outside of the rows."""
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.shape[0]:
            raise IndexError(f"a row of {int(index.min())} to {int(index.max())} of {self.shape[0]}")
        dwords = self._dwords[index // _LANES, :, index % _LANES].contiguous()
        return dwords.view(torch.bfloat16)[..., : self.shape[1]]


def limit(*, panels: bool) -> int:
    """The most rows of x for which `linear` is faster than `unpack` and torch's product: all there are in panels, but
    where the CPU has AMX. 0 where there is no kernel."""
    return _limit(lib.current_isa(), panels) if lib.known_isas() else 0


@cache
def _limit(isa: str, panels: bool) -> int:
    extension = lib.library()
    assert extension is not None, "it knows instruction sets"
    extension.ptq_linear_limit.restype = ctypes.c_int64
    return int(extension.ptq_linear_limit(isa.encode(), ctypes.c_int64(panels)))


def has_panels(fmt: Format, scales: torch.Tensor | None) -> bool:
    """Whether this machine has a kernel for a weight in panels."""
    return (
        limit(panels=True) > 0
        and _kind(fmt, scales) is not None
        and (fmt.block[0] in (1, WHOLE) or fmt.block[0] % 16 == 0)
    )


def code_panels(data: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes uint8 ``[N, B]`` in panels, uint8 ``[N', B']``: zeros pad rows to 16 and columns to 64."""
    return to_panels(data, _UNIT * fmt.element.bits // 8)


def scale_panels(scales: torch.Tensor | None, fmt: Format) -> torch.Tensor | None:
    """Scales in panels, those of a byte; the others as they are."""
    return to_panels(scales, 4) if scales is not None and _kind(fmt, scales) in (_E4M3, _E8M0) else scales


def to_panels(rows: torch.Tensor, width: int) -> torch.Tensor:
    """The bytes ``[N, B]`` of rows, padded with zeros to 16 rows and ``width`` bytes, transposed in dwords 16 rows at a
    time."""
    whole = rows.contiguous().view(torch.uint8)
    n, b = whole.shape
    whole = pad(whole, (0, -b % width, 0, -n % _LANES)).contiguous()
    dwords = whole.view(torch.int32).reshape(-1, _LANES, whole.shape[1] // 4).transpose(1, 2)
    panels = empty_bytes(whole.numel())
    panels.view(torch.int32).view(dwords.shape).copy_(dwords)
    return panels.reshape(whole.shape)


def from_panels(panels: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """The bytes ``[rows, width]`` that `to_panels` got."""
    dwords = panels.view(torch.int32).reshape(-1, panels.shape[1] // 4, _LANES)
    whole = dwords.transpose(1, 2).clone(memory_format=torch.contiguous_format)  # its last stride is 1
    return whole.view(torch.uint8).reshape(panels.shape)[:rows, :width].contiguous()


def _kind(fmt: Format, scales: torch.Tensor | None) -> int | None:
    """The kernel's kind of scales; None where it does not read them."""
    if fmt.element.name not in _ELEMENTS:
        return None
    if scales is None:
        return _NO_SCALES if fmt.block[1] == WHOLE else None
    return _SCALES.get((fmt.scale.name, fmt.block[1]))


# Memory for what every step reads whole, in huge pages where the system has them. A product with one row of x waits for
# its weights. With pages of 4 KiB the processor also waits for the address of each, and its own fetching ahead stops
# where a page ends; pages of 2 MiB leave little of that. The system is asked for them (``madvise``) and may refuse;
# nothing else depends on it.

_HUGE = 2 << 20  # bytes of a huge page on x86-64, and on aarch64 with pages of 4 KiB
_ROOM = 64 << 20  # that small tensors share: a page that is never written takes no memory
_LINE = 64
_memory_lock = threading.Lock()
# The memory in use, and the first and last byte of what is left of it.
_memory_left: tuple[mmap.mmap | None, int, int] = (None, 0, 0)


def empty_bytes(nbytes: int) -> torch.Tensor:
    """uint8 ``[nbytes]`` that begins a cache line, with any contents; given back when nothing refers to its room."""
    global _memory_left
    if nbytes < _LINE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    wanted = -(-nbytes // _LINE) * _LINE
    with _memory_lock:
        room, first, last = _memory_left if wanted < _ROOM else (None, 0, 0)
        if room is None or first + wanted > last:
            size = max(wanted, _ROOM)
            room, first = _pages(size)
            last = first + size
        if wanted < _ROOM:
            _memory_left = (room, first + wanted, last)
    # A tensor of its own, not a part of another, which could not be written if that had been made in inference mode.
    return torch.frombuffer(room, dtype=torch.uint8, count=nbytes, offset=first)


def _pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory, and where in it ``nbytes`` begin with a huge page. MemoryError without memory."""
    try:
        room = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {nbytes} bytes for weights: {error}") from None
    with suppress(OSError):  # a system without them
        room.madvise(mmap.MADV_HUGEPAGE)
    return room, -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % _HUGE
