"""Quantized weights moved from one container to another: the bytes, a few megabytes at a time.

Codes and scales are row major in every layout, so a run of rows is a run of bytes and nothing is decoded. Numbers that
a layout stores alone (global scales, input scales) are inverted where the other side divides; what that costs is
looked for and told. Knows readers, writers and parts; must not know names, configs or records.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.checkpoint.writer import CheckpointWriter
from ptqpipe.containers import Part, Role, StoredWeight, decode_low_rank
from ptqpipe.dtypes import FLOATS
from ptqpipe.errors import CheckpointError, FormatError, NumericsError
from ptqpipe.formats import Codec
from ptqpipe.qtensor import QTensor
from ptqpipe.schemes import Scheme
from ptqpipe.stages.common.jobs import COPY_BYTES

DECODE_BYTES = 1 << 20  # of codes; their float32 decode and its temporaries are some twenty times that

_OTHER_SPELLING = {
    Role.GLOBAL: Role.GLOBAL_DIVISOR,
    Role.GLOBAL_DIVISOR: Role.GLOBAL,
    Role.INPUT_GLOBAL: Role.INPUT_GLOBAL_DIVISOR,
    Role.INPUT_GLOBAL_DIVISOR: Role.INPUT_GLOBAL,
}
_FLOATS = dict(FLOATS.values())


@dataclass(frozen=True, slots=True)
class Piece:
    """One weight of the output: rows start, start+step, ... of a stored weight (of one expert of a stack).

    ``into`` is its number in a stack of the output, None for a weight of its own.
    """

    weight: str
    shape: tuple[int, int]
    scheme: Scheme
    parts: tuple[Part, ...]
    source: StoredWeight
    expert: int | None = None
    start: int = 0
    step: int = 1
    into: int | None = None

    @property
    def name(self) -> str:
        """Its name in the record: that of the weight, with the expert in a stack."""
        return self.weight if self.into is None else f"{self.weight}[{self.into}]"

    @property
    def whole(self) -> bool:
        """Whether it is all rows of its source."""
        return self.shape == self.source.shape

    def origin(self, part: Part) -> Part:
        """The stored part that a part of the output is made of. FormatError where there is none."""
        found = self.source.part(part.role) or self.source.part(_OTHER_SPELLING.get(part.role, part.role))
        if found is None:
            raise FormatError(f"{part.name} needs a scale, and the checkpoint stores none for {self.source.weight}")
        return found


@dataclass(frozen=True, slots=True)
class Moved:
    """What moving a piece gave.

    hashes        role -> sha256 of the part's bytes
    changed       the float32 decode is rounded differently, since the global scale was inverted
    irreversible  parts whose reciprocal's reciprocal is another float32
    global_scale  what multiplies the block scales, None for formats without one
    """

    hashes: dict[str, str]
    changed: bool
    irreversible: list[str]
    global_scale: float | None


def move(piece: Piece, reader: CheckpointReader, writer: CheckpointWriter) -> Moved:
    """Writes every part of a piece at its place. NumericsError for a scale that the new dtype cannot hold."""
    hashes: dict[str, str] = {}
    changed, irreversible = False, []
    global_scale: float | None = None
    for part in piece.parts:
        origin = piece.origin(part)
        if part.role in (Role.DATA, Role.SCALES):
            hashes[part.role.value] = _move_rows(piece, part, origin, reader, writer)
            continue
        value = read_number(reader, origin, expert=piece.expert)
        if origin.role is not part.role:
            inverse = 1.0 / value
            irreversible += [part.name] if bool(1.0 / inverse != value) else []
            divisor, factor = (value, inverse) if origin.role is Role.GLOBAL_DIVISOR else (inverse, value)
            if part.role in (Role.GLOBAL, Role.GLOBAL_DIVISOR):
                changed = changed or not decodes_alike(divisor, factor, piece.scheme.fmt.scale)
            value = inverse
        if part.role in (Role.GLOBAL, Role.GLOBAL_DIVISOR):
            global_scale = float(value if part.role is Role.GLOBAL else 1.0 / value)
        raw = _exactly(value.reshape(1), part).view(torch.uint8)
        writer.write(part.name, raw, byte_offset=(piece.into or 0) * raw.nbytes)
        hashes[part.role.value] = hashlib.sha256(raw.numpy().data).hexdigest()
    return Moved(hashes, changed, irreversible, global_scale)


def decodes_alike(divisor: torch.Tensor, factor: torch.Tensor, codec: Codec) -> bool:
    """Whether every value of the scale codec gives the same float32 divided by ``divisor`` and times ``factor``."""
    if not codec.enumerable:
        return False
    values = torch.tensor(codec.magnitudes, dtype=torch.float64).float()
    return torch.equal(values / divisor, values * factor)


def read_number(reader: CheckpointReader, part: Part, *, expert: int | None) -> torch.Tensor:
    """A part that holds one number (for each expert), as float32 0-d; NumericsError unless finite and positive."""
    stored = reader.read(part.name).reshape(-1)
    value = stored[expert if part.stacked and expert is not None else 0].float()
    if not (torch.isfinite(value) and value > 0):
        raise NumericsError(f"{part.name} is {value.item()}; a scale must be finite and positive")
    return value


def read_rows(
    piece: Piece, part: Part, reader: CheckpointReader, *, limit_bytes: int = COPY_BYTES, align: int = 1
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, uint8 [rows, bytes]) of a piece's DATA or SCALES, in runs of about ``limit_bytes``.

    For SCALES the rows are those of the piece's scale grid. Runs are multiples of ``align`` rows.
    """
    count, total, start, step = rows_of(piece, part)
    row_bytes = reader.entries[part.name].nbytes // ((piece.source.experts or 1) * total)
    base = (piece.expert or 0) * total + start
    run = max(limit_bytes // max(row_bytes * step, 1) // align, 1) * align
    for first in range(0, count, run):
        last = min(first + run, count)
        span = (last - first - 1) * step + 1
        raw = torch.empty(span * row_bytes, dtype=torch.uint8)
        at = (base + first * step) * row_bytes
        reader.read_into(part.name, raw, byte_start=at, byte_stop=at + span * row_bytes)
        yield first, raw.reshape(span, row_bytes)[::step].contiguous()


def decoded_rows(piece: Piece, reader: CheckpointReader) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, float32 [rows, K]) of a piece, some megabytes at a time: the decode of ``qtensor.py``."""
    fmt, source = piece.source.scheme.fmt, piece.source
    data, scales = (source.part(role) for role in (Role.DATA, Role.SCALES))
    divisor = source.part(Role.GLOBAL_DIVISOR)
    number = divisor or source.part(Role.GLOBAL)
    if data is None or scales is None:
        raise CheckpointError(f"{source.weight} has no stored codes or scales")
    g = None if number is None else read_number(reader, number, expert=piece.expert)
    raw = torch.cat([rows for _, rows in read_rows(piece, scales, reader)])
    grid = raw.view(fmt.scale.dtype or torch.uint8).reshape(fmt.scale_shape(piece.shape))
    thin = decode_low_rank(source, lambda name, i, j: reader.read(name, start=i or 0, stop=j), expert=piece.expert)
    block = fmt.block[0] or piece.shape[0]
    for first, rows in read_rows(piece, data, reader, limit_bytes=DECODE_BYTES, align=fmt.block[0] or 1):
        count = rows.shape[0]
        own = grid[first // block : -(-(first + count) // block)]
        added = None if thin is None else thin.narrow(0, first, count)
        yield first, QTensor(fmt, (count, piece.shape[1]), rows, own, g, divisor is not None, added).dequantize()


def rows_of(piece: Piece, part: Part) -> tuple[int, int, int, int]:
    """(rows of the piece, rows of the source, first row in the source, step) of a DATA or SCALES part.

    FormatError where the piece would cut a block in two.
    """
    fmt, source = piece.source.scheme.fmt, piece.source
    if part.role is Role.DATA:
        return piece.shape[0], source.shape[0], piece.start, piece.step
    block = fmt.block[0]
    total = fmt.scale_shape(source.shape)[0]
    if piece.whole or block == 0:
        return total, total, 0, 1
    if block == 1:
        return piece.shape[0], total, piece.start, piece.step
    stop = piece.start + piece.shape[0]
    if piece.step != 1 or piece.start % block or (stop % block and stop != source.shape[0]):
        raise FormatError(f"{piece.weight}: gate and up share blocks of {block} rows in {source.weight}; use ptqpipe")
    return fmt.scale_shape(piece.shape)[0], total, piece.start // block, 1


def _move_rows(piece: Piece, part: Part, origin: Part, reader: CheckpointReader, writer: CheckpointWriter) -> str:
    """Writes a DATA or SCALES part; its sha256."""
    digest = hashlib.sha256()
    cast = _same_bytes if origin.dtype == part.dtype or origin.dtype not in _FLOATS else _widened(origin, part)
    offset = _bytes_of_one(part, writer) * (piece.into or 0)
    for _, rows in read_rows(piece, origin, reader):
        raw = cast(rows)
        writer.write(part.name, raw, byte_offset=offset)
        digest.update(raw.numpy().data)
        offset += raw.nbytes
    return digest.hexdigest()


def _bytes_of_one(part: Part, writer: CheckpointWriter) -> int:
    """Bytes of one expert of a part, of all of it where it is no stack."""
    return writer.layout.placements[part.name].nbytes // (part.shape[0] if part.stacked else 1)


def _same_bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(-1)


def _widened(origin: Part, part: Part) -> Callable[[torch.Tensor], torch.Tensor]:
    dtype = _FLOATS[origin.dtype]
    return lambda rows: _exactly(rows.reshape(-1).view(dtype), part).view(torch.uint8)


def _exactly(numbers: torch.Tensor, part: Part) -> torch.Tensor:
    """Float numbers in a part's dtype; NumericsError where that would change one."""
    converted = numbers.to(_FLOATS[part.dtype])
    if not torch.equal(converted.float(), numbers.float()):
        raise NumericsError(f"{part.name} as {part.dtype} would round a {numbers.dtype} scale; keep the layout")
    return converted.contiguous()
