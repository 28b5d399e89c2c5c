"""Refuses stored scales that no converter writes: NaN, infinite, negative, zero.

A damaged scale gives numbers, wrong ones, and nothing downstream would notice. What is read is one pass over the scales
alone, a sixteenth of a weight's bytes or less. A block scale of zero is let through where it does no harm: it decodes
its block to zeros, which is what a writer without a smallest scale makes of a block of zeros. Knows no files but the
names of tensors.
"""

from dataclasses import replace

import torch

from ptqpipe.errors import CheckpointError
from ptqpipe.numerics.qtensor import QTensor


def check_scales(q: QTensor, *, scales: str, global_scale: str) -> QTensor:
    """``q`` itself. CheckpointError for a scale that is not finite or negative, and for a global one that is zero.

    A scale that is stored as a float may be zero where all codes of its block are; as a code, it may be zero.

    scales, global_scale  the names of the tensors they were read from
    """
    if q.global_scale is not None:
        check_positive(q.global_scale, global_scale)
    if q.fmt.scale.enumerable:
        # Codes of a sign, of NaN and of nothing come after those of the magnitudes.
        if q.scales.numel() and int(q.scales.max()) >= len(q.fmt.scale.magnitudes):
            bad = int((q.scales >= len(q.fmt.scale.magnitudes)).sum())
            raise _damaged(scales, f"{bad} of {q.scales.numel()} codes of {q.fmt.scale.name} that are negative or NaN")
        return q
    if bool((q.scales > 0).all()) and bool(q.scales.isfinite().all()):
        return q
    empty = replace(q, scales=(q.scales == 0).to(q.scales.dtype), global_scale=None, low_rank=None)
    if bool((q.scales == 0).any()) and not bool(empty.dequantize().any()):
        check_positive(q.scales[q.scales != 0], scales)
        return q
    check_positive(q.scales, scales)
    return q


def check_positive(values: torch.Tensor, name: str) -> None:
    """CheckpointError that names the tensor where one of its values is not finite and above zero."""
    good = (values > 0) & values.isfinite()
    if not bool(good.all()):
        raise _damaged(name, f"{float(values[~good].flatten()[0]):g}")


def _damaged(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{name!r} has {what}, expected scales that are finite and above zero; the file is damaged")
