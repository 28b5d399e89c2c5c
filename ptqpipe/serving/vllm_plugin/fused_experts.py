"""Mixtures of experts for vLLM's CPU backend, which has no kernel for FP4, MXFP8 and most of FP8 there.

vLLM's methods create and load the parameters (names and shapes are noted at `_read`); ours pack them, one weight an
expert, and run each expert on the tokens that were routed to it. vLLM's router, tensor and expert parallelism stay:
experts of other ranks are skipped here, and the sum over the ranks is the caller's.

Gated SiLU and GELU, no biases. gpt-oss (biases, interleaved gates) keeps vLLM's own method.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from ptqpipe.errors import UsageError
from ptqpipe.numerics.formats import FORMATS, Format
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import Activation
from ptqpipe.runtime.input_quantizers import InputQuantizer
from ptqpipe.runtime.packed import PackedWeight
from ptqpipe.serving.vllm_plugin import ops
from ptqpipe.serving.vllm_plugin.layer_op import PackedLayer, float_scales

QUANTIZATION = "vllm.model_executor.layers.quantization"
CT = f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe"
WEIGHT_ONLY = "ptqpipe_weight_only"
GATES: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Method:
    """One of vLLM's methods: where it is, the function that would pick a GPU kernel for it, its dynamic activations.

    activation  what the format quantizes inputs to; static ones are found by their stored scales
    """

    module: str
    name: str
    select: str | None
    activation: Activation


METHODS = (
    Method(f"{CT}.compressed_tensors_moe_w4a4_nvfp4", "CompressedTensorsW4A4Nvfp4MoEMethod",
           "select_nvfp4_moe_backend", Activation.NVFP4_STATIC_GLOBAL),
    Method(f"{CT}.compressed_tensors_moe_w4a4_mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod", None, Activation.MXFP4),
    Method(f"{CT}.compressed_tensors_moe_w8a8_mxfp8", "CompressedTensorsW8A8Mxfp8MoEMethod",
           "select_mxfp8_moe_backend", Activation.MXFP8),
    Method(f"{CT}.compressed_tensors_moe_w8a8_fp8", "CompressedTensorsW8A8Fp8MoEMethod",
           "select_fp8_moe_backend", Activation.FP8_TOKEN),
    Method(f"{QUANTIZATION}.modelopt", "ModelOptNvFp4FusedMoE",
           "select_nvfp4_moe_backend", Activation.NVFP4_STATIC_GLOBAL),
    Method(f"{QUANTIZATION}.modelopt", "ModelOptMxFp8FusedMoE", "select_mxfp8_moe_backend", Activation.MXFP8),
    Method(f"{QUANTIZATION}.modelopt", "ModelOptFp8MoEMethod", "select_fp8_moe_backend", Activation.FP8_TENSOR_STATIC),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """One of the two stacks of a layer as vLLM loaded it.

    data    [E, R, bytes]
    scales  [E, R, blocks], [E, R, 1], a grid of 128 x 128 blocks, or one number per shard of the rows [E, shards]
    globals, inputs  [E, shards]: global scales of the weight and of the input, None where the format has none
    divides  whether those two divide
    """

    data: torch.Tensor
    scales: torch.Tensor
    globals: torch.Tensor | None
    inputs: torch.Tensor | None
    divides: bool


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert: gate and up as one weight, or as two where their scales differ; then down."""

    first: tuple[PackedLayer, ...]
    second: PackedLayer

    def __call__(self, x: torch.Tensor, gate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """``x [T, H]`` to ``[T, H]``."""
        hidden = (
            torch.cat([layer(x, None) for layer in self.first], -1) if len(self.first) > 1 else self.first[0](x, None)
        )
        gated, up = hidden.chunk(2, -1)
        return self.second(gate(gated) * up, None)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of one layer of this rank. ``key`` is the parameter by whose address they are found."""

    key: torch.Tensor
    experts: tuple[Expert, ...]
    gate: Callable[[torch.Tensor], torch.Tensor]


_mixtures: dict[int, Mixture] = {}


def register_all(dispatch_key: str) -> None:
    """Defines the operator and puts our methods in the place of vLLM's."""
    schema = "vllm_experts(Tensor x, Tensor weights, Tensor ids, Tensor key, Tensor? local, bool weigh_input) -> Tensor"
    ops.define(schema, _experts, shape=lambda x, *_: torch.empty_like(x), dispatch_key=dispatch_key)
    for method in METHODS:
        _replace(method)
    _note_weight_only()


def _replace(method: Method) -> None:
    """Our subclass under vLLM's name, wherever vLLM looks for it. Its loaders go by the name of the class, too."""
    module = import_module(method.module)
    theirs = getattr(module, method.name)
    ours = type(method.name, (_Packed, theirs), {"ptqpipe_activation": method.activation, "__module__": method.module})
    if method.select is not None:
        setattr(module, method.select, lambda *_, **__: (None, None))
    for place in list(sys.modules.values()):
        if getattr(place, "__name__", "").startswith(QUANTIZATION) and vars(place).get(method.name) is theirs:
            setattr(place, method.name, ours)
    for holder in vars(module).values():
        if isinstance(holder, type) and vars(holder).get("FusedMoEMethodCls") is theirs:
            holder.FusedMoEMethodCls = ours  # type: ignore[attr-defined]


def _note_weight_only() -> None:
    base = import_module(f"{CT}.compressed_tensors_moe").CompressedTensorsMoEMethod
    original = base.get_moe_method

    def noted(quant_config: Any, layer: Any, layer_name: str) -> Any:
        method = original(quant_config, layer, layer_name)
        scheme = quant_config.get_scheme_dict(layer, f"{layer_name}.0.{layer.ckpt_gate_proj_name}") or {}
        setattr(method, WEIGHT_ONLY, scheme.get("input_activations") is None)
        return method

    base.get_moe_method = staticmethod(noted)


class _Packed:
    """Replaces vLLM's methods: packing after loading, and the forward."""

    ptqpipe_activation: Activation
    is_monolithic = False
    supports_eplb = False
    moe: Any

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the layer's experts and lets vLLM's parameters go."""
        if hasattr(layer, "ptqpipe_packed"):
            return
        if layer.activation not in GATES or not self.moe.is_act_and_mul:
            raise UsageError(f"ptqpipe runs experts with gated SiLU or GELU, not {layer.activation.value}")
        activation = Activation.NONE if getattr(self, WEIGHT_ONLY, False) else self.ptqpipe_activation
        if activation is Activation.NVFP4_STATIC_GLOBAL and getattr(self, "use_a16", False):
            activation = Activation.NONE
        if activation is Activation.FP8_TOKEN and getattr(self, "static_input_scales", False):
            activation = Activation.FP8_TENSOR_STATIC
        first, second = _read(layer, "w13"), _read(layer, "w2")
        experts = tuple(
            Expert(_layers(first, expert, activation, shards=2), _layers(second, expert, activation, shards=1)[0])
            for expert in range(first.data.shape[0])
        )
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
            delattr(layer, name)
        key = torch.nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
        layer.ptqpipe_packed = key
        _mixtures[key.data_ptr()] = Mixture(key, experts, GATES[layer.activation])

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """The weighted sum of this rank's experts for ``x [T, H]``."""
        return torch.ops.ptqpipe.vllm_experts(
            x, topk_weights, topk_ids, layer.ptqpipe_packed, layer.expert_map, layer.apply_router_weight_on_input
        )

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """No kernel of vLLM's is configured."""
        return


def _read(layer: Any, stack: str) -> Stored:
    """The parameters of ``w13`` (gate, then up) or ``w2`` (down) under the names that the containers give them:

    weight_packed or weight      the codes
    weight_scale                 the block scales
    weight_global_scale          divides; compressed-tensors, with input_global_scale
    weight_scale_2               multiplies; ModelOpt, with input_scale
    """

    def find(name: str) -> torch.Tensor | None:
        parameter = getattr(layer, f"{stack}_{name}", None)
        return None if parameter is None else parameter.data

    def by_shard(name: str) -> torch.Tensor | None:
        parameter = find(name)
        return None if parameter is None else parameter.float().reshape(parameter.shape[0], -1)

    packed = find("weight_packed")
    data, scales = packed if packed is not None else find("weight"), find("weight_scale")
    assert data is not None, stack
    assert scales is not None, stack
    divides = hasattr(layer, f"{stack}_weight_global_scale")
    names = ("weight_global_scale", "input_global_scale") if divides else ("weight_scale_2", "input_scale")
    scales = scales.unsqueeze(1) if scales.ndim == 1 else scales
    return Stored(data.view(torch.uint8), scales, by_shard(names[0]), by_shard(names[1]), divides)


def _layers(stored: Stored, expert: int, activation: Activation, *, shards: int) -> tuple[PackedLayer, ...]:
    """An expert's weight: one layer, or one a shard where numbers that span the shard differ."""
    spanning = [
        s[expert].flatten()
        for s in (stored.globals, stored.scales if stored.scales.ndim == 2 else None)
        if s is not None
    ]
    parts = shards if any(bool((s != s[0]).any()) for s in spanning) else 1
    rows = stored.data.shape[1] // parts
    quantizer = _quantizer(stored, expert, activation)
    weights = (PackedWeight.from_qtensor(_part(stored, expert, i, rows)) for i in range(parts))
    return tuple(PackedLayer(weight.arranged(), quantizer) for weight in weights)


def _part(stored: Stored, expert: int, part: int, rows: int) -> QTensor:
    """Rows ``[part * rows, (part + 1) * rows)`` of an expert's weight."""
    data = stored.data[expert, part * rows : (part + 1) * rows].contiguous()
    fmt = _format(stored)
    shape = (rows, data.shape[1] * 8 // fmt.element.bits)
    if stored.scales.ndim == 2:  # one number a shard
        fmt, scales = float_scales(fmt, stored.scales[expert, part].reshape(1, 1))
    else:
        each = fmt.scale_shape(shape)[0]
        scales = stored.scales[expert, part * each : (part + 1) * each].contiguous()
        if fmt.scale.dtype is None:
            scales = scales.view(torch.uint8)
        else:
            fmt, scales = float_scales(fmt, scales)
    scale = None if stored.globals is None else stored.globals[expert, part].clone()
    return QTensor(fmt, shape, data, scales, scale, stored.divides and scale is not None)


def _format(stored: Stored) -> Format:
    """The format, from the shapes: nothing else differs between the containers."""
    if stored.globals is not None:
        return FORMATS["nvfp4"]
    if stored.scales.ndim == 2:
        return FORMATS["fp8_tensor"]
    if stored.scales.dtype == torch.float32:
        return FORMATS["fp8_channel" if stored.scales.shape[1] == stored.data.shape[1] else "fp8_block"]
    return FORMATS["mxfp4" if stored.data.shape[2] == 16 * stored.scales.shape[2] else "mxfp8"]


def _quantizer(stored: Stored, expert: int, activation: Activation) -> InputQuantizer:
    """What happens to an expert's input. Of two stored scales vLLM takes the larger number, and so does this."""
    if activation is Activation.FP8_TOKEN and _format(stored).name == "fp8_block":
        return InputQuantizer(Activation.FP8_GROUP)
    if activation not in (Activation.NVFP4_STATIC_GLOBAL, Activation.FP8_TENSOR_STATIC):
        return InputQuantizer(activation)
    assert stored.inputs is not None
    return InputQuantizer(activation, scale=float(stored.inputs[expert].max()), divides=stored.divides)


def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    key: torch.Tensor,
    local: torch.Tensor | None,
    weigh_input: bool,
) -> torch.Tensor:
    """The operator. ``ids`` and ``weights [T, k]``; ``local`` maps an expert of the model to one here, or to -1."""
    mixture = _mixtures[key.data_ptr()]
    out = torch.zeros(x.shape, dtype=torch.float32)
    for wanted in torch.unique(ids).tolist():
        index = wanted if local is None or wanted < 0 else int(local[wanted])
        if index < 0:
            continue
        token, place = torch.where(ids == wanted)
        weight = weights[token, place, None].float()
        if weigh_input:
            result = mixture.experts[index]((x[token] * weight).to(x.dtype), mixture.gate).float()
        else:
            result = mixture.experts[index](x[token], mixture.gate).float() * weight
        out.index_add_(0, token, result)
    return out.to(x.dtype)
