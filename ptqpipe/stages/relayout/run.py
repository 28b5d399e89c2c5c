"""relayout: one packed checkpoint in, the same numbers in another container out. Nothing is quantized again.

Codes and block scales keep their bytes; what changes is names, shapes of the same bytes, the width of float scales
(only where no number changes), and the spelling of global scales: a container that divides stores the reciprocal.
1/(1/x) is not always x, and code * (v/x) may differ from code * (v*(1/x)) by its roundings, at most 5 x 2^-24 of the
number; both are looked for in every scale that is inverted, and told. Shards keep their borders (the parts of one
weight are brought together), so there and back again gives the same files, the record aside.

Knows containers and files; must not know how scales were chosen. Bytes move in ``pieces.py``.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.checkpoint.layout import ShardLayout, TensorSpec
from ptqpipe.checkpoint.source import check_disjoint
from ptqpipe.checkpoint.writer import CheckpointWriter, Mode
from ptqpipe.containers import (
    ConfigRequest,
    Container,
    Role,
    get_container,
)
from ptqpipe.errors import CheckpointError, FormatError, UsageError
from ptqpipe.formats import get_format
from ptqpipe.plan import is_matrix
from ptqpipe.record import TAKEN_OVER, UNKNOWN, read_record
from ptqpipe.source import Source
from ptqpipe.stages.common.jobs import (
    RECORD_FILE,
    copy_tensor,
    finish_checkpoint,
    named_source,
    run_id_of,
    run_parts_of,
    write_checkpoint,
)
from ptqpipe.stages.common.machine import Machine, Ranks, resident_bytes
from ptqpipe.stages.common.outputs import check_read_back
from ptqpipe.stages.common.pieces import Moved, Piece, move
from ptqpipe.stages.relayout.jobs import Job, dropped_parts, kept_job, specs_of, targets_of, warnings_of, weight_jobs

# What holds of each part of a stack's weight that is split: how its numbers were found, not what they cost.
_OF_EVERY_PART = ("search", "proven", "algorithm", "weighting", "damping", "reverted", "held_out", "input_scale")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A change of layout that is decided to the byte."""

    out: Path
    source: Source
    container: Container
    container_name: str
    layout: ShardLayout
    jobs: tuple[Job, ...]
    dropped: tuple[str, ...]
    warnings: tuple[str, ...]
    old_record: Mapping[str, Any]

    @property
    def asked(self) -> dict[str, Any]:
        """What the record says of this run and of what came before it."""
        old, source = self.old_record, named_source(self.source.reader)
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
            **{key: old[key] for key in ("statistics", "rounding") if key in old},
        }

    @property
    def run_parts(self) -> dict[str, str]:
        """What decides the bytes of this run."""
        parts = run_parts_of(self.asked, layout=self.layout.digest)
        assert parts is not None  # it is a run of this stage
        return parts


@dataclass(frozen=True, slots=True)
class Relayouted:
    """What a finished change of layout was.

    changed       weights whose float32 decode is rounded differently, since their global scale was inverted
    irreversible  scales whose reciprocal's reciprocal is another float32: back again gives its neighbour
    dropped       tensors of the source that the layout has no place for; none of them is part of a weight's decode
    """

    out: Path
    record: Mapping[str, Any]
    source_container: str
    container: str
    weights: int
    kept: int
    changed: tuple[str, ...]
    irreversible: tuple[str, ...]
    dropped: tuple[str, ...]
    warnings: tuple[str, ...]
    written_bytes: int
    seconds: float
    peak_rss_bytes: int


