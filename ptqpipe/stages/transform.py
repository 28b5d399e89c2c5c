"""transform: a float checkpoint in, an equivalent float checkpoint out that loses less when it is quantized.

A *component* is a set of tensors that edges join (a norm with q, k, v and o; a norm with an MLP or all its experts):
its factors depend on nothing else, so one worker finds them and writes its tensors, in runs of rows. Everything else is
copied byte for byte. What cannot be folded exactly is refused before anything is read.

Sums are in float64 and every tensor is rounded once, to the dtype that is written. Factors that are powers of two are
exact in every float dtype: then the dtype stays, and the result computes the same bits as the source.
"""

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.checkpoint.layout import ShardLayout, TensorSpec
from ptqpipe.checkpoint.source import check_disjoint, resolve_source
from ptqpipe.checkpoint.writer import CheckpointWriter, Mode
from ptqpipe.errors import NumericsError, UsageError
from ptqpipe.schemes import get_scheme
from ptqpipe.source import Source
from ptqpipe.stages.dequantize import DTYPES, with_dtype
from ptqpipe.stages.jobs import (
    RECORD_FILE,
    carried_files,
    copy_tensor,
    json_bytes,
    records_of,
    run_id_of,
    write_checkpoint,
)
from ptqpipe.stages.machine import Machine, Ranks, resident_bytes
from ptqpipe.stages.transform_weights import Weights, input_quantizer, make_problem, weight_quantizer
from ptqpipe.statistics import Statistics
from ptqpipe.transforms import ROTATIONS, SCALINGS, get_scaling, transform_names
from ptqpipe.transforms.folding import BLOCKS, Op, is_exact, move_factors
from ptqpipe.transforms.problem import SolveOptions
from ptqpipe.transforms.structure import Edge, Matrix, Structure, find_structure

EDGE_KINDS = ("norm", "value", "up")
_TORCH = dict(DTYPES.values())


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
        return {
            "stage": "transform",
            "source": self.source.reader.fingerprint(),
            "statistics": "" if self.statistics is None else self.statistics.digest,
            "options": repr(self.options),
            "layout": self.layout.digest,
            "version": __version__,
        }


@dataclass(frozen=True, slots=True)
class Transformed:
    """What a finished transformation was.

    rounding  squared error of the one rounding to the written dtype, relative to the weights' energy
    """

    out: Path
    record: Mapping[str, Any]
    edges: int
    changed: int
    kept: int
    exact: bool
    rounding: float
    written_bytes: int
    seconds: float
    peak_rss_bytes: int


def transform(
    model: str | Path,
    out: Path,
    *,
    stats: Path | None = None,
    options: TransformOptions | None = None,
    mode: Mode = "new",
    machine: Machine | None = None,
    ranks: Ranks | None = None,
) -> Transformed | None:
    """Writes an equivalent checkpoint. The result on rank 0, None on the others.

    Raises UsageError for what cannot be folded exactly, for missing statistics and for those of another model,
    NumericsError for numbers that the written dtype cannot hold.
    """
    begun = time.monotonic()
    options = options or TransformOptions()
    with Source.open(resolve_source(str(model))) as source:
        prepared = prepare(source, Path(out), stats=stats, options=options)
        try:
            record = write_checkpoint(
                prepared.out,
                prepared.layout,
                jobs=prepared.jobs,
                run_parts=prepared.run_parts,
                mode=mode,
                machine=machine or Machine(),
                ranks=ranks or Ranks(),
                work=lambda job, writer, _: _do(job, prepared, writer),
                finish=lambda writer: _finish(prepared, writer),
            )
        finally:
            if prepared.statistics is not None:
                prepared.statistics.close()
    if record is None:
        return None
    return Transformed(
        prepared.out,
        record,
        edges=len(record["foldings"]),
        changed=len(record["weights"]),
        kept=len(record["kept"]),
        exact=prepared.exact,
        rounding=record["rounding"],
        written_bytes=prepared.layout.file_bytes,
        seconds=time.monotonic() - begun,
        peak_rss_bytes=resident_bytes().peak,
    )


# --- Deciding, from headers


