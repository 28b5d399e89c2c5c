"""Decodes a quantized matrix by the compiled kernel where there is one: the numbers of ``QTensor.dequantize``."""

import torch

from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.qtensor import QTensor


def decoded(q: QTensor, *, memory: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [N, K]: ``q.dequantize()``, bit for bit. ``memory``: float32 of N x K numbers, which it may take."""
    if q.data.device.type != "cpu" or q.low_rank is not None or q.zeros is not None or not cpu.available():
        return q.dequantize()
    numbers = cpu.dequantize(q.data, q.scales, q.fmt, q.global_scale, global_divides=q.global_divides, memory=memory)
    return q.dequantize() if numbers is None else numbers


def same_numbers(q: QTensor, other: QTensor) -> bool:
    """Whether the compiled kernel finds that both decode to the same finite numbers, zero and its negative being one;
    False where it does not compare them: on a GPU, or of formats without a kernel."""
    if not cpu.available() or any(part.data.device.type != "cpu" for part in (q, other)):
        return False
    difference = cpu.code_difference(q, other, only_compare=True)
    return difference is not None and difference[0] == 0
