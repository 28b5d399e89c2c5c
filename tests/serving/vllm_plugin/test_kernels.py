"""Claims about our kernels inside vLLM, where vLLM is installed: what they compute from what vLLM's loaders leave.

The layers here hold what a loader would have put there: random codes and scales under vLLM's names. Expected values
decode them by `QTensor.dequantize` and multiply in float64 (exact to the rounding of bf16 inputs and outputs).
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; it pins its own transformers")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear as vllm_linear
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp4Dynamic,
)
from vllm.platforms import current_platform

import ptqpipe.serving.vllm_plugin as plugin
from ptqpipe.numerics.formats import FORMATS
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import Activation
from ptqpipe.runtime.input_quantizers import InputQuantizer

if not current_platform.is_cpu():
    pytest.skip("these kernels are for vLLM's CPU build", allow_module_level=True)
plugin.register()

ROWS, COLS, TOKENS = 96, 256, 5
# bf16 has 8 significant bits: the result is rounded once (2^-9 of it), and a kernel may round each weight once, too,
# whose errors add up like a random walk: 2^-9 of the norm of the terms each. Four of those sigmas.
TOLERANCE = 4 * 2.0**-8


class Layer(torch.nn.Module):
    """A layer of vLLM after loading: parameters by name."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def random_q(name: str, seed: int = 0, rows: int = ROWS, cols: int = COLS) -> QTensor:
    """Random codes and scales of a format (no NaN among them)."""
    generator = torch.Generator().manual_seed(seed)
    fmt = FORMATS[name]
    four_bits = fmt.element.bits == 4
    data = torch.randint(0, 256, (rows, cols // 2 if four_bits else cols), generator=generator, dtype=torch.uint8)
    if not four_bits:
        data[data & 0x7F == 0x7F] = 0  # E4M3's NaN
    grid = fmt.scale_shape((rows, cols))
    if fmt.scale.name == "e8m0":
        scales = torch.randint(118, 124, grid, generator=generator, dtype=torch.uint8)
    elif fmt.scale.name == "e4m3":
        scales = torch.randint(40, 90, grid, generator=generator, dtype=torch.uint8)
    else:
        scales = (torch.rand(grid, generator=generator) * 0.01 + 0.001).bfloat16()
    return QTensor(fmt, (rows, cols), data, scales, torch.tensor(0.0371) if fmt.has_global else None)


@pytest.fixture(autouse=True)
def default_config() -> Iterator[None]:
    """vLLM's layers ask for a configuration when they are made."""
    with set_current_vllm_config(VllmConfig()):
        yield


def inputs(seed: int = 1, cols: int = COLS) -> torch.Tensor:
    """bf16 inputs."""
    return torch.randn(TOKENS, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_product(y: torch.Tensor, x: torch.Tensor, q: QTensor, quantizer: InputQuantizer) -> None:
    """``y`` is ``quantizer(x) @ dequantize(q).T`` to bf16."""
    left, right = quantizer(x).double(), q.dequantize().double()
    wanted, size = left @ right.T, (left**2 @ (right**2).T).sqrt()
    assert y.dtype == x.dtype
    assert bool(((y.double() - wanted).abs() <= TOLERANCE * (size + wanted.abs())).all())


def run(kernel: Any, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """As vLLM calls a kernel: once after loading, then for each input."""
    kernel.process_weights_after_loading(layer)
    return kernel.apply_weights(layer, x, None)


def test_weight_only_nvfp4_takes_our_kernel_and_multiplies() -> None:
    q, x = random_q("nvfp4"), inputs()
    kernel = vllm_linear.init_nvfp4_linear_kernel(use_a16=True)
    layer = Layer(weight=q.data, weight_scale=q.scales.view(torch.float8_e4m3fn), weight_global_scale=q.global_scale)
    assert_product(run(kernel, layer, x), x, q, InputQuantizer(Activation.NONE))


@pytest.mark.parametrize("container", ["compressed_tensors", "modelopt"])
def test_nvfp4_quantizes_its_inputs_as_the_container_states(container: str) -> None:
    q, x = random_q("nvfp4"), inputs()
    scale = torch.tensor(431.0 if container == "compressed_tensors" else 0.00231)
    layer = Layer(weight=q.data, weight_scale=q.scales.view(torch.float8_e4m3fn), weight_global_scale=q.global_scale)
    divides = container == "compressed_tensors"
    layer.input_global_scale_inv, layer.input_global_scale = (scale, 1 / scale) if divides else (1 / scale, scale)
    if divides:
        layer.scheme = SimpleNamespace()
    quantizer = InputQuantizer(Activation.NVFP4_STATIC_GLOBAL, scale=float(scale), divides=divides)
    assert_product(run(vllm_linear.init_nvfp4_linear_kernel(), layer, x), x, q, quantizer)


@pytest.mark.parametrize("weight_only", [False, True])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_mx_formats_quantize_inputs_unless_the_scheme_is_weight_only(name: str, *, weight_only: bool) -> None:
    q, x = random_q(name), inputs()
    data = q.data if name == "mxfp4" else q.data.view(torch.float8_e4m3fn)
    layer = Layer(weight=data, weight_scale=q.scales)
    layer.scheme = SimpleNamespace(ptqpipe_weight_only=weight_only)
    if name == "mxfp4":
        kernel: Any = vllm_linear.init_mxfp4_linear_kernel(kMxfp4Dynamic)
    else:
        kernel = vllm_linear.init_mxfp8_linear_kernel(weight_shape=(ROWS, COLS))
    activation = Activation.NONE if weight_only else Activation(name)
    assert_product(run(kernel, layer, x), x, q, InputQuantizer(activation))


def fp8_kernel(weight_key: Any, input_key: Any) -> Any:
    """The kernel that vLLM takes for an FP8 layer of this size."""
    return vllm_linear.init_fp8_linear_kernel(
        input_key, weight_key, torch.bfloat16, torch.bfloat16, weight_shape=(ROWS, COLS)
    )


def test_fp8_per_channel_quantizes_each_token() -> None:
    q, x = random_q("fp8_channel"), inputs()
    layer = Layer(weight=q.data.view(torch.float8_e4m3fn).t(), weight_scale=q.scales.float())
    layer.input_scale = None
    y = run(fp8_kernel(kFp8StaticChannelSym, kFp8DynamicTokenSym), layer, x)
    assert_product(y, x, q, InputQuantizer(Activation.FP8_TOKEN))


def test_fp8_per_tensor_uses_its_static_input_scale() -> None:
    q, x = random_q("fp8_tensor"), inputs()
    layer = Layer(weight=q.data.view(torch.float8_e4m3fn).t(), weight_scale=q.scales.float().reshape(()))
    layer.input_scale = torch.tensor(0.0123)
    y = run(fp8_kernel(kFp8StaticTensorSym, kFp8StaticTensorSym), layer, x)
    assert_product(y, x, q, InputQuantizer(Activation.FP8_TENSOR_STATIC, scale=float(layer.input_scale)))


@pytest.mark.parametrize("rows", [256, 192])
def test_fp8_blocks_may_end_short(rows: int) -> None:
    q, x = random_q("fp8_block", rows=rows), inputs()
    weight_key = create_fp8_quant_key(static=True, group_shape=GroupShape(128, 128))
    input_key = create_fp8_quant_key(static=False, group_shape=GroupShape(1, 128))
    layer = Layer(weight=q.data.view(torch.float8_e4m3fn), weight_scale=q.scales.float())
    layer.input_scale = None
    assert_product(run(fp8_kernel(weight_key, input_key), layer, x), x, q, InputQuantizer(Activation.FP8_GROUP))


def test_fused_fp8_shards_keep_their_own_scales() -> None:
    """vLLM would requantize them to the largest; its CPU wheel lacks the operator for that."""
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.utils import w8a8_utils

    for module in (modelopt, w8a8_utils):
        weight = torch.zeros(6, 4)
        scale, kept = module.requantize_with_max_scale(weight, torch.tensor([1.0, 2.0]), [2, 4])
        assert scale.flatten().tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
        assert kept is weight
        unset = torch.tensor([3.0, torch.finfo(torch.float8_e4m3fn).min])
        assert float(module.requantize_with_max_scale(weight, unset, [2, 4])[0]) == 3.0


def test_the_operator_adds_the_bias_and_keeps_leading_dimensions() -> None:
    q, x = random_q("mxfp8"), inputs()
    layer = Layer(weight=q.data.view(torch.float8_e4m3fn), weight_scale=q.scales)
    layer.scheme = SimpleNamespace(ptqpipe_weight_only=True)
    kernel = vllm_linear.init_mxfp8_linear_kernel(weight_shape=(ROWS, COLS))
    plain = run(kernel, layer, x)
    bias = torch.full((ROWS,), 64.0, dtype=torch.bfloat16)
    y = kernel.apply_weights(layer, x.reshape(1, TOKENS, COLS), bias)
    assert y.shape == (1, TOKENS, ROWS)
    assert bool(((y[0].double() - plain.double() - 64).abs() <= 2.0**-8 * (64 + plain.double().abs())).all())


def test_torch_compile_sees_one_operator_and_no_break() -> None:
    q, x = random_q("nvfp4"), inputs()
    kernel = vllm_linear.init_nvfp4_linear_kernel(use_a16=True)
    layer = Layer(weight=q.data, weight_scale=q.scales.view(torch.float8_e4m3fn), weight_global_scale=q.global_scale)
    wanted = run(kernel, layer, x)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(lambda x: kernel.apply_weights(layer, x), backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), wanted)
    assert seen == ["ptqpipe.vllm_linear"]


E, HIDDEN, INNER, TOP = 4, 128, 64, 2


def expert_layer(first: list[list[QTensor]], second: list[QTensor], **extra: Any) -> Layer:
    """The parameters of NVFP4 experts as compressed-tensors' loader leaves them: gate, then up; scales that divide."""
    stacked = [[torch.cat([q.data for q in parts]) for parts in first], [q.data for q in second]]
    layer = Layer(
        w13_weight_packed=torch.stack(stacked[0]),
        w2_weight_packed=torch.stack(stacked[1]),
        w13_weight_scale=torch.stack([torch.cat([q.scales for q in parts]) for parts in first]).view(
            torch.float8_e4m3fn
        ),
        w2_weight_scale=torch.stack([q.scales for q in second]).view(torch.float8_e4m3fn),
        w13_weight_global_scale=torch.tensor([[1 / float(_global(q)) for q in parts] for parts in first]),
        w2_weight_global_scale=torch.tensor([1 / float(_global(q)) for q in second]),
        w13_input_global_scale=torch.ones(E, 2),
        w2_input_global_scale=torch.ones(E),
    )
    layer.activation, layer.expert_map, layer.apply_router_weight_on_input = MoEActivation.SILU, None, False
    for name, value in extra.items():
        setattr(layer, name, value)
    return layer


def _global(q: QTensor) -> torch.Tensor:
    assert q.global_scale is not None
    return q.global_scale


def method() -> Any:
    """vLLM's method for weight-only NVFP4 experts, by its own name, without its constructor's GPU."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as module,
    )

    made = object.__new__(module.CompressedTensorsW4A4Nvfp4MoEMethod)
    made.moe, made.use_a16 = SimpleNamespace(is_act_and_mul=True), True
    return made


@pytest.mark.parametrize("here", [None, [0, -1, 1, -1]])
def test_experts_are_the_weighted_sum_of_those_held_here(here: list[int] | None) -> None:
    held = E if here is None else 2
    first = [[random_q("nvfp4", 10 * e + i, INNER, HIDDEN) for i in (1, 2)] for e in range(E)][:held]
    second = [random_q("nvfp4", 10 * e + 3, HIDDEN, INNER) for e in range(E)][:held]
    layer = expert_layer(first, second, expert_map=None if here is None else torch.tensor(here))
    made = method()
    made.process_weights_after_loading(layer)
    x = inputs(cols=HIDDEN) * 0.1
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [0, 2]])
    weights = torch.rand(TOKENS, TOP, generator=torch.Generator().manual_seed(5))
    y = made.apply(layer, x, weights, ids, None, None)
    wanted = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for place in range(TOP):
            expert = int(ids[token, place])
            local = expert if here is None else here[expert]
            if local < 0:
                continue
            gate, up = (q.dequantize().double() @ x[token].double() for q in first[local])
            hidden = torch.nn.functional.silu(gate) * up
            wanted[token] += float(weights[token, place]) * (second[local].dequantize().double() @ hidden)
    assert y.dtype == x.dtype
    assert float((y.double() - wanted).norm() / wanted.norm()) < 0.02  # three roundings to bf16 on the way


def test_experts_whose_gate_and_up_differ_in_global_scale_are_read_exactly() -> None:
    from ptqpipe.serving.vllm_plugin.fused_experts import _layers, _read

    one, two = random_q("nvfp4", 1, INNER, HIDDEN), random_q("nvfp4", 2, INNER, HIDDEN)
    other = QTensor(two.fmt, two.shape, two.data, two.scales, torch.tensor(0.0525))
    second = [random_q("nvfp4", 3, HIDDEN, INNER)] * E
    same = _read(expert_layer([[one, two]] * E, second), "w13")
    mixed = _read(expert_layer([[one, other]] * E, second), "w13")
    assert len(_layers(same, 0, Activation.NONE, shards=2)) == 1
    assert len(_layers(mixed, 0, Activation.NONE, shards=2)) == 2


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_fp8_experts_are_read_in_every_shape_that_vllm_stores(name: str) -> None:
    from ptqpipe.serving.vllm_plugin.fused_experts import _layers, _read

    inner, hidden = 256, 128
    first = [[random_q(name, 10 * e + i, inner, hidden) for i in (1, 2)] for e in range(E)]
    second = [random_q(name, 10 * e + 3, hidden, inner) for e in range(E)]
    layer = Layer(
        w13_weight=torch.stack([torch.cat([q.data for q in parts]) for parts in first]).view(torch.float8_e4m3fn),
        w2_weight=torch.stack([q.data for q in second]).view(torch.float8_e4m3fn),
        w13_weight_scale=torch.stack([torch.cat([q.scales.float() for q in parts]) for parts in first]),
        w2_weight_scale=torch.stack([q.scales.float() for q in second]),
    )
    if name == "fp8_tensor":  # [E, 2] and [E]
        layer.w13_weight_scale.data = layer.w13_weight_scale.data.reshape(E, 2)
        layer.w2_weight_scale.data = layer.w2_weight_scale.data.reshape(E)
    for expert in range(E):
        parts = _layers(_read(layer, "w13"), expert, Activation.FP8_TOKEN, shards=2)
        found = torch.cat([part.weight.dequantize() for part in parts])
        assert torch.equal(found, torch.cat([q.dequantize() for q in first[expert]]))
        (down,) = _layers(_read(layer, "w2"), expert, Activation.FP8_TOKEN, shards=1)
        assert torch.equal(down.weight.dequantize(), second[expert].dequantize())
        wanted = Activation.FP8_GROUP if name == "fp8_block" else Activation.FP8_TOKEN
        assert down.quantizer.activation is wanted
