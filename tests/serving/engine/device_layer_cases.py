"""The claims about decoder layers on a GPU in few launches. ``test_device_layers.py`` runs this file in a process.

Under Triton's interpreter on CPU tensors, with Triton's products in the place of the CPU's; and on a CUDA device where
there is one.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from ptqpipe.numerics.kernels import cpu_linear, triton_attention, triton_layer, triton_linear
from ptqpipe.numerics.kernels.triton import interpreting
from ptqpipe.runtime import load, packed
from ptqpipe.serving.engine import EngineOptions, fused_layers, model_runner as runners
from ptqpipe.serving.engine.attention import PagedAttention
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.fused_layers import BOUND, use_fused_layers
from ptqpipe.serving.engine.graphs import StepGraphs
from ptqpipe.serving.engine.model_runner import ModelRunner
from tests.runtime.models import SIZES, quantized
from tests.serving.engine.models import has_kernels, steps

DEVICE = "cpu" if interpreting() else "cuda"
BLOCK = 4
SMALL = SIZES | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,  # biases of queries, keys and values
    "qwen3": transformers.Qwen3Config,  # a norm of each head
    "mistral": transformers.MistralConfig,  # a window
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of weights lie in rows, and Triton multiplies."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cpu_linear, "has_panels", lambda *given: False)
        monkeypatch.setattr(packed, "_kernel", product)


def product(x: torch.Tensor, w: packed.PackedWeight, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Of the GPU."""
    return triton_linear.linear(x, w.data, w.scales, w.factor, w.fmt, w.shape, bias)


def source(kind: str, folder: Path, **sizes: Any) -> Path:
    """A seeded bfloat16 model of a config's class, its norms and biases anything but ones and zeros."""
    options = SMALL | ({"sliding_window": 3} if kind == "mistral" else {}) | sizes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**options), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1 if "norm" in name else 0, 0.1)
    model.save_pretrained(folder)
    return folder


def checkpoint(kind: str, folder: Path, **sizes: Any) -> Path:
    """The same in NVFP4."""
    plain = source(kind, folder / "source", **sizes)
    return Path(quantized(plain, "compressed_tensors", "nvfp4").save(folder / "packed"))


def runner(path: Path, *, max_seqs: int = 3, activations: str = "none") -> ModelRunner:
    """As a service has it."""
    model = load(path, dtype="bfloat16", device=DEVICE, activations=activations).eval()
    return ModelRunner(model, EngineOptions(1 << 24, max_len=64, max_seqs=max_seqs, block_size=BLOCK))


