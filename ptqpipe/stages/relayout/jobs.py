"""The jobs of a change of layout, decided from headers, and from float scales where their width must be chosen.

A job moves one stored weight (one expert of a stack) or copies a kept tensor under its new name. Knows containers and
names; must not write.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ptqpipe.checkpoint import TensorSpec
from ptqpipe.containers import Container, Role, StoredWeight, Target, kv_scale
from ptqpipe.errors import FormatError
from ptqpipe.formats import CODECS
from ptqpipe.plan import INTERLEAVED_GATE_UP
from ptqpipe.schemes import Scheme
from ptqpipe.source import Source
from ptqpipe.stages.common import CopyTensor, Job
from ptqpipe.stages.relayout.pieces import Piece, rows_of


@dataclass(frozen=True, slots=True)
class MoveWeight(Job):
    """Moves a stored weight, or one expert of a stack, as the weights of the output that it becomes."""

    pieces: tuple[Piece, ...]


def weight_jobs(stored: StoredWeight, source: Source, target: Container, name: str, *, group: int) -> list[MoveWeight]:
    """One job per weight, or per expert of a stack; FormatError naming the weight where the layout cannot store it."""
    scheme = _scheme_in(stored, source, target)
    reason = target.supports(scheme)
    if reason is not None:
        raise FormatError(f"{stored.weight}: {reason}")
    if stored.experts is None:
        pieces = [[_piece(stored.weight, stored.shape, scheme, target, stored)]]
    elif target.ABILITIES.stacks:
        parts = target.parts(stored.weight, stored.shape, scheme, experts=stored.experts, transposed=stored.transposed)
        pieces = [
            [Piece(stored.weight, stored.shape, scheme, parts, stored, expert=e, into=e)] for e in range(stored.experts)
        ]
    else:
        pieces = [list(_split(stored, e, scheme, source, target)) for e in range(stored.experts)]
    total = sum(source.reader.entries[part.name].nbytes for part in stored.parts)
    for piece in pieces[0]:
        for part in piece.parts:
            origin = piece.origin(part)
            if part.role in (Role.DATA, Role.SCALES):
                rows_of(piece, origin)  # raises where it cuts blocks
    return [
        MoveWeight(
            stored.weight if stored.experts is None else f"{stored.weight}[{e}]",
            group,
            source_bytes=total // len(pieces),
            pieces=tuple(of_one),
        )
        for e, of_one in enumerate(pieces)
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
) -> Piece:
    transposed = stored.transposed and stored.experts is None
    parts = target.parts(weight, shape, scheme, transposed=transposed)
    return Piece(weight, shape, scheme, parts, stored, expert=expert, start=start, step=step)


def _split(stored: StoredWeight, expert: int, scheme: Scheme, source: Source, target: Container) -> Iterator[Piece]:
    """One expert of a stack as weights of their own: gate and up of a fused one apart, as the plan of convert does."""
    base = stored.weight.removesuffix(".weight")
    parent, _, leaf = base.rpartition(".")
    if f"{base}_bias" in source.reader.entries:
        raise FormatError(
            f"{stored.weight}: experts with biases have no per-expert spelling that readers know; "
            "use --container ptqpipe or gptoss_mxfp4"
        )
    rows, cols = stored.shape
    if leaf != "gate_up_proj":
        yield _piece(f"{parent}.{expert}.{leaf}.weight", stored.shape, scheme, target, stored, expert=expert)
        return
    interleaved = str(source.reader.config.get("model_type")) in INTERLEAVED_GATE_UP
    for index, part in enumerate(("gate_proj", "up_proj")):
        start, step = (index, 2) if interleaved else (index * rows // 2, 1)
        shape = (rows // 2, cols)
        weight = f"{parent}.{expert}.{part}.weight"
        yield _piece(weight, shape, scheme, target, stored, expert=expert, start=start, step=step)


def _scheme_in(stored: StoredWeight, source: Source, target: Container) -> Scheme:
    """The scheme as the target stores it: float scales that only a wider layout made float32 become bfloat16 again."""
    scheme, fmt = stored.scheme, stored.scheme.fmt
    widened = source.container is not None and source.container.ABILITIES.float32_scales
    if target.ABILITIES.float32_scales or not widened or fmt.scale.name != "fp32":
        return scheme
    numbers = [
        source.reader.read(part.name)
        for part in stored.parts
        if part.role in (Role.SCALES, Role.INPUT_GLOBAL, Role.INPUT_GLOBAL_DIVISOR)
    ]
    if all(bool((x.float() == x.bfloat16().float()).all()) for x in numbers):
        return replace(scheme, fmt=replace(fmt, scale=CODECS["bf16"]))
    return scheme


def kept_job(tensor: str, source: Source, target: Container, name: str, *, group: int) -> CopyTensor:
    """A tensor that is part of no quantized weight; scales of the kv cache get the layout's name."""
    entry = source.reader.entries[tensor]
    spelled, style = kv_scale(tensor, entry.dtype, entry.shape, container=target), target.ABILITIES.kv_cache
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


def pieces_of(jobs: Iterable[MoveWeight | CopyTensor]) -> Iterator[Piece]:
    """The weights of the output, in order; each expert of a stack alone."""
    return (piece for job in jobs if isinstance(job, MoveWeight) for piece in job.pieces)


def dropped_parts(source: Source, jobs: Iterable[MoveWeight | CopyTensor]) -> Iterator[str]:
    """Stored parts that nothing in the output is made of."""
    used = {piece.origin(part).name for piece in pieces_of(jobs) for part in piece.parts}
    for stored in source.stored.values():
        for part in stored.parts:
            if part.name not in used:
                yield part.name


def warnings_of(source: Source, target: Container, name: str, jobs: Sequence[MoveWeight | CopyTensor]) -> Iterator[str]:
    """What readers of the output are known to get wrong."""
    yield from target.warnings(targets_of(jobs), source.reader.config)
    names = [job.spec.name for job in jobs if isinstance(job, CopyTensor)]
    scales = [n for n in names if kv_scale(n, "F32", (1,), container=target) is not None]
    if scales and target.ABILITIES.kv_cache is None:
        yield f"{name} cannot announce a quantized KV cache; {scales[0]} and its like are kept, and readers drop them"


def targets_of(jobs: Iterable[MoveWeight | CopyTensor]) -> list[Target]:
    """What the config files say of every weight of the output."""
    found: dict[str, Target] = {}
    for piece in pieces_of(jobs):
        stack = piece.source.experts if piece.into is not None else None
        transposed = piece.source.transposed and (piece.into is not None or piece.expert is None)
        found.setdefault(piece.weight, Target(piece.weight, piece.scheme, stack, transposed))
    return list(found.values())
