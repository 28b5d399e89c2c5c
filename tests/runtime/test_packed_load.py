"""Claims about packed models: they compute what the decoded weights compute, in the memory of the packed ones.

The oracle is load_model in float64 (the decode is float32, so nothing is rounded); what a packed model may differ from
it is measured by how far the same decoded weights are from it in the model's own dtype.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import initialization

import ptqpipe
from ptqpipe.runtime import load, load_model, loading
from ptqpipe.runtime.linear import PackedLinear, Stacked
from ptqpipe.runtime.parallel import TensorParallel
from ptqpipe.runtime.replace import multiplies_only
from tests.checkpoint.layouts.builders import Checkpoint
from tests.runtime.models import TOKENS, local_kv_heads, logits, packed_bytes, quantized

CASES = [
    ("llama", "compressed_tensors", "nvfp4"),
    ("biased", "modelopt", "nvfp4_w4a4"),
    ("tied", "compressed_tensors", "mxfp4"),
    ("biased", "compressed_tensors", "mxfp6"),
    ("llama", "compressed_tensors", "mxfp8"),
    ("llama", "compressed_tensors", "fp8_dynamic"),
    ("llama", "compressed_tensors", "int4_g32"),
    ("llama", "compressed_tensors", "int8_w8a8"),
    ("llama", "compressed_tensors", "fp8_static"),
    ("llama", "deepseek_fp8", "fp8_block"),
    ("llama", "ptqpipe", "e2m1/8/ue5m3"),
    ("qwen3_moe", "compressed_tensors", "nvfp4_w4a4"),
    ("mixtral", "modelopt", "nvfp4"),
    ("mixtral", "compressed_tensors", "fp8_block"),
    ("qwen3_moe", "mxfp8_hf", "mxfp8"),
    ("gemma3", "compressed_tensors", "nvfp4"),
    ("phi3", "compressed_tensors", "nvfp4"),
]


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Relative L2 distance of two logits, in float64: the median over tokens.

    A router at the edge of two experts sends a token elsewhere for the last bit of its input, whatever the weights are.
    """
    x, y = x.double(), y.double()
    return float(((x - y).norm(dim=-1) / y.norm(dim=-1)).median())


def layers(model: Any) -> dict[str, PackedLinear]:
    """The packed layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model", "container", "scheme"), CASES)
def test_logits_are_as_near_as_those_of_decoded_weights(
    sources: Mapping[str, Path], tmp_path: Path, model: str, container: str, scheme: str, dtype: torch.dtype
) -> None:
    path = quantized(sources[model], container, scheme).save(tmp_path / "q")
    exact = exact_logits(path)
    floats = distance(logits(load_model(path, dtype=dtype, activations="none")), exact)
    packed = load(path, dtype=dtype, activations="none")
    assert len(layers(packed)) >= 8
    assert distance(logits(packed), exact) < 2 * floats


@torch.no_grad()
def exact_logits(path: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Of the decoded weights, float64."""
    model = load_model(path, dtype=torch.float64, activations="none")
    model.config._experts_implementation = "eager"  # the grouped product of torch knows no float64
    found: torch.Tensor = model(tokens).logits
    return found


@pytest.mark.parametrize(("model", "container", "scheme"), CASES)
def test_each_layer_quantizes_its_input_and_multiplies(
    sources: Mapping[str, Path], tmp_path: Path, model: str, container: str, scheme: str
) -> None:
    """Against the decoded layer with its hooks, float32: sums of K products differ by K ulps of magnitudes."""
    path = quantized(sources[model], container, scheme).save(tmp_path / "q")
    oracle = load_model(path)
    compared = 0
    for name, layer in layers(load(path, dtype="float32")).items():
        if ".experts." in name:
            continue
        theirs = oracle.get_submodule(name)
        x = torch.randn(7, layer.in_features, generator=torch.Generator().manual_seed(compared))
        seen: list[torch.Tensor] = []
        theirs.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            ours, expected = layer(x), theirs(x)
            bound = seen[0].abs() @ theirs.weight.abs().t() * layer.in_features * 2.0**-23 + 1e-30
        assert bool(((ours - expected).abs() <= bound).all()), name
        compared += 1
    assert compared >= 8


