"""Rotations of columns by block Hadamard matrices: of a layer's inputs while the model runs, and of its weights.

    y = W x = (W R) (R x),    R block diagonal with Sylvester's matrix H / sqrt(block), symmetric and its own inverse

Rotating spreads a large channel over its block, which matters where inputs are quantized with one scale for a block.
The arithmetic of inputs is compressed-tensors' (``transform/factory/hadamard.py`` of 0.20): float32 products with
the signs of H, then one division, rounded once to the dtype of the input. Knows tensors; must not know layers or files.
"""

from functools import cache

import torch


@cache
def signs(block: int) -> torch.Tensor:
    """float64 [block, block]: Sylvester's matrix of ones and minus ones; ``block`` is a power of two."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def rotated(x: torch.Tensor, block: int) -> torch.Tensor:
    """``x [..., K]`` rotated along its last axis: same shape and dtype, float32 inside (float64 for float64).

    block  columns that are rotated together, which divide K; 0: none, ``x`` itself
    """
    if not block or not x.numel():
        return x
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    h = signs(block).to(device=x.device, dtype=wide)
    blocks = x.to(wide).reshape(*x.shape[:-1], -1, block)
    product: torch.Tensor = (blocks @ h) / block**0.5
    return product.reshape(x.shape).to(x.dtype)


def rotated_weight(w: torch.Tensor, block: int) -> torch.Tensor:
    """``w [N, K]`` as it is multiplied with rotated inputs: float32, computed in float64. 0: ``w`` itself."""
    return rotated(w.double(), block).float() if block else w
