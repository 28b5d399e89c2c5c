"""transform: a float checkpoint in, an equivalent float checkpoint out that loses less when it is quantized."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import ShardLayout, TensorSpec, check_disjoint, resolve_source
from ptqpipe.conversion.job import (
    Run,
    WriteResult,
    write_checkpoint,
)
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.same_model import check_model
from ptqpipe.conversion.transform import plan
from ptqpipe.conversion.transform.learn import LearningUnit, learning_units
from ptqpipe.conversion.transform.transformation import Transformation
from ptqpipe.errors import UsageError, arg, usage
from ptqpipe.models.folding import ROTATIONS, find_structure, get_rotation
from ptqpipe.models.source import Source
from ptqpipe.quantization.transforms import SCALINGS, transform_names
from ptqpipe.run.machine import Machine
from ptqpipe.run.quantities import scientific

FLOAT32_ROUNDING = 1e-12  # relative MSE below which an error is float32's own: not worth a number


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
    layout = ShardLayout.plan(list(groups.values()), shard_bytes=options.shard_size)
    statistics = _open_statistics(stats, source, names, opened, learn=bool(options.learn))
    units: tuple[LearningUnit, ...] = ()
    if options.learn and statistics is not None:
        units = learning_units(names, structure, statistics, options)
    work = (out, source, layout, tuple(jobs), options, names, structure, statistics, exact, dtype, origins)
    return Transformation(*work, tuple(components), units)


def check_memory(work: Transformation, machine: Machine) -> None:
    """UsageError where the pairs that rotations are learned from do not fit."""
    least, _ = work.least_memory()
    if work.units:
        machine.require(least, "the pairs that rotations are learned from", otherwise="calibrate fewer tokens")


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


def render(done: WriteResult) -> str:
    record = done.record
    rounding = "exact: every factor is a power of two" if record["exact"] else f"rounded once to {record['dtype']}"
    if not record["exact"] and record["rounding"] > FLOAT32_ROUNDING:
        rounding += f", a relative MSE of {scientific(record['rounding'], 2)}"
    return (
        f"Done: {done.out}: {' then '.join(record['transforms'])}, {len(record['foldings'])} foldings into "
        f"{len(record['weights'])} tensors, {len(record['kept'])} kept; {rounding}; {done.cost}"
    )


def to_json(done: WriteResult) -> dict[str, Any]:
    record = done.record
    return done.to_json(
        changed=len(record["weights"]),
        kept=len(record["kept"]),
        **{key: record[key] for key in ("transforms", "foldings", "exact", "rounding")},
    )