def test_memory_is_that_of_the_packed_weights(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """NVFP4: 4.5 bits a weight and 32 a matrix."""
    for model in ("llama", "mixtral"):
        path = quantized(sources[model], "compressed_tensors", "nvfp4").save(tmp_path / model)
        packed, floats = packed_bytes(load(path))
        assert packed <= 0.2825 * floats
        assert floats > 2e5


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_gate_and_up_projections_are_one_matrix_where_they_can(
    sources: Mapping[str, Path], tmp_path: Path, model: str
) -> None:
    """They share a global scale; where a writer gave them two, they stay two."""
    checkpoint = quantized(sources[model], "compressed_tensors", "nvfp4")
    one = load(checkpoint.save(tmp_path / "one"), dtype="float32")
    assert not any(isinstance(module, Stacked) for module in one.modules())
    leaf = ("up_proj" if model == "qwen3_moe" else "w3") + ".weight_global_scale"
    tensors = {k: v * 2 if k.endswith(f".experts.1.{leaf}") else v for k, v in checkpoint.tensors.items()}
    path = Checkpoint(checkpoint.configs, tensors).save(tmp_path / "two")
    two = load(path, dtype="float32")
    assert sum(isinstance(module, Stacked) for module in two.modules()) == 2
    assert distance(logits(two), logits(load_model(path))) < 1e-5
    assert distance(logits(two), logits(one)) > 1e-3


def test_a_dtype_change_leaves_the_codes(sources: Mapping[str, Path], tmp_path: Path) -> None:
    path = quantized(sources["llama"], "compressed_tensors", "nvfp4").save(tmp_path / "q")
    model = load(path, dtype="float32")
    before = packed_bytes(model)
    model.to(torch.bfloat16)
    assert packed_bytes(model) == before
    assert logits(model).isfinite().all()


def test_floats_where_asked(sources: Mapping[str, Path], tmp_path: Path) -> None:
    path = quantized(sources["llama"], "compressed_tensors", "mxfp4").save(tmp_path / "q")
    model = load(path, dtype="float32", packed=False)
    assert not layers(model)
    assert torch.equal(logits(model), logits(load_model(path)))


def test_a_model_knows_its_key_value_heads(sources: Mapping[str, Path], tmp_path: Path) -> None:
    path = quantized(sources["llama"], "compressed_tensors", "nvfp4").save(tmp_path / "q")
    expected = {f"model.layers.{index}.self_attn": 2 for index in range(2)}
    assert local_kv_heads(load(path)) == local_kv_heads(load_model(path)) == expected


def test_scales_of_the_kv_cache_follow_their_heads(sources: Mapping[str, Path], tmp_path: Path) -> None:
    checkpoint = quantized(sources["llama"], "compressed_tensors", "nvfp4")
    config: dict[str, Any] = dict(checkpoint.config)
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {**config["quantization_config"], "kv_cache_scheme": scheme}
    heads = torch.tensor([0.25, 0.5]).reshape(2, 1, 1)
    scales = {f"model.layers.{i}.self_attn.{x}_scale": heads.clone() for i in range(2) for x in "kv"}
    path = Checkpoint({"config.json": config}, {**checkpoint.tensors, **scales}).save(tmp_path / "q")
    for size, rank, head in ((2, 0, 0), (2, 1, 1), (4, 1, 0), (4, 2, 1)):
        model = part_of(path, TensorParallel(size, rank))
        assert local_kv_heads(model) == {f"model.layers.{index}.self_attn": 1 for index in range(2)}
        for layer in model.model.layers:
            kept = layer.self_attn.ptqpipe_kv_scales
            assert [float(scale) for scale in kept] == [float(heads[head])] * 2


def part_of(path: Path, ranks: TensorParallel) -> Any:
    """One rank's part of a model, without the others: it cannot run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorParallel, "check", lambda ranks: None)
        return loading.load_rank(path, ranks, dtype="float32")


@pytest.mark.slow
@pytest.mark.shared
def test_every_golden_checkpoint_stays_packed(shared_dir: Path) -> None:
    tokens = torch.randint(3, 500, (2, 32), generator=torch.Generator().manual_seed(3))
    folders = sorted(path.parent for path in (shared_dir / "golden").glob("*/config.json"))
    assert len(folders) == 24
    for folder in folders:
        with torch.no_grad():
            exact = exact_logits(folder, tokens)
            floats = distance(load_model(folder, activations="none")(tokens).logits, exact)
            packed = load(folder, dtype="float32", activations="none")
            assert bool(layers(packed)) is not folder.name.startswith("bf16"), folder.name
            assert distance(packed(tokens).logits, exact) <= 2 * floats, folder.name


def test_models_may_initialize_stacks_that_are_packed(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """Qwen3-Omni's blocks do, whose experts are in a module below them. Nothing can be computed with what is left."""
    model = load(quantized(sources["qwen3_moe"], "compressed_tensors", "nvfp4").save(tmp_path / "q"), dtype="float32")
    experts = model.model.layers[0].mlp.experts
    for stack in (experts.gate_up_proj, experts.down_proj):
        initialization.normal_(stack, std=1.0)
        assert stack.device.type == "meta"
    assert not any(name.endswith("experts.gate_up_proj") for name in model.state_dict())


def test_layers_that_share_their_weights_load(tmp_path: Path) -> None:
    """Zamba's attention blocks are one, at several places; the rest stays packed."""
    config = transformers.ZambaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, n_mamba_heads=2, mamba_dt_rank=16, use_mamba_kernels=False, max_position_embeddings=64,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    ptqpipe.convert(tmp_path / "source", out=tmp_path / "q", format="nvfp4", container="ptqpipe")
    model = load(tmp_path / "q", dtype="float32")
    blocks = [model.model.layers[at].shared_transf.self_attn.q_proj for at in (1, 3)]
    assert blocks[0].weight is blocks[1].weight
    assert any("mamba" in name for name in layers(model))
    assert distance(logits(model), logits(load_model(tmp_path / "q"))) < 1e-5


def test_a_linear_layer_of_another_name_stays_packed(tmp_path: Path) -> None:
    config = transformers.FalconConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    ptqpipe.convert(tmp_path / "source", out=tmp_path / "q", format="nvfp4", container="ptqpipe")
    model = load(tmp_path / "q", dtype="float32")
    assert len(layers(model)) == 8
    assert distance(logits(model), logits(load_model(tmp_path / "q"))) < 1e-5


def test_a_linear_layer_that_does_more_is_left_alone() -> None:
    class Router(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).softmax(-1)

    class Grouped(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.einsum("...k,nk->...n", input.flatten(1), self.weight)

    assert multiplies_only(torch.nn.Linear(32, 16))
    for layer in (Router(32, 16), Grouped(32, 16), torch.nn.Conv1d(32, 16, 1)):
        assert not multiplies_only(layer)


@pytest.mark.slow
def test_a_model_that_asks_for_a_weight_itself_gets_its_decode(tmp_path: Path) -> None:
    """Mamba multiplies with dt_proj.weight, StarCoder initializes c_proj.weight, RWKV writes to what it has loaded."""
    configs = (
        transformers.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=16, time_step_rank=16),
        transformers.GPTBigCodeConfig(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64),
        transformers.RwkvConfig(vocab_size=96, hidden_size=64, num_hidden_layers=4, rescale_every=2, context_length=64),
    )
    for number, config in enumerate(configs):
        source, path = tmp_path / f"{number}", tmp_path / f"{number}q"
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
        ptqpipe.convert(source, out=path, format="nvfp4", container="ptqpipe")
        model, exact = load(path, dtype="float32"), load_model(path)
        assert all(layer.unpacked is None for layer in layers(model).values())
        for _ in range(2):
            assert distance(logits(model), logits(exact)) < 1e-5
        for name, layer in layers(model).items():
            assert torch.equal(layer.weight, exact.get_submodule(name).weight)
        assert {layer.weight.dtype for layer in layers(model.to(torch.bfloat16)).values()} == {torch.bfloat16}
