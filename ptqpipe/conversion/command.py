"""convert: a published checkpoint in, a packed low-precision checkpoint out.

What ``prepare.py`` has decided from headers runs here; the jobs are those of ``conversion/conversion.py``.
"""

from typing import Unpack

from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.job import Run, WriteResult, write_checkpoint
from ptqpipe.conversion.unit_job import QuantizeUnit
from ptqpipe.errors import arg
from ptqpipe.run.machine import Machine


def convert(conversion: Conversion, **run: Unpack[Run]) -> WriteResult | None:
    """Runs a conversion that is prepared. The result on rank 0, None on the others.

    Raises UsageError where one unit alone needs more than ``max_memory``, NumericsError for damaged weights,
    OutputError where the target refuses; what is done stays resumable.
    """
    _check_memory(conversion, run.get("machine") or Machine())
    return write_checkpoint(conversion, **run)


def _check_memory(conversion: Conversion, machine: Machine) -> None:
    least, job = conversion.least_memory()
    if not isinstance(job, QuantizeUnit):
        return
    why = f"whose weights share one scale in {job.unit.scheme.fmt.name}"
    remedy = "a format with a scale for each row"
    if job.unit.rule.calibrated:
        why = "whose second moment is factored in memory"
        remedy = f"{arg('algorithm', 'rtn')}, {arg('objective', 'diagonal')}"
    machine.require(least, f"{job.id}, {why}", otherwise=remedy)