def plain_runner(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ModelRunner:
    """Without these layers."""
    monkeypatch.setattr(runners, "use_fused_layers", lambda model, attention: [])
    made = runner(path, **options)
    monkeypatch.setattr(runners, "use_fused_layers", use_fused_layers)
    assert not any(has_kernels(made))
    return made


def assert_near(one: torch.Tensor, other: torch.Tensor, bound: float = BOUND) -> None:
    """Each row, in the root mean square."""
    gap = (one.float() - other.float()).square().mean(-1).sqrt()
    assert bool((gap <= bound * other.float().square().mean(-1).sqrt()).all())


@pytest.mark.parametrize(
    ("kind", "packed_weights"),
    [("llama", False), ("qwen2", True), ("qwen3", True), ("mistral", False)],
)
def test_steps_are_those_of_separate_operators(
    kind: str, packed_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(kind, tmp_path) if packed_weights else source(kind, tmp_path)
    plain, run = plain_runner(path, monkeypatch), runner(path)
    assert has_kernels(run) == [True, True]
    assert not any(pages.keys.any() or pages.values.any() for pages in run.attention.pages.values())
    for one, other in zip(steps(run), steps(plain), strict=True):
        assert_near(one, other)
        assert_near(other.gather(-1, one.argmax(-1, keepdim=True)), other.amax(-1, keepdim=True))
    for layer, pages in run.attention.pages.items():
        for mine, own in ((pages.keys, plain.attention.pages[layer].keys), (pages.values, None)):
            assert_near(mine.flatten(2), (plain.attention.pages[layer].values if own is None else own).flatten(2))


def calls_of(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[int]:
    """Fills with the rows of each call's first tensor from now on."""
    calls: list[int] = []
    own = getattr(place, name)
    monkeypatch.setattr(place, name, lambda x, *given, **more: (calls.append(len(x)), own(x, *given, **more))[1])
    return calls


def singles(count: int, total: int) -> Batch:
    """A token each of sequences that have a page of their own."""
    spans = tuple(Span(1, total, (at,)) for at in range(count))
    return Batch(torch.arange(count) % 90 + 3, torch.arange(count), spans)


def test_a_step_takes_four_products_a_layer_and_no_other_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner(checkpoint("qwen2", tmp_path))
    products, norms = calls_of(monkeypatch, triton_linear, "linear"), calls_of(monkeypatch, triton_layer, "norm")
    stores, seen = (
        calls_of(monkeypatch, triton_attention, "store"),
        calls_of(monkeypatch, triton_attention, "attention"),
    )
    run.graphs = None
    run.run(singles(2, 1))
    assert (len(products), len(norms), len(stores), len(seen)) == (8, 4, 0, 2)
    run.run(Batch(torch.tensor([3, 4, 5]), torch.tensor([1, 2]), (Span(2, 2, (0,)), Span(1, 2, (1,)))))
    assert (len(products), len(norms), len(stores), len(seen)) == (8 + 14, 4, 2, 4)


def test_joined_weights_are_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint("qwen2", tmp_path)
    plain, run = plain_runner(path, monkeypatch), runner(path)
    for one, other in zip(run.model.model.layers, plain.model.model.layers, strict=True):
        names = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
        for part, leaves in names:
            mine = [getattr(getattr(one, part), leaf) for leaf in leaves]
            own = [getattr(getattr(other, part), leaf) for leaf in leaves]
            for kind in ("data", "scales"):
                tensors = [getattr(module.packed, kind) for module in mine]
                places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
                assert len(places) == 1
                assert tensors[0].untyped_storage().nbytes() == sum(tensor.nbytes for tensor in tensors)
            for module, before in zip(mine, own, strict=True):
                assert torch.equal(module.packed.dequantize(), before.packed.dequantize())


def test_weights_that_do_not_go_together_are_multiplied_by_their_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of queries, keys and values that are quantized, and of a gate and an up part of which one is kept."""
    kept = source("llama", tmp_path / "source")
    pick = lambda name: None if "up_proj" in name or "lm_head" in name or "embed" in name else "nvfp4_w4a4"  # noqa: E731
    path = Path(quantized(kept, "compressed_tensors", pick).save(tmp_path / "packed"))
    plain, run = plain_runner(path, monkeypatch, activations="simulated"), runner(path, activations="simulated")
    assert run.model.model.layers[0].self_attn.q_proj.quantizer is not None
    assert has_kernels(run) == [True, True]
    for one, other in zip(steps(run), steps(plain), strict=True):
        assert_near(one, other, 4 * BOUND)  # a step of a code is many of bfloat16


def test_more_rows_than_the_products_take_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, count = checkpoint("llama", tmp_path, num_hidden_layers=1), triton_linear.MANY + 6
    plain, run = plain_runner(path, monkeypatch, max_seqs=count), runner(path, max_seqs=count)
    plain.graphs = run.graphs = None
    gates = calls_of(monkeypatch, triton_layer, "gated")
    assert_near(run.run(singles(count, 1)), plain.run(singles(count, 1)))
    assert gates == [count]


def test_recorded_steps_have_these_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = source("qwen3", tmp_path)
    plain, run = plain_runner(path, monkeypatch), runner(path)
    plain.graphs = None
    if DEVICE == "cpu":
        monkeypatch.setattr(StepGraphs, "_graph", lambda self, size: lambda: self._compute(size))
        run.graphs = StepGraphs(run.model, run.attention, max_len=32, max_seqs=3, spare=run.blocks - 1)
    gates = calls_of(monkeypatch, triton_layer, "gated")
    for one, other in zip(steps(run), steps(plain), strict=True):
        assert_near(one, other)
    assert run.graphs is not None
    assert {size: replay is not None for size, replay in run.graphs._recorded.items()} == {2: True, 3: True}
    assert set(gates) == {2, 3}


def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str = "llama") -> ModelRunner:
    """A plain model of one layer that has kept its forward so far."""
    return plain_runner(source(kind, tmp_path, num_hidden_layers=1), monkeypatch)


def takes(run: ModelRunner) -> bool:
    """Whether the layer gets the forward, which it loses again. The pages are zeros afterwards."""
    use_fused_layers(run.model, run.attention)
    [fused] = has_kernels(run)
    assert not any(pages.keys.any() or pages.values.any() for pages in run.attention.pages.values())
    for layer in run.model.model.layers:
        vars(layer).pop("forward", None)
    return fused


@pytest.mark.parametrize("place", ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"])
def test_a_norm_with_another_epsilon_or_another_kind_is_noticed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(monkeypatch, tmp_path, "qwen3")
    assert takes(run)
    layer = run.model.model.layers[0]
    norm = getattr(layer.self_attn if place[1:] == "_norm" else layer, place)
    own = type(norm)

    class OtherEpsilon(own):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.float()
            root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.25 * self.variance_epsilon)
            return self.weight * (x * root).bfloat16()

    class OnePlus(own):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float().pow(0) * x + own.forward(self, x)  # type: ignore[no-any-return]

    for other in (OtherEpsilon, OnePlus):
        norm.__class__ = other
        assert not takes(run)
    norm.__class__ = own
    assert takes(run)


@pytest.mark.parametrize("missing", ["first residual", "second residual", "activation", "factor"])
def test_a_layer_that_adds_something_else_is_noticed(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(monkeypatch, tmp_path)
    layer = run.model.model.layers[0]

    class Other(type(layer)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            y = self.self_attn(hidden_states=self.input_layernorm(x), **options)[0]
            y = y if missing == "first residual" else x + y
            z = self.post_attention_layernorm(y)
            if missing == "activation":
                z = self.mlp.down_proj(torch.nn.functional.gelu(self.mlp.gate_proj(z)) * self.mlp.up_proj(z))
            else:
                z = self.mlp(z) * (1.125 if missing == "factor" else 1)
            return z if missing == "second residual" else y + z  # type: ignore[no-any-return]

    layer.__class__ = Other
    assert not takes(run)


@pytest.mark.parametrize(("share", "factor"), [(0.05, 0.22), (0.2, 0.22), (0.2, 0.9), (1.0, 0.9)])
def test_a_factor_of_what_is_added_is_noticed_however_little_that_is(
    share: float, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granite's layers have such factors and a Llama layer's parts."""
    run = tiny(monkeypatch, tmp_path)
    layer = run.model.model.layers[0]
    with torch.no_grad():
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight *= share
    assert takes(run)

    class Other(type(layer)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            y = x + factor * self.self_attn(hidden_states=self.input_layernorm(x), **options)[0]
            z = self.post_attention_layernorm(y)
            return y + factor * self.mlp(z)  # type: ignore[no-any-return]

    layer.__class__ = Other
    assert not takes(run)


@pytest.mark.parametrize("error", [AttributeError, KeyError])
def test_a_layer_that_cannot_be_asked_keeps_its_forward(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(monkeypatch, tmp_path)
    layer = run.model.model.layers[0]

    class Other(type(layer)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            raise error("no positions")

    layer.__class__ = Other
    assert not takes(run)


def test_what_a_layer_is_given_beside_goes_to_its_own_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(monkeypatch, tmp_path)
    layer, given = run.model.model.layers[0], []

    class Other(type(layer)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, more: object = None, **options: Any) -> Any:
            given.append(more)
            return super().forward(x, **options)

    layer.__class__ = Other
    use_fused_layers(run.model, run.attention)
    assert has_kernels(run) == [True]
    run.graphs = None
    given.clear()
    run.run(singles(2, 1))
    assert not given
    call = layer.forward
    layer.forward = lambda x, **options: call(x, more=3, **options)
    run.run(singles(2, 1))
    assert given == [3]


def test_another_convention_of_rotary_embeddings_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of neighbours instead of halves, and to the other side."""
    run = tiny(monkeypatch, tmp_path)
    assert takes(run)

    def of_neighbours(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    own = modeling_llama.rotate_half
    for other in (of_neighbours, lambda x: -own(x)):
        monkeypatch.setattr(modeling_llama, "rotate_half", other)
        assert not takes(run)


@pytest.mark.parametrize("change", [{"window": 3}, {"scaling": 0.35}, {"scaling": 0.21}])
def test_other_terms_of_the_attention_are_noticed(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than those that the layer gives: as if it had been heard wrong."""
    run = tiny(monkeypatch, tmp_path)
    attend = fused_layers.Listener.attend

    def misheard(self: Any, layer: int, *given: Any) -> torch.Tensor:
        out = attend(self, layer, *given)
        self.terms[layer] = replace(self.terms[layer], **change)
        return out

    monkeypatch.setattr(fused_layers.Listener, "attend", misheard)
    assert not takes(run)


@pytest.mark.parametrize("term", [{"softcap": 30.0}, {"sinks": torch.zeros(4)}])
def test_soft_caps_and_sinks_keep_their_forward(
    term: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(monkeypatch, tmp_path)
    attend = PagedAttention.attend
    there = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in term.items()}
    monkeypatch.setattr(
        fused_layers.Listener, "attend",
        lambda self, layer, q, k, v, terms: (
            self.terms.update({layer: replace(terms, **there)}), attend(self, layer, q, k, v, terms)
        )[1],
    )  # fmt: skip
    assert not takes(run)


def test_hooks_are_called_whenever_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(monkeypatch, tmp_path)
    layer = run.model.model.layers[0]
    calls: list[int] = []
    hook = layer.mlp.register_forward_hook(lambda module, args, out: calls.append(out.shape[1]))
    assert not takes(run)
    hook.remove()
    use_fused_layers(run.model, run.attention)
    assert has_kernels(run) == [True]
    run.graphs = None
    calls.clear()
    run.run(singles(2, 1))
    layer.mlp.register_forward_hook(lambda module, args, out: calls.append(out.shape[1]))
    run.run(singles(3, 1))
    assert calls == [3]


def test_how_far_from_the_bound_a_step_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of it at most: what takes the other neighbour is the exception."""
    gaps: list[float] = []

    def alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
        gap, size = (x.float().square().mean(-1).sqrt() for x in (found.float() - expected.float(), expected))
        gaps.append(float((gap / size).max()))
        return True

    monkeypatch.setattr(fused_layers, "near", alike)
    runner(checkpoint("qwen3", tmp_path))
    assert len(gaps) == 10
    assert max(gaps) <= BOUND / 4
