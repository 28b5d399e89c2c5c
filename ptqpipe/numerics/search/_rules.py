"""What the closed-form scale rules (abs-max and the OCP ones) share: the largest magnitude of a block, codes of scales.

Knows formats; scores nothing.
"""

import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import check_finite, magnitude_codes, scale_values, to_blocks


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
