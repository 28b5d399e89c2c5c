"""Block formats in Triton: scale codes and packed codes of a weight in one pass over it.

The scales are those of ``search/brute_force.py`` or ``baselines.absmax``, the codes those of
``qtensor.encode``, the bytes those of ``formats.pack``. Knows formats; must not know searches, files or containers.
Imports Triton: import it from inside functions.
"""

import math

import torch
import triton
import triton.language as tl

from ptqpipe.numerics.formats import Codec, Format
from ptqpipe.numerics.kernels.triton_codecs import Minifloat, encode_signed, minifloat_of
from ptqpipe.numerics.kernels.triton_search import BlockPlan, absmax_code, candidate, deviation, magnitudes, search

BLOCKS = (8, 16, 32)
ELEMENTS = ("e2m1", "e2m3", "e3m2", "e4m3")
_SCALES = {"e4m3": (Minifloat(9, -6, 3, 448.0), 126), "ue5m3": (Minifloat(9, -14, 3, 122880.0), 255)}  # codec, last


def plan_of(fmt: Format) -> BlockPlan | None:
    """The constants of a format that the kernel covers, or None."""
    element, (rows, block) = minifloat_of(fmt.element), fmt.block
    if element is None or rows != 1 or block not in BLOCKS or fmt.element.name not in ELEMENTS:
        return None
    if block * element.bits % 32:
        return None
    e8m0 = fmt.scale.name == "e8m0" and not fmt.has_global
    if not e8m0 and (fmt.scale.name not in _SCALES or fmt.element.name != "e2m1"):
        return None
    scale, stop = _SCALES.get(fmt.scale.name, (Minifloat(0, 0, 0, 0.0), 254))
    octave = math.frexp(element.max)[1] - 1
    return BlockPlan(element, block, e8m0, scale, stop, octave, *_limits(fmt.element, block))


def _limits(codec: Codec, block: int) -> tuple[float, float]:
    """(above, below): a scale with amax/s at most ``above`` loses to s/2, one with more than ``below`` to 2s.

    ``above`` is the midpoint of max/2 and the next magnitude. ``below``: where doubling the scale doubles the step,
    the elements other than amax lose at most (step/2)^2 each; amax gains (y - max)^2 less its new squared error. For
    E2M1 that is (block-1)/4 against 4y - 28, for E2M3 (block-1)/64 against y - 7.75; both limits are rounded up by
    one block-th part. For E3M2 and E4M3 the whole octave below amax's own loses: a gain of 16 and 3072 against
    (block-1)/2^8 and (block-1)/2^20, so the limit is 0.
    """
    half = codec.magnitudes.index(codec.max / 2)
    above = (codec.magnitudes[half] + codec.magnitudes[half + 1]) / 2
    below = {"e2m1": 7 + block / 16, "e2m3": 7.75 + block / 64}
    return above, below.get(codec.name, 0.0)


@triton.jit
def load_columns(start: tl.tensor, live: tl.tensor, B: tl.constexpr) -> tl.tuple:
    """B float32 tensors: element k of every lane's block. After the first one they come from the cache."""
    columns: tl.tuple = ()
    for k in tl.static_range(B):
        columns = columns + (tl.load(start + k, mask=live, other=0.0).to(tl.float32),)  # noqa: RUF005 - see magnitudes
    return columns


