"""Claims about scores, perplexity and divergence: the protocol as stated, the numbers of plain float64 torch."""

import gc
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from transformers import AutoModelForCausalLM

from ptqpipe.check.evaluate import scores as module
from ptqpipe.check.evaluate.measures import divergence, perplexity
from ptqpipe.check.evaluate.scores import Scores, Window, score, windows
from ptqpipe.errors import NumericsError, UsageError


def tiny(seed: int, vocabulary: int = 48) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0 if parameter.dim() > 1 else 1, 0.3)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny(0)


@pytest.fixture(scope="module")
def other() -> Any:
    """``model`` with a little noise: a baseline."""
    changed = tiny(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return changed


TOKENS = torch.randint(0, 48, (203,), generator=torch.Generator().manual_seed(2))


@given(st.integers(2, 300), st.integers(2, 64), st.integers(1, 64))
@settings(deadline=None)
def test_every_token_is_scored_once_from_all_the_context_there_is(count: int, window: int, stride: int) -> None:
    stride = min(stride, window)
    found = windows(count, window, stride=stride)
    scored = [token for w in found for token in range(w.first, w.stop)]
    assert len(scored) == len(set(scored))
    unscored = set(range(count)) - set(scored)
    if stride < window:
        assert unscored == {0}
    else:
        assert unscored == set(range(0, count, window))
    for w in found:
        assert w.start % stride == 0
        assert w.stop - w.start <= window
        if w.first > w.start + 1:  # an earlier window scored up to here: the overlap is context
            assert w.first - w.start >= window - stride


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (8, 0), (8, 9)])
def test_impossible_windows_are_refused(window: int, stride: int) -> None:
    with pytest.raises(UsageError, match=f"window {window} and stride {stride}"):
        windows(100, window, stride=stride)


def by_hand(model: Any, tokens: torch.Tensor, window: int, stride: int) -> dict[int, torch.Tensor]:
    """token index -> float64 log-probabilities that predict it, one prefix at a time."""
    found: dict[int, torch.Tensor] = {}
    start = 0
    while True:
        stop = min(start + window, len(tokens))
        for token in range(start + 1, stop):
            if token not in found:
                with torch.no_grad():
                    logits = model(tokens[None, start:token]).logits[0, -1]
                found[token] = logits.double().log_softmax(-1)
        if stop == len(tokens):
            return found
        start += stride