def prepare(source: Source, out: Path, *, stats: Path | None, options: TransformOptions) -> Prepared:
    """Everything but the factors. Writes nothing; ``source`` must stay open."""
    if source.container is not None:
        raise UsageError(
            f"{source.reader.path} is quantized ({source.container_name}); transform the float model, or what "
            "`ptqpipe dequantize` makes of it"
        )
    check_disjoint(source.reader.path, out)
    names = transform_names(options.apply)
    _check_options(options, names)
    structure = find_structure(source.tensors, source.reader.config)
    for name in names:
        if name in ROTATIONS:
            import_module(f"ptqpipe.transforms.{name}").check(structure, options.block, untie=options.untie)
    exact = _exact(names, options, structure)
    dtype = options.dtype if options.dtype is not None else None if exact else "fp32"
    jobs, origins = _jobs(source, structure, names, dtype=dtype, options=options)
    layout = ShardLayout.plan([job.specs for job in jobs], shard_bytes=options.shard_bytes)
    statistics = _open_statistics(stats, source, names)
    return Prepared(
        out, source, statistics, options, names, structure, exact, dtype, layout, tuple(jobs), origins
    )  # fmt: skip


def _check_options(options: TransformOptions, names: Sequence[str]) -> None:
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UsageError(f"--dtype {options.dtype!r} is unknown; use {', '.join(DTYPES)}")
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
    if statistics.model_fingerprint != source.reader.fingerprint():
        statistics.close()
        raise UsageError(f"{stats} was measured on another model than {source.reader.path}; calibrate this one")
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
    if dtype is not None and entry[0] not in _TORCH:
        raise UsageError(f"'{name}' is {entry[0]}, expected BF16, F16 or F32; factors cannot be folded into it")
    return TensorSpec(name, entry[0] if dtype is None else DTYPES[dtype][0], entry[1])


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


# --- Doing


def _do(job: Job, prepared: Prepared, writer: CheckpointWriter) -> dict[str, Any]:
    source = prepared.source
    if not (job.edges or job.writers or job.embeddings):
        name = job.specs[0].name
        sha256, nbytes = copy_tensor(source.reader, name, writer, name)
        return {"kept": {name: {"sha256": sha256, "bytes": nbytes}}}
    weights = Weights(source.reader, prepared.origins)
    foldings = [entry for name in prepared.names for entry in _fold(name, job, prepared, weights)]
    members = {spec.name: _write(spec, weights, writer, exact=prepared.exact) for spec in job.specs}
    return {"members": members, "foldings": foldings}


def _fold(name: str, job: Job, prepared: Prepared, weights: Weights) -> list[dict[str, Any]]:
    """Adds what one transform folds in this component; one entry of the record for each edge."""
    options = prepared.options
    if name in ROTATIONS:
        rotation = import_module(f"ptqpipe.transforms.{name}")
        foldings = rotation.fold(
            prepared.structure, job.edges, writers=job.writers, embeddings=job.embeddings, block=options.block,
            read=weights.whole,
        )  # fmt: skip
        weights.add(foldings)
        changed = list(dict.fromkeys(tensor for tensor, _ in foldings))
        return [{"transform": name, "block": options.block, "tensors": changed}] if changed else []
    scaling, statistics = get_scaling(name), prepared.statistics
    assert statistics is not None
    entries = []
    for edge in job.edges:
        if edge.kind not in (options.edges or scaling.EDGES):
            continue
        search_for = get_scheme(options.format).fmt if scaling.NEEDS_QUANTIZER else None
        problem = make_problem(edge, weights, statistics, search_for=search_for)
        if problem is None:
            entries.append({"transform": name, "edge": edge.id, "kind": edge.kind, "skipped": "nothing is quantized"})
            continue
        solution = scaling.solve(problem, _solve_options(prepared, name))
        factors = solution.factors
        weights.add(move_factors(edge, factors))
        weights.divide_inputs(edge, factors)
        entry: dict[str, Any] = {
            "transform": name,
            "edge": edge.id,
            "kind": edge.kind,
            "channels": edge.channels,
            "least": float(factors.amin()),
            "largest": float(factors.amax()),
            "changed": int((factors != 1).sum()),
            "tensors": edge.tensors(),
            **solution.facts,
        }
        if solution.error is not None:
            entry |= {"error": solution.error, "plain_error": solution.plain_error}
        entries.append(entry)
    return entries


def _solve_options(prepared: Prepared, name: str) -> SolveOptions:
    options, scaling = prepared.options, get_scaling(name)
    alpha = SolveOptions().alpha if options.alpha is None else options.alpha
    if not scaling.NEEDS_QUANTIZER:
        return SolveOptions(alpha=alpha, powers_of_two=options.powers_of_two)
    scheme = get_scheme(options.format)
    return SolveOptions(
        powers_of_two=options.powers_of_two,
        quantize=weight_quantizer(scheme.fmt),
        quantize_inputs=input_quantizer(scheme.activation) if scaling.NEEDS_INPUT_QUANTIZER else None,
    )


