"""Reads parts of tensors: rows and columns of a stored weight as a QTensor of their own, boxes of plain tensors.

Only the bytes of the part are read. Codes and scales are row major in every layout, so a part of some rows is a run of
bytes, and a part of some columns is one run a row. Knows no models and no ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd, prod

import torch

from ptqpipe.checkpoint import CheckpointReader, bytes_of
from ptqpipe.checkpoint.layouts import Part, PartKind, StoredWeight, part_bytes, scale_codes
from ptqpipe.errors import CheckpointError, FormatError
from ptqpipe.models.source import Source
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import QTensor

Range = tuple[int, int]


def read_box(reader: CheckpointReader, name: str, ranges: Sequence[Sequence[Range]]) -> torch.Tensor:
    """The part of a stored tensor that lies in the given ranges of each dimension, concatenated along each.

    Stored dtype, contiguous. A full dimension is one range; the last dimensions that are full are read as one run.
    """
    entry = reader.entries[name]
    dtype = stored_dtype(reader, name)
    shape = [sum(stop - start for start, stop in part) for part in ranges]
    out = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
    view, offset = bytes_of(out), 0
    for start, stop in _runs(entry.shape, ranges):
        first, last = start * dtype.itemsize, stop * dtype.itemsize
        reader.read_into(name, view[offset : offset + last - first], start=first, stop=last)
        offset += last - first
    return out.view(dtype).reshape(shape)


def _runs(shape: Sequence[int], ranges: Sequence[Sequence[Range]]) -> list[Range]:
    """Element runs [start, stop) of a row-major tensor that make up a box, in its order; neighbours are joined."""
    runs: list[Range] = [(0, 1)]
    for extent, part in zip(shape, ranges, strict=True):
        if list(part) == [(0, extent)]:
            runs = [(start * extent, stop * extent) for start, stop in runs]
            continue
        rows = (row for start, stop in runs for row in range(start, stop))
        runs = [(row * extent + start, row * extent + stop) for row in rows for start, stop in part]
    return runs


def read_part(
    source: Source,
    stored: StoredWeight,
    *,
    expert: int | None = None,
    rows: Sequence[Range] | None = None,
    columns: Range | None = None,
) -> QTensor:
    """Rows and columns of a stored weight (of one expert of a stack) as a QTensor.

    ``columns`` must lie on block edges, else FormatError. ``rows`` may cut blocks that are several rows high: the part
    then has lower blocks with the same scales, which decode to the same numbers. CheckpointError for damaged scales.
    """
    n, k = stored.shape
    rows = [(0, n)] if rows is None else list(rows)
    first, last = columns or (0, k)
    fmt = stored.scheme.fmt
    if stored.whole is not None:
        whole = source.quantized(stored.weight, expert=expert)
        return check_scales(
            _cut(whole, rows, (first, last)), scales=_need(stored, PartKind.SCALES).name, global_scale=""
        )
    high, wide = fmt.block_extent(stored.shape)
    if fmt.block[1] and (first % wide or (last % wide and last != k)):
        raise FormatError(f"columns [{first}, {last}) of {stored.weight} do not lie on block edges of {wide}")
    low = _common_rows(fmt, stored.shape, rows)
    local = (sum(stop - start for start, stop in rows), last - first)
    part_fmt = fmt if fmt.block[0] in (0, low) else replace(fmt, block=(low, fmt.block[1]))
    bits = fmt.element.bits
    span = (first * bits // 8, last * bits // 8, k * bits // 8)
    data = _read_rows(source, _need(stored, PartKind.DATA), rows, expert, span)
    grid = fmt.scale_shape(stored.shape)
    scale_rows = _scale_rows(rows, high, low) if fmt.block[0] else [0]
    scale_columns = (0, grid[1]) if not fmt.block[1] else (first // wide, -(-last // wide))
    scales = _read_scales(source, stored, grid, scale_rows, scale_columns, expert)
    divisor = stored.part(PartKind.GLOBAL_DIVISOR)
    scalar = divisor or stored.part(PartKind.GLOBAL)
    part = QTensor(
        part_fmt,
        local,
        data,
        scales.reshape(part_fmt.scale_shape(local)),
        None if scalar is None else _read_scalar(source, scalar, expert),
        global_divides=divisor is not None,
    )
    return check_scales(
        part, scales=_need(stored, PartKind.SCALES).name, global_scale="" if scalar is None else scalar.name
    )


def _cut(q: QTensor, rows: Sequence[Range], columns: Range) -> QTensor:
    """Rows and columns of what has to be read whole. FormatError where they cut blocks."""
    if list(rows) != [(0, q.shape[0])]:
        parts = [q.narrow(0, start, stop - start) for start, stop in rows]
        zeros = None if q.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
        data, scales = (torch.cat(pieces) for pieces in zip(*[(part.data, part.scales) for part in parts], strict=True))
        q = replace(q, shape=(len(data), q.shape[1]), data=data, scales=scales, zeros=zeros)
    return q if columns == (0, q.shape[1]) else q.narrow(1, columns[0], columns[1] - columns[0])


def _common_rows(fmt: Format, shape: tuple[int, int], rows: Sequence[Range]) -> int:
    """The height of blocks that both the stored blocks and the rows of the part are made of."""
    high = fmt.block_extent(shape)[0]
    if not fmt.block[0] or high == 1:
        return high
    edges = [edge for start, stop in rows for edge in (start, stop if stop != shape[0] else start)]
    if len(rows) > 1:  # pieces are put side by side, so each must be whole blocks
        edges += [stop - start for start, stop in rows]
    return gcd(high, *edges)


def _scale_rows(rows: Sequence[Range], high: int, low: int) -> list[int]:
    return [row // high for start, stop in rows for row in range(start, stop, low)]


def _read_rows(
    source: Source, part: Part, rows: Sequence[Range], expert: int | None, span: tuple[int, int, int]
) -> torch.Tensor:
    """uint8 [rows, bytes] of a part whose rows are ``span[2]`` bytes wide: bytes [span[0], span[1]) of each."""
    first, last, width = span
    base = part_bytes(part) // part.shape[0] * expert if expert is not None and part.stacked else 0
    count = sum(stop - start for start, stop in rows)
    out = torch.empty(count, last - first, dtype=torch.uint8)
    runs: list[Range] = [(start * width, stop * width) for start, stop in rows]
    if last - first != width:
        runs = [(row * width + first, row * width + last) for start, stop in rows for row in range(start, stop)]
    view, offset = bytes_of(out), 0
    for begin, end in runs:
        source.reader.read_into(part.name, view[offset : offset + end - begin], start=base + begin, stop=base + end)
        offset += end - begin
    return out


def _read_scales(
    source: Source,
    stored: StoredWeight,
    grid: tuple[int, int],
    rows: Sequence[int],
    columns: Range,
    expert: int | None,
) -> torch.Tensor:
    """The scales of a part, [len(rows), columns]: uint8 codes, or the floats that are stored."""
    part = _need(stored, PartKind.SCALES)
    one = part_bytes(part) // (part.shape[0] if part.stacked else 1)
    size = one // (grid[0] * grid[1])
    runs = _runs_of(rows)
    raw = _read_rows(source, part, runs, expert, (columns[0] * size, columns[1] * size, grid[1] * size))
    if len(raw) != len(rows):  # blocks that were cut: a row of scales serves several
        read = [row for start, stop in runs for row in range(start, stop)]
        index = {row: position for position, row in enumerate(read)}
        raw = raw[torch.tensor([index[row] for row in rows])]
    scales, fmt = raw.view(stored_dtype(source.reader, part.name)), stored.scheme.fmt
    return scale_codes(scales, fmt, part.name) if fmt.scale.enumerable else scales


def _runs_of(rows: Sequence[int]) -> list[Range]:
    runs: list[Range] = []
    for row in rows:
        if runs and row < runs[-1][1]:
            continue
        if runs and row == runs[-1][1]:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def stored_dtype(reader: CheckpointReader, name: str) -> torch.dtype:
    """The torch dtype of a stored tensor, without reading it where that can be avoided."""
    return (reader.read(name, start=0, stop=0) if reader.entries[name].shape else reader.read(name)).dtype


def _read_scalar(source: Source, part: Part, expert: int | None) -> torch.Tensor:
    """A global scale, float32 0-d."""
    if part.stacked and expert is not None:
        return source.reader.read(part.name, start=expert, stop=expert + 1).float().reshape(())
    return source.reader.read(part.name).float().reshape(())


def _need(stored: StoredWeight, role: PartKind) -> Part:
    part = stored.part(role)
    if part is None:
        raise FormatError(f"{stored.weight} has no stored {role}")
    return part


# Refuses stored scales that no converter writes: NaN, infinite, negative, zero. A damaged scale gives numbers, wrong
# ones, and nothing downstream would notice. What is read is one pass over the scales alone, a sixteenth of a weight's
# bytes or less. A block scale of zero is let through where it does no harm: it decodes its block to zeros, which is
# what a writer without a smallest scale makes of a block of zeros.


def check_scales(q: QTensor, *, scales: str, global_scale: str) -> QTensor:
    """``q`` itself. CheckpointError for a scale that is not finite or negative, and for a global one that is zero.

    A scale that is stored as a float may be zero where all codes of its block are; as a code, it may be zero.

    scales, global_scale  the names of the tensors they were read from
    """
    if q.global_scale is not None:
        check_positive(q.global_scale, global_scale)
    if q.fmt.scale.enumerable:
        # Codes of a sign, of NaN and of nothing come after those of the magnitudes.
        if q.scales.numel() and int(q.scales.max()) >= len(q.fmt.scale.magnitudes):
            bad = int((q.scales >= len(q.fmt.scale.magnitudes)).sum())
            raise _damaged(scales, f"{bad} of {q.scales.numel()} codes of {q.fmt.scale.name} that are negative or NaN")
        return q
    if bool((q.scales > 0).all()) and bool(q.scales.isfinite().all()):
        return q
    empty = replace(q, scales=(q.scales == 0).to(q.scales.dtype), global_scale=None)
    if bool((q.scales == 0).any()) and not bool(empty.dequantize().any()):
        check_positive(q.scales[q.scales != 0], scales)
        return q
    check_positive(q.scales, scales)
    return q


def check_positive(values: torch.Tensor, name: str) -> None:
    """CheckpointError that names the tensor where one of its values is not finite and above zero."""
    good = (values > 0) & values.isfinite()
    if not bool(good.all()):
        raise _damaged(name, f"{float(values[~good].flatten()[0]):g}")


def _damaged(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{name!r} has {what}, expected scales that are finite and above zero; the file is damaged")