@pytest.mark.slow
@pytest.mark.parametrize(("window", "stride"), [(32, 32), (32, 16), (17, 5), (300 // 5, 60)])
def test_numbers_are_those_of_plain_torch(model: Any, other: Any, window: int, stride: int) -> None:
    """Float32 against float64 prefix by prefix: logits of about 1 differ by some 1e-6."""
    scores = score(model, TOKENS, window=window, stride=stride, reference=other)
    ours, theirs = by_hand(model, TOKENS, window, stride), by_hand(other, TOKENS, window, stride)
    nll = [-float(ours[t][TOKENS[t]]) for t in sorted(ours)]
    reference = [-float(theirs[t][TOKENS[t]]) for t in sorted(ours)]
    kl = [float((theirs[t].exp() * (theirs[t] - ours[t])).sum()) for t in sorted(ours)]
    assert scores.kl is not None
    assert scores.nll.tolist() == pytest.approx(nll, abs=2e-5)
    assert scores.kl.tolist() == pytest.approx(kl, abs=2e-5)
    found = perplexity(scores)
    assert found.tokens == len(nll)
    assert found.value == pytest.approx(math.exp(sum(nll) / len(nll)), rel=2e-5)
    assert found.reference == pytest.approx(math.exp(sum(reference) / len(nll)), rel=2e-5)
    assert found.difference == found.value - found.reference  # type: ignore[operator]
    assert found.interval is not None
    assert found.interval[0] <= found.difference <= found.interval[1]  # type: ignore[operator]
    measured = divergence(scores)
    assert measured.mean == pytest.approx(sum(kl) / len(kl), abs=1e-6)
    assert measured.max == pytest.approx(max(kl), abs=2e-5)
    assert measured.percentiles["50"] == pytest.approx(sorted(kl)[len(kl) // 2], rel=0.1)
    agreed = sum(int(ours[t].argmax()) == int(theirs[t].argmax()) for t in ours)
    assert measured.top1_agreement == pytest.approx(agreed / len(ours))


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 8)])
def test_every_window_reads_the_token_that_texts_begin_with(model: Any, window: int, stride: int) -> None:
    """As if it stood at each window's start; what is scored stays the text's own tokens."""
    scores, at = score(model, TOKENS, window=window, stride=stride, begin=3), 0
    for one in windows(len(TOKENS), window, stride=stride):
        ids = torch.cat([torch.tensor([3]), TOKENS[one.start + 1 : one.stop]])
        with torch.no_grad():
            logp = model(ids[None]).logits[0].float().log_softmax(-1)
        expected = -logp[one.first - 1 - one.start : -1].gather(1, TOKENS[one.first : one.stop, None])[:, 0]
        assert scores.nll[at : at + one.scored].tolist() == pytest.approx(expected.tolist(), abs=2e-5)
        at += one.scored
    assert at == len(scores.nll)


def test_a_model_does_not_diverge_from_itself(model: Any) -> None:
    found = divergence(score(model, TOKENS, window=32, reference=model))
    assert (found.mean, found.max, found.top1_agreement) == (0.0, 0.0, 1.0)


def test_clusters_are_windows(model: Any) -> None:
    scores = score(model, TOKENS, window=32)
    assert scores.cluster.tolist() == [t // 32 for t in range(203) if t % 32]


def test_small_batches_and_small_steps_change_rounding_only(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score(model, TOKENS, window=16)
    monkeypatch.setattr(module, "BATCH_TOKENS", 16)
    monkeypatch.setattr(module, "CHUNK_LOGITS", 48 * 3)
    parts = score(model, TOKENS, window=16)
    assert torch.allclose(whole.nll, parts.nll, atol=2e-5)


def test_a_batch_never_holds_more_logits_than_its_limit() -> None:
    found = windows(10_000, 100)
    for batch in module.batches(found, vocabulary=module.BATCH_LOGITS // 250):
        assert len(batch) <= 2
    assert [len(b) for b in module.batches(found[:3], vocabulary=2 * module.BATCH_LOGITS)] == [1, 1, 1]


def test_progress_counts_scored_tokens(model: Any) -> None:
    seen: list[int] = []
    scores = score(model, TOKENS, window=16, on_batch=seen.append)
    assert len(seen) > 1
    assert sum(seen) == len(scores.nll)


@pytest.mark.parametrize("bad", [48, 1000, -1])
def test_tokens_outside_the_vocabulary_are_named(model: Any, bad: int) -> None:
    tokens = TOKENS.clone()
    tokens[7] = bad
    with pytest.raises(UsageError, match=f"token {bad} is outside the model's vocabulary of 48"):
        score(model, tokens, window=16)


def test_another_vocabulary_cannot_be_compared(model: Any) -> None:
    with pytest.raises(UsageError, match="vocabulary of 64, the model one of 48"):
        score(model, TOKENS, window=16, reference=tiny(0, vocabulary=64))


def test_one_token_is_too_few(model: Any) -> None:
    with pytest.raises(UsageError, match="1 tokens are too few"):
        score(model, TOKENS[:1], window=16)


def test_a_broken_model_is_an_error_not_a_number(model: Any) -> None:
    def broken(batch: Sequence[Window], tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(sum(w.scored for w in batch), 48)
        logits[5] = float("nan")
        return logits

    scores = score(broken, TOKENS, window=32)
    with pytest.raises(NumericsError, match="scored token 5"):
        perplexity(scores)
    with pytest.raises(NumericsError, match="baseline"):
        divergence(score(model, TOKENS, window=32, reference=broken))


def test_divergence_needs_a_reference() -> None:
    scores = Scores(4, 4, torch.zeros(3, dtype=torch.int64), torch.ones(3))
    with pytest.raises(UsageError, match="no reference"):
        divergence(scores)


def test_one_window_has_no_interval(model: Any, other: Any) -> None:
    scores = score(model, TOKENS[:20], window=32, reference=other)
    found = divergence(scores)
    assert found.interval is None
    assert found.standard_error is None
    assert perplexity(scores).interval is None


@pytest.mark.slow
def test_no_tensor_outlives_its_batch(model: Any, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small scores between large logits had kept the heap from using a place twice: 6 kB for each of 32,768 tokens.

    How much that is differs from run to run by more than the limit of a test could be, so tensors are counted.
    """
    monkeypatch.setattr(module, "BATCH_TOKENS", 16)
    alive: list[int] = []

    def count(_: int) -> None:
        gc.collect()
        alive.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))

    score(model, TOKENS, window=16, reference=other, on_batch=count)
    assert len(alive) > 10
    assert set(alive[1:-1]) == {alive[1]}
