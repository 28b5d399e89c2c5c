"""Stores learned codes: codes and scales that were chosen earlier (learned rounding), unchanged, and measures them.

Knows tensors and formats; must not know where the codes came from.
"""

from ptqpipe.errors import FormatError
from ptqpipe.numerics.global_scale import absmax_global
from ptqpipe.quantization.unit import Promise, Task, UnitResult, WeightError, chunks, largest, measure, total_error


def quantize(task: Task) -> UnitResult:
    """Sends the rows of ``task.codes`` to the sink; errors are those of the decode. Computes on the CPU.

    FormatError where the QTensors of a unit do not share one global scale; NumericsError for unusable weights.
    """
    fmt, stored = task.fmt, task.codes or ()
    g = stored[0].global_scale
    if any((q.global_scale is None) != (g is None) or (g is not None and q.global_scale != g) for q in stored):
        raise FormatError(f"the stored codes of {' and '.join(task.names)} have different global scales; tune again")
    amax = largest(task)
    plain = absmax_global(amax, fmt) if fmt.has_global else None
    errors = []
    for index, (weight, q) in enumerate(zip(task.weights, stored, strict=True)):
        squared = energy = absmax = 0.0
        for start, stop in chunks(weight.shape, fmt):
            w = weight.rows(start, stop)
            rows = q.narrow(0, start, stop - start)
            task.sink(index, start, rows)
            error, power = measure(rows, w)
            squared, energy = squared + error, energy + power
            absmax += total_error(w, fmt, search="absmax", global_scale=plain)
        errors.append(WeightError(squared, energy, squared / absmax if absmax else 1.0))
    count = len(errors)
    return UnitResult(
        None if g is None else float(g),
        1.0,
        tuple(errors),
        proven=False,
        promises=(Promise(scales=False, codes=False),) * count,
        record_fields=({"algorithm": "learned"},) * count,
    )
