"""transform: a float checkpoint in, an equivalent float checkpoint out that loses less when it is quantized.

A *component* is a set of tensors that edges join (a norm with q, k, v and o; a norm with an MLP or all its experts):
its factors depend on nothing else, so one worker finds them and writes its tensors, in runs of rows. Everything else is
copied byte for byte. What cannot be folded exactly is refused before anything is read.

Sums are in float64 and every tensor is rounded once, to the dtype that is written. Factors that are powers of two are
exact in every float dtype: then the dtype stays, and the result computes the same bits as the source.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import torch

from ptqpipe._version import __version__
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import CheckpointWriter, ShardLayout, TensorSpec, check_disjoint, resolve_source
from ptqpipe.checkpoint.dtypes import FLOAT_DTYPES
from ptqpipe.conversion.dequantize import with_dtype
from ptqpipe.conversion.input_moments import check_model
from ptqpipe.conversion.job import (
    CheckpointJob,
    CopyTensor,
    Run,
    WriteResult,
    merged,
    named_source,
    parts_of_stage,
    write_checkpoint,
)
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform import plan
from ptqpipe.conversion.transform.learn import LearningUnit, learn_units, learning_bytes, learning_units, matrices_of
from ptqpipe.conversion.transform.plan import Component
from ptqpipe.conversion.transform.weights import Weights, input_quantizer, make_problem, weight_quantizer
from ptqpipe.errors import NumericsError, UsageError, arg, usage
from ptqpipe.models.folding import ROTATIONS, Edge, Op, Structure, find_structure, get_rotation, is_exact, move_factors
from ptqpipe.models.source import Source
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.quantization.transforms import SCALINGS, Solution, SolveOptions, get_scaling, transform_names
from ptqpipe.run.machine import BASE_BYTES, Machine, WorkerBudget, counting_bar
from ptqpipe.run.quantities import option_size, option_size_above, scientific

FLOAT32_ROUNDING = 1e-12  # relative MSE below which an error is float32's own: not worth a number

Folded = tuple[dict[str, Any], torch.Tensor | None]
"""What the record says of one folding, and the factors of a scaling, float64 [channels]."""


@dataclass(frozen=True)
class Transformation(CheckpointJob[Component | CopyTensor]):
    """A transformation that is decided but for the factors.

    names       the transforms, in their order
    statistics  None where no transform scales
    exact       whether every factor is a power of two that only multiplies
    dtype       of the tensors that change; None: each its own
    origins     output name -> source name where they differ (a head that was the embedding)
    units       the rotations that are learned
    learned     the entry of each in the journal, by its name, once it is found
    """

    options: TransformOptions
    names: tuple[str, ...]
    structure: Structure
    statistics: Statistics | None
    exact: bool
    dtype: str | None
    origins: Mapping[str, str]
    units: tuple[LearningUnit, ...]
    learned: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def head(self) -> dict[str, Any]:
        """The head of the record: what this run was to do, and with what."""
        options = self.options
        return {
            "ptqpipe": __version__,
            "container": "plain",
            "transformed_from": named_source(self.source),
            "statistics": None if self.statistics is None else self.statistics.digest,
            "transforms": list(self.names),
            "options": {
                "alpha": options.alpha,
                "powers_of_two": options.power_of_two,
                "edges": options.fold_at,
                "block": options.rotation_size or plan.default_block(options, self.structure),
                "untie": options.untie,
                "format": options.format,
            }
            | ({"learn": options.learn} if options.learn else {}),
            "exact": self.exact,
            "dtype": self.dtype,
            "untied": sorted(self.origins),
        }

    @property
    def run_parts(self) -> Mapping[str, str]:
        """As `CheckpointJob`."""
        return parts_of_stage("transform", self.head, layout=self.layout.digest)

    def least_memory(self) -> tuple[int, Component | CopyTensor | None]:
        """As `CheckpointJob`: what learning holds is let go of before the jobs begin."""
        least, job = super().least_memory()
        if self.statistics is not None and self.units:
            least = max(least, BASE_BYTES + sum(learning_bytes(self.units, self.statistics)))
        return least, job

    def before_jobs(self, writer: CheckpointWriter, machine: Machine) -> None:
        """As `CheckpointJob`: learns the rotations that an earlier run, or the first rank, has not learned."""

        def commit(name: str, entry: Mapping[str, Any]) -> None:
            writer.commit(name, entry)
            writer.flush()

        if self.units:
            self.learn(writer.done(), commit, machine)

    def learn(
        self, former: Mapping[str, Mapping[str, Any]], commit: Callable[[str, dict[str, Any]], None], machine: Machine
    ) -> None:
        """Learns the rotations that the journal's entries do not have, and commits one after another to it."""
        if self.statistics is None:
            return
        self.learned.update({unit.id: former[unit.id] for unit in self.units if unit.id in former})
        missing = [unit for unit in self.units if unit.id not in former]
        total, begun = (self.options.learn * sum(len(unit.inputs) for unit in units) for units in (self.units, missing))

        def keep(unit: LearningUnit, entry: Mapping[str, Any]) -> None:
            commit(unit.id, dict(entry))
            self.learned[unit.id] = entry

        shown = machine.progress and bool(begun)
        with counting_bar(total, "steps", shown=shown, title="learn", done=total - begun) as advance:
            weights = Weights(self.source.reader, self.origins)
            learn_units(missing, weights, self.statistics, self.options, machine=machine, advance=advance, keep=keep)

    def do(self, job: Component | CopyTensor, writer: CheckpointWriter, share: WorkerBudget) -> dict[str, Any]:
        """As `CheckpointJob`. NumericsError for numbers outside the range of the written dtype."""
        if isinstance(job, CopyTensor):
            return {"kept": {job.tensor: self.copy(job, writer)}}
        weights = Weights(self.source.reader, self.origins)
        foldings = [entry for name in self.names for entry, _ in self.fold(name, job, weights)]
        members = {spec.name: _write(spec, weights, writer, exact=self.exact) for spec in job.specs}
        return {"members": members, "foldings": foldings}

    def fold(self, name: str, job: Component, weights: Weights) -> list[Folded]:
        """Adds what one transform folds in this component; one entry of the record for each edge."""
        if name in ROTATIONS:
            block = plan.block_of(name, self.options, self.structure)
            units = [unit for unit in self.units if unit.transform == name and unit.turns(job.edges)]
            matrices = {unit.key: matrices_of(unit, self.learned[unit.id]) for unit in units}
            foldings = get_rotation(name).fold(
                self.structure, job.edges, writers=job.writers, embeddings=job.embeddings, block=block,
                read=weights.whole, matrices=matrices,
            )  # fmt: skip
            weights.add(foldings)
            changed = list(dict.fromkeys(tensor for tensor, _ in foldings))
            return [({"transform": name, "block": block, "tensors": changed}, None)] if changed else []
        edges = [edge for edge in job.edges if edge.kind in (self.options.fold_at or get_scaling(name).EDGES)]
        return [self._scale(name, edge, weights) for edge in edges]

    def _scale(self, name: str, edge: Edge, weights: Weights) -> Folded:
        """Finds and adds the factors that one scaling moves across an edge; the record's entry."""
        scaling, statistics = get_scaling(name), self.statistics
        assert statistics is not None  # `_open_statistics`
        search_for = get_scheme(self.options.format).fmt if scaling.NEEDS_QUANTIZER else None
        problem = make_problem(edge, weights, statistics, search_for=search_for)
        if problem is None:
            return {"transform": name, "edge": edge.id, "kind": edge.kind, "skipped": "nothing is quantized"}, None
        solution = scaling.solve(problem, _solve_options(self.options, name))
        weights.add(move_factors(edge, solution.factors))
        weights.divide_inputs(edge, solution.factors)
        return _entry(name, edge, solution), solution.factors

    def configs(self) -> dict[str, dict[str, Any]]:
        """As `CheckpointJob`."""
        config = dict(self.source.reader.config)
        if self.dtype is not None:
            config = with_dtype(config, self.dtype)
        if self.origins:
            config["tie_word_embeddings"] = False
        return {"config.json": config}

    def record(self, done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """``rounding``: squared error of the one rounding to the written dtype, relative to the weights' energy."""
        written = merged(done, "members")
        squared = sum(facts["squared_error"] for facts in written.values())
        energy = sum(facts["energy"] for facts in written.values())
        learned = [entry for unit in self.units if (entry := self.learned[unit.id]["record"]) is not None]
        return {
            **self.head,
            **({"learned": {"steps": self.options.learn, "rotations": learned}} if learned else {}),
            "run_id": self.run_id,
            "rounding": squared / energy if energy else 0.0,
            "foldings": [folding for entry in done for folding in entry.get("foldings", [])],
            "weights": written,
            "kept": merged(done, "kept"),
        }


def transform(
    model: str | Path,
    out: Path,
    *,
    stats: Path | None = None,
    options: TransformOptions | None = None,
    **run: Unpack[Run],
) -> WriteResult | None:
    """Writes an equivalent checkpoint. The result on rank 0, None on the others.

    Raises UsageError for what cannot be folded exactly, for missing statistics and for those of another model,
    NumericsError for numbers outside the range of the written dtype.
    """
    with ExitStack() as opened:
        source = opened.enter_context(Source.open(resolve_source(str(model))))
        work = prepare(source, Path(out), opened, stats=stats, options=options or TransformOptions())
        check_memory(work, run.get("machine") or Machine())
        return write_checkpoint(work, **run)


def prepare(
    source: Source, out: Path, opened: ExitStack, *, stats: Path | None, options: TransformOptions
) -> Transformation:
    """Everything but the factors. Writes nothing; ``opened`` closes the statistics."""
    if source.container is not None:
        raise UsageError(
            f"{source.reader.path} is quantized ({source.container_name}); transform the float model, or what "
            "`ptqpipe dequantize` makes of it"
        )
    check_disjoint(source.reader.path, out)
    source.reader.check_links()
    names = transform_names(options.transforms)
    plan.check_options(options, names)
    structure = find_structure(source.tensors, source.reader.config)
    for name in names:
        if name in ROTATIONS:
            get_rotation(name).check(structure, plan.block_of(name, options, structure), untie=options.untie)
    exact = plan.is_exact(names, options, structure) and options.dtype in (None, "fp32")
    dtype = options.dtype if options.dtype is not None else None if exact else "fp32"
    jobs, origins = plan.make_jobs(source, structure, names, dtype=dtype, options=options)
    groups = [[job.spec] if isinstance(job, CopyTensor) else job.specs for job in jobs]
    layout = ShardLayout.plan(groups, shard_bytes=options.shard_size)
    statistics = _open_statistics(stats, source, names, opened, learn=bool(options.learn))
    units: tuple[LearningUnit, ...] = ()
    if options.learn and statistics is not None:
        units = learning_units(names, structure, statistics, options)
    work = (out, source, layout, tuple(jobs), options, names, structure, statistics, exact, dtype, origins)
    return Transformation(*work, units)


def check_memory(work: Transformation, machine: Machine) -> None:
    """UsageError where the pairs that rotations are learned from do not fit."""
    least, _ = work.least_memory()
    if work.units and least > machine.memory_bytes:
        raise UsageError(
            f"{arg('max_memory', option_size(machine.memory_bytes))} is too small for the pairs that rotations are "
            f"learned from; give {arg('max_memory', option_size_above(least))}, or calibrate fewer tokens"
        )


def _open_statistics(
    stats: Path | None, source: Source, names: Sequence[str], opened: ExitStack, *, learn: bool
) -> Statistics | None:
    needing = arg("learn") if learn else next((name for name in names if name in SCALINGS), None)
    if needing is None:
        return None
    if stats is None:
        moments = "diagonal,pairs" if learn else None
        calibrate = usage("calibrate", str(source.reader.path), data="TEXT", moments=moments, out="STATS")
        raise UsageError(f"{needing} needs {arg('stats')}; make them with: {calibrate}")
    statistics = opened.enter_context(Statistics.open(Path(stats)))
    check_model(statistics, source)
    return statistics


def _entry(name: str, edge: Edge, solution: Solution) -> dict[str, Any]:
    """The entry of the factors on one edge in the record."""
    factors = solution.factors
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
    return entry if solution.error is None else entry | {"error": solution.error, "plain_error": solution.plain_error}


def _solve_options(options: TransformOptions, name: str) -> SolveOptions:
    scaling = get_scaling(name)
    alpha = SolveOptions().alpha if options.alpha is None else options.alpha
    if not scaling.NEEDS_QUANTIZER:
        return SolveOptions(alpha=alpha, powers_of_two=options.power_of_two)
    scheme = get_scheme(options.format)
    return SolveOptions(
        powers_of_two=options.power_of_two,
        quantize=weight_quantizer(scheme.fmt),
        quantize_inputs=input_quantizer(scheme.activation) if scaling.NEEDS_INPUT_QUANTIZER else None,
    )


def _beyond(spec: TensorSpec, rows: torch.Tensor) -> NumericsError:
    """The error for rows that are not finite in the dtype of a tensor."""
    if not bool(torch.isfinite(rows).all()):
        return NumericsError(f"'{spec.name}' has NaN or inf; the source checkpoint is damaged")
    remedy = (
        f"use {arg('dtype', 'fp32')}"
        if spec.dtype == "F16"
        else "check its weights, or convert the model without a transform"
    )
    return NumericsError(f"'{spec.name}' has numbers that {spec.dtype} cannot hold; {remedy}")


def _write(spec: TensorSpec, weights: Weights, writer: CheckpointWriter, *, exact: bool) -> dict[str, Any]:
    """Writes one tensor of a component; its hash and what rounding cost."""
    dtype, written = FLOAT_DTYPES[spec.dtype], writer.tensor(spec.name)
    squared = energy = 0.0
    experts: Sequence[int | None] = range(spec.shape[0]) if len(spec.shape) == 3 else (None,)
    for expert in experts:
        for _, rows in weights.runs(spec.name, expert=expert):
            rounded = rows.to(dtype)
            error = float(((rounded.double() - rows) ** 2).sum())
            if not math.isfinite(error):
                raise _beyond(spec, rows)
            squared, energy = squared + error, energy + float((rows**2).sum())
            written.put(rounded)
    ops: list[Op] = weights.ops.get(spec.name, [])
    if squared and exact and is_exact(ops):
        of_two = spec.dtype == "F32"
        remedy = f"transform it without {arg('power_of_two')}" if of_two else f"use {arg('dtype', 'fp32')}"
        raise NumericsError(f"'{spec.name}' leaves the range of {spec.dtype} by powers of two; {remedy}")
    return {"shape": list(spec.shape), "squared_error": squared, "energy": energy, "sha256": written.sha256}


def render(done: WriteResult) -> str:
    """What was done, for a terminal."""
    record = done.record
    rounding = "exact: every factor is a power of two" if record["exact"] else f"rounded once to {record['dtype']}"
    if not record["exact"] and record["rounding"] > FLOAT32_ROUNDING:
        rounding += f", a relative MSE of {scientific(record['rounding'], 2)}"
    return (
        f"Done: {done.out}: {' then '.join(record['transforms'])}, {len(record['foldings'])} foldings into "
        f"{len(record['weights'])} tensors, {len(record['kept'])} kept; {rounding}; {done.cost}"
    )


def to_json(done: WriteResult) -> dict[str, Any]:
    """The outcome as data."""
    record = done.record
    return done.to_json(
        changed=len(record["weights"]),
        kept=len(record["kept"]),
        **{key: record[key] for key in ("transforms", "foldings", "exact", "rounding")},
    )
