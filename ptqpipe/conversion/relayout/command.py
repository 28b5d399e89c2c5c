"""relayout: one packed checkpoint in, the same numbers in another container out. Nothing is quantized again.

Codes and block scales keep their bytes; what changes is names, shapes of the same bytes, the width of float scales
(only where no number changes), and the convention of global scales: a container that divides stores the reciprocal.
1/(1/x) is not always x, and code * (v/x) may differ from code * (v*(1/x)) by its roundings, at most 5 x 2^-24 of the
number; both are looked for in every scale that is inverted, and recorded. Shards keep their borders (the parts of one
weight are brought together), so there and back again gives the same files, the record aside. Bytes move in ``jobs.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from ptqpipe._version import __version__
from ptqpipe.checkpoint import RECORD_FILE, CheckpointWriter, ShardLayout, TensorSpec, check_disjoint
from ptqpipe.checkpoint.layouts import ConfigRequest, Container, PartKind, get_container
from ptqpipe.conversion.job import (
    CheckpointJob,
    CopyTensor,
    Run,
    WriteResult,
    merged,
    named_source,
    write_checkpoint,
)
from ptqpipe.conversion.planned_outputs import check_read_back
from ptqpipe.conversion.record import TAKEN_OVER, UNKNOWN, read_record, self_faults
from ptqpipe.conversion.relayout.jobs import (
    Moved,
    MoveWeight,
    WeightPiece,
    dropped_parts,
    kept_job,
    specs_of,
    targets_of,
    warnings_of,
    weight_jobs,
)
from ptqpipe.errors import CheckpointError, FormatError, UsageError, arg, usage
from ptqpipe.models.source import Source
from ptqpipe.numerics.formats import get_format
from ptqpipe.recipe.plan import is_matrix

# What holds of each part of a stack's weight that is split: how its numbers were found, not what they cost.
_OF_EVERY_PART = (
    "search", "enlarged", "proven", "algorithm", "weighting", "damping", "reverted", "held_out", "input_scale",
)  # fmt: skip


@dataclass(frozen=True)
class Relayout(CheckpointJob[MoveWeight | CopyTensor]):
    """A change of layout that is decided to the byte.

    dropped     tensors of the source that the layout has no place for; none of them is part of a weight's decode
    old_record  ptqpipe.json of the source; empty where it has none
    """

    stage = "relayout"

    container: Container
    container_name: str
    dropped: tuple[str, ...]
    old_record: Mapping[str, Any]

    @property
    def head(self) -> dict[str, Any]:
        old, source = self.old_record, named_source(self.source)
        # The plan does not follow from the recipe any more: "recipe" is not at the top, where verify would replan it.
        was = {key: old[key] for key in ("recipe", "container", "run_id", "ptqpipe") if key in old}
        converted = old.get("converted_as") or (was if "recipe" in was else None)
        return {
            "ptqpipe": __version__,
            "container": self.container_name,
            "source": old.get("source", source),
            "relayout_of": old.get("run_id"),
            "relayout_from": source,
            **({"converted_as": converted} if converted else {}),
            **{key: old[key] for key in ("statistics", "rounding", "transformed") if key in old},
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(warnings_of(self.source, self.container, self.container_name, self.jobs))

    def copy(self, job: CopyTensor, writer: CheckpointWriter) -> dict[str, Any]:
        """As `CheckpointJob`, with what the source's record says of the tensor."""
        written = super().copy(job, writer)
        old = self.old_record.get("kept", {}).get(job.tensor, {})
        self._check_same(job.tensor, written["sha256"], old.get("sha256"))
        taken_over = {key: old[key] for key in ("not_finite",) if key in old}
        return {"reason": old.get("reason", TAKEN_OVER), **written, **taken_over}

    def member(self, piece: WeightPiece, moved: Moved) -> dict[str, Any]:
        """The record of a weight: that of the source where it is the same weight, with the new hashes. A part of a
        stack that was split has no measured errors of its own."""
        stored = piece.source
        name = stored.key(piece.expert)
        old = self.old_record.get("weights", {}).get(name, {})
        facts = {
            "shape": list(piece.shape),
            "format": stored.scheme.fmt.name,
            "scheme": stored.scheme.name,
            "search": UNKNOWN,
            "proven": False,
            "global_scale": moved.global_scale,
            "bits_per_weight": get_format(stored.scheme.fmt.name).bits_per_weight(piece.shape),  # in any layout
        }
        if piece.whole:
            self._check_same(name, moved.hashes[PartKind.DATA.value], old.get("sha256", {}).get(PartKind.DATA.value))
            facts = {**old, **({} if old else facts)}
        else:
            facts |= {key: old[key] for key in _OF_EVERY_PART if key in old}
        return {**facts, "sha256": moved.hashes}

    def _check_same(self, name: str, sha256: str, recorded: str | None) -> None:
        if recorded is not None and recorded != sha256:
            raise CheckpointError(
                f"{name} does not have the bytes that {RECORD_FILE} of {self.source.reader.path} records; "
                "it was changed or damaged after it was written, convert the model again"
            )

    def configs(self) -> dict[str, dict[str, Any]]:
        """As `CheckpointJob`, as the target layout has them."""
        source = self.source
        kept = [job.spec for job in self.jobs if isinstance(job, CopyTensor)]
        modules = [spec.name.removesuffix(".weight") for spec in kept if is_matrix(spec.name, spec.dtype, spec.shape)]
        tied = "lm_head.weight" not in source.tensors
        kept_modules = tuple(dict.fromkeys(modules + ["lm_head"] * tied))
        provenance = {"producer": "ptqpipe", "version": __version__}
        return self.container.configs(ConfigRequest(source.config, targets_of(self.jobs), kept_modules, provenance))

    def record(self, done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As `CheckpointJob`: the source's record, with this layout, the new hashes, and the run that it came from.

        decode_rounds_differently  weights whose float32 decode is rounded differently, since their global scale was
                                   inverted
        reciprocal_is_not_exact    scales whose reciprocal's reciprocal is another float32
        """
        return {
            **{key: value for key, value in self.old_record.items() if key != "recipe"},
            **self.head,
            "run_id": self.run_id,
            "weights": merged(done, "members"),
            "kept": merged(done, "kept"),
            "decode_rounds_differently": [name for entry in done for name in entry.get("changed", ())],
            "reciprocal_is_not_exact": [name for entry in done for name in entry.get("irreversible", ())],
            "dropped": list(self.dropped),
        }


def relayout(ckpt: Path, out: Path, *, container: str, **run: Unpack[Run]) -> WriteResult | None:
    """Rewrites a packed checkpoint in another container. The result on rank 0, None on the others.

    Raises UsageError for a plain checkpoint or the same container, FormatError for what the container cannot store,
    CheckpointError for damage, among it a payload that is not the one that the checkpoint's record describes.
    """
    with Source.open(Path(ckpt)) as source:
        return write_checkpoint(prepare(source, Path(out), container=container), **run)


def prepare(source: Source, out: Path, *, container: str) -> Relayout:
    """Everything that will be written, except the numbers. Writes nothing; ``source`` must stay open."""
    name = container.lower().replace("-", "_")
    target = get_container(name)
    if source.container is None:
        convert = usage("convert", str(source.reader.path), container=name)
        raise UsageError(f"{source.reader.path} is not quantized; {convert} quantizes it")
    if source.container_name == name:
        raise UsageError(f"{source.reader.path} has the {name} layout already; choose another {arg('container')}")
    rotated = next((weight for weight in source.stored.values() if weight.scheme.rotation), None)
    if rotated is not None and not target.CAPABILITIES.rotation:
        raise FormatError(
            f"{rotated.weight} has rotated inputs (blocks of {rotated.scheme.rotation}), which no reader of {name} "
            f"rotates; convert the source without {arg('rotate')}"
        )
    check_disjoint(source.reader.path, out)
    source.reader.check_links()
    jobs: list[MoveWeight | CopyTensor] = []
    groups: list[list[TensorSpec]] = []
    shard_of: list[int] = []
    shards: dict[Path, int] = {}
    owners = {part.name: stored for stored in source.stored.values() for part in stored.parts}
    seen: set[str] = set()
    for tensor, entry in source.reader.entries.items():
        stored = owners.get(tensor)
        if stored is not None and stored.weight in seen:
            continue
        new_jobs: Sequence[MoveWeight | CopyTensor]
        if stored is None:
            new_jobs = [kept_job(tensor, source, target, name, group=len(groups))]
        else:
            new_jobs = weight_jobs(stored, source, target, name, group=len(groups))
            seen.add(stored.weight)
        jobs += new_jobs
        groups.append(list({spec.name: spec for job in new_jobs for spec in specs_of(job)}.values()))
        shard_of.append(shards.setdefault(entry.file, len(shards)))
    layout = ShardLayout.with_borders(groups, shard_of=shard_of)
    record = _old_record(source)
    work = Relayout(out, source, layout, tuple(jobs), target, name, tuple(dropped_parts(source, jobs)), record)
    check_read_back(target, work.configs(), layout, targets_of(jobs), container_name=name)
    return work


def _old_record(source: Source) -> Mapping[str, Any]:
    """The record of the checkpoint, empty without one. CheckpointError where it is not the one that was written: what
    it says would be written again."""
    folder = source.reader.path
    if not (folder / RECORD_FILE).exists():
        return {}
    record = read_record(source.reader).raw
    wrong = next(self_faults(folder, record), None)
    if wrong is not None:
        raise CheckpointError(f"{folder / RECORD_FILE}: {wrong[0]} {wrong[1]}")
    return record


def render(done: WriteResult) -> str:
    record = done.record
    changed, irreversible = record["decode_rounds_differently"], record["reciprocal_is_not_exact"]
    lines = [
        f"Done: {done.out}: {len(record['weights'])} weights from {done.source_container} to {record['container']}, "
        f"{len(record['kept'])} tensors kept; {done.cost}",
        "codes and block scales have the same bytes",
    ]
    if changed:
        lines.append(
            f"the global scales of {len(changed)} weights were inverted: their float32 decode is rounded differently, "
            f"by at most 5 x 2^-24 of a number ({changed[0]} is the first)"
        )
    if irreversible:
        lines.append(
            f"{len(irreversible)} global scales have no exact float32 reciprocal; converting back changes them by one "
            "unit in the last place"
        )
    if record["dropped"]:
        lines.append(
            f"{len(record['dropped'])} tensors have no place in this layout, the first: {record['dropped'][0]}"
        )
    return "\n".join([*lines, *(f"note: {warning}" for warning in done.warnings)])


def to_json(done: WriteResult) -> dict[str, Any]:
    record = done.record
    return done.to_json(
        source_container=done.source_container,
        container=record["container"],
        weights=len(record["weights"]),
        kept=len(record["kept"]),
        **{key: record[key] for key in ("decode_rounds_differently", "reciprocal_is_not_exact", "dropped")},
        warnings=list(done.warnings),
    )
