"""What a conversion needs of memory, and how many units run at once in what there is.

The numbers are those of the algorithms' own estimates; what every process and worker holds is in ``machine.py``.
"""

from ptqpipe.algorithms import rtn
from ptqpipe.dtypes import DTYPES
from ptqpipe.errors import UsageError
from ptqpipe.formats import WHOLE
from ptqpipe.plan import Member, Unit
from ptqpipe.source import Source
from ptqpipe.stages.common import low_rank
from ptqpipe.stages.common.machine import BASE_BYTES, WORKER_BYTES, Machine, Share
from ptqpipe.stages.common.moments import (
    unit_extra_bytes,
)
from ptqpipe.stages.common.text import mebibytes
from ptqpipe.stages.convert.prepare import Prepared


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
    return machine.divide_memory(largest_unit(prepared), len(jobs), reserved_bytes=most_extra(prepared)[0])


def units_at_once(unit: Unit, prepared: Prepared, share: Share) -> int:
    """How many units like this one are quantized at the same time."""
    extra = extra_bytes(unit, prepared)
    return share.workers if not extra else max(1, min(share.workers, share.pool_bytes // extra))


def largest_unit(prepared: Prepared) -> int:
    """Bytes of the largest unit in the source, which a worker would like to keep."""
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
