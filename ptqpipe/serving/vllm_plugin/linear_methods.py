"""Kernels for vLLM's CPU backend, where it has none (NVFP4, MXFP4, MXFP8) or slower ones (FP8).

vLLM's loaders, configs and parameters stay as they are. A kernel takes what they loaded (names and shapes are noted at
each), packs it for ``ptqpipe.runtime.packed``, and runs it with the activations that the checkpoint states. Where vLLM
has no way to say that a scheme is weight-only, the note is made where it reads the config (`_note_weight_only`).
"""

from typing import Any

import torch
import vllm.model_executor.kernels.linear as vllm_linear
from vllm.model_executor.kernels.linear import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearKernel,
    MxFp4LinearKernel,
    Mxfp8LinearKernel,
    NvFp4LinearKernel,
)
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.utils import w8a8_utils
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic
from vllm.platforms import PlatformEnum, current_platform

from ptqpipe.numerics.formats import FORMATS
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import Activation
from ptqpipe.runtime.input_quantizers import InputQuantizer
from ptqpipe.serving.vllm_plugin import layer_op

WEIGHT_ONLY = "ptqpipe_weight_only"  # attribute of a scheme of compressed-tensors
Verdict = tuple[bool, str | None]


def register_all() -> None:
    """Registers the kernels with vLLM, ahead of its own for the CPU."""
    layer_op.define(current_platform.dispatch_key)
    for kernel, kind in ((PackedNvFp4, "nvfp4"), (PackedMxFp4, "mxfp4"), (PackedMxFp8, "mxfp8")):
        vllm_linear.register_linear_kernel(kernel, PlatformEnum.CPU, kind)
    vllm_linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, PackedFp8)
    vllm_linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, PackedFp8Block)
    # Weight-only NVFP4 does not ask the table: it takes the class of this name, which needs a GPU.
    vllm_linear.MarlinNvFp4LinearKernel = PackedNvFp4
    _note_weight_only()
    w8a8_utils.requantize_with_max_scale = modelopt.requantize_with_max_scale = keep_scales


def keep_scales(
    weight: torch.Tensor, weight_scale: torch.Tensor, logical_widths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of vLLM's requantization of fused FP8 shards to one scale: (scale of each row [N, 1], weight as it was).

    `PackedFp8` has a scale for each row at no cost, and the CPU wheel lacks the operator that vLLM would call. A shard
    whose scale was never set belongs to a checkpoint that stores the fused weight: one scale for all.
    """
    if weight_scale.ndim == 0 or weight_scale[-1] <= torch.finfo(torch.float8_e4m3fn).min:
        return weight_scale.max(), weight
    widths = torch.tensor(logical_widths)
    return weight_scale.data.float().repeat_interleave(widths).unsqueeze(1), weight


def _note_weight_only() -> None:
    """Lets schemes of compressed-tensors know whether the checkpoint quantizes activations: vLLM treats MXFP4 and
    MXFP8 alike in both cases."""
    original = CompressedTensorsConfig._get_scheme_from_parts

    def noted(self: Any, weight_quant: Any, input_quant: Any, *args: Any, **kwargs: Any) -> Any:
        scheme = original(self, weight_quant, input_quant, *args, **kwargs)
        setattr(scheme, WEIGHT_ONLY, input_quant is None)
        return scheme

    CompressedTensorsConfig._get_scheme_from_parts = noted


def _dynamic(layer: Any, activation: Activation) -> InputQuantizer:
    """The quantizer of a dynamic format, or none where the checkpoint has none."""
    weight_only = getattr(getattr(layer, "scheme", None), WEIGHT_ONLY, False)
    return InputQuantizer(Activation.NONE if weight_only else activation)


def _codes(stored: torch.Tensor) -> torch.Tensor:
    """Bytes of a parameter, dense."""
    return stored.data.contiguous().view(torch.uint8)


def _supported() -> Verdict:
    return (True, None) if current_platform.is_cpu() else (False, "runs on a CPU")


class _OnCpu:
    """Shared by the kernels: they run on a CPU and hand their layers to the operator."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Verdict:
        """Whether this platform is theirs."""
        return _supported()

    @classmethod
    def can_implement(cls, config: Any) -> Verdict:
        """Every layer of the format."""
        return True, None

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., K]`` to ``[..., N]``."""
        return layer_op.apply(layer, x, bias)


class PackedNvFp4(_OnCpu, NvFp4LinearKernel):
    """NVFP4, W4A16 and W4A4.

    Finds ``weight`` uint8 [N, K/2], ``weight_scale`` E4M3 [N, K/16], ``weight_global_scale`` (multiplies), and with
    quantized activations ``input_global_scale`` (multiplies) and its inverse, which compressed-tensors stores.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        rows, half = layer.weight.shape
        q = QTensor(
            FORMATS["nvfp4"],
            (rows, 2 * half),
            _codes(layer.weight),
            _codes(layer.weight_scale),
            layer.weight_global_scale.data.float().reshape(()),
        )
        quantizer = InputQuantizer(Activation.NONE)
        if hasattr(layer, "input_global_scale_inv"):
            divides = hasattr(layer, "scheme")  # compressed-tensors: the stored number is the divisor
            scale = layer.input_global_scale_inv if divides else layer.input_global_scale
            quantizer = InputQuantizer(Activation.NVFP4_STATIC_GLOBAL, scale=float(scale), divides=divides)
        layer_op.keep(layer, q, quantizer, drop=("weight_scale",))


