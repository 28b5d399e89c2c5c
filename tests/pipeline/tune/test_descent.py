"""Codes by the divergence of a whole model: what is kept, what is refused, and that a stopped run goes on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from ptqpipe.calibration.activations import InMemory
from ptqpipe.calibration.runner import Runner
from ptqpipe.errors import NumericsError
from ptqpipe.models.source import Source
from ptqpipe.pipeline.tune.kl.choice import Choice, with_codes
from ptqpipe.pipeline.tune.kl.descent import CALM, PATIENCE, DescentResult, Float, Variables, descend
from ptqpipe.pipeline.tune.kl.model_divergence import ModelPair
from ptqpipe.pipeline.tune.options import Settings
from ptqpipe.runtime.skeleton import Skeleton
from tests.calibration.models import make_model, make_windows
from tests.pipeline.tune.test_choice import correlated, quantized

SETTINGS = Settings(steps=64, rate=0.02)
SMALL, LARGE = replace(SETTINGS, rate=CALM), replace(SETTINGS, rate=2 * CALM)  # the half of this one is left at step 32


class Linear:
    """A model of one matrix: the divergence is the squared error of its output, on inputs of two kinds."""

    def __init__(self) -> None:
        self.w = torch.randn(24, 64, generator=torch.Generator().manual_seed(2))
        self.q = quantized(self.w)
        self.choice = Choice(self.w, self.q)
        xs = correlated(20, 64, 64, seed=3)
        self.learned, self.texts = xs[:16], {"same": xs[16:18], "other": xs[18:]}
        self.floats: dict[str, Float] = {}
        self.saved: list[Mapping[str, torch.Tensor]] = []
        self.calls = 0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ (self.choice.weight() - self.w).t()).square().mean()

    def backward(self, batch: int, share: float) -> float:
        self.calls += 1
        loss = self.loss(self.learned[batch])
        (loss * share).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def judge(self) -> dict[str, float]:
        with torch.no_grad():
            return {name: float(torch.stack([self.loss(x) for x in xs]).mean()) for name, xs in self.texts.items()}

    def save(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.saved.append({name: tensor.clone() for name, tensor in tensors.items()})

    def descend(self, state: Mapping[str, torch.Tensor] | None = None, **changes: Any) -> DescentResult:
        given: dict[str, Any] = {"judge": self.judge, "settings": SETTINGS} | changes
        return descend(
            Variables(given.pop("choices", {"w": self.choice}), self.floats),
            backward=self.backward,
            batches=range(16),
            per_step=2,
            state=state,
            save=self.save,
            **given,
        )


class Scaled(Linear):
    """The same with a factor for each output, which is stored as bfloat16, and that must make up for 10 %."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.full((24,), 0.9).bfloat16().float().requires_grad_(True)
        self.floats = {"f": Float(self.factors, 1e-2, lambda x: x.bfloat16())}
        self.judged: list[torch.Tensor] = []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.choice.weight().t()) * self.factors - x @ self.w.t()).square().mean()

    def judge(self) -> dict[str, float]:
        self.judged.append(self.factors.detach().clone())
        return super().judge()


def error(model: Linear, codes: torch.Tensor) -> float:
    """On inputs that neither taught nor judged."""
    x = torch.cat(correlated(64, 64, 64, seed=3)[20:])
    return float((x @ (model.w - with_codes(model.q, codes).dequantize()).t()).square().mean())


def test_descent_lowers_the_loss_on_inputs_that_neither_taught_nor_judged() -> None:
    model = Linear()
    found = model.descend()
    assert error(model, found.codes["w"]) < 0.6 * error(model, model.q.codes)
    assert found.best > 0
    assert found.result.keys() == found.start.keys() == {"same", "other"}
    assert all(found.result[name] < before for name, before in found.start.items())
    changed = found.codes["w"] != model.q.codes
    assert found.moved == pytest.approx(float(changed.float().mean()))


def test_codes_that_are_worse_on_one_kind_of_text_are_not_taken() -> None:
    """Ever better on one kind, ever worse on another: the start stays, and descent ends early."""
    model = Linear()
    calls: list[int] = []

    def judge() -> dict[str, float]:
        calls.append(1)
        return {"same": 1.0 / len(calls), "other": 1.0 + 1e-3 * len(calls)}

    found = model.descend(judge=judge, settings=SMALL)
    assert found.best == 0
    assert found.result == found.start
    assert torch.equal(found.codes["w"], model.q.codes)
    assert found.moved == 0.0
    assert found.steps == PATIENCE * SETTINGS.steps // 8


def test_the_best_codes_are_returned_not_the_last() -> None:
    model = Linear()
    judged = iter([1.0, 0.9, 0.5, 0.7, 0.8, 0.9])
    found = model.descend(judge=lambda: {"same": next(judged)}, settings=SMALL)
    assert found.best == 2 * SETTINGS.steps // 8
    assert found.result == {"same": 0.5}
    again = Linear().descend(settings=SMALL)
    assert not torch.equal(found.codes["w"], again.codes["w"])


