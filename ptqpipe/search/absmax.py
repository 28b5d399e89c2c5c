"""Abs-max: the largest element of a block lands on the largest magnitude. The baseline of every comparison."""

import torch

from ptqpipe.formats import Format
from ptqpipe.qtensor import magnitude_codes, to_blocks

PROVEN = False


def search(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales ``[N/bn, K/bk]``: amax / element max / global_scale, rounded to nearest, at least the smallest scale.

    Scales that are numbers (FP8's bfloat16) are rounded up, so that nothing clips. ``importance`` does not matter.
    """
    amax = to_blocks(w.float(), fmt).abs().amax(dim=1)
    wanted = amax / fmt.element.max
    if global_scale is not None:
        wanted = wanted / global_scale
    grid = fmt.scale_shape((w.shape[0], w.shape[1]))
    if fmt.scale.enumerable:
        codes = magnitude_codes(wanted, fmt.scale).clamp(min=fmt.scale.first_scale_code)
        return codes.to(torch.uint8).reshape(grid)
    dtype = fmt.scale.dtype or torch.float32
    rounded = wanted.to(dtype)
    up = torch.where(rounded.float() < wanted, torch.nextafter(rounded, torch.full_like(rounded, torch.inf)), rounded)
    return up.clamp(min=torch.finfo(dtype).smallest_normal).reshape(grid)
