"""The baselines of the literature and of other tools, none of them proven: abs-max, the OCP rules, windows, refits.

Each has a row of ``SEARCHES`` and that table's signature; where ``importance`` plays no part, its docstring says so.
"""

import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.kernels.cpu_tensors import column_weights
from ptqpipe.numerics.qtensor import check_finite, magnitude_codes, round_to, scale_values, to_blocks
from ptqpipe.numerics.search._grid import element_grid
from ptqpipe.numerics.search.objective import flush, importance_blocks, magnitude_blocks, scores


def absmax(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Abs-max: maps the largest magnitude of the block to the largest element, and rounds the scale.

    A block whose scale rounds to zero is lost, as in the plain rule of the literature; zero is no scale
    to write, so such a block gets a scale so large that all its elements round to zero (0.125 for E2M1 with E4M3
    scales, which is also what compressed-tensors writes). ``absmax_pz`` keeps those blocks. Minifloat scales are
    rounded to nearest; powers of two, bfloat16 and float16 up; float32 not at all.

    Scales ``[N/bn, K/bk]`` of the rule; ``importance`` plays no part. NumericsError for NaN and inf.
    """
    scales = rounded_scale(fitted_scale(block_amax(w, fmt), fmt, global_scale=global_scale), fmt)
    if fmt.scale.enumerable and fmt.scale.first_scale_code > 0:
        scales = torch.where(scales == 0, flush_code(fmt), scales)
    return as_grid(scales, w, fmt)


def flush_code(fmt: Format) -> int:
    """The code at which a block whose scale rounds to zero has no element above half the smallest magnitude.

    64 times the smallest scale, or more for elements of a wider range than that; the smallest scale itself if the codec
    ends before.
    """
    wide = fmt.element.max / fmt.element.min_positive
    wanted = fmt.scale.min_positive * max(64.0, wide)
    large = (code for code, value in enumerate(fmt.scale.magnitudes) if value >= wanted)
    return next(large, fmt.scale.first_scale_code)


def absmax_pz(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Abs-max with underflow protection ("prevent zero"): as ``absmax``, but never below the smallest scale.

    What ModelOpt does, and the PZ rows of Schaefer and Tabak (arXiv 2605.08565).

    Scales ``[N/bn, K/bk]`` of the rule; ``importance`` plays no part. NumericsError for NaN and inf.
    """
    fitted = fitted_scale(block_amax(w, fmt), fmt, global_scale=global_scale)
    return as_grid(at_least_smallest(rounded_scale(fitted, fmt), fmt), w, fmt)


def four_over_six(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Four over six: per block, maps the largest magnitude to 6 or to 4, whichever has the smaller squared error.

    arXiv 2512.02010: two abs-max scales, amax/6 and 1.5 times that, both rounded to nearest and kept from
    underflow; 4 wins only where it is strictly better.

    Scales ``[N/bn, K/bk]`` of the rule, errors weighted by ``importance`` if given.

    Raises FormatError unless the elements are E2M1 (whose gap between 4 and 6 the rule is about) and the scales finer
    than powers of two; NumericsError for NaN and inf.
    """
    if fmt.element.name != "e2m1" or fmt.scale.power_of_two:
        raise FormatError(
            f"four_over_six is for e2m1 elements with scales between powers of two, not {fmt.name}; use exact"
        )
    x = magnitude_blocks(w, fmt)
    h = importance_blocks(importance, w, fmt)
    fitted = fitted_scale(x.amax(dim=1), fmt, global_scale=global_scale)
    six, four = (at_least_smallest(rounded_scale(fitted * k, fmt), fmt) for k in (1.0, 1.5))
    error_six, error_four = (scores(x, code, fmt=fmt, global_scale=global_scale, h=h) for code in (six, four))
    return as_grid(torch.where(error_four < error_six, four, six), w, fmt)


BELOW, ABOVE = 3, 7  # codes of the window


def window(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """A fixed window of scale codes around abs-max: the best of [-3, +7] from the code at or below amax / max.

    ScaleSweep, arXiv 2606.07618. Its proof needs half of the scale to be legal, so without a global scale it
    misses optima among the lowest codes: the block {30, 22.5, 14 x 7.5} * 2^-9 starts at code 5 and is exact at code
    15.

    uint8 codes ``[N/bn, K/bk]`` of the least score in the window, ties to the smaller code.

    Raises FormatError unless the scales have codes and are finer than powers of two; NumericsError for NaN and inf.
    """
    if not fmt.scale.enumerable or fmt.scale.power_of_two:
        raise FormatError(
            f"the window of codes is for minifloat scales, {fmt.name} has {fmt.scale.name} scales; use exact"
        )
    x = magnitude_blocks(w, fmt)
    h = importance_blocks(importance, w, fmt)
    first, last = fmt.scale.first_scale_code, len(fmt.scale.magnitudes) - 1
    values = scale_values(torch.arange(last + 1, device=w.device).to(torch.uint8), fmt.scale)
    fitted = fitted_scale(x.abs().amax(dim=1), fmt, global_scale=global_scale)
    base = (torch.bucketize(fitted, values, right=True) - 1).clamp(first, last)
    best = torch.full_like(fitted, float("inf"), dtype=torch.float64)
    chosen = torch.full_like(base, first)
    for offset in range(-BELOW, ABOVE + 1):
        code = (base + offset).clamp(first, last)
        score = scores(x, code.to(torch.uint8), fmt=fmt, global_scale=global_scale, h=h)
        better = score < best
        best, chosen = torch.where(better, score, best), torch.where(better, code, chosen)
    return as_grid(chosen.to(torch.uint8), w, fmt)


def ocp_floor(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """The OCP rule: scale exponent floor(log2 amax) - emax, emax being the exponent of the largest element.

    OCP MX v1.0, section 6.3. The largest magnitude lands in [2^emax, 2^(emax+1)), and is clipped where the
    element codec ends before that: 6 of [4, 8) for E2M1.

    E8M0 codes ``[N/bn, K/bk]``; ``importance`` plays no part. FormatError for other scales.
    """
    exponent = exponent_below(block_amax(w, fmt)) - top_exponent(fmt)
    return as_grid(power_of_two_codes(exponent, fmt), w, fmt)


def ocp_even(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """The OCP rule with round-half-up exponents: as ``ocp_floor``, but a significand of 1.75 or more counts as 2.

    What compressed-tensors and Quark ("even") write for MXFP4 and MXFP8.

    E8M0 codes ``[N/bn, K/bk]``; ``importance`` plays no part. FormatError for other scales.
    """
    amax = block_amax(w, fmt)
    bumped = torch.frexp(amax).mantissa >= 0.875  # frexp's mantissa lies in [1/2, 1)
    exponent = exponent_below(amax) + bumped - top_exponent(fmt)
    return as_grid(power_of_two_codes(exponent, fmt), w, fmt)


def ocp_ceil(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """The smallest power of two that clips nothing: scale exponent ceil(log2(amax / max)).

    What ModelOpt writes for MXFP4. For MXFP8 it is nearly always the optimum.

    E8M0 codes ``[N/bn, K/bk]``; ``importance`` plays no part. FormatError for other scales.
    """
    fitted = fitted_scale(block_amax(w, fmt), fmt, global_scale=None)
    above = torch.frexp(fitted).mantissa > 0.5  # no power of two itself
    return as_grid(power_of_two_codes(exponent_below(fitted) + above, fmt), w, fmt)


REFIT_POINTS = 32  # points per octave: past this the refit finds the same scales
REFIT_ROUNDS = 8  # of refits at most; nearly all blocks are done after three
REFIT_CHUNK = 1 << 18  # elements at a time


def refit(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 scales: the best of a list of candidates, then alternating least squares. Good, not proven.

    float32 scales cannot be enumerated, so this does not claim the minimum: the name says so. For fixed codes q the
    best scale is <x, q> / <q, q>, for a fixed scale the best codes are the nearest ones; alternating the two never
    raises the error and ends in a local minimum, and the ladder decides in which one. Research rows only: formats that
    readers know have bfloat16 or enumerable scales, and ``exact`` is for them.

    float32 scales ``[N/bn, K/bk]``.

    Raises FormatError unless the format has float32 scales and elements with a sign bit; NumericsError for NaN, inf and
    unusable importance.
    """
    if fmt.scale.dtype != torch.float32:
        raise FormatError(f"refit is for float32 scales, {fmt.name} has {fmt.scale.name} scales; use exact")
    if not fmt.element.symmetric:
        raise FormatError(f"refit is for elements with a sign bit, {fmt.name} has {fmt.element.name}; use absmax")
    check_finite(w)
    h = None if importance is None else to_blocks(column_weights(importance, w).expand_as(w), fmt)
    blocks = to_blocks(w, fmt)
    size = max(1, REFIT_CHUNK // blocks.shape[1])
    parts = [
        _refit_blocks(blocks[k : k + size], None if h is None else h[k : k + size], fmt=fmt, global_scale=global_scale)
        for k in range(0, len(blocks), size)
    ]
    return as_grid(torch.cat(parts), w, fmt)


def _refit_blocks(
    blocks: torch.Tensor, h: torch.Tensor | None, *, fmt: Format, global_scale: torch.Tensor | None
) -> torch.Tensor:
    """float32 ``[blocks]``."""
    x = blocks.float().abs()
    amax = x.amax(dim=1)
    x = flush(x, amax.unsqueeze(1))
    g = torch.ones_like(amax) if global_scale is None else global_scale.expand_as(amax)
    smallest = torch.finfo(torch.float32).smallest_normal
    best = torch.full_like(amax, float("inf"), dtype=torch.float64)
    chosen = torch.full_like(amax, smallest)

    def offer(scale: torch.Tensor) -> bool:
        nonlocal best, chosen
        scale = scale.clamp(min=smallest)
        score = scores(x, scale, fmt=fmt, global_scale=global_scale, h=h)
        better = score < best
        best, chosen = torch.where(better, score, best), torch.where(better, scale, chosen)
        return bool(better.any())

    # From where nothing is clipped up to where half of the scale is as good (the halving proof of objective.py), and
    # as far down as clipping pays for blocks of up to 256.
    grid = element_grid(fmt.element)
    octaves = torch.log2(torch.tensor(1.5 * grid.wrap / grid.half)).item()
    for k in range(int(REFIT_POINTS * octaves) + 1):
        offer(amax / (1.5 * grid.wrap * 2.0 ** (-k / REFIT_POINTS)) / g)
    for _ in range(REFIT_ROUNDS):
        q = round_to(x * (1.0 / (chosen * g)).unsqueeze(1), fmt.element).double()
        weighted = q if h is None else q * h
        refitted = ((x * weighted).sum(dim=1) / (q * weighted).sum(dim=1).clamp(min=1e-300)).float() / g
        if not offer(refitted):
            break
    return chosen


# What the rules share


def block_amax(w: torch.Tensor, fmt: Format) -> torch.Tensor:
    """float32 ``[blocks]``: the largest magnitude of each block of ``w`` ``[N, K]``; NumericsError for NaN and inf."""
    amax = to_blocks(w, fmt).abs().amax(dim=1).float()
    if not bool(torch.isfinite(amax).all()):
        check_finite(w)
    return amax


def fitted_scale(amax: torch.Tensor, fmt: Format, *, global_scale: torch.Tensor | None) -> torch.Tensor:
    """float32: the scale that puts ``amax`` on the largest element, (amax / max) / global_scale, before rounding."""
    fitted = amax / torch.full_like(amax, fmt.element.max)  # a tensor: dividing by a number may multiply instead
    return fitted if global_scale is None else fitted / global_scale


def rounded_scale(fitted: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Scales as a QTensor stores them: the nearest code, ties to the even one; zero where the codec rounds to zero.

    Powers of two are rounded *up* (to nearest would clip up to a third of the largest weight), and so are bfloat16 and
    float16 scales, whose steps are fine enough to clip nothing; these are normal numbers. float32 is taken as it is.
    """
    if fmt.scale.enumerable:
        codes = magnitude_codes(fitted, fmt.scale)
        if fmt.scale.power_of_two:
            short = scale_values(codes.to(torch.uint8), fmt.scale) < fitted
            codes = (codes + short).clamp(max=len(fmt.scale.magnitudes) - 1)
        return codes.to(torch.uint8)
    dtype = fmt.scale.dtype
    assert dtype is not None
    info = torch.finfo(dtype)
    fitted = fitted.clamp(info.smallest_normal, info.max)
    rounded = fitted.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, float("inf")))
    return torch.where(rounded.float() < fitted, above, rounded).clamp(max=info.max)


def at_least_smallest(scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes below the smallest legal scale replaced by it (underflow protection)."""
    return scales.clamp(min=fmt.scale.first_scale_code) if fmt.scale.enumerable else scales


def as_grid(scales: torch.Tensor, w: torch.Tensor, fmt: Format) -> torch.Tensor:
    """``[blocks]`` -> the scale grid of ``w``."""
    return scales.reshape(fmt.scale_shape((w.shape[0], w.shape[1])))


def power_of_two_codes(exponent: torch.Tensor, fmt: Format) -> torch.Tensor:
    """E8M0 codes of the scales 2^exponent (integers), clamped to the codec.

    Raises FormatError unless the format's scales are E8M0.
    """
    if fmt.scale.name != "e8m0":
        raise FormatError(
            f"the OCP scale rules choose powers of two, {fmt.name} has {fmt.scale.name} scales; use absmax"
        )
    return (exponent + 127).clamp(0, len(fmt.scale.magnitudes) - 1).to(torch.uint8)


def exponent_below(x: torch.Tensor) -> torch.Tensor:
    """int32 floor(log2 x) of float32 ``x``, exactly; -1000 for zero."""
    return torch.where(x > 0, torch.frexp(x).exponent - 1, -1000)


def top_exponent(fmt: Format) -> int:
    """floor(log2) of the element codec's largest magnitude: emax of the OCP text, 2 for E2M1, 8 for E4M3."""
    return int(exponent_below(torch.tensor(fmt.element.max)))