@pytest.mark.parametrize(("settings", "best", "steps"), [(SMALL, 0, 24), (LARGE, 56, 64)], ids=["small", "large"])
def test_codes_that_get_worse_while_steps_are_large_are_waited_for(settings: Settings, best: int, steps: int) -> None:
    """Worse than the start until step 40, better from step 48: found where the first step is large, and the judgements
    before half of the steps end nothing."""
    model = Linear()
    judged = iter([1.0, 1.2, 1.3, 1.2, 1.1, 1.01, 0.9, 0.8, 0.85])
    found = model.descend(judge=lambda: {"same": next(judged)}, settings=settings)
    assert (found.best, found.steps) == (best, steps)
    assert torch.equal(found.codes["w"], model.q.codes) == (best == 0)
    assert found.result == {"same": 0.8 if best else 1.0}


def test_codes_that_never_get_better_end_descent_early_with_large_steps_too() -> None:
    model = Linear()
    judged = iter([1.0] + [1.1] * 8)
    found = model.descend(judge=lambda: {"same": next(judged)}, settings=LARGE)
    assert (found.best, found.steps) == (0, 48)  # judged at 32, 40 and 48
    assert torch.equal(found.codes["w"], model.q.codes)


def test_floats_alone_have_steps_of_their_own_and_end_as_early_at_any_rate_of_codes() -> None:
    model = Scaled()
    judged = iter([1.0] + [1.1] * 8)
    found = model.descend(judge=lambda: {"same": next(judged)}, settings=LARGE, choices={})
    assert (found.best, found.steps) == (0, 24)


def test_floats_are_learned_with_the_codes_and_judged_as_they_will_be_stored() -> None:
    model, codes_alone = Scaled(), Scaled()
    codes_alone.floats = {}
    slow = Settings(steps=64, rate=0.005)  # at which codes alone make up for less
    found, other = model.descend(settings=slow), codes_alone.descend(settings=slow)
    assert found.floats["f"].dtype == torch.bfloat16
    assert float((found.floats["f"].float() - 1.0).abs().mean()) < 0.05  # from 0.1
    assert all(found.result[name] < 0.4 * other.result[name] for name in found.result)
    assert len(model.judged) > 2
    for seen in model.judged:
        assert torch.equal(seen, seen.bfloat16().float())
    model.factors.data = found.floats["f"].float()
    model.choice.v.data.copy_(torch.where(found.codes["w"] != model.q.codes, 0.5, -0.5))
    assert Linear.judge(model) == found.result


def test_floats_that_gain_nothing_stay_as_they_were() -> None:
    model = Scaled()
    start = model.factors.detach().clone()
    calls: list[int] = []

    def judge() -> dict[str, float]:
        calls.append(1)
        return {"same": float(len(calls))}

    found = model.descend(judge=judge)
    assert found.best == 0
    assert torch.equal(found.floats["f"].float(), start)


@pytest.mark.parametrize("kind", [Linear, Scaled])
@pytest.mark.parametrize("saves", [1, 5])
def test_a_stopped_descent_goes_on_to_the_same_codes(saves: int, kind: type[Linear]) -> None:
    whole, cut = kind(), kind()
    found = whole.descend()
    go_on = kind()
    cut.descend()
    again = go_on.descend(state=cut.saved[saves - 1])
    assert torch.equal(again.codes["w"], found.codes["w"])
    assert all(torch.equal(again.floats[name], value) for name, value in found.floats.items())
    assert (again.start, again.result, again.best) == (found.start, found.result, found.best)
    assert go_on.calls == whole.calls - saves * 2 * SETTINGS.steps // 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_model(tmp_path_factory.mktemp("model") / "llama", "llama")


def moved(whole: ModelPair, number: int, by: float) -> torch.Tensor:
    """Makes the quantized layer ``number`` one that adds ``by`` to what the float one returns; what it adds."""
    added = torch.full((whole.float_layers[0].module.self_attn.q_proj.weight.shape[1],), by, requires_grad=True)
    plain = whole.layers[number]
    layers = list(whole.layers)
    layers[number] = lambda x, batch: plain(x, batch) + added * torch.arange(len(added)).sub(8.0)
    whole.layers = layers
    return added


def test_the_gradient_of_the_whole_model_is_that_of_its_divergence(model: Any) -> None:
    """Against the difference of divergences, through a layer that others follow, and logits in pieces."""
    windows = make_windows(samples=3)
    with (
        Source.open(model) as source,
        Runner.open(Skeleton.of(source, dtype=torch.float32), windows) as runner,
        ModelPair.open(runner, InMemory(), lambda name: None) as whole,
    ):
        assert float(whole.divergence([0]).mean()) == pytest.approx(0.0, abs=1e-7)
        plain = whole.layers
        found = {}
        for by in (0.01, 0.0101, 0.0099):
            whole.layers = plain
            added = moved(whole, 0, by)
            found[by] = float(whole.divergence([0]).mean())
            if by == 0.01:
                assert whole.backward(0, 1.0) == pytest.approx(found[by], rel=1e-5)
                assert added.grad is not None
                slope = float(added.grad.sum())
        assert found[0.01] > 0
        assert slope == pytest.approx((found[0.0101] - found[0.0099]) / 2e-4, rel=0.02)


def test_gradients_that_are_not_finite_are_one_line(model: Any) -> None:
    with (
        Source.open(model) as source,
        Runner.open(Skeleton.of(source, dtype=torch.float32), make_windows(samples=2)) as runner,
        ModelPair.open(runner, InMemory(), lambda name: None) as whole,
    ):
        moved(whole, 0, float("inf"))
        with pytest.raises(NumericsError, match=r"not finite; check .* or use method=.gptq."):
            whole.backward(0, 1.0)
