"""Compiled kernels around the packed layers: who gets one, and that the model computes what it computed before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.kernels import cpu_library
from ptqpipe.runtime import compiled, load
from ptqpipe.runtime.linear import PackedLinear, Siblings
from tests.runtime.models import TOKENS, quantized, save_source
from tests.serving.engine.models import has_panels

pytestmark = pytest.mark.skipif(
    not has_panels(), reason="this machine has no kernel for bfloat16 panels, or a faster way"
)
KINDS = ("llama", "tied", "biased", "qwen3", "qwen3_moe", "mixtral", "gemma3", "phi3", "gpt_oss")


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LEAST_NUMBERS", 0)


def packed(kind: str, folder: Path, scheme: str = "nvfp4") -> Any:
    """The model as a service has it: bfloat16, NVFP4."""
    source = save_source(kind, folder / "source")
    path = quantized(source, "compressed_tensors", scheme).save(folder / "packed")
    return load(path, dtype="bfloat16").eval()


def groups(model: Any) -> set[tuple[str, ...]]:
    """Names of the layers that are computed together."""
    names = {module: name for name, module in model.named_modules()}
    found = {m.siblings for m in names if isinstance(m, PackedLinear) and m.siblings is not None}
    return {tuple(names[layer] for layer in siblings.layers) for siblings in found}


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_model_computes_what_it_did(kind: str, tmp_path: Path) -> None:
    model = packed(kind, tmp_path)
    positions = torch.arange(TOKENS.shape[1])[None].expand(2, -1)
    before = model(TOKENS, position_ids=positions, use_cache=False).logits.float()
    compiled.use_kernels(model)
    after = model(TOKENS, position_ids=positions, use_cache=False).logits.float()
    # Sums in another order: a rounding to bfloat16 here and there.
    assert float((after - before).abs().max()) <= 0.03 * float(before.abs().max())
    assert torch.equal(after.argmax(-1), before.argmax(-1)) or float((after - before).abs().mean()) < 2e-3


def test_a_query_a_key_and_a_value_go_together_and_so_do_a_gate_and_its_up_projection(tmp_path: Path) -> None:
    model = packed("llama", tmp_path)
    compiled.use_kernels(model)
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        assert tuple(f"{attention}.{leaf}_proj" for leaf in "qkv") in groups(model)
        assert (f"{mlp}.gate_proj", f"{mlp}.up_proj") in groups(model)
    assert len(groups(model)) == 4


def test_quantized_inputs_stay_alone(tmp_path: Path) -> None:
    """Each layer quantizes its own."""
    model = packed("llama", tmp_path, "fp8")
    compiled.use_kernels(model)
    assert groups(model) == set()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "head", "embedding"), [("llama", True, False), ("tied", True, True), ("gemma3", False, False)]
)
def test_a_head_gets_panels_and_an_embedding_that_shares_them(
    kind: str, head: bool, embedding: bool, tmp_path: Path
) -> None:
    """Gemma scales what its embedding gives, by a module of its own."""
    model = packed(kind, tmp_path)
    before = model.get_input_embeddings()(TOKENS)
    compiled.use_kernels(model)
    assert (model.lm_head.weight is None) == head
    assert (model.get_input_embeddings().weight is None) == embedding
    assert torch.equal(model.get_input_embeddings()(TOKENS), before)


@torch.inference_mode()
def test_small_layers_get_panels_where_bfloat16_has_no_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain model: not one of its layers is left to torch's bfloat16 product."""
    monkeypatch.undo()  # the least number of this file's other tests
    model = load(save_source("llama", tmp_path), dtype="bfloat16").eval()
    cpu_library.force_isa("avx2")
    try:
        before = model(TOKENS, use_cache=False).logits.float()
        compiled.use_kernels(model)
        after = model(TOKENS, use_cache=False).logits.float()
    finally:
        cpu_library.force_isa(None)
    assert all(m.weight is None for m in model.modules() if type(m) is torch.nn.Linear)
    assert float((after - before).abs().max()) <= 0.03 * float(before.abs().max())


def test_norms_of_another_kind_keep_their_own_forward(tmp_path: Path) -> None:
    """Gemma multiplies by one more than the weight, in float32."""
    for kind, gets in (("llama", True), ("qwen3", True), ("gemma3", False)):
        model = packed(kind, tmp_path / kind)
        compiled.use_kernels(model)
        norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
        assert norms
        assert all(("forward" in vars(norm)) == gets for norm in norms), kind


@torch.inference_mode()
def test_siblings_asked_with_other_tensors_compute_their_own(tmp_path: Path) -> None:
    model = packed("biased", tmp_path)
    attention = model.model.layers[0].self_attn
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    g = torch.Generator().manual_seed(2)
    one, other = (torch.randn(1, 5, layers[0].in_features, generator=g).bfloat16() for _ in range(2))
    alone = {(layer, at): layer(x) for layer in layers for at, x in enumerate((one, other))}
    siblings = Siblings(layers)
    for layer in layers:
        layer.siblings = siblings
    q, k, v = layers
    for layer, at in ((q, 0), (k, 1), (v, 0), (k, 0), (k, 0), (q, 1), (v, 1), (k, 1), (q, 0), (k, 0), (v, 0)):
        assert torch.equal(layer((one, other)[at]), alone[layer, at])


@torch.no_grad()
def test_siblings_see_a_write_to_their_input_between_them(tmp_path: Path) -> None:
    """Of a tensor that counts its writes, which those of inference mode do not."""
    attention = packed("biased", tmp_path).model.layers[0].self_attn
    query, key, value = layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    x = torch.randn(1, 5, query.in_features, generator=torch.Generator().manual_seed(2)).bfloat16()
    keys, other_keys, other_values = key(x), key(-x), value(-x)
    siblings = Siblings(layers)
    for layer in layers:
        layer.siblings = siblings
    query(x)
    x.neg_()
    assert torch.equal(key(x), other_keys)
    assert torch.equal(value(x), other_values)
    query(x)
    with torch.inference_mode():  # the tensor is from outside it
        x.neg_()
        assert torch.equal(key(x), keys)


@torch.inference_mode()
def test_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """The kernels know addresses alone: what torch would have refused must not be read as something else."""
    model = packed("llama", tmp_path)
    compiled.use_kernels(model)
    layer, norm, width = model.model.layers[0].mlp.gate_proj, model.model.norm, model.config.hidden_size
    for x in (torch.ones(1, width // 2).bfloat16(), torch.ones(1, width)):
        with pytest.raises(FormatError, match="an input of"):
            model.lm_head(x)
    for module in (layer, norm):
        with pytest.raises((FormatError, RuntimeError)):
            module(torch.ones(1, width // 2).bfloat16())
    own = norm(torch.ones(width))  # another dtype: the module's own
    assert torch.allclose(own, norm.weight.float(), rtol=1e-5)


@torch.inference_mode()
def test_an_input_that_was_written_to_is_another_one(tmp_path: Path) -> None:
    model = packed("llama", tmp_path)
    compiled.use_kernels(model)
    mlp = model.model.layers[0].mlp
    x = torch.randn(1, 3, mlp.gate_proj.in_features).bfloat16()
    mlp.gate_proj(x)
    mlp.up_proj(x)
    x.mul_(2)  # a buffer that a model uses again
    y = mlp.gate_proj(x)
    mlp.up_proj(x)
    assert torch.equal(y, mlp.gate_proj(x.clone()))
