"""Codes and scales that were chosen elsewhere (learned rounding), sent out as they are and measured.

Knows tensors and formats; must not know where the codes came from.
"""

from collections.abc import Sequence

from ptqpipe.algorithms.rows import checked_amax, chunks, measure, total_error
from ptqpipe.algorithms.rtn import Promise, Sink, UnitResult, Weight, WeightError
from ptqpipe.errors import FormatError
from ptqpipe.formats import Format
from ptqpipe.global_scale import absmax_global
from ptqpipe.qtensor import QTensor


def quantize(
    weights: Sequence[Weight], stored: Sequence[QTensor], fmt: Format, *, names: Sequence[str], sink: Sink
) -> UnitResult:
    """Sends the rows of ``stored``, one QTensor a weight, to ``sink``; errors are those of the decode.

    FormatError where the QTensors of a unit do not share one global scale; NumericsError for unusable weights.
    """
    g = stored[0].global_scale
    if any((q.global_scale is None) != (g is None) or (g is not None and q.global_scale != g) for q in stored):
        raise FormatError(f"the stored codes of {' and '.join(names)} have different global scales; tune again")
    amax = max(
        checked_amax(weight.rows(*run), name)
        for weight, name in zip(weights, names, strict=True)
        for run in chunks(weight.shape, fmt)
    )
    plain = absmax_global(amax, fmt) if fmt.has_global else None
    errors = []
    for index, (weight, q) in enumerate(zip(weights, stored, strict=True)):
        squared = energy = absmax = 0.0
        for start, stop in chunks(weight.shape, fmt):
            w = weight.rows(start, stop)
            rows = q.narrow(0, start, stop - start)
            sink(index, start, rows)
            error, power = measure(rows, w)
            squared, energy = squared + error, energy + power
            absmax += total_error(w, fmt, search="absmax", global_scale=plain)
        errors.append(WeightError(squared, energy, squared / absmax if absmax else 1.0))
    promises = (Promise(scales=False, codes=False),) * len(weights)
    return UnitResult(None if g is None else float(g), 1.0, tuple(errors), proven=False, promises=promises)
