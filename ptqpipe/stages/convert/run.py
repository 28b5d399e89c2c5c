"""convert: a published checkpoint in, a packed low-precision checkpoint out.

One straight line: open the source (headers only), decide the fate of every tensor, place every byte, then let workers
quantize unit by unit and write each at its place, and give the folder its name when everything is on disk. Memory is a
few chunks per worker, whatever the size of the model; the bytes depend on source and recipe alone.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.algorithms import rtn
from ptqpipe.checkpoint.direct import margin
from ptqpipe.checkpoint.header import DTYPES
from ptqpipe.checkpoint.source import check_disjoint, resolve_source
from ptqpipe.checkpoint.writer import CheckpointWriter, Mode
from ptqpipe.containers import Container, get_container
from ptqpipe.errors import NumericsError, UsageError
from ptqpipe.formats import WHOLE
from ptqpipe.plan import Member, Plan, Unit, make_plan
from ptqpipe.recipe import Recipe, RecipeOptions, build_recipe
from ptqpipe.rounding import Rounding
from ptqpipe.search import get_search
from ptqpipe.source import Scratch, Source, SourceRows
from ptqpipe.stages.common import kv_cache, low_rank
from ptqpipe.stages.common.biases import MeanErrors, corrected_biases, with_reasons
from ptqpipe.stages.common.input_scales import InputScales
from ptqpipe.stages.common.jobs import (
    carried_names,
    finish_checkpoint,
    run_id_of,
    write_checkpoint,
)
from ptqpipe.stages.common.machine import BASE_BYTES, WORKER_BYTES, Machine, Ranks, Share, resident_bytes
from ptqpipe.stages.common.moments import (
    describe_statistics,
    means_of,
    open_statistics,
    unit_extra_bytes,
)
from ptqpipe.stages.common.outputs import (
    Job,
    Outputs,
    abilities_of,
    check_readable,
    check_supported,
    config_files,
    make_outputs,
)
from ptqpipe.stages.common.quantize_unit import learned_codes, quantize_unit
from ptqpipe.stages.common.text import mebibytes
from ptqpipe.stages.convert.write_parts import PartWriter, keep_tensor
from ptqpipe.statistics import Statistics

# A weight whose squared error is above this share of its energy is gone; the coarsest formats leave a tenth of it.
LOST = 0.5

_of_worker = threading.local()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversion that is decided to the byte and has read no weight. A context manager; or call ``close``."""

    source_path: Path
    out: Path
    recipe: Recipe
    plan: Plan
    outputs: Outputs
    source: Source
    container: Container
    run_parts: Mapping[str, str]
    input_scales: InputScales
    statistics: Statistics | None = None
    rounding: Rounding | None = None

    @property
    def run_id(self) -> str:
        """Identifies source, recipe, layout and version: a run resumes only itself."""
        return run_id_of(self.run_parts)

    def __enter__(self) -> "Prepared":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files of the source, of the statistics and of learned codes."""
        for opened in (self.source, self.statistics, self.rounding):
            if opened is not None:
                opened.close()


@dataclass(frozen=True, slots=True)
class Converted:
    """What a finished conversion was: where it lies, its record (the content of ptqpipe.json), and its cost."""

    out: Path
    record: Mapping[str, Any]
    source_bytes: int
    written_bytes: int
    seconds: float
    peak_rss_bytes: int


def best_with(options: RecipeOptions, *, stats: Path | None, recipe_path: Path | None) -> RecipeOptions:
    """The options with the best algorithm that statistics allow, where neither they nor a recipe name one."""
    if stats is None or recipe_path is not None or options.algorithm is not None or options.weighting is not None:
        return options
    return replace(options, algorithm="gptq")


def prepare(
    model: str | Path,
    *,
    options: RecipeOptions | None = None,
    recipe_path: Path | None = None,
    out: Path | None = None,
    stats: Path | None = None,
    rounding: Path | None = None,
) -> Prepared:
    """Everything that can be decided from headers. Raises before any weight is read; writes nothing.

    stats     a folder of `ptqpipe calibrate`; rounding  one of `ptqpipe tune`: its codes are written as they are
    """
    recipe = build_recipe(options or RecipeOptions(), path=recipe_path)
    for rule in recipe.rules:
        get_search(rule.search)
    container_name = recipe.container_name
    container = get_container(container_name)
    check_supported(container, recipe)
    path = resolve_source(str(model))
    source = Source.open(path)
    statistics = learned = None
    try:
        source.check_requantizable()
        plan = make_plan(source.tensors, source.reader.config, recipe=recipe, abilities=abilities_of(container_name))
        plan = with_reasons(plan, corrected_biases(plan, source, recipe))
        outputs = make_outputs(plan, source, container, container_name=container_name, recipe=recipe)
        check_readable(outputs, plan, source, container)
        statistics = open_statistics(stats, source, plan, recipe=recipe)
        kv_cache.check_statistics(dict(job.cache for job in outputs.jobs if job.cache is not None), statistics)
        learned = open_rounding(rounding, source, plan)
        target = out if out is not None else default_out(str(model), path, recipe)
        check_disjoint(path, target)
        parts = {
            "source": source.reader.fingerprint(),
            "recipe": recipe.digest,
            "layout": outputs.layout.digest,
            "version": __version__,
        }
        if statistics is not None:
            parts["statistics"] = statistics.digest
        if learned is not None:
            parts["rounding"] = learned.digest
        scales = InputScales(recipe, statistics)
        return Prepared(path, target, recipe, plan, outputs, source, container, parts, scales, statistics, learned)
    except BaseException:
        for opened in (source, statistics, learned):
            if opened is not None:
                opened.close()
        raise


def open_rounding(path: Path | None, source: Source, plan: Plan) -> Rounding | None:
    """Learned codes, checked against model and plan. UsageError where they are another model's, or lack a weight."""
    if path is None:
        return None
    found = Rounding.open(path)
    if found.model_fingerprint != source.reader.fingerprint():
        found.close()
        raise UsageError(f"{path} was tuned on another model than {source.reader.path}; tune this one")
    for unit in plan.units:
        if unit.scheme.low_rank is not None:
            found.close()
            raise UsageError(f"{path} has codes that were learned without a low-rank part; leave low_rank out")
        keys = [member.key for member in unit.members]
        missing = [key for key in keys if not found.has(key)]
        if missing and len(missing) < len(keys):
            found.close()
            raise UsageError(f"{path} has no codes of '{missing[0]}', but of what shares its scale; tune again")
    if not any(found.has(member.key) for unit in plan.units for member in unit.members):
        found.close()
        raise UsageError(f"{path} has codes of no weight that the recipe quantizes; tune with the same recipe")
    return found