def relayout(
    ckpt: Path,
    out: Path,
    *,
    container: str,
    mode: Mode = "new",
    machine: Machine | None = None,
    ranks: Ranks | None = None,
) -> Relayouted | None:
    """Rewrites a packed checkpoint in another container. The result on rank 0, None on the others.

    Raises UsageError for a plain checkpoint or the same container, FormatError for what the container cannot spell,
    CheckpointError for damage, among it a payload that is not the one that the checkpoint's record describes.
    """
    begun = time.monotonic()
    with Source.open(Path(ckpt)) as source:
        prepared = prepare(source, Path(out), container=container)
        record = write_checkpoint(
            prepared.out,
            prepared.layout,
            jobs=prepared.jobs,
            source=source.reader,
            run_parts=prepared.run_parts,
            mode=mode,
            machine=machine or Machine(),
            ranks=ranks or Ranks(),
            work=lambda job, writer, _: _do(job, prepared, writer),
            finish=lambda writer: _finish(prepared, writer),
        )
    if record is None:
        return None
    return Relayouted(
        prepared.out,
        record,
        source.container_name,
        prepared.container_name,
        weights=len(record["weights"]),
        kept=len(record["kept"]),
        changed=tuple(record["decode_rounds_differently"]),
        irreversible=tuple(record["reciprocal_is_not_exact"]),
        dropped=prepared.dropped,
        warnings=prepared.warnings,
        written_bytes=prepared.layout.file_bytes,
        seconds=time.monotonic() - begun,
        peak_rss_bytes=resident_bytes().peak,
    )


# --- Deciding, from headers (and from float scales, where their width must be chosen)


def prepare(source: Source, out: Path, *, container: str) -> Prepared:
    """Everything that will be written, except the numbers. Writes nothing; ``source`` must stay open."""
    name = container.lower().replace("-", "_")
    target = get_container(name)
    if source.container is None:
        raise UsageError(f"{source.reader.path} is not quantized; `ptqpipe convert --container {name}` quantizes it")
    if source.container_name == name:
        raise UsageError(f"{source.reader.path} has the {name} layout already; choose another --container")
    thin = next((weight for weight in source.stored.values() if weight.scheme.low_rank is not None), None)
    if thin is not None:
        raise FormatError(
            f"{thin.weight} has a low-rank part ({thin.scheme.low_rank}), for which {name} has no place; "
            "`ptqpipe dequantize` adds it to the weights, or convert the source without low_rank"
        )
    check_disjoint(source.reader.path, out)
    source.reader.check_links()
    jobs: list[Job] = []
    groups: list[list[TensorSpec]] = []
    shard_of: list[int] = []
    shards: dict[Path, int] = {}
    owners = {part.name: stored for stored in source.stored.values() for part in stored.parts}
    seen: set[str] = set()
    for tensor, entry in source.reader.entries.items():
        stored = owners.get(tensor)
        if stored is not None and stored.weight in seen:
            continue
        made = [kept_job(tensor, source, target, name)] if stored is None else weight_jobs(stored, source, target, name)
        seen.update([] if stored is None else [stored.weight])
        jobs += [replace(job, group=len(groups)) for job in made]
        specs = {spec.name: spec for job in made for spec in specs_of(job)}
        groups.append(list(specs.values()))
        shard_of.append(shards.setdefault(entry.file, len(shards)))
    layout = ShardLayout.with_borders(groups, shard_of=shard_of)
    dropped = tuple(dropped_parts(source, jobs))
    warnings = tuple(warnings_of(source, target, name, jobs))
    record = read_record(source.reader).raw if (source.reader.path / RECORD_FILE).exists() else {}
    prepared = Prepared(out, source, target, name, layout, tuple(jobs), dropped, warnings, record)
    check_read_back(target, _config_files(prepared), layout, targets_of(jobs), container_name=name)
    return prepared


# --- Writing


def _do(job: Job, prepared: Prepared, writer: CheckpointWriter) -> dict[str, Any]:
    """Moves a job's pieces, or copies its tensor; its record."""
    reader = prepared.source.reader
    if job.kept is not None:
        source = job.id.removeprefix("keep:")
        sha256, nbytes = copy_tensor(reader, source, writer, job.kept.name)
        old = prepared.old_record.get("kept", {}).get(source, {})
        _check_same(source, sha256, old.get("sha256"), prepared)
        told = {"reason": old.get("reason", TAKEN_OVER), "sha256": sha256, "bytes": nbytes}
        return {"kept": {job.kept.name: told | {key: old[key] for key in ("not_finite",) if key in old}}}
    members: dict[str, Any] = {}
    changed, irreversible = [], []
    for piece in job.pieces:
        moved = move(piece, reader, writer)
        changed += [piece.name] if moved.changed else []
        irreversible += moved.irreversible
        members[piece.name] = _member(piece, moved, prepared)
    return {"members": members, "changed": changed, "irreversible": irreversible}


