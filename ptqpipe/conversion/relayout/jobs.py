"""The jobs of a change of layout: decided from headers, then bytes that move, a few megabytes at a time.

A job moves one stored weight (one expert of a stack) or copies a kept tensor under its new name. Float scales are read
beforehand where their width must be chosen. Codes and scales are row major in every layout, so a run of rows is a run
of bytes and nothing is decoded. Numbers that a layout stores alone (global scales, input scales) are inverted where the
other side divides; what that costs is looked for and recorded.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ptqpipe.checkpoint import COPY_BYTES, CheckpointReader, CheckpointWriter, TensorSpec
from ptqpipe.checkpoint.dtypes import FLOAT_DTYPES
from ptqpipe.checkpoint.layouts import Container, Part, PartKind, StoredWeight, Target, kv_scale, scale_codes
from ptqpipe.conversion.job import CopyTensor, WriteJob
from ptqpipe.errors import FormatError, NumericsError, arg
from ptqpipe.models.families import family_of
from ptqpipe.models.layout_issues import layout_warnings
from ptqpipe.models.source import Source
from ptqpipe.numerics.formats import CODECS, Codec
from ptqpipe.numerics.qtensor import scale_values
from ptqpipe.numerics.schemes import Scheme
from ptqpipe.run.machine import WorkerBudget

_OTHER_SPELLING = {
    PartKind.GLOBAL: PartKind.GLOBAL_DIVISOR,
    PartKind.GLOBAL_DIVISOR: PartKind.GLOBAL,
    PartKind.INPUT_GLOBAL: PartKind.INPUT_GLOBAL_DIVISOR,
    PartKind.INPUT_GLOBAL_DIVISOR: PartKind.INPUT_GLOBAL,
}


@dataclass(frozen=True, slots=True)
class WeightPiece:
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
        return self.shape == self.source.shape

    def origin(self, part: Part) -> Part:
        """The stored part that a part of the output is made of. FormatError where there is none."""
        part_there = self.source.part(part.role) or self.source.part(_OTHER_SPELLING.get(part.role, part.role))
        if part_there is None:
            raise FormatError(f"{part.name} needs a scale, and the checkpoint stores none for {self.source.weight}")
        return part_there


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


def move(piece: WeightPiece, source: Source, writer: CheckpointWriter) -> Moved:
    """Writes every part of a piece at its place. NumericsError for a scale that the new dtype cannot hold."""
    hashes: dict[str, str] = {}
    changed, irreversible = False, []
    global_scale: float | None = None
    for part in piece.parts:
        origin = piece.origin(part)
        if part.role in (PartKind.DATA, PartKind.SCALES):
            hashes[part.role.value] = _move_rows(piece, part, origin, source.reader, writer)
            continue
        value = source.number(origin, expert=piece.expert)
        if origin.role is not part.role:
            inverse = 1.0 / value
            irreversible += [part.name] if bool(1.0 / inverse != value) else []
            divisor, factor = (value, inverse) if origin.role is PartKind.GLOBAL_DIVISOR else (inverse, value)
            if part.role in (PartKind.GLOBAL, PartKind.GLOBAL_DIVISOR):
                changed = changed or not decodes_alike(divisor, factor, piece.scheme.fmt.scale)
            value = inverse
        if part.role in (PartKind.GLOBAL, PartKind.GLOBAL_DIVISOR):
            global_scale = float(value if part.role is PartKind.GLOBAL else 1.0 / value)
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


def _read_rows(piece: WeightPiece, part: Part, reader: CheckpointReader) -> Iterator[torch.Tensor]:
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
        begin = (base + first * step) * row_bytes
        reader.read_into(part.name, raw, start=begin, stop=begin + span * row_bytes)
        yield raw.reshape(span, row_bytes)[::step].contiguous()


def rows_of(piece: WeightPiece, part: Part) -> tuple[int, int, int, int]:
    """(rows of the piece, rows of the source, first row in the source, step) of a DATA or SCALES part.

    FormatError where the piece would cut a block in two.
    """
    fmt, source = piece.source.scheme.fmt, piece.source
    if part.role is PartKind.DATA:
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


def _move_rows(piece: WeightPiece, part: Part, origin: Part, reader: CheckpointReader, writer: CheckpointWriter) -> str:
    fmt = piece.scheme.fmt
    as_numbers = part.role is PartKind.SCALES and fmt.scale.enumerable and "F32" in (origin.dtype, part.dtype)
    same = origin.dtype == part.dtype or origin.dtype not in FLOAT_DTYPES
    one = writer.layout.entries[part.name].nbytes // (part.shape[0] if part.stacked else 1)
    written = writer.tensor(part.name, byte_offset=one * (piece.into or 0))
    for rows in _read_rows(piece, origin, reader):
        if as_numbers:  # codes on one side, their numbers on the other
            codes = scale_codes(rows.view(FLOAT_DTYPES.get(origin.dtype, torch.uint8)), fmt, origin.name)
            written.put(scale_values(codes, fmt.scale) if part.dtype == "F32" else codes)
        else:
            written.put(rows if same else _exactly(rows.reshape(-1).view(FLOAT_DTYPES[origin.dtype]), part))
    return written.sha256


def _exactly(numbers: torch.Tensor, part: Part) -> torch.Tensor:
    """Float numbers in a part's dtype; NumericsError where that would change one."""
    converted = numbers.to(FLOAT_DTYPES[part.dtype])
    if not torch.equal(converted.float(), numbers.float()):
        raise NumericsError(f"{part.name} as {part.dtype} would round a {numbers.dtype} scale; keep the layout")
    return converted.contiguous()