def default_out(model: str, path: Path, recipe: Recipe) -> Path:
    """``<model>-NVFP4A16`` in the working directory; ``-MIXED`` for several schemes."""
    schemes = recipe.schemes()
    name = path.resolve().name if Path(model).exists() else model.rsplit("/", 1)[-1]
    return Path(f"{name}-{schemes[0].suffix if len(schemes) == 1 else 'MIXED'}")


def convert(
    prepared: Prepared, *, mode: Mode = "new", machine: Machine | None = None, ranks: Ranks | None = None
) -> Converted | None:
    """Runs a prepared conversion. The result on rank 0, None on the others.

    Raises NumericsError for damaged weights, OutputError where the target refuses; what is done stays resumable.
    """
    machine, ranks = machine or Machine(), ranks or Ranks()
    check_memory(prepared, machine)
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
        run_parts=prepared.run_parts,
        mode=mode,
        machine=machine,
        ranks=ranks,
        work=work,
        unit_bytes=_largest_unit(prepared),
        extra_bytes=lambda job: 0 if job.unit is None else extra_bytes(job.unit, prepared),
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


def extra_bytes(unit: Unit, prepared: Prepared) -> int:
    """About what a unit takes beside its weights and what every worker has."""
    codes = 0 if prepared.rounding is not None else unit_extra_bytes(unit, prepared.statistics)
    if prepared.rounding is None and unit.scheme.fmt.block == (WHOLE, WHOLE):
        size = max(_element_bytes(prepared.source, member) for member in unit.members)
        codes += rtn.gathered_bytes([m.shape for m in unit.members], unit.scheme.fmt, element_bytes=size)
    return max(codes, low_rank.extra_bytes(unit, prepared.statistics))


