"""The reverse pass: gradients at linear layers against the Fisher information of logits, pushed back by autograd."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ptqpipe.calibration import backward as reverse_pass
from ptqpipe.calibration.activations import InMemory
from ptqpipe.calibration.backward import draw_labels, enough, least_step, run_backward, streams, thinned
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.gradients import Gradients, rows_of
from ptqpipe.calibration.inputs import OUT_ROWS
from ptqpipe.calibration.runner import Runner
from ptqpipe.errors import NumericsError
from ptqpipe.models.source import Source
from ptqpipe.runtime.skeleton import Skeleton
from tests import tiny
from tests.calibration.models import make_model, make_windows


@contextlib.contextmanager
def opened(model: Path, windows: torch.Tensor) -> Iterator[Runner]:
    with (
        Source.open(model) as source,
        Runner.open(Skeleton.of(source, dtype=torch.float32), windows) as runner,
    ):
        yield runner


def gradients_of(runner: Runner, modules: list[str], seed: int = 0) -> dict[str, Gradients]:
    return dict(run_backward(runner, seed=seed, store=InMemory, modules=lambda _block: modules))


@pytest.mark.parametrize("kind", ["llama_tied", "gemma2", "gpt2", "gpt_oss"])
def test_logits_behind_the_last_block_are_the_models_own(kind: str, tmp_path: Path) -> None:
    """Tied heads and capped logits, too."""
    import transformers

    path, windows = make_model(tmp_path / kind, kind), make_windows(samples=2)
    with opened(path, windows) as runner:
        for _ in runner.layers():
            pass
        with runner.head(), torch.no_grad():
            found = runner.logits(runner.batches[0], runner.activations.get(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(windows).logits
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_slopes_of_drawn_labels_have_the_fisher_information_and_one_length(scale: float) -> None:
    """However sure the distribution is, at most 0.98 for one label here; and their mean is zero."""
    p, draws = torch.softmax(torch.tensor([0.0, 0.3, -0.2, 1.0, 0.1]) * scale, 0), 200_000
    labels, counts = draw_labels(p.expand(draws, 5).contiguous(), torch.Generator().manual_seed(0))
    slopes = counts.unsqueeze(1) * (torch.nn.functional.one_hot(labels, 5) - p)
    fisher = torch.diag(p) - torch.outer(p, p)
    assert torch.allclose(slopes.t() @ slopes / draws, fisher, rtol=0, atol=0.01 * float(fisher.trace()))
    assert torch.allclose(slopes.square().sum(1), fisher.trace().expand(draws), rtol=0.02)
    assert float(slopes.mean(0).abs().max()) < 0.01 * float(fisher.trace()) ** 0.5


def test_tokens_of_which_the_model_is_sure_have_no_slope() -> None:
    """Not NaN, though their labels cannot be told from their distribution; nor is a label drawn that cannot be."""
    sure = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    labels, counts = draw_labels(sure, torch.Generator().manual_seed(0))
    assert torch.equal(counts.unsqueeze(1) * (torch.nn.functional.one_hot(labels, 3) - sure), torch.zeros(3, 3))
    split = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).expand(1000, 5).contiguous()
    labels, counts = draw_labels(split, torch.Generator().manual_seed(0))
    assert set(labels.tolist()) == {1, 3}
    assert torch.equal(counts.abs(), torch.ones(1000))


def test_moments_of_gradients_are_the_fisher_information_of_the_logits(tmp_path: Path) -> None:
    """On average over labels; exactly, at the output of v_proj in the first of two layers: the sum over tokens of
    J^T (diag p - p p^T) J, J the derivative of the logits of all tokens by that output."""
    path, draws, tokens = make_model(tmp_path / "llama", "llama"), 600, 3
    window = make_windows(samples=1, seqlen=tokens)
    with opened(path, window.repeat(draws, 1)) as runner:
        found = gradients_of(runner, ["self_attn.v_proj"])["model.layers.0"]
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    value = torch.zeros(1, tokens, 32)  # what is added to the output

    def logits(change: torch.Tensor) -> torch.Tensor:
        handle = model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _m, _a, out: out + change)
        try:
            return model(window).logits[0]
        finally:
            handle.remove()

    jacobian = torch.autograd.functional.jacobian(logits, value)[:, :, 0]  # [tokens, vocabulary, tokens, 32]
    p = logits(value).detach().softmax(-1)
    fisher = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    exact = torch.einsum("tvsi,tvw,twsj->ij", jacobian, fisher, jacobian) / tokens
    # the energies of this layer's inputs are alike: they are normalized
    (outer,) = found.outputs["self_attn.v_proj"]
    assert float((outer - exact).norm() / exact.norm()) < 0.15
    assert float(outer.trace() / exact.trace()) == pytest.approx(1.0, abs=0.06)
    (last,) = found.last
    assert torch.equal(last, last.t())


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("llama", "self_attn.k_proj"),
        ("gpt2", "mlp.c_fc"),  # [in, out], with a bias
        ("deepseek_v3", "mlp.shared_experts.up_proj"),  # of which tokens are one dimension
    ],
)
def test_squares_of_the_gradients_of_a_weight_are_those_of_autograd(kind: str, module: str, tmp_path: Path) -> None:
    """Of the whole model's loss in each window, at the labels that the reverse pass draws."""
    import transformers

    path, windows = make_model(tmp_path / kind, kind), make_windows(samples=3)
    has = lambda block: [module] if module in dict(block.module.named_modules()) else []  # noqa: E731
    with opened(path, windows) as runner:
        found = dict(run_backward(runner, seed=7, store=InMemory, modules=has, weights=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    block = next(name for name in found if found[name].weights)
    weight = model.get_submodule(f"{block}.{module}").weight
    squares, along = torch.zeros(weight.shape, dtype=torch.float64), list[torch.Tensor]()
    for number, window in enumerate(windows):
        logits = model(window[None]).logits[0]
        drawn = torch.Generator().manual_seed(7 * 1_000_003 + number)
        labels, counts = draw_labels(logits.detach().softmax(-1), drawn)
        (d,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels, reduction="none") @ counts, weight)
        squares = squares + d.double().square() / windows.numel()
        along.append((d * weight.detach()).double().sum() / window.numel() ** 0.5)
    squares = squares.t() if kind == "gpt2" else squares
    of = found[block].weights[module]
    torch.testing.assert_close(of.rows.double(), squares.sum(1), rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(of.columns.double(), squares.sum(0), rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(of.along.double(), torch.stack(along), rtol=1e-3, atol=1e-5)


def test_a_module_that_is_not_given_every_token_at_once_has_no_squares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which windows its tokens are of is not known. What is known token by token is there."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def in_halves(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return torch.cat([self.down_proj(half) for half in h.chunk(2, dim=1)], 1)

    monkeypatch.setattr(LlamaMLP, "forward", in_halves)
    names = ["mlp.up_proj", "mlp.down_proj"]
    with opened(make_model(tmp_path / "llama", "llama"), make_windows(samples=3)) as runner:
        found = dict(run_backward(runner, seed=0, store=InMemory, modules=lambda _: names, weights=True))
    for gradients in found.values():
        assert set(gradients.outputs) == {"mlp.up_proj", "mlp.down_proj"}
        assert set(gradients.weights) == {"mlp.up_proj"}


def test_inputs_that_a_layer_changes_after_their_use_give_no_squares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    def changing(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        out: torch.Tensor = self.down_proj(h)
        h.zero_()
        return out

    monkeypatch.setattr(LlamaMLP, "forward", changing)
    with opened(make_model(tmp_path / "llama", "llama"), make_windows(samples=3)) as runner:
        names = ["mlp.up_proj", "mlp.down_proj"]
        found = dict(run_backward(runner, seed=0, store=InMemory, modules=lambda _: names, weights=True))
    assert all(set(gradients.weights) == {"mlp.up_proj"} for gradients in found.values())


def of_experts(path: Path, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the last decoder layer."""
    with opened(path, windows) as runner:
        return dict(next(run_backward(runner, seed=0, store=InMemory, modules=lambda _: [], weights=True))[1].experts)


def test_one_expert_that_is_given_every_token_has_the_gradients_of_a_dense_layer(tmp_path: Path) -> None:
    import transformers

    shape = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 48, "rope_theta": 10_000.0}
    torch.manual_seed(0)
    dense = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    config = transformers.Qwen3MoeConfig(**shape, num_experts=1, num_experts_per_tok=1, moe_intermediate_size=48)
    moe = transformers.Qwen3MoeForCausalLM(config)
    found = moe.load_state_dict(dense.state_dict(), strict=False)
    assert found.unexpected_keys
    with torch.no_grad():
        for here, there in zip(moe.model.layers, dense.model.layers, strict=True):
            here.mlp.experts.gate_up_proj[0] = torch.cat([there.mlp.gate_proj.weight, there.mlp.up_proj.weight])
            here.mlp.experts.down_proj[0] = there.mlp.down_proj.weight
    dense.save_pretrained(tmp_path / "dense")
    moe.save_pretrained(tmp_path / "moe")
    windows = make_windows(samples=3)
    names = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    with opened(tmp_path / "dense", windows) as runner:
        wanted = gradients_of(runner, names)["model.layers.1"].outputs
    experts = of_experts(tmp_path / "moe", windows)
    assert set(experts) == {f"model.layers.1.mlp.experts.0.{name.removeprefix('mlp.')}" for name in names}
    for name in names:
        (whole,) = wanted[name]
        of_expert = experts[f"model.layers.1.mlp.experts.0.{name.removeprefix('mlp.')}"]
        torch.testing.assert_close(of_expert, whole.diagonal(), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "stack", "gate", "up"),
    [
        ("mixtral", "", "block_sparse_moe.experts.1.w1", "block_sparse_moe.experts.1.w3"),
        ("llama4", "feed_forward.experts.gate_up_proj", "feed_forward.experts.1.gate_proj", ""),
        ("gpt_oss", "mlp.experts.gate_up_proj", "mlp.experts.1.gate_proj", ""),  # by turns, with biases
    ],
)
def test_gate_and_up_of_an_expert_are_told_apart(kind: str, stack: str, gate: str, up: str, tmp_path: Path) -> None:
    """A gate that is zero lets no gradient through to the other half."""
    path, layer = make_model(tmp_path / kind, kind), "model.layers.1"
    up = up or gate.replace("gate", "up")
    tensors = load_file(path / "model.safetensors")
    if not stack:
        tensors[f"{layer}.{gate}.weight"].zero_()
    else:
        width = tensors[f"{layer}.{stack}"].shape[-1]
        places = slice(0, width, 2) if kind == "gpt_oss" else slice(0, width // 2)
        tensors[f"{layer}.{stack}"][1][:, places] = 0
        if kind == "gpt_oss":
            tensors[f"{layer}.{stack}_bias"][1][places] = 0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    found = of_experts(path, make_windows(samples=8))
    assert float(found[f"{layer}.{gate}"].min()) > 0
    assert not found[f"{layer}.{up}"].any()
    assert float(found[f"{layer}.{up.replace('.1.', '.2.')}"].min()) > 0
    if stack:
        assert int((found[f"{layer}.{stack}[1]"] > 0).sum()) == len(found[f"{layer}.{gate}"])


def test_an_expert_that_was_given_few_tokens_has_the_mean_of_all_by_its_share(tmp_path: Path) -> None:
    path = make_model(tmp_path / "qwen3_moe", "qwen3_moe")
    few, many = (of_experts(path, make_windows(samples=n, seqlen=6)) for n in (1, 100))
    of = [few[f"model.layers.1.mlp.experts.{e}.up_proj"] for e in range(4)]
    for each in of:
        torch.testing.assert_close(each / each.sum(), of[0] / of[0].sum())
    apart = [many[f"model.layers.1.mlp.experts.{e}.up_proj"] for e in range(4)]
    assert float((apart[0] / apart[0].sum() - apart[1] / apart[1].sum()).abs().max()) > 1e-3


def test_labels_follow_from_the_seed(tmp_path: Path) -> None:
    path, windows = make_model(tmp_path / "qwen3", "qwen3"), make_windows(samples=3)
    found = []
    for seed in (0, 0, 1):
        with opened(path, windows) as runner:
            found.append(gradients_of(runner, ["mlp.down_proj"], seed)["model.layers.1"].outputs["mlp.down_proj"][0])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_logits_that_are_not_finite_are_an_error_of_the_model(tmp_path: Path) -> None:
    """No label can be drawn from NaN. Every hidden state is finite here, so nothing before the head notices."""
    path, windows = make_model(tmp_path / "llama", "llama"), make_windows(samples=2)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][3, 5] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with opened(path, windows) as runner, pytest.raises(NumericsError, match="logits are not finite; check"):
        gradients_of(runner, ["mlp.down_proj"])


@pytest.mark.parametrize("blocks", [1, 2, 5, 7, 9, 80])
def test_few_hidden_states_are_enough(blocks: int) -> None:
    step = least_step(blocks)
    assert streams(blocks, step) == min(streams(blocks, each) for each in range(1, blocks + 1))
    assert streams(blocks, 1) == blocks + 1


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3, 7])
def test_blocks_that_run_again_give_the_same_gradients(step: int, tmp_path: Path) -> None:
    """With no more hidden states at once than are said to be, and every place closed."""
    config = {**tiny.LLAMA_CONFIG, "num_hidden_layers": 7}
    path = tiny.save(tmp_path / "llama", tiny.llama(layers=7), config=config)
    windows = make_windows(samples=100)  # two batches
    places: list[Counted] = []
    most = 0

    def store() -> InMemory:
        nonlocal most
        places.append(Counted())
        most = max(most, sum(place.open for place in places))
        return places[-1]

    with opened(path, windows) as runner:
        whole = gradients_of(runner, ["self_attn.q_proj"])
    with opened(path, windows) as runner:
        assert len(runner.batches) == 2
        modules = lambda _block: ["self_attn.q_proj"]  # noqa: E731
        found = dict(run_backward(runner, seed=0, store=store, modules=modules, step=step))
    assert list(found) == list(whole) == [f"model.layers.{i}" for i in reversed(range(7))]
    for name in whole:
        pairs = zip(found[name].outputs["self_attn.q_proj"], whole[name].outputs["self_attn.q_proj"], strict=True)
        assert all(torch.equal(a, b) for a, b in [*pairs, *zip(found[name].last, whole[name].last, strict=True)])
    assert most + 1 <= streams(7, step)  # and the gradients
    assert not any(place.open for place in places)


class Counted(InMemory):
    """Knows whether it is closed."""

    open = True

    def close(self) -> None:
        super().close()
        self.open = False


def test_outputs_of_a_part_of_a_module_are_cut_from_those_of_all() -> None:
    """What lies in two runs of the module counts as zero."""
    generator = torch.Generator().manual_seed(0)
    sizes = (OUT_ROWS, 40)
    known = [torch.rand(n, n, generator=generator) for n in sizes]
    whole = torch.block_diag(*known)  # type: ignore[no-untyped-call]
    places = torch.randperm(sum(sizes), generator=generator)[: OUT_ROWS + 8]
    wanted = whole[places][:, places]
    first, second = rows_of(known, places)
    assert torch.equal(first, wanted[:OUT_ROWS, :OUT_ROWS])
    assert torch.equal(second, wanted[OUT_ROWS:, OUT_ROWS:])


@pytest.mark.parametrize(
    ("tokens", "world", "wanted"),
    [
        (40, 1, [0, 2, 5, 7]),  # of ten windows of ten tokens
        (49, 1, [0, 2, 5, 7]),
        (100, 1, list(range(10))),
        (1000, 1, list(range(10))),
        (9, 1, [0]),
        (9, 3, [0, 3, 6]),  # one for each process
    ],
)
def test_samples_that_are_run_backwards_are_spread_over_all(
    tokens: int, world: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reverse_pass, "TOKENS", tokens)
    windows = torch.arange(10).unsqueeze(1).repeat(1, 10)
    samples = Samples(windows, windows[:0], "", (), 10, origin=torch.arange(10) // 5)
    found = thinned(samples, world)
    assert found.windows[:, 0].tolist() == wanted
    assert found.origin.tolist() == [row // 5 for row in wanted]


@pytest.mark.parametrize(
    ("windows", "seqlen", "wanted"),
    [(32, 128, 32), (64, 256, 64), (65, 256, 64), (128, 256, 64), (128, 2048, 16), (1024, 256, 128), (7, 30_000, 1)],
)
def test_more_samples_give_more_of_them_backwards_once_an_eighth_is_more(
    windows: int, seqlen: int, wanted: int
) -> None:
    assert enough(windows, seqlen) == wanted
