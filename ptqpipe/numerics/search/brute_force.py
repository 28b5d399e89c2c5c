"""The oracle: scores every scale code of the format for every block and takes the best one, ties to the smallest code.

Slow on purpose and free of any bound, so that the fast searches have something to be equal to. For bfloat16 and
float16 scales "every code" is every positive normal number of that type; float32 scales cannot be enumerated.
"""

import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import Codec, Format
from ptqpipe.numerics.search.objective import importance_blocks, magnitude_blocks, scores

_AT_ONCE = 1 << 17  # elements that are scored side by side, where a block has fewer: each with several scales


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
    best = torch.full((len(x),), float("inf"), dtype=torch.float64, device=w.device)
    chosen = candidates[:1].expand(len(x))
    for some in torch.split(candidates, max(1, _AT_ONCE // max(1, x.numel()))):
        many = len(some)
        blocks = x.expand(many, *x.shape).flatten(0, 1)
        weights = None if h is None else h.expand(many, *x.shape).flatten(0, 1)
        codes = some.repeat_interleave(len(x))
        tile_scores = scores(blocks, codes, fmt=fmt, global_scale=global_scale, h=weights).reshape(many, len(x))
        smallest = tile_scores.nan_to_num(nan=float("inf"), posinf=float("inf")).argmin(
            dim=0
        )  # of candidates of one score
        score = tile_scores.gather(0, smallest.unsqueeze(0))[0]
        better = score < best
        best = torch.where(better, score, best)
        chosen = torch.where(better, some[smallest], chosen)
    return chosen.reshape(fmt.scale_shape((w.shape[0], w.shape[1])))


def all_scales(codec: Codec) -> torch.Tensor:
    """Every legal (positive, finite) scale of a codec, ascending: uint8 codes, or the numbers themselves."""
    if codec.enumerable:
        return torch.arange(codec.first_scale_code, len(codec.magnitudes)).to(torch.uint8)
    if codec.dtype not in (torch.bfloat16, torch.float16):
        raise FormatError(f"{codec.name} scales cannot be enumerated; use bf16 or fp16 scales, or another search")
    first, end = (0x0400, 0x7C00) if codec.dtype == torch.float16 else (0x0080, 0x7F80)  # bits of normal numbers
    return torch.arange(first, end, dtype=torch.int16).view(codec.dtype)