def least_memory(prepared: Prepared) -> tuple[int, str]:
    """(bytes that a conversion needs with one unit at a time, the unit that needs the most, "" for none)."""
    extra, largest = most_extra(prepared)
    return BASE_BYTES + WORKER_BYTES + extra, "" if largest is None else largest.id


def _element_bytes(source: Source, member: Member) -> int:
    """Of a weight in memory: as it is stored, float32 where it is decoded."""
    name = member.source.tensor
    return 4 if name in source.stored else DTYPES[source.tensors[name][0]][1]


def share_of(prepared: Prepared, machine: Machine) -> Share:
    """What the workers of a conversion get, where one process does all of it."""
    jobs = prepared.outputs.jobs
    return machine.divide_memory(_largest_unit(prepared), len(jobs), reserved_bytes=most_extra(prepared)[0])


def units_at_once(unit: Unit, prepared: Prepared, share: Share) -> int:
    """How many units like this one are quantized at the same time."""
    extra = extra_bytes(unit, prepared)
    return share.workers if not extra else max(1, min(share.workers, share.pool_bytes // extra))


def _largest_unit(prepared: Prepared) -> int:
    return max((job.source_bytes for job in prepared.outputs.jobs if job.unit is not None), default=0)


def most_extra(prepared: Prepared) -> tuple[int, Unit | None]:
    """(what the unit that needs the most takes beside its weights, that unit; 0 and None where none takes any)."""
    needs = [(extra_bytes(unit, prepared), unit) for unit in prepared.plan.units]
    extra, largest = max(needs, key=lambda need: need[0], default=(0, None))
    return extra, largest if extra else None


def check_memory(prepared: Prepared, machine: Machine) -> None:
    """UsageError where one unit alone would go beyond ``--max-memory``."""
    least, unit = least_memory(prepared)
    if unit and least > machine.memory_bytes:
        rule = next(other for other in prepared.plan.units if other.id == unit)
        if rule.rule.calibrated or rule.scheme.low_rank is not None:
            why = "whose second moment is factored in memory"
            remedy = "--algorithm rtn --weighting diagonal without low_rank"
        else:
            why, remedy = (
                f"whose weights share one scale in {rule.scheme.fmt.name}",
                "a format with a scale for each row",
            )
        raise UsageError(
            f"--max-memory {machine.memory_bytes >> 20}MiB is too small for {unit}, {why}; "
            f"give --max-memory {mebibytes(least)}, or {remedy}"
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
    done = quantize_unit(unit, weights, statistics=prepared.statistics, learned=codes, sink=sink, device=machine.device)
    result = done.result
    _check_kept_alive(unit, result.errors)
    hashes = written.finish()
    members = {}
    told = zip(unit.members, result.errors, hashes, done.told, scales, strict=True)
    for member, error, sha256, outcome, scale in told:
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


def _check_kept_alive(unit: Unit, errors: Sequence[rtn.WeightError]) -> None:
    """NumericsError for a weight of which mostly zeros are left: its scale, often a shared one, cannot hold it."""
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
        "source": {"name": prepared.source_path.name, "fingerprint": prepared.run_parts["source"]},
        "recipe": prepared.recipe.to_json(),
        **({} if prepared.statistics is None else {"statistics": describe_statistics(prepared.statistics)}),
        **({} if prepared.rounding is None else {"rounding": prepared.rounding.describe()}),
        "weights": weights,
        "kept": kept,
        "consumed": sorted(prepared.source.consumed),
        "carried_files": carried_names(prepared.source.reader),
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
