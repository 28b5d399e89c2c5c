"""Claims about the training of models for the benchmark: a call keeps to its time, and goes on where one stopped."""

from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

STEPS = 40


@pytest.fixture(scope="module")
def script() -> Any:
    pytest.importorskip("transformers", reason="needs the extra hf")
    return import_module("labs.train_bench_model.__main__")


def options(out: Path, **changed: Any) -> Namespace:
    """Those of a model that trains in a second."""
    shape = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32, "length": 16, "batch": 4}
    rest = {"tie": False, "seed": 0, "steps": STEPS, "save": 1000, "lr": 1e-2, "minutes": 0.0, "begun": 0.0, "out": out}
    rest |= {"experts": 0, "start": None}
    return Namespace(**{**shape, **rest, **changed})


def trained(script: Any, args: Namespace, tokens: torch.Tensor) -> tuple[Any, list[tuple[int, float]]]:
    """The model, and what was saved: step and loss."""
    saved: list[tuple[int, float]] = []
    model = script.build(args, 64)
    script.train(args, lambda step, loss: saved.append((step, loss)), model, tokens)
    return model, saved


@pytest.fixture
def tokens() -> torch.Tensor:
    """A text that repeats itself."""
    return torch.arange(24).repeat(40)


def test_the_loss_falls_and_a_call_goes_on_where_one_stopped(script: Any, tokens: torch.Tensor, tmp_path: Path) -> None:
    whole, saved = trained(script, options(tmp_path), tokens)
    assert saved[-1][0] == STEPS
    assert saved[-1][1] < 2 < np.log(64)
    for name in ("parts", "again"):
        (tmp_path / name).mkdir()
    _, first = trained(script, options(tmp_path / "parts", save=15), tokens)
    assert [step for step, _ in first] == [15, 30, STEPS]
    assert first[-1][1] == saved[-1][1]  # what is saved on the way changes nothing
    again, later = trained(script, options(tmp_path, steps=STEPS + 1), tokens)
    assert [step for step, _ in later] == [STEPS + 1]
    assert not torch.equal(again.lm_head.weight, whole.lm_head.weight)


def test_a_call_ends_when_its_time_is_over(
    script: Any, tokens: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(np.arange(0.0, 1e4, 6.0))  # seconds: a step takes six
    monkeypatch.setattr(script.time, "monotonic", lambda: float(next(clock)))
    _, saved = trained(script, options(tmp_path, minutes=1.0, steps=10_000), tokens)
    assert [step for step, _ in saved] == [11]  # the last one begins when the minute is over


def test_the_rate_rises_by_steps_and_falls_by_steps_or_by_the_clock(script: Any, tmp_path: Path) -> None:
    args = options(tmp_path, steps=1000)
    rates = [script.rate(step, 0.0, args) for step in range(1000)]
    assert rates[:20] == pytest.approx([args.lr * (step + 1) / 20 for step in range(20)])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.05 * args.lr, rel=0.01)
    assert script.rate(100, 0.5, args) == pytest.approx(0.525 * args.lr)
    assert script.rate(900, 0.5, args) == rates[900]
    assert script.rate(100, 1.0, args) == pytest.approx(0.05 * args.lr)


def test_tokens_are_read_as_they_are(script: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.array([3, 65535, 0], dtype=np.uint16))
    assert script.read_tokens([tmp_path / "tokens.npy"], None).tolist() == [3, 65535, 0]


def test_a_mixture_of_copies_computes_what_the_llama_does_until_they_learn_to_differ(
    script: Any, tokens: torch.Tensor, tmp_path: Path
) -> None:
    llama, _ = trained(script, options(tmp_path), tokens)
    llama.save_pretrained(tmp_path / "llama")
    (tmp_path / "mixture").mkdir()
    args = options(tmp_path / "mixture", experts=4, start=tmp_path / "llama", lr=1e-3)
    mixture = script.upcycled(args)
    rows = tokens[:64].view(4, 16)
    with torch.no_grad():
        before, after = llama(rows).logits, mixture(rows).logits
    assert float((before - after).abs().max()) < 0.1 * float(before.std())
    experts = mixture.model.layers[0].mlp.experts.gate_up_proj
    at_first = float((experts[0] - experts[1]).detach().norm())
    script.train(args, lambda step, loss: None, mixture, tokens)
    assert float((experts[0] - experts[1]).detach().norm()) > 2 * at_first
    assert not mixture.config.output_router_logits
