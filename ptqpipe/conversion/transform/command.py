"""transform: a float checkpoint in, an equivalent float checkpoint out that loses less when it is quantized.

First all factors are found and put into the journal. A *component* is a set of tensors that edges join (a norm with q,
k, v and o; a norm with an MLP or all its experts): its factors depend on nothing else, so one worker finds them. Then
the model with them folded in (``models/folded.py``) is written as any other source of floats is (``dequantize.py``).
What no edge joins is copied byte for byte. What cannot be folded exactly is refused before anything is read.

Sums are in float64 and every tensor is rounded once, to the dtype that is written. Factors that are powers of two are
exact in every float dtype: then the dtype stays, and the result computes the same bits as the source.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Unpack

from ptqpipe._version import __version__
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import CheckpointWriter, ShardLayout, TensorSpec, check_disjoint, resolve_source
from ptqpipe.conversion.dequantize import FloatCheckpoint, WriteFloats, with_dtype
from ptqpipe.conversion.input_moments import check_model
from ptqpipe.conversion.job import (
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
from ptqpipe.conversion.transform.learn import LearningUnit, learn_units, learning_bytes, learning_units
from ptqpipe.conversion.transform.plan import Component
from ptqpipe.conversion.transform.weights import Weights, input_quantizer, make_problem, weight_quantizer
from ptqpipe.errors import NumericsError, UsageError, arg, usage
from ptqpipe.models.folded import FoldedTensors, encoded
from ptqpipe.models.folding import ROTATIONS, Edge, Structure, find_structure, get_rotation, move_factors
from ptqpipe.models.source import Source
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.quantization.transforms import SCALINGS, Solution, SolveOptions, get_scaling, transform_names
from ptqpipe.run.machine import BASE_BYTES, Machine, WorkerBudget, counting_bar, progress_bar, run_jobs
from ptqpipe.run.quantities import option_size, option_size_above, scientific

Commit = Callable[[str, dict[str, Any]], None]
FLOAT32_ROUNDING = 1e-12  # relative MSE below which an error is float32's own: not worth a number


@dataclass(frozen=True)
class Transformation(FloatCheckpoint):
    """A transformation that is decided but for the factors.

    names       the transforms, in their order
    statistics  None where no transform scales
    exact       whether every factor is a power of two that only multiplies
    dtype       of the tensors that change; None: each its own
    origins     output name -> source name where they differ (a head that was the embedding)
    components  where factors are found
    units       the rotations that are learned
    entries     the journal's entries of components and units, by their names, once they are found
    transformed the source with all of it folded in, once it is found
    """

    options: TransformOptions
    names: tuple[str, ...]
    structure: Structure
    statistics: Statistics | None
    exact: bool
    dtype: str | None
    origins: Mapping[str, str]
    components: tuple[Component, ...]
    units: tuple[LearningUnit, ...]
    entries: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    transformed: list[Source] = field(default_factory=list)

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

    @property
    def view(self) -> FoldedTensors:
        """As `FloatCheckpoint`."""
        return self.transformed[0].view or super().view

    def least_memory(self) -> tuple[int, WriteFloats | CopyTensor | None]:
        """As `CheckpointJob`: what learning holds is let go of before the jobs begin."""
        least, job = super().least_memory()
        if self.statistics is not None and self.units:
            least = max(least, BASE_BYTES + sum(learning_bytes(self.units, self.statistics)))
        return least, job

    def before_jobs(self, writer: CheckpointWriter, machine: Machine) -> None:
        """As `CheckpointJob`: finds what an earlier run, or the first rank, has not found."""

        def commit(name: str, entry: dict[str, Any]) -> None:
            writer.commit(name, entry)
            writer.flush()

        self.find(writer.done(), commit, machine)
        self.transformed.append(self.source.folded(self.foldings()))

    def find(self, former: Mapping[str, Mapping[str, Any]], commit: Commit, machine: Machine) -> None:
        """Learns the rotations and finds the factors that the journal's entries do not have, and commits one after
        another to it."""
        names = [part.id for part in (*self.units, *self.components)]
        self.entries.update({name: former[name] for name in names if name in former})
        self.learn(commit, machine)
        missing = [component for component in self.components if component.id not in self.entries]
        done = [component for component in self.components if component.id in self.entries]
        shown, lock = machine.progress and self.statistics is not None, Lock()
        with progress_bar(missing, shown=shown and not self.units, done=done) as advance:

            def do(component: Component) -> None:
                weights = Weights(FoldedTensors(self.source.reader, self.origins))
                entry = {"foldings": [entry for name in self.names for entry in self.fold(name, component, weights)]}
                with lock:
                    commit(component.id, entry)
                    self.entries[component.id] = entry
                advance(component)

            run_jobs(missing, do, threads=machine.workers)

    def learn(self, commit: Commit, machine: Machine) -> None:
        """Learns the rotations that have no entry yet."""
        missing = [unit for unit in self.units if unit.id not in self.entries]
        if self.statistics is None or not missing:
            return
        total, begun = (self.options.learn * sum(len(unit.inputs) for unit in units) for units in (self.units, missing))

        def keep(unit: LearningUnit, entry: Mapping[str, Any]) -> None:
            commit(unit.id, dict(entry))
            self.entries[unit.id] = entry

        with counting_bar(
            total, "steps", shown=machine.progress and bool(begun), title="learn", done=total - begun
        ) as advance:
            weights = Weights(FoldedTensors(self.source.reader, self.origins))
            learn_units(missing, weights, self.statistics, self.options, machine=machine, advance=advance, keep=keep)

    def do(self, job: WriteFloats | CopyTensor, writer: CheckpointWriter, share: WorkerBudget) -> dict[str, Any]:
        """As `FloatCheckpoint`. NumericsError for powers of two that leave the range of the written dtype, too."""
        entry = super().do(job, writer, share)
        spec = job.spec
        if self.exact and entry.get("members", {}).get(spec.name, {}).get("squared_error"):
            of_two = spec.dtype == "F32"
            remedy = f"transform it without {arg('power_of_two')}" if of_two else f"use {arg('dtype', 'fp32')}"
            raise NumericsError(f"'{spec.name}' leaves the range of {spec.dtype} by powers of two; {remedy}")
        return entry

    def foldings(self) -> list[dict[str, Any]]:
        """What is folded in, as `folded` takes it: the matrices of rotations, and the factors of every edge."""
        foldings: list[dict[str, Any]] = []
        by_component = [one for component in self.components for one in self.entries[component.id]["foldings"]]
        for name in self.names:
            units = [(unit, self.entries[unit.id]) for unit in self.units if unit.transform == name]
            if units:
                foldings += [{**(e["record"] or unit.place), "matrices": e["matrices"]} for unit, e in units]
            elif name in ROTATIONS:
                foldings.append({"transform": name, "block": plan.block_of(name, self.options, self.structure)})
            else:
                foldings += [one for one in by_component if one["transform"] == name]
        return foldings

    def fold(self, name: str, component: Component, weights: Weights) -> list[dict[str, Any]]:
        """What one transform folds into this component: an entry for each edge, with the factors, or for a rotation."""
        if name in ROTATIONS:
            block = plan.block_of(name, self.options, self.structure)
            changes = get_rotation(name).fold(
                self.structure, component.edges, writers=component.writers, embeddings=component.embeddings,
                block=block, read=weights.whole, matrices={},
            )  # fmt: skip
            changed = list(dict.fromkeys(tensor for tensor, _ in changes))
            return [{"transform": name, "block": block, "tensors": changed}] if changed else []
        edges = [edge for edge in component.edges if edge.kind in (self.options.fold_at or get_scaling(name).EDGES)]
        return [self._scale(name, edge, weights) for edge in edges]

    def _scale(self, name: str, edge: Edge, weights: Weights) -> dict[str, Any]:
        """Finds and adds the factors that one scaling moves across an edge."""
        scaling, statistics = get_scaling(name), self.statistics
        assert statistics is not None  # `_open_statistics`
        search_for = get_scheme(self.options.format).fmt if scaling.NEEDS_QUANTIZER else None
        problem = make_problem(edge, weights, statistics, search_for=search_for)
        if problem is None:
            return {"transform": name, "edge": edge.id, "kind": edge.kind, "skipped": "nothing is quantized"}
        solution = scaling.solve(problem, _solve_options(self.options, name))
        weights.tensors.add(move_factors(edge, solution.factors))
        weights.divide_inputs(edge, solution.factors)
        return {**_entry(name, edge, solution), "factors": encoded(solution.factors)}

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
        learned = [entry for unit in self.units if (entry := self.entries[unit.id]["record"]) is not None]
        foldings = [one for component in self.components for one in self.entries[component.id]["foldings"]]
        return {
            **self.head,
            **({"learned": {"steps": self.options.learn, "rotations": learned}} if learned else {}),
            "run_id": self.run_id,
            "rounding": squared / energy if energy else 0.0,
            "foldings": [{key: value for key, value in one.items() if key != "factors"} for one in foldings],
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
    jobs, components, origins = plan.make_jobs(source, structure, names, dtype=dtype, options=options)
    groups: dict[int, list[TensorSpec]] = {}
    for job in jobs:
        groups.setdefault(job.group, []).append(job.spec)
    layout = ShardLayout.plan(groups.values(), shard_bytes=options.shard_size)
    statistics = _open_statistics(stats, source, names, opened, learn=bool(options.learn))
    units: tuple[LearningUnit, ...] = ()
    if options.learn and statistics is not None:
        units = learning_units(names, structure, statistics, options)
    work = (out, source, layout, tuple(jobs), options, names, structure, statistics, exact, dtype, origins)
    return Transformation(*work, tuple(components), units)


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
