"""Claims about simulated activations: the numbers are compressed-tensors' in float32, bit for bit, layer by layer.

Expected values come from compressed-tensors' own quantization of activations, and for experts, which no reader in
Python simulates, from a loop over experts written here.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from transformers import AutoModelForCausalLM

from ptqpipe.errors import UsageError
from ptqpipe.numerics.formats import CODECS
from ptqpipe.numerics.qtensor import round_to
from ptqpipe.numerics.schemes import Activation
from ptqpipe.runtime import load_model
from ptqpipe.runtime.input_quantizers import InputQuantizer
from tests.checkpoint.layouts.builders import INPUT_SCALE, Checkpoint
from tests.runtime.models import float_twin, logits, quantized

ARGS: dict[Activation, dict[str, Any]] = {
    Activation.NVFP4_STATIC_GLOBAL: {
        "num_bits": 4,
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": "local",
        "scale_dtype": torch.float8_e4m3fn,
    },
    Activation.MXFP4: {
        "num_bits": 4,
        "strategy": "group",
        "group_size": 32,
        "dynamic": True,
        "scale_dtype": torch.uint8,
    },
    Activation.MXFP8: {
        "num_bits": 8,
        "strategy": "group",
        "group_size": 32,
        "dynamic": True,
        "scale_dtype": torch.uint8,
    },
    Activation.FP8_TOKEN: {"num_bits": 8, "strategy": "token", "dynamic": True},
    Activation.FP8_GROUP: {"num_bits": 8, "strategy": "group", "group_size": 128, "dynamic": True},
    Activation.FP8_TENSOR_STATIC: {"num_bits": 8, "strategy": "tensor", "dynamic": False},
}


def theirs(activation: Activation, x: torch.Tensor, scale: float | None) -> torch.Tensor:
    """compressed-tensors' fake quantization of [batch, tokens, K]. NVFP4's ``scale`` divides, FP8's multiplies."""
    args = QuantizationArgs(type="float", symmetric=True, **ARGS[activation])
    if activation is Activation.FP8_TENSOR_STATIC:
        return fake_quantize(x, torch.tensor([scale]), torch.zeros(1), args)
    global_scale = None if scale is None else torch.tensor([scale])
    scales, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), global_scale=global_scale)
    return fake_quantize(x, scales, zero, args, global_scale=global_scale)