@dataclass(frozen=True, slots=True)
class MoveWeight(WriteJob):
    """Moves a stored weight, or one expert of a stack, as the weights of the output that it becomes."""

    pieces: tuple[WeightPiece, ...]

    def run(self, work: Any, writer: CheckpointWriter, share: WorkerBudget) -> dict[str, Any]:
        """``work``: a `Relayout`. CheckpointError for bytes that are not those that the source's record describes."""
        moved = [(piece, move(piece, work.source, writer)) for piece in self.pieces]
        return {
            "members": {piece.name: work.member(piece, result) for piece, result in moved},
            "changed": [piece.name for piece, result in moved if result.changed],
            "irreversible": [name for _, result in moved for name in result.irreversible],
        }


def weight_jobs(stored: StoredWeight, source: Source, target: Container, name: str, *, group: int) -> list[MoveWeight]:
    """One job per weight, or per expert of a stack; FormatError naming the weight where the layout cannot store it."""
    scales, grid = stored.part(PartKind.SCALES), stored.scheme.fmt.scale_shape(stored.shape)
    if scales is not None and math.prod(scales.shape) != (stored.experts or 1) * math.prod(grid):
        raise FormatError(
            f"{stored.weight}: its scales are of shards that were quantized apart, for which {name} has no place; "
            "`ptqpipe dequantize` gives the float model, which `ptqpipe convert` quantizes"
        )
    scheme = _scheme_in(stored, source, target)
    reason = target.supports(scheme)
    if reason is not None:
        raise FormatError(f"{stored.weight}: {reason}")
    if stored.experts is None:
        pieces = [[_piece(stored.weight, stored.shape, scheme, target, stored)]]
    elif target.CAPABILITIES.stacks:
        parts = target.parts(stored.weight, stored.shape, scheme, experts=stored.experts, transposed=stored.transposed)
        pieces = [
            [WeightPiece(stored.weight, stored.shape, scheme, parts, stored, expert=e, into=e)]
            for e in range(stored.experts)
        ]
    else:
        pieces = [list(_split(stored, e, scheme, source, target)) for e in range(stored.experts)]
    total = sum(source.reader.entries[part.name].nbytes for part in stored.parts)
    for piece in pieces[0]:
        for part in piece.parts:
            origin = piece.origin(part)
            if part.role in (PartKind.DATA, PartKind.SCALES):
                rows_of(piece, origin)  # raises where it cuts blocks
    return [
        MoveWeight(
            stored.key(e),
            group,
            source_bytes=total // len(pieces),
            pieces=tuple(of_one),
        )
        for e, of_one in zip(stored.planes, pieces, strict=True)
    ]


def _piece(
    weight: str,
    shape: tuple[int, int],
    scheme: Scheme,
    target: Container,
    stored: StoredWeight,
    *,
    expert: int | None = None,
    start: int = 0,
    step: int = 1,
) -> WeightPiece:
    transposed = stored.transposed and stored.experts is None
    parts = target.parts(weight, shape, scheme, transposed=transposed)
    return WeightPiece(weight, shape, scheme, parts, stored, expert=expert, start=start, step=step)