class PackedMxFp4(_OnCpu, MxFp4LinearKernel):
    """MXFP4. Finds ``weight`` uint8 [N, K/2] and ``weight_scale`` E8M0 as uint8 [N, K/32]."""

    @classmethod
    def can_implement(cls, config: Any) -> Verdict:
        """Activations in MXFP4, or none."""
        if config.activation_quant_key in (None, kMxfp4Dynamic):
            return True, None
        return False, "activations in MXFP4 or not quantized"

    def process_weights_after_loading(self, layer: Any) -> None:
        rows, half = layer.weight.shape
        q = QTensor(FORMATS["mxfp4"], (rows, 2 * half), _codes(layer.weight), _codes(layer.weight_scale))
        activation = Activation.NONE if self.config.activation_quant_key is None else Activation.MXFP4
        layer_op.keep(layer, q, _dynamic(layer, activation), drop=("weight_scale",))


class PackedMxFp8(_OnCpu, Mxfp8LinearKernel):
    """MXFP8. Finds ``weight`` E4M3 [N, K] and ``weight_scale`` E8M0 as uint8, at least [N, K/32]."""

    def process_weights_after_loading(self, layer: Any) -> None:
        rows, cols = layer.weight.shape
        scales = layer.weight_scale.data[:rows, : cols // 32]
        q = QTensor(FORMATS["mxfp8"], (rows, cols), _codes(layer.weight), _codes(scales))
        layer_op.keep(layer, q, _dynamic(layer, Activation.MXFP8), drop=("weight_scale",))


class PackedFp8(FP8ScaledMMLinearKernel):
    """FP8 with one scale per channel or tensor.

    Finds ``weight`` E4M3 [K, N] (transposed by the loader), ``weight_scale`` float32 [N, 1] or scalar, and with static
    activations ``input_scale`` (multiplies).
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Verdict:
        """Whether this platform is ours."""
        return _supported()

    @classmethod
    def can_implement(cls, config: Any) -> Verdict:
        """Weights per channel or tensor; activations dynamic per token or static per tensor."""
        weight, x = config.weight_quant_key.scale.group_shape, config.activation_quant_key.scale
        if not (weight.is_per_tensor() or weight.is_per_channel() or weight.is_per_token()):
            return False, "weights with one scale per channel or tensor"
        if x.static and x.group_shape.is_per_tensor():
            return True, None
        if not x.static and x.group_shape.is_per_token():
            return True, None
        return False, "activations with one static scale, or one per token"

    def process_weights_after_loading(self, layer: Any) -> None:
        weight, scale, input_scale, _ = self._get_layer_params(layer)
        cols, rows = weight.shape
        fmt = FORMATS["fp8_tensor" if scale.numel() == 1 else "fp8_channel"]
        fmt, scales = layer_op.float_scales(fmt, scale.data.reshape(fmt.scale_shape((rows, cols))))
        q = QTensor(fmt, (rows, cols), _codes(weight.data.t()), scales)
        if self.config.activation_quant_key.scale.static:
            quantizer = InputQuantizer(Activation.FP8_TENSOR_STATIC, scale=float(input_scale))
        else:
            quantizer = InputQuantizer(Activation.FP8_TOKEN)
        layer_op.keep(layer, q, quantizer, drop=(self.layer_param_names[1],))

    def apply_weights(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., K]`` to ``[..., N]``."""
        return layer_op.apply(layer, x, bias)

    def apply_scaled_mm(self, **_: Any) -> torch.Tensor:
        """Part of vLLM's interface; `apply_weights` does not come here."""
        raise NotImplementedError


class PackedFp8Block(Fp8BlockScaledMMLinearKernel):
    """FP8 in blocks of 128 x 128. Finds ``weight`` E4M3 [N, K] and float32 scales as ``weight_scale`` or ``_inv``."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Verdict:
        """Whether this platform is ours."""
        return _supported()

    @classmethod
    def can_implement(cls, config: Any) -> Verdict:
        """Weights in blocks of 128 x 128, activations dynamic per 128 columns."""
        weight, x = config.weight_quant_key.scale.group_shape, config.activation_quant_key.scale
        if tuple(weight) != (128, 128) or x.static or tuple(x.group_shape) != (1, 128):
            return False, "weights in blocks of 128 x 128, activations per token and 128 columns"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        params = self._get_layer_params(layer)
        rows, cols = params.weight.shape
        fmt, scales = layer_op.float_scales(FORMATS["fp8_block"], params.block_scale.data.contiguous())
        q = QTensor(fmt, (rows, cols), _codes(params.weight), scales)
        layer_op.keep(layer, q, InputQuantizer(Activation.FP8_GROUP), drop=(params.block_scale_attr,))

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        """``x [..., K]`` to ``[..., N]``."""
        return layer_op.apply(layer, x, bias)

    def apply_block_scaled_mm(self, *_: Any, **__: Any) -> torch.Tensor:
        """Part of vLLM's interface; `apply_weights` does not come here."""
        raise NotImplementedError