@triton.jit
def store_packed(
    words: tl.tensor,
    w: tl.tuple,
    r: tl.tensor,
    live: tl.tensor,
    PLAN: tl.constexpr,
) -> None:
    """Packs a lane's block of codes into little-endian words of 32 bits at ``words``."""
    ELEMENT: tl.constexpr = PLAN.element
    BITS: tl.constexpr = ELEMENT.bits
    B: tl.constexpr = PLAN.block
    for i in tl.static_range(B * BITS // 32):
        word = tl.zeros(r.shape, tl.int32)
        for k in tl.static_range(B):
            if k * BITS < i * 32 + 32 and k * BITS + BITS > i * 32:
                code = encode_signed(w[k], r, ELEMENT)
                if k * BITS >= i * 32:
                    word |= code << (k * BITS - i * 32)
                else:
                    word |= code >> (i * 32 - k * BITS)
        tl.store(words + i, word, mask=live)


@triton.jit
def block_quantize_kernel(
    w: tl.tensor,
    h: tl.tensor,
    g: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    totals: tl.tensor,
    damaged: tl.tensor,
    blocks: tl.tensor,
    blocks_per_row: tl.tensor,
    PLAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ABSMAX: tl.constexpr,
    TOTALS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """LANES blocks of B numbers of ``w`` ``[blocks * B]``: scales and words, or with TOTALS the least scores alone.

    h ``[blocks_per_row * B]`` float32 weights (WEIGHTED), g float32 ``[1]``, words int32 ``[blocks * B*bits/32]``,
    scales uint8 ``[blocks]``, totals float64 ``[blocks]``, damaged int32 ``[1]``: set to 1 where ``w`` has NaN or inf.
    """
    ELEMENT: tl.constexpr = PLAN.element
    B: tl.constexpr = PLAN.block
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    live = block < blocks
    columns = load_columns(w + block * B, live, B)
    weights = columns
    if WEIGHTED:
        weights = load_columns(h + block % blocks_per_row * B, live, B)
    global_scale = tl.load(g + tl.zeros([LANES], tl.int32))
    amax, x = magnitudes(columns, B)
    if ABSMAX:
        code = absmax_code(amax, global_scale, PLAN)
    else:
        code = search(x, weights, amax, global_scale, PLAN, WEIGHTED)
    r, square = candidate(code, global_scale, PLAN)
    if TOTALS:
        acc, _ = deviation(x, weights, r, PLAN, WEIGHTED)
        tl.store(totals + block, (acc.to(square.dtype) * square).to(tl.float64), mask=live)
    else:
        tl.store(scales + block, code.to(tl.uint8), mask=live)
        store_packed(words + block * (B * ELEMENT.bits // 32), columns, r, live, PLAN)
    highest = tl.zeros([LANES], tl.int32)
    for k in tl.static_range(B):
        highest = tl.maximum(highest, columns[k].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(damaged + tl.zeros([LANES], tl.int32), tl.full([LANES], 1, tl.int32), mask=highest >= 0x7F800000)


def quantize(
    w: torch.Tensor,
    plan: BlockPlan,
    *,
    absmax: bool,
    lanes: int,
    global_scale: torch.Tensor | None,
    importance: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data uint8 ``[N, K*bits/8]``, scales uint8 ``[N, K/block]``, damaged int32 ``[1]``) of contiguous ``w``.

    ``importance`` is normalized as ``normalize_importance`` does. ``damaged`` is 1 where ``w`` is not finite.
    """
    data = torch.empty(w.shape[0], w.shape[1] * plan.element.bits // 8, dtype=torch.uint8, device=w.device)
    scales = torch.empty(w.shape[0], w.shape[1] // plan.block, dtype=torch.uint8, device=w.device)
    nothing = torch.empty(0, dtype=torch.float64, device=w.device)
    damaged = _launch(w, data.view(torch.int32), scales, nothing, plan, lanes, global_scale, importance, absmax=absmax)
    return data, scales, damaged


def scores(
    w: torch.Tensor,
    plan: BlockPlan,
    *,
    absmax: bool,
    lanes: int,
    global_scale: torch.Tensor | None,
    importance: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the score of every block's scale, float64 ``[blocks]``, damaged int32 ``[1]``) of contiguous ``w``."""
    totals = torch.empty(w.numel() // plan.block, dtype=torch.float64, device=w.device)
    nothing = torch.empty(0, dtype=torch.int32, device=w.device)
    none = nothing.view(torch.uint8)
    damaged = _launch(w, nothing, none, totals, plan, lanes, global_scale, importance, absmax=absmax)
    return totals, damaged


def _launch(
    w: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    totals: torch.Tensor,
    plan: BlockPlan,
    lanes: int,
    global_scale: torch.Tensor | None,
    importance: torch.Tensor | None,
    *,
    absmax: bool = False,
) -> torch.Tensor:
    """Runs the kernel over all blocks; totals instead of words and scales where ``totals`` is not empty."""
    blocks = w.numel() // plan.block
    damaged = torch.zeros(1, dtype=torch.int32, device=w.device)
    one = torch.ones(1, dtype=torch.float32, device=w.device)
    block_quantize_kernel[(triton.cdiv(blocks, lanes),)](
        w,
        one if importance is None else importance,
        one if global_scale is None else global_scale.to(w.device, torch.float32).reshape(1),
        words,
        scales,
        totals,
        damaged,
        blocks,
        w.shape[1] // plan.block,
        PLAN=plan,
        WEIGHTED=importance is not None,
        ABSMAX=absmax,
        TOTALS=totals.numel() > 0,
        LANES=lanes,
        num_warps=4,
        enable_fp_fusion=False,
    )

    return damaged
