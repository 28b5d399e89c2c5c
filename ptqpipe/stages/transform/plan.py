"""What `transform` will do, decided from headers, config and statistics' headers: components, dtypes, the layout.

Everything that cannot be folded exactly is refused here, before anything is read. Knows structure and names; must not
know how factors are found.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.checkpoint.layout import ShardLayout, TensorSpec
from ptqpipe.checkpoint.source import check_disjoint
from ptqpipe.dtypes import FLOATS
from ptqpipe.errors import UsageError
from ptqpipe.schemes import get_scheme
from ptqpipe.source import Source
from ptqpipe.stages.common.identity import check_model
from ptqpipe.stages.common.jobs import named_source, run_parts_of
from ptqpipe.statistics import Statistics
from ptqpipe.transforms import ROTATIONS, SCALINGS, get_rotation, get_scaling, transform_names
from ptqpipe.transforms.find_structure import find_structure
from ptqpipe.transforms.folding import BLOCKS
from ptqpipe.transforms.structure import Edge, Matrix, Structure

EDGE_KINDS = ("norm", "value", "up")
TORCH_DTYPES = dict(FLOATS.values())


@dataclass(frozen=True, slots=True)
class TransformOptions:
    """What decides the bytes, beside source and statistics.

    apply           transforms in their order, as on the command line
    alpha           of SmoothQuant and Smooth-SwiGLU; None: their defaults
    powers_of_two   factors are powers of two
    edges           kinds of edges that scalings use; None: each transform's own
    block           size of the Hadamard blocks
    untie           a head that is the embedding becomes a tensor of its own
    dtype           of what changes: bf16, fp16, fp32; None: the source's where that is exact, else fp32
    format          the scheme that searches quantize with
    shard_bytes     of the output's files; None: chosen from the total size
    """

    apply: str = "smoothquant"
    alpha: float | None = None
    powers_of_two: bool = False
    edges: tuple[str, ...] | None = None
    block: int = 32
    untie: bool = False
    dtype: str | None = None
    format: str = "nvfp4"
    shard_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A component, or one tensor that is copied."""

    id: str
    group: int
    source_bytes: int
    specs: tuple[TensorSpec, ...]
    edges: tuple[Edge, ...] = ()
    writers: tuple[Matrix, ...] = ()
    embeddings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A transformation that is decided but for the factors."""

    out: Path
    source: Source
    statistics: Statistics | None
    options: TransformOptions
    names: tuple[str, ...]
    structure: Structure
    exact: bool
    dtype: str | None
    layout: ShardLayout
    jobs: tuple[Job, ...]
    origins: Mapping[str, str]

    @property
    def run_parts(self) -> dict[str, str]:
        """What decides the bytes of this run."""
        parts = run_parts_of(self.asked, layout=self.layout.digest)
        assert parts is not None  # it is a run of this stage
        return parts

    @property
    def asked(self) -> dict[str, Any]:
        """What the record says of this run."""
        options = asdict(self.options)
        return {
            "ptqpipe": __version__,
            "container": "plain",
            "transformed_from": named_source(self.source.reader),
            "statistics": None if self.statistics is None else self.statistics.digest,
            "transforms": list(self.names),
            "options": {key: options[key] for key in ("alpha", "powers_of_two", "edges", "block", "untie", "format")},
            "exact": self.exact,
            "dtype": self.dtype,
            "untied": sorted(self.origins),
        }


def prepare(source: Source, out: Path, *, stats: Path | None, options: TransformOptions) -> Prepared:
    """Everything but the factors. Writes nothing; ``source`` must stay open."""
    if source.container is not None:
        raise UsageError(
            f"{source.reader.path} is quantized ({source.container_name}); transform the float model, or what "
            "`ptqpipe dequantize` makes of it"
        )
    check_disjoint(source.reader.path, out)
    source.reader.check_links()
    names = transform_names(options.apply)
    _check_options(options, names)
    structure = find_structure(source.tensors, source.reader.config)
    for name in names:
        if name in ROTATIONS:
            get_rotation(name).check(structure, options.block, untie=options.untie)
    exact = _exact(names, options, structure) and options.dtype in (None, "fp32")
    dtype = options.dtype if options.dtype is not None else None if exact else "fp32"
    jobs, origins = _jobs(source, structure, names, dtype=dtype, options=options)
    layout = ShardLayout.plan([job.specs for job in jobs], shard_bytes=options.shard_bytes)
    statistics = _open_statistics(stats, source, names)
    return Prepared(
        out, source, statistics, options, names, structure, exact, dtype, layout, tuple(jobs), origins
    )  # fmt: skip


def _check_options(options: TransformOptions, names: Sequence[str]) -> None:
    if options.dtype is not None and options.dtype not in FLOATS:
        raise UsageError(f"--dtype {options.dtype!r} is unknown; use {', '.join(FLOATS)}")
    if options.block not in BLOCKS:
        raise UsageError(f"--block {options.block} is no size of a Hadamard block; use {', '.join(map(str, BLOCKS))}")
    if any(name in SCALINGS and get_scaling(name).NEEDS_QUANTIZER for name in names):
        get_scheme(options.format)
    if options.alpha is not None and not 0.0 <= options.alpha <= 1.0:
        raise UsageError(f"--alpha {options.alpha:g} is outside 0 .. 1")
    unknown = next((kind for kind in options.edges or () if kind not in EDGE_KINDS), None)
    if unknown is not None:
        raise UsageError(f"--edges {unknown!r} is unknown; use {', '.join(EDGE_KINDS)}")
    rotated = next((name for name in names if name in ROTATIONS), None)
    late = next((n for n in names if rotated and n in SCALINGS and names.index(n) > names.index(rotated)), None)
    if late is not None:
        raise UsageError(
            f"{late} after {rotated} would use statistics of channels that are rotated away; scale first, or calibrate "
            "the rotated model and transform that"
        )


def _exact(names: Sequence[str], options: TransformOptions, structure: Structure) -> bool:
    """Whether every factor is a power of two that only multiplies: no norm of the form (1 + weight)."""
    if any(name in ROTATIONS for name in names):
        return False
    for name in names:
        scaling = get_scaling(name)
        if not options.powers_of_two and not scaling.ALWAYS_POWERS_OF_TWO:
            return False
        if structure.architecture.offset and "norm" in (options.edges or scaling.EDGES):
            return False
    return True


def _open_statistics(stats: Path | None, source: Source, names: Sequence[str]) -> Statistics | None:
    needing = next((name for name in names if name in SCALINGS), None)
    if needing is None:
        return None
    if stats is None:
        raise UsageError(f"{needing} needs --stats; make them with: ptqpipe calibrate {source.reader.path} -o STATS")
    statistics = Statistics.open(Path(stats))
    try:
        check_model(statistics, source)
    except BaseException:
        statistics.close()
        raise
    return statistics


def _used(structure: Structure, names: Sequence[str], options: TransformOptions) -> list[Edge]:
    """The edges on which something will be folded."""
    kinds: set[str] = set()
    for name in names:
        if name in SCALINGS:
            kinds |= set(options.edges or get_scaling(name).EDGES)
        else:
            kinds |= {"value"} if name == "rotate_values" else {"norm", "final"}
    return [edge for edge in structure.edges if edge.kind in kinds]


def _jobs(
    source: Source, structure: Structure, names: Sequence[str], *, dtype: str | None, options: TransformOptions
) -> tuple[list[Job], dict[str, str]]:
    """Components and copied tensors in the order of the source, and where new tensors come from."""
    edges = _used(structure, names, options)
    residual = "rotate_residual" in names
    writers = structure.writers if residual else ()
    embeddings = structure.embeddings if residual else ()
    sets = [edge.tensors() for edge in edges]
    sets += [[w.tensor, *([w.bias] if w.bias else [])] for w in writers] + [[name] for name in embeddings]
    component = _joined(sets)
    tensors = dict(source.tensors)
    origins: dict[str, str] = {}
    if residual and structure.tied:
        tensors["lm_head.weight"] = source.tensors[structure.embeddings[0]]
        origins["lm_head.weight"] = structure.embeddings[0]
    members: dict[str, list[str]] = {}
    for name in tensors:
        members.setdefault(component.get(name, f"keep:{name}"), []).append(name)
    jobs: list[Job] = []
    for key, group in members.items():
        inside = set(group) if not key.startswith("keep:") else set()
        specs = tuple(_spec(name, tensors[name], dtype if name in inside else None) for name in group)
        size = sum(source.reader.entries[origins.get(name, name)].nbytes for name in group)
        jobs.append(
            Job(
                key,
                len(jobs),
                size,
                specs,
                tuple(edge for edge in edges if edge.tensors()[0] in inside),
                tuple(writer for writer in writers if writer.tensor in inside),
                tuple(name for name in embeddings if name in inside),
            )
        )
    return jobs, origins


def _spec(name: str, entry: tuple[str, tuple[int, ...]], dtype: str | None) -> TensorSpec:
    if dtype is not None and entry[0] not in TORCH_DTYPES:
        raise UsageError(f"'{name}' is {entry[0]}, expected BF16, F16 or F32; factors cannot be folded into it")
    return TensorSpec(name, entry[0] if dtype is None else FLOATS[dtype][0], entry[1])


def _joined(sets: Iterable[Sequence[str]]) -> dict[str, str]:
    """Name -> the name that stands for all that overlapping sets join it with."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for names in sets:
        for name in names[1:]:
            parent[root(name)] = root(names[0])
        root(names[0])
    return {name: root(name) for name in parent}
