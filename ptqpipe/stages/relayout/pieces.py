"""Quantized weights moved from one container to another: the bytes, a few megabytes at a time.

Codes and scales are row major in every layout, so a run of rows is a run of bytes and nothing is decoded. Numbers that
a layout stores alone (global scales, input scales) are inverted where the other side divides; what that costs is
looked for and recorded. Knows readers, writers and parts; must not know names, configs or records.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ptqpipe.checkpoint import COPY_BYTES, CheckpointReader, CheckpointWriter
from ptqpipe.containers import Part, Role, StoredWeight
from ptqpipe.dtypes import FLOATS
from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.formats import Codec
from ptqpipe.schemes import Scheme
from ptqpipe.source import Source

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


def move(piece: Piece, source: Source, writer: CheckpointWriter) -> Moved:
    """Writes every part of a piece at its place. NumericsError for a scale that the new dtype cannot hold."""
    hashes: dict[str, str] = {}
    changed, irreversible = False, []
    global_scale: float | None = None
    for part in piece.parts:
        origin = piece.origin(part)
        if part.role in (Role.DATA, Role.SCALES):
            hashes[part.role.value] = _move_rows(piece, part, origin, source.reader, writer)
            continue
        value = source.number(origin, expert=piece.expert)
        if origin.role is not part.role:
            inverse = 1.0 / value
            irreversible += [part.name] if bool(1.0 / inverse != value) else []
            divisor, factor = (value, inverse) if origin.role is Role.GLOBAL_DIVISOR else (inverse, value)
            if part.role in (Role.GLOBAL, Role.GLOBAL_DIVISOR):
                changed = changed or not decodes_alike(divisor, factor, piece.scheme.fmt.scale)
            value = inverse
        if part.role in (Role.GLOBAL, Role.GLOBAL_DIVISOR):
            global_scale = float(value if part.role is Role.GLOBAL else 1.0 / value)
        number = _exactly(value.reshape(1), part)
        written = writer.tensor(part.name, byte_offset=(piece.into or 0) * number.nbytes).put(number)
        hashes[part.role.value] = written.sha256
    return Moved(hashes, changed, irreversible, global_scale)


def decodes_alike(divisor: torch.Tensor, factor: torch.Tensor, codec: Codec) -> bool:
    """Whether every value of the scale codec gives the same float32 divided by ``divisor`` and times ``factor``."""
    if not codec.enumerable:
        return False
    values = torch.tensor(codec.magnitudes, dtype=torch.float64).float()
    return torch.equal(values / divisor, values * factor)


def _read_rows(piece: Piece, part: Part, reader: CheckpointReader) -> Iterator[torch.Tensor]:
    """uint8 [rows, bytes] of a piece's DATA or SCALES, in runs of some megabytes.

    For SCALES the rows are those of the piece's scale grid.
    """
    count, total, start, step = rows_of(piece, part)
    row_bytes = reader.entries[part.name].nbytes // ((piece.source.experts or 1) * total)
    base = (piece.expert or 0) * total + start
    run = max(COPY_BYTES // max(row_bytes * step, 1), 1)
    for first in range(0, count, run):
        last = min(first + run, count)
        span = (last - first - 1) * step + 1
        raw = torch.empty(span * row_bytes, dtype=torch.uint8)
        at = (base + first * step) * row_bytes
        reader.read_into(part.name, raw, start=at, stop=at + span * row_bytes)
        yield raw.reshape(span, row_bytes)[::step].contiguous()


def rows_of(piece: Piece, part: Part) -> tuple[int, int, int, int]:
    """(rows of the piece, rows of the source, first row in the source, step) of a DATA or SCALES part.

    FormatError where the piece would cut a block in two.
    """
    fmt, source = piece.source.scheme.fmt, piece.source
    if part.role is Role.DATA:
        return piece.shape[0], source.shape[0], piece.start, piece.step
    block = fmt.block[0]
    total = fmt.scale_shape(source.shape)[0]
    if piece.whole or fmt.shares_rows:
        return total, total, 0, 1
    if block == 1:
        return piece.shape[0], total, piece.start, piece.step
    stop = piece.start + piece.shape[0]
    if piece.step != 1 or piece.start % block or (stop % block and stop != source.shape[0]):
        raise FormatError(f"{piece.weight}: gate and up share blocks of {block} rows in {source.weight}; use ptqpipe")
    return fmt.scale_shape(piece.shape)[0], total, piece.start // block, 1


def _move_rows(piece: Piece, part: Part, origin: Part, reader: CheckpointReader, writer: CheckpointWriter) -> str:
    """Writes a DATA or SCALES part; its sha256."""
    same = origin.dtype == part.dtype or origin.dtype not in _FLOATS
    one = writer.layout.placements[part.name].nbytes // (part.shape[0] if part.stacked else 1)
    written = writer.tensor(part.name, byte_offset=one * (piece.into or 0))
    for rows in _read_rows(piece, origin, reader):
        written.put(rows if same else _exactly(rows.reshape(-1).view(_FLOATS[origin.dtype]), part))
    return written.sha256


def _exactly(numbers: torch.Tensor, part: Part) -> torch.Tensor:
    """Float numbers in a part's dtype; NumericsError where that would change one."""
    converted = numbers.to(_FLOATS[part.dtype])
    if not torch.equal(converted.float(), numbers.float()):
        raise NumericsError(f"{part.name} as {part.dtype} would round a {numbers.dtype} scale; keep the layout")
    return converted.contiguous()
