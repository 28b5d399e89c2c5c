"""QTensor <-> the bytes of stored tensors. Containers list the tensors of a weight (parts); this file fills them.

A part's role, dtype and shape say all there is to know: codes and scales are row major in every layout, so a run of
whole block rows is a run of bytes.
"""

import math
from dataclasses import replace

import torch

from ptqpipe.checkpoint.dtypes import DTYPE_NAMES, DTYPES, FLOATS
from ptqpipe.checkpoint.layouts._types import Load, Part, PartKind, StoredWeight
from ptqpipe.errors import CheckpointError, FormatError, NumericsError
from ptqpipe.numerics.formats import CODECS, Format
from ptqpipe.numerics.qtensor import QTensor, scale_values

TORCH_DTYPES = {
    name: DTYPES[name][0] for name in ("U8", "I8", "I32", "I64", "F8_E4M3", "F8_E8M0", "F16", "BF16", "F32")
}
FLOAT_SCALES: dict[str, str] = {stored: short for short, (stored, _) in FLOATS.items()}
"""The codec of a scale that is stored as a plain float, by safetensors dtype."""

# Parts that belong to the whole weight, not to rows of it.
WHOLE_ROLES = frozenset(
    (PartKind.GLOBAL, PartKind.GLOBAL_DIVISOR, PartKind.INPUT_GLOBAL, PartKind.INPUT_GLOBAL_DIVISOR, PartKind.SHAPE)
)


def part_bytes(part: Part) -> int:
    return math.prod(part.shape) * TORCH_DTYPES[part.dtype].itemsize


