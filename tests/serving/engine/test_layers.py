"""Decoder layers in one compiled call, and steps of a whole model without its forward: the bits are those of
transformers' code, and other layers and models keep their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from ptqpipe.numerics.kernels import cpu_library
from ptqpipe.runtime import load
from ptqpipe.runtime.compiled import use_kernels
from ptqpipe.runtime.linear import PackedLinear
from ptqpipe.serving.engine import EngineOptions, model_runner as runners
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.fused_layers import use_fused_layers
from ptqpipe.serving.engine.model_runner import ModelRunner
from tests.runtime.models import linear_layers, quantized, save_source
from tests.serving.engine.models import has_kernels, has_panels, steps

pytestmark = pytest.mark.skipif(not has_panels(), reason="this machine has no panels, or a faster way for many rows")
BLOCK = 4
WITH_PANELS = [name for name in cpu_library.known_isas() if name in ("avx512", "avx2", "neon")]


@pytest.fixture(params=WITH_PANELS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu_library.force_isa(request.param)
    yield request.param
    cpu_library.force_isa(None)


def checkpoint(kind: str, folder: Path) -> Path:
    source = save_source(kind, folder / "source")
    return Path(quantized(source, "compressed_tensors", "nvfp4").save(folder / "packed"))


def runner(path: Path) -> ModelRunner:
    """As a service has it."""
    model = load(path, dtype="bfloat16", activations="none").eval()
    use_kernels(model, every=True)
    return ModelRunner(model, EngineOptions(1 << 24, max_len=64, max_seqs=3, block_size=BLOCK))


@pytest.mark.parametrize(("kind", "packed"), [("llama", False), ("biased", True)])
def test_steps_have_the_bits_of_separate_operators(
    kind: str, packed: bool, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(kind, tmp_path) if packed else save_source(kind, tmp_path)
    run = runner(path)
    assert has_kernels(run) == [True, True]
    monkeypatch.setattr(runners, "use_fused_layers", lambda model, attention: [])
    plain = runner(path)
    assert has_kernels(plain) == [False, False]
    assert not any(pages.keys.any() or pages.values.any() for pages in run.attention.pages.values())
    for one, other in zip(steps(run), steps(plain), strict=True):
        assert torch.equal(one, other)
    for layer, pages in run.attention.pages.items():
        assert torch.equal(pages.keys, plain.attention.pages[layer].keys)
        assert torch.equal(pages.values, plain.attention.pages[layer].values)


def test_a_head_in_fp8_beside_nvfp4_is_multiplied_packed(isa: str, tmp_path: Path) -> None:
    """Its numbers are those that torch's own FP8 has for the bytes of the file."""
    source, layers = save_source("llama", tmp_path / "source"), linear_layers("nvfp4")
    made = quantized(source, "compressed_tensors", lambda name: "fp8_dynamic" if name == "lm_head" else layers(name))
    run = runner(made.save(tmp_path / "packed"))
    head, calls = run.model.lm_head, []
    assert isinstance(head, PackedLinear)
    assert head.packed.fmt.name == "fp8_channel"
    assert has_kernels(run) == [True, True]
    head.register_forward_hook(lambda module, args, out: calls.append((args[0].float(), out.float())))
    steps(run)
    codes, scales = made.tensors["lm_head.weight"], made.tensors["lm_head.weight_scale"]
    weight = codes.view(torch.float8_e4m3fn).double() * scales.double()
    assert len(calls) >= 5
    for x, out in calls:
        wanted, most = x.double() @ weight.T, x.double().abs() @ weight.T.abs()
        assert ((out - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-20 * most).all()


def test_decode_steps_do_not_reach_the_layers_own_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one token a sequence; a prompt's do."""
    run = runner(checkpoint("llama", tmp_path))
    calls: list[int] = []
    attend = run.attention.attend
    monkeypatch.setattr(run.attention, "attend", lambda layer, *args: (calls.append(layer), attend(layer, *args))[1])
    for tokens, total in ((torch.arange(3, 7), 4), (torch.tensor([5]), 5)):
        run.run(Batch(tokens, torch.tensor([len(tokens) - 1]), (Span(len(tokens), total, (0, 1)),)))
        assert calls == [0, 1]


def test_a_step_is_one_call_for_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls, call = runner(checkpoint("llama", tmp_path)), [], cpu_library.call
    steps_alone(run)
    monkeypatch.setattr(cpu_library, "call", lambda name, *args: (calls.append(name), call(name, *args))[1])
    steps_alone(run)
    assert calls.count("ptq_layers_step") == 3


@pytest.mark.parametrize("kind", ["qwen3", "phi3"])
def test_layers_of_other_parts_keep_their_forward(kind: str, tmp_path: Path) -> None:
    assert not any(has_kernels(runner(checkpoint(kind, tmp_path))))


def test_layers_whose_norms_have_no_weight_keep_their_forward(tmp_path: Path) -> None:
    """OLMo's are in LayerNorm without one."""
    path = checkpoint("llama", tmp_path)
    model = load(path, dtype="bfloat16", activations="none").eval()
    use_kernels(model, every=True)
    own = model.model.layers[0].input_layernorm
    model.model.layers[0].input_layernorm = OlmoLayerNorm(len(own.weight))
    run = ModelRunner(model, EngineOptions(1 << 24, max_len=64, max_seqs=3, block_size=BLOCK))
    assert has_kernels(run) == [False, *[True] * (len(model.model.layers) - 1)]


def test_layers_that_compute_something_else_keep_their_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a Llama layer, but one has a hook, as ranks have, and one scales what it gives."""
    monkeypatch.setattr(runners, "use_fused_layers", lambda model, attention: [])
    run = runner(save_source("llama", tmp_path))
    hooked, scaled = run.model.model.layers
    plain, hook = type(scaled), hooked.mlp.down_proj.register_forward_hook(lambda module, args, out: out * 2)

    class Scaled(plain):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            return 2 * super().forward(*args, **options)  # type: ignore[no-any-return]

    scaled.__class__ = Scaled
    use_fused_layers(run.model, run.attention)
    assert has_kernels(run) == [False, False]
    scaled.__class__ = plain
    use_fused_layers(run.model, run.attention)
    assert has_kernels(run) == [False, True]
    hook.remove()
    use_fused_layers(run.model, run.attention)
    assert has_kernels(run) == [True, True]


def test_a_hook_that_comes_later_is_called(tmp_path: Path) -> None:
    run = runner(save_source("llama", tmp_path))
    calls: list[torch.Size] = []
    run.model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: calls.append(out.shape))
    for count, total in ((3, 3), (1, 4)):
        run.run(Batch(torch.arange(count) + 3, torch.tensor([count - 1]), (Span(count, total, (0,)),)))
    assert [shape[1] for shape in calls] == [3, 1]


@pytest.mark.parametrize("change", ["in place", "another tensor"])
def test_what_a_model_does_between_its_layers_is_seen(change: str, tmp_path: Path) -> None:
    """The first layer computes those behind it ahead of the model: they are computed anew where the model differs."""
    run = runner(save_source("llama", tmp_path))
    layers = run.model.model.layers

    def changed(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        if out.shape[1] > 1:  # a prompt
            return out
        if change == "in place":
            out.mul_(2)
            return out
        return out * 2

    layers[0].register_forward_hook(changed)
    found = steps_alone(run)
    for layer in layers:
        del layer.forward
    assert all(torch.equal(one, other) for one, other in zip(steps_alone(run), found, strict=True))


def calls_of_forward(run: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with how many tokens each forward of the model's decoder had from now on."""
    calls: list[int] = []
    own = type(run.model.model).forward

    def forward(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        calls.append(input_ids.shape[1])
        return own(self, input_ids=input_ids, **options)

    monkeypatch.setattr(type(run.model.model), "forward", forward)
    return calls


@pytest.mark.parametrize(("kind", "packed"), [("llama", False), ("biased", True)])
def test_whole_steps_have_the_bits_of_the_models_forward(
    kind: str, packed: bool, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(kind, tmp_path) if packed else save_source(kind, tmp_path)
    monkeypatch.setattr(runners, "decode_step", lambda *args: None)
    plain = runner(path)
    monkeypatch.undo()
    run = runner(path)
    assert not any(pages.keys.any() or pages.values.any() for pages in run.attention.pages.values())
    calls = calls_of_forward(run, monkeypatch)
    found = steps(run)
    assert calls == [18, 4]  # the prompts, and the step in which one sequence has two tokens
    expected = steps(plain)
    assert calls == [18, 4, 18, 3, 3, 2, 4]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for layer, pages in run.attention.pages.items():
        assert torch.equal(pages.keys, plain.attention.pages[layer].keys)
        assert torch.equal(pages.values, plain.attention.pages[layer].values)


def test_a_step_gives_the_logits_that_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, also of some of the tokens and of none."""
    run = runner(save_source("llama", tmp_path))
    spans = tuple(Span(1, 1, (at,)) for at in range(3))
    calls = calls_of_forward(run, monkeypatch)
    every, some, none = (
        run.run(Batch(torch.tensor([7, 8, 9]), torch.tensor(wanted, dtype=torch.int64), spans))
        for wanted in ([0, 1, 2], [0, 2], [])
    )
    assert torch.equal(some, every[[0, 2]])
    assert none.shape == (0, every.shape[1])
    assert calls == [3]  # the last alone


@pytest.mark.parametrize("part", ["model", "decoder", "layer", "product"])
def test_a_step_with_a_hook_is_the_models(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner(save_source("llama", tmp_path))
    decoder = run.model.model
    parts = {
        "model": run.model,
        "decoder": decoder,
        "layer": decoder.layers[1],
        "product": decoder.layers[0].mlp.up_proj,
    }
    calls = calls_of_forward(run, monkeypatch)
    steps_alone(run)
    assert calls == [4]
    seen: list[int] = []
    parts[part].register_forward_hook(lambda *args: seen.append(1))
    steps_alone(run)
    assert calls == [4, 4, 1, 1, 1]
    assert len(seen) == 4


def test_a_model_that_computes_something_else_keeps_its_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of a Llama model, but what it gives is scaled."""
    run = runner(save_source("llama", tmp_path))
    plain = steps_alone(run)
    scaled_class = type(run.model.model)
    own = scaled_class.forward

    def scaled(self: Any, *args: Any, **options: Any) -> Any:
        out = own(self, *args, **options)
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    monkeypatch.setattr(scaled_class, "forward", scaled)
    other = runner(tmp_path)
    assert has_kernels(other) == [True, True]
    for one, twice in zip(plain, steps_alone(other), strict=True):
        assert torch.equal(2 * one, twice)


def steps_alone(run: ModelRunner) -> list[torch.Tensor]:
    """Logits of a prompt and of three tokens of one sequence."""
    found = [run.run(Batch(torch.arange(3, 7), torch.tensor([3]), (Span(4, 4, (0,)),)))]
    for total in (5, 6, 7):
        found.append(run.run(Batch(torch.tensor([total]), torch.tensor([0]), (Span(1, total, (0, 1)),))))
    return found
