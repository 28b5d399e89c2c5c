"""transform: a float checkpoint in, an equivalent float checkpoint out that loses less when it is quantized.

First all factors are found and put into the journal. A *component* is a set of tensors that edges join (a norm with q,
k, v and o; a norm with an MLP or all its experts): its factors depend on nothing else, so one worker finds them. Then
the model with them folded in (``models/folded.py``) is written as any other source of floats is (``dequantize.py``).
What no edge joins is copied byte for byte. What cannot be folded exactly is refused before anything is read.

Sums are in float64 and every tensor is rounded once, to the dtype that is written. Factors that are powers of two are
exact in every float dtype: then the dtype stays, and the result computes the same bits as the source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import CheckpointWriter, TensorSpec
from ptqpipe.conversion.dequantize import FloatCheckpoint, WriteFloats, with_dtype
from ptqpipe.conversion.job import CopyTensor, merged, named_source
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform import plan
from ptqpipe.conversion.transform.learn import LearningUnit, learn_units, learning_bytes
from ptqpipe.conversion.transform.plan import Component
from ptqpipe.conversion.transform.weights import Weights, solve_edge
from ptqpipe.errors import NumericsError, arg
from ptqpipe.models.folded import FoldedTensors
from ptqpipe.models.folding import ROTATIONS, Structure, get_rotation
from ptqpipe.models.source import Source
from ptqpipe.quantization.transforms import get_scaling
from ptqpipe.run.machine import BASE_BYTES, Machine, counting_bar, progress_bar, run_jobs

Commit = Callable[[str, dict[str, Any]], None]


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

    stage = "transform"

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
    def view(self) -> FoldedTensors:
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
        names = [unit.id for unit in self.units] + [component.id for component in self.components]
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

    def check_rounding(self, spec: TensorSpec, squared: float) -> None:
        """NumericsError for powers of two that leave the range of the written dtype."""
        if self.exact and squared:
            of_two = spec.dtype == "F32"
            remedy = f"transform it without {arg('power_of_two')}" if of_two else f"use {arg('dtype', 'fp32')}"
            raise NumericsError(f"'{spec.name}' leaves the range of {spec.dtype} by powers of two; {remedy}")

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
        assert self.statistics is not None  # `_open_statistics`
        return [solve_edge(name, edge, weights, self.statistics, self.options) for edge in edges]

    def configs(self) -> dict[str, dict[str, Any]]:
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