def part_offset(
    part: Part, fmt: Format, shape: tuple[int, int], row_start: int = 0, *, expert: int | None = None
) -> int:
    """Byte offset in a part where the weight's row ``row_start`` (of one expert of a stack) begins.

    fmt, shape  the format and (N, K) of the weight, of one expert in a stack
    row_start   a multiple of the format's block rows

    Global scales belong to the whole weight: their offset is that of the expert, and writing one with every run of
    rows writes the same bytes again. Raises FormatError for a row inside a block, ValueError for a
    missing ``expert``.
    """
    if part.stacked != (expert is not None):
        raise ValueError(f"{part.name} is {'' if part.stacked else 'not '}a stack, but expert is {expert}")
    one = part_bytes(part) // (part.shape[0] if part.stacked else 1)
    base = one * (expert or 0)
    if part.role in WHOLE_ROLES or row_start == 0:
        return base
    rows = fmt.step(0)
    if not 0 <= row_start < shape[0] or row_start % rows:
        raise FormatError(f"row {row_start} of {part.name} does not begin a block; use multiples of {rows}")
    if part.role is PartKind.DATA:
        return base + row_start * (one // shape[0])
    return base + fmt.scale_run(0, row_start, row_start + 1)[0] * (one // fmt.scale_shape(shape)[0])


def encode_part(part: Part, q: QTensor, *, input_global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """The stored form of one part of ``q``, a whole weight, one expert of a stack, or a run of rows.

    Returns a contiguous tensor of the part's dtype; its shape is the part's (without the expert axis), the first axis
    cut to the rows at hand. ``input_global_scale`` is float32 and multiplies, whatever the part stores.

    Raises NumericsError for a global scale that is not finite and positive, or a scale that the dtype cannot hold
    exactly.
    """
    inner = part.shape[1:] if part.stacked else part.shape
    if part.role is PartKind.DATA:
        data = q.data.contiguous()
        return _cut(data if part.dtype == "U8" else data.view(TORCH_DTYPES[part.dtype]), inner)
    if part.role is PartKind.SHAPE:
        return torch.tensor(part.numbers, dtype=TORCH_DTYPES[part.dtype])
    if part.role is PartKind.SCALES:
        return _cut(_stored_scales(part, q.scales, q.fmt), inner)
    if part.role in (PartKind.GLOBAL, PartKind.GLOBAL_DIVISOR):
        return _stored_global(part, q.global_scale, q.global_divides is (part.role is PartKind.GLOBAL)).reshape(inner)
    if part.role in (PartKind.INPUT_GLOBAL, PartKind.INPUT_GLOBAL_DIVISOR):
        return _stored_global(part, input_global_scale, part.role is PartKind.INPUT_GLOBAL_DIVISOR).reshape(inner)
    raise FormatError(f"{part.name} is not computed from the weight; copy it")


def decode(
    stored: StoredWeight, load: Load, *, expert: int | None = None, rows: tuple[int, int] | None = None
) -> QTensor:
    """A stored weight, or expert ``expert`` of a stack, or rows [start, stop) of either, as a QTensor.

    ``rows`` must lie on block edges. A divisor stays a divisor (``global_divides``), so that the float32 decode is the
    reader's. Raises FormatError for rows inside a block, ValueError for a missing ``expert``.
    """
    if (stored.experts is None) != (expert is None):
        raise ValueError(f"{stored.weight} has {stored.experts} experts, but expert is {expert}")
    fmt, (n, k) = stored.scheme.fmt, stored.shape
    start, stop = rows if rows is not None else (0, n)
    step = fmt.step(0)
    if not 0 <= start < stop <= n or start % step or (stop % step and stop != n):
        raise FormatError(f"rows [{start}, {stop}) of {stored.weight} are not whole blocks; use multiples of {step}")
    grid = fmt.scale_run(0, start, stop)
    if start == 0:
        _check_shape(stored, load)
    if stored.whole is not None:
        return stored.whole(load).narrow(0, start, stop - start)
    data = _read(_need(stored, PartKind.DATA), load, expert=expert, rows=(start, stop), total=n)
    scales = _read(
        _need(stored, PartKind.SCALES), load, expert=expert, rows=grid, total=fmt.scale_shape(stored.shape)[0]
    )
    if fmt.scale.enumerable:
        scales = scale_codes(scales, fmt, _need(stored, PartKind.SCALES).name)
    divisor = stored.part(PartKind.GLOBAL_DIVISOR)
    source = divisor or stored.part(PartKind.GLOBAL)
    return QTensor(
        fmt,
        (stop - start, k),
        data.contiguous().view(torch.uint8).reshape(stop - start, -1),
        scales.reshape(fmt.scale_shape((stop - start, k))),
        None if source is None else _read(source, load, expert=expert).float().reshape(()),
        global_divides=divisor is not None,
    )


def _check_shape(stored: StoredWeight, load: Load) -> None:
    """CheckpointError where a stored shape is another one than that of the codes: readers cut or pad by it."""
    part = stored.part(PartKind.SHAPE)
    said = None if part is None else tuple(load(part.name, None, None).tolist())
    if part is not None and said != stored.shape:
        raise CheckpointError(
            f"'{part.name}' says {'x'.join(map(str, said or ()))}, but the codes of the weight are "
            f"{stored.shape[0]}x{stored.shape[1]}; one of them is another weight's: start from the model's float "
            "checkpoint"
        )


def decode_input_global(stored: StoredWeight, load: Load, *, expert: int | None = None) -> torch.Tensor | None:
    """The static input scale of a stored weight, float32 0-d, as a factor; None where there is none."""
    divisor = stored.part(PartKind.INPUT_GLOBAL_DIVISOR)
    source = divisor or stored.part(PartKind.INPUT_GLOBAL)
    if source is None:
        return None
    value = _read(source, load, expert=expert).float().reshape(())
    return value if divisor is None else 1.0 / value


def scale_codes(stored: torch.Tensor, fmt: Format, name: str) -> torch.Tensor:
    """uint8 codes of an enumerable scale codec, from what is stored: codes, or (E8M0 in DeepSeek's layout) their
    numbers as float32. CheckpointError for a number that the codec does not have."""
    if stored.dtype.itemsize == 1:
        return stored.view(torch.uint8)
    values = stored.float()
    codes = (values.view(torch.int32) >> 23).clamp(0, len(fmt.scale.magnitudes) - 1).to(torch.uint8)
    same = scale_values(codes, fmt.scale) == values
    if not bool(same.all()):
        wrong = float(values[~same][0])
        raise CheckpointError(f"{name} has the scale {wrong:.9g}, but its config says {fmt.scale.name}: powers of two")
    return codes


def scale_dtype(fmt: Format) -> str:
    """The natural stored dtype of a format's block scales: E4M3 codes as F8_E4M3, other codes as U8, floats as such."""
    if fmt.scale.dtype is not None:
        return DTYPE_NAMES[fmt.scale.dtype]
    return "F8_E4M3" if fmt.scale.name == "e4m3" else "U8"


def with_scale_dtype(fmt: Format, dtype: str) -> Format:
    """``fmt`` with the codec of the scales that a checkpoint stores in ``dtype``; only float scales vary."""
    if fmt.scale.dtype is None or dtype not in FLOAT_SCALES:
        return fmt
    return replace(fmt, scale=CODECS[FLOAT_SCALES[dtype]])


def _cut(x: torch.Tensor, inner: tuple[int, ...]) -> torch.Tensor:
    """``x`` in the shape of a part, the first axis being whatever remains."""
    return x.reshape(-1, *inner[1:]) if inner else x.reshape(())


def _stored_scales(part: Part, scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    dtype = TORCH_DTYPES[part.dtype]
    scales = scale_values(scales, fmt.scale) if fmt.scale.enumerable and dtype.itemsize > 1 else scales.contiguous()
    if scales.dtype is dtype:
        return scales
    if scales.dtype is torch.uint8:
        return scales.view(dtype)  # codes
    converted = scales.to(dtype)
    if not torch.equal(converted.float(), scales.float()):
        raise NumericsError(f"{part.name}: some {scales.dtype} scales are not {part.dtype} numbers; round them first")
    return converted


def _stored_global(part: Part, scale: torch.Tensor | None, invert: bool) -> torch.Tensor:
    if scale is None:
        raise NumericsError(f"{part.name} needs a scale, and none was given; calibrate or give a constant")
    value = scale.detach().float().reshape(())
    value = 1.0 / value if invert else value
    if not (torch.isfinite(value) and value > 0):
        raise NumericsError(f"{part.name} would be {value.item()}; a scale must be finite and positive")
    return value.to(TORCH_DTYPES[part.dtype])


def _need(stored: StoredWeight, role: PartKind) -> Part:
    part = stored.part(role)
    if part is None:
        raise CheckpointError(f"{stored.weight} has no stored {role}")
    return part


def _read(
    part: Part, load: Load, *, expert: int | None = None, rows: tuple[int, int] | None = None, total: int = 1
) -> torch.Tensor:
    """Rows of the stored tensor, or of one expert of it. ``total`` is how many rows there are."""
    if part.stacked:
        assert expert is not None
        whole = load(part.name, expert, expert + 1)[0]
        return whole if rows is None or not whole.dim() else whole[rows[0] : rows[1]]
    if rows is None or rows == (0, total) or not part.shape or part.shape[0] != total:
        return load(part.name, None, None)
    return load(part.name, rows[0], rows[1])