def inputs() -> torch.Tensor:
    """[3, 64, 256]: normal rows of every magnitude, outliers, ties, zero and constant blocks."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 64, 256, generator=generator)
    x *= torch.exp2(torch.randint(-20, 12, (3, 64, 1), generator=generator).float())
    x[0, 0, :128] = 0
    x[0, 1, ::32] *= 300
    x[0, 2] = 1.0
    x[0, 3] = torch.tensor([0.25, -0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(32)
    x[0, 4] = torch.tensor([1.75, -1.749, 3.5, 7.0, 1.0, -0.0, 0.0, 1e-30]).repeat(32)
    return x


@pytest.mark.parametrize("activation", list(ARGS))
def test_the_numbers_are_those_of_compressed_tensors(activation: Activation) -> None:
    x = inputs()
    static = {Activation.NVFP4_STATIC_GLOBAL: 37.5, Activation.FP8_TENSOR_STATIC: 0.0123}.get(activation)
    ours = InputQuantizer(activation, static, divides=activation is Activation.NVFP4_STATIC_GLOBAL)(x)
    assert torch.equal(ours, theirs(activation, x, static))
    assert not torch.equal(ours, x)


def test_e2m1_rounds_as_the_encoder_does_ties_included() -> None:
    eighths = torch.arange(-64, 65) / 8.0
    far = torch.tensor(9.0)
    every = torch.cat(
        [eighths, torch.nextafter(eighths, far), torch.nextafter(eighths, -far), torch.tensor([1e30, -0.0])]
    )
    x = every.repeat_interleave(16).reshape(-1, 16).clone()
    x[:, 0] = 6.0  # with which the block's scale is one
    got = InputQuantizer(Activation.NVFP4_STATIC_GLOBAL, 1.0)(x.clamp(-6.0, 6.0))
    expected = round_to(x.clamp(-6.0, 6.0).abs(), CODECS["e2m1"]).copysign(x)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("activation", list(ARGS))
def test_a_lower_dtype_is_rounded_once_at_the_end(activation: Activation) -> None:
    x = inputs().bfloat16()
    static = {Activation.NVFP4_STATIC_GLOBAL: 37.5, Activation.FP8_TENSOR_STATIC: 0.0123}.get(activation)
    quantizer = InputQuantizer(activation, static)
    assert torch.equal(quantizer(x), quantizer(x.float()).bfloat16())


def test_a_power_of_two_may_multiply_or_divide() -> None:
    x = inputs()
    for activation in (Activation.NVFP4_STATIC_GLOBAL, Activation.FP8_TENSOR_STATIC):
        divided = InputQuantizer(activation, 8.0, divides=True)(x)
        assert torch.equal(divided, InputQuantizer(activation, 0.125)(x))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    x = inputs()
    for activation in ARGS:
        static = 0.5 if has_scale(activation) else None
        quantizer = InputQuantizer(activation, static)
        assert torch.equal(quantizer(x)[1, 7], quantizer(x[1, 7]))
        assert torch.equal(quantizer(x.reshape(-1, 256)), quantizer(x).reshape(-1, 256))


def has_scale(activation: Activation) -> bool:
    return activation in (Activation.NVFP4_STATIC_GLOBAL, Activation.FP8_TENSOR_STATIC)


@pytest.mark.parametrize("activation", list(ARGS))
def test_nan_is_not_hidden(activation: Activation) -> None:
    x = torch.ones(1, 256)
    x[0, 5] = float("nan")
    static = 0.5 if has_scale(activation) else None
    assert bool(InputQuantizer(activation, static)(x)[0, 5].isnan())


@pytest.mark.parametrize(
    ("activation", "scale"),
    [
        (Activation.NVFP4_STATIC_GLOBAL, None),
        (Activation.NVFP4_STATIC_GLOBAL, 0.0),
        (Activation.FP8_TENSOR_STATIC, float("inf")),
        (Activation.MXFP4, 1.0),
        (Activation.UNKNOWN, None),
    ],
)
def test_scales_must_fit_the_format(activation: Activation, scale: float | None) -> None:
    with pytest.raises(UsageError):
        InputQuantizer(activation, scale)


STATIC = float(INPUT_SCALE)
DENSE = [
    ("compressed_tensors", "nvfp4_w4a4", Activation.NVFP4_STATIC_GLOBAL, 1 / STATIC),
    ("modelopt", "nvfp4_w4a4", Activation.NVFP4_STATIC_GLOBAL, 1 / STATIC),
    ("compressed_tensors", "mxfp4", Activation.MXFP4, None),
    ("compressed_tensors", "mxfp8", Activation.MXFP8, None),
    ("compressed_tensors", "fp8_dynamic", Activation.FP8_TOKEN, None),
    ("deepseek_fp8", "fp8_block", Activation.FP8_GROUP, None),
    ("ptqpipe", "nvfp4_w4a4", Activation.NVFP4_STATIC_GLOBAL, 1 / STATIC),
]


@pytest.mark.parametrize(("container", "scheme", "activation", "scale"), DENSE)
def test_every_linear_layer_gets_its_quantized_input(
    sources: Mapping[str, Path],
    tmp_path: Path,
    container: str,
    scheme: str,
    activation: Activation,
    scale: float | None,
) -> None:
    checkpoint = quantized(sources["biased"], container, scheme)
    twin = float_twin(sources["biased"], checkpoint.dequantized(container), tmp_path / "f")
    plain = logits(twin)
    for name, module in twin.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args: (theirs(activation, args[0], scale),))
    loaded = load_model(checkpoint.save(tmp_path / "q"))
    assert torch.equal(logits(loaded), logits(twin))
    assert not torch.equal(logits(loaded), plain)


@pytest.mark.parametrize("scheme", ["fp8_dynamic", "fp8_block", "int8_w8a8"])
def test_transformers_computes_the_same_where_it_is_right(
    sources: Mapping[str, Path], tmp_path: Path, scheme: str
) -> None:
    """Its own reading of compressed-tensors, which runs in float32 for 8 bits alone."""
    from ptqpipe.runtime.hf import register, unregister

    path = quantized(sources["llama"], "compressed_tensors", scheme).save(tmp_path / "q")
    unregister()
    try:
        reader = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        expected = logits(reader)
    finally:
        register()
    assert torch.equal(logits(load_model(path)), expected)


def experts_by_hand(
    module: Any, quantize: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Every expert on every token, weighted; nothing is grouped or skipped."""

    def forward(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(module.num_experts):
            gate, up = (quantize(x) @ module.gate_up_proj[expert].t()).chunk(2, dim=-1)
            hidden = quantize(torch.nn.functional.silu(gate) * up) @ module.down_proj[expert].t()
            out += hidden * (weights * (index == expert)).sum(-1, keepdim=True)
        return out

    return forward


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("container", "scheme", "activation", "scale"),
    [
        ("compressed_tensors", "nvfp4_w4a4", Activation.NVFP4_STATIC_GLOBAL, 1 / STATIC),
        ("compressed_tensors", "mxfp4", Activation.MXFP4, None),
        ("compressed_tensors", "fp8_dynamic", Activation.FP8_TOKEN, None),
    ],
)
def test_inputs_of_fused_experts_are_quantized(
    sources: Mapping[str, Path],
    tmp_path: Path,
    model: str,
    container: str,
    scheme: str,
    activation: Activation,
    scale: float | None,
) -> None:
    """Up to the order of sums over experts: logits of about 1 in float32."""
    checkpoint = quantized(sources[model], container, lambda name: scheme if ".experts." in name else None)
    twin = float_twin(sources[model], checkpoint.dequantized(container), tmp_path / "f")
    plain = logits(twin)
    for module in twin.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            module.forward = experts_by_hand(module, lambda x: theirs(activation, x[None], scale)[0])
    ours = logits(load_model(checkpoint.save(tmp_path / "q")))
    assert float((ours - logits(twin)).abs().max()) < 1e-4
    assert float((ours - plain).abs().max()) > 1e-2


