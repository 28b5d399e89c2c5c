"""The oracle: scores every scale code of the format for every block and takes the least, ties to the smallest code.

Slow on purpose and free of any bound, so that the fast searches have something to be equal to. For bfloat16 and
float16 scales "every code" is every positive normal number of that type; float32 scales cannot be enumerated.
"""

import torch

from ptqpipe.errors import FormatError
from ptqpipe.formats import Codec, Format
from ptqpipe.search.objective import importance_blocks, magnitude_blocks, scores

PROVEN = True


def search(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales ``[N/bn, K/bk]`` (uint8 codes, or numbers of the scale's dtype) of the least score of each block."""
    x = magnitude_blocks(w, fmt)
    h = importance_blocks(importance, w, fmt)
    candidates = all_scales(fmt.scale).to(w.device)
    best = torch.full((x.shape[0],), float("inf"), dtype=torch.float64, device=w.device)
    chosen = candidates[:1].expand(x.shape[0]).clone()
    for candidate in candidates:
        score = scores(x, candidate.expand(x.shape[0]), fmt=fmt, global_scale=global_scale, h=h)
        better = score < best
        best = torch.where(better, score, best)
        chosen = torch.where(better, candidate, chosen)
    return chosen.reshape(fmt.scale_shape((w.shape[0], w.shape[1])))


def all_scales(codec: Codec) -> torch.Tensor:
    """Every legal (positive, finite) scale of a codec, ascending: uint8 codes, or the numbers themselves."""
    if codec.enumerable:
        return torch.arange(codec.first_scale_code, len(codec.magnitudes)).to(torch.uint8)
    if codec.dtype not in (torch.bfloat16, torch.float16):
        raise FormatError(f"{codec.name} scales cannot be enumerated; use bf16 or fp16 scales, or another search")
    first, end = (0x0400, 0x7C00) if codec.dtype == torch.float16 else (0x0080, 0x7F80)  # bits of normal numbers
    return torch.arange(first, end, dtype=torch.int16).view(codec.dtype)