def _split(
    stored: StoredWeight, expert: int, scheme: Scheme, source: Source, target: Container
) -> Iterator[WeightPiece]:
    """One expert of a stack as weights of their own: gate and up of a fused one apart, as the plan of convert does."""
    base = stored.weight.removesuffix(".weight")
    parent, _, leaf = base.rpartition(".")
    if f"{base}_bias" in source.reader.entries:
        raise FormatError(
            f"{stored.weight}: experts with biases have no names one by one that readers know; "
            f"use {arg('container', 'ptqpipe')} or gptoss_mxfp4"
        )
    rows, cols = stored.shape
    if leaf != "gate_up_proj":
        yield _piece(f"{parent}.{expert}.{leaf}.weight", stored.shape, scheme, target, stored, expert=expert)
        return
    interleaved = family_of(source.reader.config).interleaved
    for index, part in enumerate(("gate_proj", "up_proj")):
        start, step = (index, 2) if interleaved else (index * rows // 2, 1)
        shape = (rows // 2, cols)
        weight = f"{parent}.{expert}.{part}.weight"
        yield _piece(weight, shape, scheme, target, stored, expert=expert, start=start, step=step)


def _scheme_in(stored: StoredWeight, source: Source, target: Container) -> Scheme:
    """The scheme as the target stores it: float scales that only a wider layout made float32 become bfloat16 again."""
    scheme, fmt = stored.scheme, stored.scheme.fmt
    widened = source.container is not None and source.container.CAPABILITIES.float32_scales
    if target.CAPABILITIES.float32_scales or not widened or fmt.scale.name != "fp32":
        return scheme
    numbers = [
        source.reader.read(part.name)
        for part in stored.parts
        if part.role in (PartKind.SCALES, PartKind.INPUT_GLOBAL, PartKind.INPUT_GLOBAL_DIVISOR)
    ]
    if all(bool((x.float() == x.bfloat16().float()).all()) for x in numbers):
        return replace(scheme, fmt=replace(fmt, scale=CODECS["bf16"]))
    return scheme


def kept_job(tensor: str, source: Source, target: Container, name: str, *, group: int) -> CopyTensor:
    """A tensor that is part of no quantized weight; scales of the kv cache get the layout's name."""
    entry = source.reader.entries[tensor]
    spelled, style = kv_scale(tensor, entry.dtype, entry.shape, container=target), target.CAPABILITIES.kv_cache
    if spelled is not None and style is not None and not style.per_head and spelled.shape != style.shape:
        raise FormatError(f"{tensor} is {list(entry.shape)}, {name} has one kv-cache scale per layer; keep the layout")
    spec = TensorSpec(tensor, entry.dtype, entry.shape)
    if spelled is not None:
        spec = TensorSpec(spelled.name, spelled.dtype, spelled.shape)
    return CopyTensor(f"keep:{tensor}", group, entry.nbytes, tensor, spec)


def specs_of(job: MoveWeight | CopyTensor) -> list[TensorSpec]:
    """The tensors that a job writes, with those that other experts of the same stack write, too."""
    if isinstance(job, CopyTensor):
        return [job.spec]
    return [TensorSpec(part.name, part.dtype, part.shape) for piece in job.pieces for part in piece.parts]


def pieces_of(jobs: Iterable[MoveWeight | CopyTensor]) -> Iterator[WeightPiece]:
    """The weights of the output, in order; each expert of a stack alone."""
    return (piece for job in jobs if isinstance(job, MoveWeight) for piece in job.pieces)


def dropped_parts(source: Source, jobs: Iterable[MoveWeight | CopyTensor]) -> Iterator[str]:
    """Stored parts that nothing in the output is made of, but for shapes, which it has."""
    used = {piece.origin(part).name for piece in pieces_of(jobs) for part in piece.parts}
    for stored in source.stored.values():
        for part in stored.parts:
            if part.name not in used and part.role is not PartKind.SHAPE:
                yield part.name


def warnings_of(source: Source, target: Container, name: str, jobs: Sequence[MoveWeight | CopyTensor]) -> Iterator[str]:
    yield from layout_warnings(name, targets_of(jobs), source.reader.config)
    names = [job.spec.name for job in jobs if isinstance(job, CopyTensor)]
    scales = [n for n in names if kv_scale(n, "F32", (1,), container=target) is not None]
    if scales and target.CAPABILITIES.kv_cache is None:
        yield f"{name} cannot announce a quantized KV cache; {scales[0]} and its like are kept, and readers drop them"


def targets_of(jobs: Iterable[MoveWeight | CopyTensor]) -> list[Target]:
    """What the config files say of every weight of the output."""
    targets: dict[str, Target] = {}
    for piece in pieces_of(jobs):
        stack = piece.source.experts if piece.into is not None else None
        transposed = piece.source.transposed and (piece.into is not None or piece.expert is None)
        targets.setdefault(piece.weight, Target(piece.weight, piece.scheme, stack, transposed))
    return list(targets.values())