def test_each_expert_has_its_own_static_scale(sources: Mapping[str, Path], tmp_path: Path) -> None:
    checkpoint = quantized(
        sources["qwen3_moe"], "compressed_tensors", lambda name: "nvfp4_w4a4" if ".experts." in name else None
    )
    tensors = dict(checkpoint.tensors)
    for name in tensors:
        if name.endswith("experts.2.down_proj.input_global_scale"):
            tensors[name] = torch.tensor([4000.0])
    changed = load_model(Checkpoint(checkpoint.configs, tensors).save(tmp_path / "c"))
    module = changed.model.layers[0].mlp.experts
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
    weights = torch.full((5, 1), 1.0)
    same = load_model(checkpoint.save(tmp_path / "q")).model.layers[0].mlp.experts
    for expert in range(4):
        index = torch.full((5, 1), expert)
        equal = torch.equal(module(x, index, weights), same(x, index, weights))
        assert equal is (expert != 2)


def test_none_leaves_the_activations(sources: Mapping[str, Path], tmp_path: Path) -> None:
    checkpoint = quantized(sources["llama"], "compressed_tensors", "mxfp4")
    twin = float_twin(sources["llama"], checkpoint.dequantized("compressed_tensors"), tmp_path / "f")
    path = checkpoint.save(tmp_path / "q")
    assert torch.equal(logits(load_model(path, activations="none")), logits(twin))
    assert not torch.equal(logits(load_model(path)), logits(twin))


def test_activations_that_no_word_names_are_refused(sources: Mapping[str, Path], tmp_path: Path) -> None:
    checkpoint = quantized(sources["llama"], "compressed_tensors", "mxfp8")
    config: dict[str, Any] = dict(checkpoint.config)
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["num_bits"] = 6
    path = Checkpoint({"config.json": config}, checkpoint.tensors).save(tmp_path / "q")
    with pytest.raises(UsageError, match=r"cannot simulate; use activations 'none'"):
        load_model(path)
    assert bool(torch.isfinite(logits(load_model(path, activations="none"))).all())


def test_inputs_that_groups_do_not_divide_are_one_line() -> None:
    with pytest.raises(UsageError, match="a scale for every 128 columns, but a layer has 64 inputs"):
        InputQuantizer(Activation.FP8_GROUP)(torch.ones(2, 64))
