"""convert: a published checkpoint in, a packed low-precision checkpoint out.

One straight line: what ``prepare.py`` has decided from headers, workers quantize unit by unit and write, each at its
place, and the folder gets its name when everything is on disk. Memory is a
few chunks per worker, whatever the size of the model; the bytes depend on source and recipe alone.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.algorithms.unit import WeightError, check_decode
from ptqpipe.checkpoint.direct import margin
from ptqpipe.checkpoint.writer import CheckpointWriter, Mode
from ptqpipe.errors import NumericsError
from ptqpipe.plan import Unit
from ptqpipe.source import Scratch, SourceRows
from ptqpipe.stages.common import kv_cache
from ptqpipe.stages.common.biases import MeanErrors
from ptqpipe.stages.common.identity import name_of
from ptqpipe.stages.common.jobs import (
    finish_checkpoint,
    write_checkpoint,
)
from ptqpipe.stages.common.machine import Machine, Ranks, resident_bytes
from ptqpipe.stages.common.moments import (
    describe_statistics,
    means_of,
)
from ptqpipe.stages.common.outputs import (
    Job,
    config_files,
)
from ptqpipe.stages.common.quantize_unit import learned_codes, quantize_unit
from ptqpipe.stages.convert import memory
from ptqpipe.stages.convert.prepare import Prepared
from ptqpipe.stages.convert.write_parts import PartWriter, keep_tensor

# A weight whose squared error is above this share of its energy is gone; the coarsest formats leave a tenth of it.
LOST = 0.5

_of_worker = threading.local()


@dataclass(frozen=True, slots=True)
class Converted:
    """What a finished conversion was: where it lies, its record (the content of ptqpipe.json), and its cost."""

    out: Path
    record: Mapping[str, Any]
    source_bytes: int
    written_bytes: int
    seconds: float
    peak_rss_bytes: int


def convert(
    prepared: Prepared, *, mode: Mode = "new", machine: Machine | None = None, ranks: Ranks | None = None
) -> Converted | None:
    """Runs a prepared conversion. The result on rank 0, None on the others.

    Raises NumericsError for damaged weights, OutputError where the target refuses; what is done stays resumable.
    """
    machine, ranks = machine or Machine(), ranks or Ranks()
    memory.check_memory(prepared, machine)
    begun = time.monotonic()

    def work(job: Job, writer: CheckpointWriter, cache_bytes: int) -> Mapping[str, Any]:
        if job.unit is not None:
            return _quantize(job, prepared, writer, machine, cache_bytes)
        if job.cache is not None:
            assert prepared.statistics is not None  # `prepare` has looked
            return {"kept": kv_cache.write_scales(*job.cache, prepared.statistics, writer)}
        return keep_tensor(job, prepared.source, writer)

    record = write_checkpoint(
        prepared.out,
        prepared.outputs.layout,
        jobs=prepared.outputs.jobs,
        source=prepared.source.reader,
        run_parts=prepared.run_parts,
        mode=mode,
        machine=machine,
        ranks=ranks,
        work=work,
        unit_bytes=memory.largest_unit(prepared),
        extra_bytes=lambda job: 0 if job.unit is None else memory.extra_bytes(job.unit, prepared),
        finish=lambda writer: _finish(prepared, writer),
    )
    if record is None:
        return None
    return Converted(
        prepared.out,
        record,
        source_bytes=sum(entry.nbytes for entry in prepared.source.reader.entries.values()),
        written_bytes=prepared.outputs.layout.file_bytes,
        seconds=time.monotonic() - begun,
        peak_rss_bytes=resident_bytes().peak,
    )


def _quantize(
    job: Job, prepared: Prepared, writer: CheckpointWriter, machine: Machine, cache_bytes: int
) -> dict[str, Any]:
    """Quantizes a unit, writes its parts, and returns its record."""
    unit = job.unit
    assert unit is not None
    fmt = unit.scheme.fmt
    cache = job.source_bytes <= cache_bytes
    scratch = _scratch()
    if cache:
        scratch.begin(job.source_bytes + (64 + margin()) * len(unit.members))
    weights = [
        SourceRows(prepared.source, m.source, shape=m.shape, cache=cache, memory=scratch.take) for m in unit.members
    ]
    scales = prepared.input_scales.of(unit)
    written = PartWriter(job, writer, input_scales=scales)
    biases = dict(zip((b.removesuffix("bias") + "weight" for b in job.biases), job.biases, strict=True))
    means = means_of(unit, prepared.statistics, set(biases))
    errors = MeanErrors(weights, means, written.take)
    sink = errors.take if biases else written.take
    codes = learned_codes(unit, prepared.rounding)
    result = quantize_unit(unit, weights, sink, statistics=prepared.statistics, codes=codes, device=machine.device)
    _check_kept_alive(unit, result.errors)
    hashes = written.finish()
    members = {}
    done = zip(unit.members, result.errors, hashes, result.record_fields, scales, strict=True)
    for member, error, sha256, outcome, scale in done:
        members[member.key] = {
            "shape": list(member.shape),
            "format": fmt.name,
            "scheme": unit.scheme.name,
            "search": unit.rule.search,
            "proven": result.proven,
            "global_scale": result.global_scale,
            "versus_plain_global": result.versus_plain_global,
            "squared_error": error.squared_error,
            "energy": error.energy,
            "relative_mse": error.relative_mse,
            "versus_absmax": error.versus_absmax,
            "bits_per_weight": unit.scheme.bits_per_weight(member.shape),
            "sha256": sha256,
            **({} if scale is None else {"input_scale": float(scale)}),
            **outcome,
        }
    return {"members": members, "kept": errors.write(unit.members, biases, prepared.source, writer)}


def _scratch() -> Scratch:
    """The calling worker's own; it goes when the worker's thread ends."""
    found: Scratch | None = getattr(_of_worker, "scratch", None)
    if found is None:
        found = _of_worker.scratch = Scratch()
    return found


def _check_kept_alive(unit: Unit, errors: Sequence[WeightError]) -> None:
    """NumericsError for a weight of which mostly zeros are left: its scale, often a shared one, cannot hold it."""
    check_decode([member.weight for member in unit.members], errors, unit.scheme.fmt)
    for member, error in zip(unit.members, errors, strict=True):
        if error.relative_mse > LOST:
            others = [m.weight for m in unit.members if m is not member]
            shared = f", at the scale that it shares with {' and '.join(others)}" if others else ""
            raise NumericsError(
                f"{member.weight} would lose {min(error.relative_mse, 1.0):.0%} of its energy in "
                f"{unit.scheme.fmt.name}{shared}; repair the source, or keep it: --ignore '{member.module}'"
            )


def _record(prepared: Prepared, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of ptqpipe.json: recipe, versions, fate, error and hash of every tensor, in the plan's order."""
    weights: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for entry in records:
        weights.update(entry.get("members", {}))
        kept.update(entry.get("kept", {}))
    return {
        "ptqpipe": __version__,
        "torch": torch.__version__,
        "run_id": prepared.run_id,
        "container": prepared.outputs.container_name,
        "source": {"name": name_of(prepared.source_path), "fingerprint": prepared.run_parts["source"]},
        "recipe": prepared.recipe.to_json(),
        **({} if prepared.statistics is None else {"statistics": describe_statistics(prepared.statistics)}),
        **({} if prepared.rounding is None else {"rounding": prepared.rounding.describe()}),
        "weights": weights,
        "kept": kept,
        "consumed": sorted(prepared.source.consumed),
    }


def _finish(prepared: Prepared, writer: CheckpointWriter) -> dict[str, Any]:
    """The config files, the record and what is carried along; then the output has its name. The record."""
    provenance = {"producer": "ptqpipe", "version": __version__}
    files = config_files(prepared.outputs, prepared.plan, prepared.source, prepared.container, provenance=provenance)
    return finish_checkpoint(
        writer,
        prepared.outputs.jobs,
        prepared.source.reader,
        record=lambda records: _record(prepared, records),
        configs=files,
    )
