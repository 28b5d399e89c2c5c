"""Quantized inputs of linear layers, simulated: quantized and decoded as the format says, then multiplied in floats.

The arithmetic is compressed-tensors' (its ``fake_quantize``, which transformers runs, and which vLLM's kernels agree
with up to the last bits of a division), in float32 whatever the model computes in, rounded once to the model's dtype:

    nvfp4       per 16: scale e4m3(amax / 6 / global), E2M1 codes; one static global scale per layer
    mxfp4       per 32: scale 2^(floor(log2 amax') - 2), where amax' rounds a significand of 1.75 or more up; E2M1
    mxfp8       the same with 2^(floor(log2 amax') - 8); E4M3
    fp8_token   scale amax / 448 per token, E4M3;  fp8_group  per token and 128 columns
    fp8_static  one static scale per layer, E4M3
    int8_token  scale amax / 127.5 per token, -128 to 127

Must not know where the weights of a layer come from, so that packed layers can use `InputQuantizer`, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ptqpipe.errors import UsageError
from ptqpipe.numerics.rotation import rotated
from ptqpipe.numerics.schemes import Activation

_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
GROUP = {  # columns that share one scale
    Activation.NVFP4_STATIC_GLOBAL: 16,
    Activation.MXFP4: 32,
    Activation.MXFP8: 32,
    Activation.FP8_GROUP: 128,
}


@dataclass(frozen=True, slots=True)
class InputQuantizer:
    """Quantizes (and rotates) the input ``[..., K]`` of a layer.

    scale    the static scale of the layer, where the format has one
    divides  whether it divides on decode instead of multiplying (as compressed-tensors stores NVFP4's)
    rotation columns that are rotated together first (``rotation.py``); 0: none
    """

    activation: Activation
    scale: float | None = None
    divides: bool = False
    rotation: int = 0

    def __post_init__(self) -> None:
        if self.activation is Activation.UNKNOWN:
            raise UsageError(
                "config.json quantizes activations in a way that ptqpipe cannot simulate; load with activations 'none'"
            )
        static = self.activation.static_max is not None
        if static != (self.scale is not None) or (self.scale is not None and not 0 < self.scale < float("inf")):
            raise UsageError(f"activations {self.activation} with the static scale {self.scale}; expected one above 0")

    @classmethod
    def fitted(cls, activation: Activation, x: torch.Tensor) -> "InputQuantizer":
        """One whose static scale, where there is one, just holds the largest magnitude of ``x``; 1 for zeros."""
        largest = activation.static_max
        return cls(activation, None if largest is None else float(x.abs().amax()) / largest or 1.0)

    @property
    def idle(self) -> bool:
        """Whether nothing happens to the input."""
        return self.activation is Activation.NONE and not self.rotation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` rotated, quantized and decoded: same shape and dtype. Float32 inside."""
        return self.quantized(rotated(x, self.rotation))

    def quantized(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, rotated already, quantized and decoded."""
        if self.activation is Activation.NONE or x.numel() == 0:
            return x
        group = GROUP.get(self.activation)
        if group is not None and x.shape[-1] % group:
            raise UsageError(
                f"{self.activation} activations have a scale for every {group} columns, but a layer has {x.shape[-1]} "
                "inputs; load with activations 'none'"
            )
        blocks = x.float() if group is None else x.float().reshape(*x.shape[:-1], -1, group)
        decoded = _QUANTIZE[self.activation](self, blocks)
        return (decoded if group is None else decoded.flatten(-2)).to(x.dtype)

    def pre_hook(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A forward pre-hook of a layer."""
        return (self(args[0]), *args[1:])


def _nvfp4(quantizer: InputQuantizer, x: torch.Tensor) -> torch.Tensor:
    assert quantizer.scale is not None
    wanted = x.abs().amax(-1, keepdim=True) / _E2M1_MAX
    wanted = wanted * quantizer.scale if quantizer.divides else wanted / quantizer.scale
    scale = round_to_e4m3(wanted)
    # A block scale that underflows makes every code zero, whatever replaces it; so only the division must be safe.
    scale = torch.where(scale == 0, 0.125, scale)
    return _e2m1(x, scale / quantizer.scale if quantizer.divides else scale * quantizer.scale)


def _mxfp4(quantizer: InputQuantizer, x: torch.Tensor) -> torch.Tensor:
    return _e2m1(x, _power_of_two(x, offset=2))


def _mxfp8(quantizer: InputQuantizer, x: torch.Tensor) -> torch.Tensor:
    scale = _power_of_two(x, offset=8)
    return round_to_e4m3(x / scale) * scale


def _fp8_dynamic(quantizer: InputQuantizer, x: torch.Tensor) -> torch.Tensor:
    codes, scale = fp8_codes(x)
    return codes.float() * scale


def _fp8_static(quantizer: InputQuantizer, x: torch.Tensor) -> torch.Tensor:
    assert quantizer.scale is not None
    if quantizer.divides:
        return round_to_e4m3(x * quantizer.scale) / quantizer.scale
    return round_to_e4m3(x / quantizer.scale) * quantizer.scale


def _int8_dynamic(quantizer: InputQuantizer, x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
    return (x / scale).clamp_(-128, 127).round_().mul_(scale)


_QUANTIZE: dict[Activation, Callable[[InputQuantizer, torch.Tensor], torch.Tensor]] = {
    Activation.NVFP4_STATIC_GLOBAL: _nvfp4,
    Activation.MXFP4: _mxfp4,
    Activation.MXFP8: _mxfp8,
    Activation.FP8_TOKEN: _fp8_dynamic,
    Activation.FP8_GROUP: _fp8_dynamic,
    Activation.FP8_TENSOR_STATIC: _fp8_static,
    Activation.INT8_TOKEN: _int8_dynamic,
}


def fp8_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn ``[..., K]``, float32 scales ``[..., 1]``) of float32 rows: what ``fp8_token`` decodes."""
    scale = x.abs().amax(-1, keepdim=True) / _E4M3_MAX
    scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
    return _to_e4m3(x / scale), scale


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded to E4M3: saturating, ties to even. NaN stays NaN."""
    return _to_e4m3(x).float()


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _e2m1(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 quantized to E2M1 with a scale and decoded, as ``qtensor.encode`` rounds. NaN stays NaN.

    Magnitudes below 2, below 4 and above are multiples of a half, one and two; halves of those go to the even code.
    """
    y = x / scale
    size = y.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    rounded = (size / step).round_().mul_(step).clamp_(max=_E2M1_MAX)
    return torch.copysign(rounded, y).mul_(scale)


def _power_of_two(x: torch.Tensor, *, offset: int) -> torch.Tensor:
    """The E8M0 scale of each block, as compressed-tensors and Quark ("even") choose it."""
    amax = x.abs().amax(-1, keepdim=True)
    bumped = (amax.view(torch.int32) + (1 << 21)) & 0x7F800000  # a significand of 1.75 or more carries
    exponent = (bumped >> 23) - offset
    return torch.exp2(exponent.clamp(0, 254).float() - 127)