def _write(spec: TensorSpec, weights: Weights, writer: CheckpointWriter, *, exact: bool) -> dict[str, Any]:
    """Writes one tensor of a component; its hash and what rounding cost."""
    dtype = _TORCH[spec.dtype]
    digest, offset = hashlib.sha256(), 0
    squared = energy = 0.0
    experts: Sequence[int | None] = range(spec.shape[0]) if len(spec.shape) == 3 else (None,)
    for expert in experts:
        for _, rows in weights.runs(spec.name, expert=expert):
            rounded = rows.to(dtype)
            error = float(((rounded.double() - rows) ** 2).sum())
            if not math.isfinite(error):
                raise NumericsError(f"'{spec.name}' has numbers that {spec.dtype} cannot hold; use --dtype fp32")
            squared, energy = squared + error, energy + float((rows**2).sum())
            raw = rounded.reshape(-1).view(torch.uint8)
            writer.write(spec.name, raw, byte_offset=offset)
            digest.update(raw.numpy().data)
            offset += raw.nbytes
    ops: list[Op] = weights.ops.get(spec.name, [])
    if squared and exact and is_exact(ops):
        raise NumericsError(f"'{spec.name}' leaves the range of {spec.dtype} by powers of two; use --dtype fp32")
    return {"shape": list(spec.shape), "squared_error": squared, "energy": energy, "sha256": digest.hexdigest()}


def _finish(prepared: Prepared, writer: CheckpointWriter) -> dict[str, Any]:
    source = prepared.source
    source.reader.check_unchanged()
    records = records_of(prepared.jobs, writer.done())
    written = {name: facts for entry in records for name, facts in entry.get("members", {}).items()}
    squared = sum(facts["squared_error"] for facts in written.values())
    energy = sum(facts["energy"] for facts in written.values())
    record = {
        "ptqpipe": __version__,
        "run_id": run_id_of(prepared.run_parts),
        "container": "plain",
        "transformed_from": {"name": source.reader.path.name, "fingerprint": prepared.run_parts["source"]},
        "statistics": prepared.run_parts["statistics"] or None,
        "transforms": list(prepared.names),
        "options": _described(prepared.options),
        "exact": prepared.exact,
        "dtype": prepared.dtype,
        "rounding": squared / energy if energy else 0.0,
        "foldings": [folding for entry in records for folding in entry.get("foldings", [])],
        "weights": written,
        "kept": {name: facts for entry in records for name, facts in entry.get("kept", {}).items()},
        "untied": sorted(prepared.origins),
        "carried_files": sorted(name for _, name in carried_files(source.reader)),
    }
    config = dict(source.reader.config)
    if prepared.dtype is not None:
        config = with_dtype(config, prepared.dtype)
    if prepared.origins:
        config["tie_word_embeddings"] = False
    extra = {"config.json": json_bytes(config), RECORD_FILE: json_bytes(record)}
    carried = [(path, name) for path, name in carried_files(source.reader) if name not in extra]
    writer.finish(expected_units=[job.id for job in prepared.jobs], extra=extra, copy=carried)
    return record


def _described(options: TransformOptions) -> dict[str, Any]:
    return {
        "alpha": options.alpha,
        "powers_of_two": options.powers_of_two,
        "edges": None if options.edges is None else list(options.edges),
        "block": options.block,
        "untie": options.untie,
        "format": options.format,
    }


def render(done: Transformed) -> str:
    """What was done, for a terminal."""
    how = (
        "exact: every factor is a power of two"
        if done.exact
        else f"rounded once to {done.record['dtype']}: {done.rounding:.1e} of the weights' energy"
    )
    return (
        f"{done.out}: {' then '.join(done.record['transforms'])}, {done.edges} foldings into {done.changed} tensors, "
        f"{done.kept} kept; {how}; {done.written_bytes} bytes in {done.seconds:.1f} s, peak memory "
        f"{done.peak_rss_bytes >> 20} MiB"
    )


def to_json(done: Transformed) -> dict[str, Any]:
    """The outcome as data."""
    return {
        "out": str(done.out),
        "transforms": done.record["transforms"],
        "foldings": done.record["foldings"],
        "changed": done.changed,
        "kept": done.kept,
        "exact": done.exact,
        "rounding": done.rounding,
        "written_bytes": done.written_bytes,
        "seconds": done.seconds,
        "peak_rss_bytes": done.peak_rss_bytes,
    }
