"""Claims about cached log-probabilities: a hit is a miss to the bit, damage is noticed, the size is bounded."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ptqpipe.check.evaluate.cache import CachedLogits, decode, encode, open_cache, store_bytes
from ptqpipe.check.evaluate.measures import divergence, perplexity
from ptqpipe.check.evaluate.scores import score, windows
from ptqpipe.errors import CheckpointError, NumericsError

VOCABULARY = 40
TOKENS = torch.randint(0, VOCABULARY, (150,), generator=torch.Generator().manual_seed(2))
WINDOWS = windows(150, 32, stride=16)
BYTES = store_bytes(WINDOWS, VOCABULARY)


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def never() -> Any:
    raise AssertionError("the model was not needed")


def opened(
    cache: Path, make: Any, *, name: str = "m", limit: int = 10 * BYTES, dtype: torch.dtype = torch.float32
) -> CachedLogits:
    found = open_cache(
        cache,
        key={"model": name},
        windows=WINDOWS,
        vocabulary=VOCABULARY,
        dtype=dtype,
        make=make,
        limit_bytes=limit,
    )
    assert found is not None
    return found


def measured(reference: Any) -> Any:
    scores = score(make_model(1), TOKENS, window=32, stride=16, reference=reference)
    return divergence(scores), perplexity(scores)


def test_a_hit_measures_the_same_bits_without_the_model(tmp_path: Path) -> None:
    missed = measured(opened(tmp_path, make_model))
    assert measured(opened(tmp_path, never)) == missed
    (kl, ppl), (straight_kl, straight_ppl) = missed, measured(make_model())
    assert abs(kl.mean - straight_kl.mean) < (straight_kl.interval[1] - straight_kl.interval[0]) / 100
    assert kl.top1_agreement == straight_kl.top1_agreement
    assert ppl.reference == pytest.approx(straight_ppl.reference, rel=1e-4)


def test_filling_stores_every_batch_and_the_bytes_that_a_miss_stores(tmp_path: Path) -> None:
    seen: list[int] = []
    opened(tmp_path / "a", make_model).fill(WINDOWS, TOKENS, on_batch=seen.append)
    assert sum(seen) == 149
    measured(opened(tmp_path / "b", make_model))

    def content(root: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in root.rglob("*") if p.is_file()}

    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert measured(opened(tmp_path / "a", never)) == measured(opened(tmp_path / "b", never))


def test_a_store_says_what_it_takes_at_most_and_whether_it_was_there(tmp_path: Path) -> None:
    store = opened(tmp_path, make_model)
    assert not store.stored
    store.fill(WINDOWS, TOKENS)
    files = [p for p in tmp_path.rglob("*-*") if p.is_file()]
    assert 0.9 * store.most < sum(p.stat().st_size for p in files) <= store.most == BYTES
    assert opened(tmp_path, never).stored


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 300.0])
def test_log_probabilities_come_back(spread: float) -> None:
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(3)) * spread + 5
    exact = logits.double().log_softmax(-1)
    raw = encode(logits)
    found = decode(raw, 7, 1000)
    assert found is not None
    assert torch.equal(found.argmax(-1), logits.argmax(-1))
    near = exact > -16
    assert float((found - exact)[near].abs().max()) < 1 / 4096 + 1e-5
    rest = (exact < -16) & (exact > -31)
    assert bool(((found - exact).abs()[rest] <= 1 / 16 + 1e-5).all())
    assert len(raw) == 7 * 4 + 7000 + int((exact > -16).sum())
    assert decode(raw[:-1], 7, 1000) is None
    assert decode(raw[:100], 7, 1000) is None


def test_a_large_vocabulary_takes_less_than_half_of_float32_and_the_divergence_stays() -> None:
    """Few likely tokens among as many as Qwen has, as large models give them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 151_936, generator=generator) * 2.5
    logits[:, :5] += 10
    other = (logits + 0.05 * torch.randn(16, 151_936, generator=generator)).double().log_softmax(-1)
    raw = encode(logits)
    assert len(raw) < logits.numel() * 4 / 2.2

    def mean_kl(reference: torch.Tensor | None) -> float:
        assert reference is not None
        p = reference.double().log_softmax(-1)
        return float((p.exp() * (p - other)).sum(-1).mean())

    exact = mean_kl(logits)
    assert exact > 1e-4
    assert mean_kl(decode(raw, 16, 151_936)) == pytest.approx(exact, rel=2e-3)


def test_nan_is_refused() -> None:
    with pytest.raises(NumericsError, match="NaN"):
        encode(torch.tensor([[0.0, float("nan")]]))


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_computed_again(tmp_path: Path, harm: str) -> None:
    straight = measured(opened(tmp_path, make_model))
    victim = next(p for p in tmp_path.rglob("*-*") if p.is_file())
    raw = bytearray(victim.read_bytes())
    if harm == "remove":
        victim.unlink()
    else:
        raw[10] ^= 64
        victim.write_bytes(raw if harm == "flip" else raw[:-9])
    with pytest.raises(AssertionError, match="not needed"):
        measured(opened(tmp_path, never))
    assert measured(opened(tmp_path, make_model)) == straight
    assert measured(opened(tmp_path, never)) == straight


def test_another_key_is_another_store(tmp_path: Path) -> None:
    opened(tmp_path, make_model, name="a").fill(WINDOWS, TOKENS)
    with pytest.raises(AssertionError, match="not needed"):
        measured(opened(tmp_path, never, name="b"))


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    folders = {}
    for age, name in enumerate(["old", "older", "new"]):
        store = opened(tmp_path, make_model, name=name)
        store.fill(WINDOWS, TOKENS)
        folders[name] = store.folder
        used = {"old": 2, "older": 1, "new": 3}[name]
        os.utime(store.folder / "key.json", (used, used))
        assert age < 3
    size = sum(p.stat().st_size for p in folders["new"].iterdir())
    kept = opened(tmp_path, make_model, name="fresh", limit=2 * size + BYTES)
    assert size - BYTES < 1000  # the key
    assert not folders["older"].exists()
    assert folders["old"].exists()
    assert folders["new"].exists()
    assert kept.folder.exists()


def test_what_does_not_fit_is_not_cached(tmp_path: Path) -> None:
    found = open_cache(
        tmp_path, key={}, windows=WINDOWS, vocabulary=VOCABULARY, dtype=torch.float32, make=never, limit_bytes=BYTES - 1
    )
    assert found is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_means_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = open_cache(
        tmp_path / "file", key={}, windows=WINDOWS, vocabulary=VOCABULARY, dtype=torch.float32, make=never
    )
    assert found is None


def test_a_model_of_another_vocabulary_is_noticed(tmp_path: Path) -> None:
    found = open_cache(tmp_path, key={}, windows=WINDOWS, vocabulary=39, dtype=torch.float32, make=make_model)
    assert found is not None
    with pytest.raises(CheckpointError, match="39"):
        found.fill(WINDOWS, TOKENS)
