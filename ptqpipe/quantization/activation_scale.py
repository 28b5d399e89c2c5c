"""Static activation scales: one float32 number per layer, by which its input is divided at run time.

The scale is amax / largest, where ``largest`` is what the format reaches at a scale of one: 6 x 448 for NVFP4 (its
block scales are chosen at run time below it), 448 for FP8. What amax is, is the policy:

    absmax      the largest activation that calibration saw
    percentile  the 99.99 % quantile of |x|: rarer activations clip
    mse         of amax times 2^(-k/2), the one with the least squared error on columns that are normal, with the
                moments that calibration saw, cut at the largest activation: a model of the input, not the input

times ``headroom``, for activations that calibration did not see.
"""

from collections.abc import Mapping

import torch

from ptqpipe.errors import NumericsError, UsageError, arg
from ptqpipe.numerics.formats import FORMATS, Format
from ptqpipe.numerics.global_scale import RANGE, canonical

POLICIES = ("absmax", "percentile", "mse")
QUANTILE = 0.9999
HALF_OCTAVES = 12  # candidates of mse below amax
_ROWS = 64  # of the model of the input
_COLUMNS = 4096  # at most, evenly taken


def static_amax(
    amax: torch.Tensor,
    second_moment: torch.Tensor,
    quantiles: Mapping[float, float],
    *,
    policy: str,
    largest: float,
    name: str,
) -> float:
    """The activation that must not clip, by the policy. 0 for an input that is always zero.

    amax, second_moment  float32 [K] of the input's columns

    Raises UsageError for an unknown policy or a quantile that the statistics lack, NumericsError for NaN and inf.
    """
    top = float(amax.max()) if amax.numel() else 0.0
    if not top < float("inf"):
        raise NumericsError(
            f"the largest activation of {name} is {top}; calibrate again with {arg('dtype', 'fp32')}, or check "
            "the model's weights"
        )
    if policy == "absmax" or top == 0.0:
        return top
    if policy == "percentile":
        if QUANTILE not in quantiles:
            raise UsageError(f"the statistics of {name} have no {QUANTILE} quantile; use input_scale absmax")
        return min(top, quantiles[QUANTILE]) or top
    if policy == "mse":
        return _least_error(amax, second_moment, top, largest)
    raise UsageError(f"input_scale {policy!r} is unknown; use {', '.join(POLICIES)}")


def nvfp4_scale(amax: float, *, headroom: float) -> torch.Tensor:
    """float32 0-d: the global scale of an NVFP4 input, the same as a multiplier and as a divisor; 1 for amax 0."""
    fmt = FORMATS["nvfp4"]
    wanted = amax * headroom / fmt.max_product
    return canonical(torch.tensor(min(max(wanted, RANGE[0]), RANGE[1])), fmt) if amax > 0 else torch.tensor(1.0)


def fp8_scale(amax: float, *, headroom: float = 1.0) -> torch.Tensor:
    """float32 0-d: amax * headroom / 448 rounded up to a bfloat16 number, since some readers round it to one."""
    wanted = torch.tensor(amax * headroom / FORMATS["fp8_tensor"].element.max, dtype=torch.float32)
    if not wanted > 0:
        return torch.tensor(1.0)
    scale = wanted.clamp(min=2.0**-100).bfloat16()
    bits = scale.view(torch.int16) + int(scale.float() < wanted)
    return bits.view(torch.bfloat16).float()


def _least_error(amax: torch.Tensor, second_moment: torch.Tensor, top: float, largest: float) -> float:
    step = max(1, len(amax) // _COLUMNS)
    size = len(amax) // step // 16 * 16
    chosen = torch.arange(size) * step
    normal = torch.randn(_ROWS, size, generator=torch.Generator().manual_seed(0))
    x = normal * second_moment[chosen].sqrt()
    x = torch.minimum(torch.maximum(x, -amax[chosen]), amax[chosen])
    x[0] = amax[chosen]  # each column's largest activation occurs
    if not size:
        return top
    error = _nvfp4_error if largest > FORMATS["fp8_tensor"].element.max else _fp8_error
    errors: list[tuple[float, float]] = []
    for k in range(HALF_OCTAVES):
        candidate = float(top * 2.0 ** (-k / 2))
        errors.append((error(x, torch.tensor(candidate / largest, dtype=torch.float32)), candidate))
    return min(errors, key=lambda error_and_scale: error_and_scale[0])[1]


def _nvfp4_error(x: torch.Tensor, g: torch.Tensor) -> float:
    """Squared error of x at global scale g with the block scales that readers choose: amax / 6, rounded to E4M3."""
    fmt: Format = FORMATS["nvfp4"]
    blocks = x.reshape(-1, 16)
    wanted = (blocks.abs().amax(dim=1) / (fmt.element.max * g)).clamp(max=fmt.scale.max)
    scale = wanted.to(torch.float8_e4m3fn).float() * g
    y = torch.where(scale.unsqueeze(1) > 0, blocks / scale.clamp(min=1e-38).unsqueeze(1), 0.0)
    magnitudes = torch.tensor(fmt.element.magnitudes)
    nearest = magnitudes[torch.bucketize(y.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2)] * y.sign()
    return float((nearest * scale.unsqueeze(1) - blocks).double().square().sum())


def _fp8_error(x: torch.Tensor, scale: torch.Tensor) -> float:
    y = (x / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    return float((y * scale - x).double().square().sum())