def _member(piece: Piece, moved: Moved, prepared: Prepared) -> dict[str, Any]:
    """The record of a weight: that of the source where it is the same weight, with the new hashes. A part of a stack
    that was split has no measured errors of its own."""
    stored = piece.source
    name = stored.weight if piece.expert is None else f"{stored.weight}[{piece.expert}]"
    old = prepared.old_record.get("weights", {}).get(name, {})
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
        _check_same(name, moved.hashes[Role.DATA.value], old.get("sha256", {}).get(Role.DATA.value), prepared)
        facts = {**old, **({} if old else facts)}
    else:
        facts |= {key: old[key] for key in _OF_EVERY_PART if key in old}
    return {**facts, "sha256": moved.hashes}


def _check_same(name: str, sha256: str, recorded: str | None, prepared: Prepared) -> None:
    if recorded is not None and recorded != sha256:
        raise CheckpointError(
            f"{name} does not have the bytes that {RECORD_FILE} of {prepared.source.reader.path} records; "
            "it was changed or damaged after it was written, convert the model again"
        )


def _finish(prepared: Prepared, writer: CheckpointWriter) -> dict[str, Any]:
    """Config files, record and carried files; then the output has its name. The record."""
    return finish_checkpoint(
        writer,
        prepared.jobs,
        prepared.source.reader,
        record=lambda records: _record(prepared, records),
        configs=_config_files(prepared),
    )


def _config_files(prepared: Prepared) -> dict[str, dict[str, Any]]:
    """The config files by name, as the target layout spells them."""
    source = prepared.source
    kept = [job.kept for job in prepared.jobs if job.kept is not None]
    modules = [spec.name.removesuffix(".weight") for spec in kept if is_matrix(spec.name, spec.dtype, spec.shape)]
    tied = "lm_head.weight" not in source.tensors
    kept_modules = tuple(dict.fromkeys(modules + ["lm_head"] * tied))
    provenance = {"producer": "ptqpipe", "version": __version__}
    return prepared.container.configs(
        ConfigRequest(source.reader.config, targets_of(prepared.jobs), kept_modules, provenance)
    )


def _record(prepared: Prepared, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """ptqpipe.json: what the source's says, with this layout, the new hashes, and the run that it came from."""
    old = prepared.old_record
    return {
        **{key: value for key, value in old.items() if key != "recipe"},
        **prepared.asked,
        "run_id": run_id_of(prepared.run_parts),
        "weights": {name: facts for entry in records for name, facts in entry.get("members", {}).items()},
        "kept": {name: facts for entry in records for name, facts in entry.get("kept", {}).items()},
        "decode_rounds_differently": [name for entry in records for name in entry.get("changed", ())],
        "reciprocal_is_not_exact": [name for entry in records for name in entry.get("irreversible", ())],
        "dropped": list(prepared.dropped),
    }


def render(done: Relayouted) -> str:
    """What was done, for a terminal."""
    lines = [
        f"{done.out}: {done.weights} weights from {done.source_container} to {done.container}, {done.kept} tensors "
        f"kept; {done.written_bytes} bytes in {done.seconds:.1f} s, peak memory {done.peak_rss_bytes >> 20} MiB",
        "codes and block scales have the same bytes",
    ]
    if done.changed:
        lines.append(
            f"the global scales of {len(done.changed)} weights were inverted: their float32 decode is rounded "
            f"differently, by at most 5 x 2^-24 of a number ({done.changed[0]} is the first)"
        )
    if done.irreversible:
        lines.append(f"{len(done.irreversible)} reciprocals are not exact: the way back gives their float32 neighbours")
    if done.dropped:
        lines.append(f"{len(done.dropped)} tensors have no place in this layout, the first: {done.dropped[0]}")
    return "\n".join([*lines, *(f"note: {warning}" for warning in done.warnings)])


def to_json(done: Relayouted) -> dict[str, Any]:
    """The outcome as data."""
    return {
        "out": str(done.out),
        "source_container": done.source_container,
        "container": done.container,
        "weights": done.weights,
        "kept": done.kept,
        "decode_rounds_differently": list(done.changed),
        "reciprocal_is_not_exact": list(done.irreversible),
        "dropped": list(done.dropped),
        "warnings": list(done.warnings),
        "written_bytes": done.written_bytes,
        "seconds": done.seconds,
        "peak_rss_bytes": done.peak_rss_bytes,
    }
