"""Tokens are drawn from the distribution that was asked for, by each sequence's own numbers."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from ptqpipe.errors import UsageError
from ptqpipe.serving.engine.sampler import logprobs_of, sample
from ptqpipe.serving.engine.sequence import SamplingParams, Sequence
from tests.serving.engine.models import ask, encoded, engine, generate

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])


def sequence(
    *, seed: int = 0, tokens: tuple[int, ...] = (0,), ends: frozenset[int] = frozenset(), **params: Any
) -> Sequence:
    asked = SamplingParams(**{"temperature": 1.0, "max_tokens": 99, "seed": seed, **params})
    made = Sequence("r", 0, [0], asked, ends)
    for token in tokens[1:]:
        made.append(token)
    return made


def frequencies(logits: torch.Tensor, *, draws: int = 5_000, **params: Any) -> list[float]:
    seq = sequence(**params)
    counts = [0] * len(logits)
    for _ in range(draws):
        counts[sample(logits[None], [seq])[0]] += 1
    return [count / draws for count in counts]


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in values)
    return [math.exp(x) / total for x in values]


def near(found: list[float], wanted: list[float], draws: int = 5_000) -> bool:
    """Within five standard deviations of a binomial: one false alarm in a million."""
    return all(abs(f - w) <= 5 * math.sqrt(w * (1 - w) / draws) for f, w in zip(found, wanted, strict=True))


def test_temperature_divides_logits() -> None:
    assert near(frequencies(LOGITS, temperature=0.7), softmax([x / 0.7 for x in LOGITS.tolist()]))


def test_top_k_keeps_the_k_best() -> None:
    assert near(frequencies(LOGITS, top_k=2), [*softmax([2.0, 1.0]), 0.0, 0.0, 0.0])


@pytest.mark.slow
def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    p = softmax(LOGITS.tolist())
    assert p[0] < 0.8 < p[0] + p[1]
    assert near(frequencies(LOGITS, top_p=0.8), [*softmax([2.0, 1.0]), 0.0, 0.0, 0.0])
    assert near(frequencies(LOGITS, top_p=0.5), [1.0, 0.0, 0.0, 0.0, 0.0])


def test_top_p_is_of_what_top_k_leaves() -> None:
    left = softmax([2.0, 1.0, 0.0])
    assert left[0] < 0.68 < softmax(LOGITS.tolist())[0] + softmax(LOGITS.tolist())[1]
    found = frequencies(LOGITS, top_k=3, top_p=0.66)
    assert found[0] == 1.0  # 0.665 of the three reaches it, 0.636 of all five would not


@pytest.mark.slow
def test_a_wide_nucleus_is_found_beyond_the_first_candidates() -> None:
    flat = torch.zeros(2000)
    seq = sequence(top_p=0.9)
    drawn = {sample(flat[None], [seq])[0] for _ in range(6000)}
    assert 1500 < len(drawn) <= 1801


def plainly(logits: torch.Tensor, seq: Sequence) -> int:
    """One token, by the book: penalties counted over all tokens, all tokens sorted, one after the other added up."""
    params, adjusted = seq.params, logits.clone()
    changes = dict(params.logit_bias)
    for token, count in Counter(seq.tokens[seq.prompt_len :]).items():
        penalty = params.presence_penalty + params.frequency_penalty * count
        changes[token] = changes.get(token, 0.0) - penalty
    for token, change in changes.items():
        adjusted[token] += change
    scaled = adjusted.double() / params.temperature
    values, tokens = torch.topk(scaled, params.top_k or len(logits))
    if params.top_k == 0 and params.top_p == 1:  # then their order is the vocabulary's
        values, tokens = scaled, torch.arange(len(logits))
    probabilities = torch.exp(values - torch.logsumexp(values, 0))
    kept, total = [], 0.0
    for token, probability in zip(tokens.tolist(), probabilities.tolist(), strict=True):
        if total >= params.top_p:
            break
        total += probability
        kept.append((token, total))
    number = seq.rng.random() * total
    return int(next((token for token, reached in kept if number < reached), kept[-1][0]))


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.9}, {"top_p": 0.999}, {"top_p": 0.3, "temperature": 0.7}, {}, {"top_k": 40, "top_p": 0.8},
        {"top_k": 1000, "top_p": 0.2}, {"top_k": 1000}, {"presence_penalty": 1.5, "top_p": 0.95},
        {"frequency_penalty": 0.3, "presence_penalty": -0.2, "logit_bias": ((3, 2.5), (999, -1.7)), "top_p": 0.95},
        {"frequency_penalty": 2.0, "temperature": 1.8},
    ],
    ids=str,
)  # fmt: skip
def test_a_seed_gives_the_tokens_that_the_definition_gives(params: dict[str, Any]) -> None:
    vocabulary = 5000  # nuclei of every size in which candidates are looked for
    draw = torch.Generator().manual_seed(3)
    found, wanted = sequence(**params), sequence(**params)
    for _ in range(12):
        width = float(torch.rand(1, generator=draw)) * 4
        logits = torch.linspace(-width, width, vocabulary)[torch.randperm(vocabulary, generator=draw)]
        token = sample(logits[None], [found])[0]
        assert token == plainly(logits, wanted)
        found.append(token)
        wanted.append(token)


def test_a_sequence_counts_its_tokens_only_where_penalties_ask() -> None:
    assert sequence(tokens=(0, 4, 4, 2), presence_penalty=1.0).counts == {4: 2, 2: 1}
    assert sequence(tokens=(0, 4, 4, 2)).counts == {}


def test_wide_nuclei_grow_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    topk = torch.topk

    def counted(x: torch.Tensor, k: int) -> Any:
        asked.append(k)
        return topk(x, k)

    monkeypatch.setattr(torch, "topk", counted)
    sample(torch.linspace(0, 1, 70_000)[None], [sequence(top_p=0.04)])  # 1,800 tokens
    assert asked == [256, 4096]
    asked.clear()
    sample(torch.zeros(1, 70_000), [sequence(top_p=0.99)])
    assert asked == [256, 4096, 65536, 70_000]


def test_a_seed_gives_the_same_tokens_whoever_else_is_in_the_batch() -> None:
    prompts, made = encoded(), engine()
    warm = {"temperature": 1.0, "seed": 7}
    alone = generate(made, [ask(prompts[0], 24, **warm)])["a"][0]
    crowd = [ask(prompt, 24, name=str(at), temperature=1.0, seed=at) for at, prompt in enumerate(prompts)]
    together = generate(made, [*crowd, ask(prompts[0], 24, **warm)])
    assert together["a"][0] == alone
    assert generate(made, [ask(prompts[0], 24, temperature=1.0, seed=8)])["a"][0] != alone


def test_choices_of_one_request_differ() -> None:
    found = generate(engine(), [ask(encoded()[0], 16, n=4, temperature=1.0, seed=1)])["a"]
    assert len({tuple(tokens) for tokens in found}) == 4


@pytest.mark.parametrize("temperature", [1e-308, 1e-9, 1.1e-5])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.5}, {"top_k": 3}], ids=str)
def test_the_smallest_temperatures_are_greedy(temperature: float, more: dict[str, Any]) -> None:
    logits = torch.tensor([[1.0, 5.0, 4.9, 300.0, -2.0]])
    assert sample(logits, [sequence(temperature=temperature, seed=3, **more)]) == [3]


def test_penalties_and_biases_change_logits_of_generated_tokens() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.5]])
    assert sample(logits, [sequence(temperature=0.0, tokens=(1, 0))]) == [0]
    assert sample(logits, [sequence(temperature=0.0, tokens=(1, 0), presence_penalty=0.2)]) == [1]
    assert sample(logits, [sequence(temperature=0.0, tokens=(1, 0, 1, 1), frequency_penalty=0.3)]) == [0]
    assert sample(logits, [sequence(temperature=0.0, tokens=(0,), presence_penalty=2.0)]) == [0]  # the prompt's: none
    assert sample(logits, [sequence(temperature=0.0, logit_bias=((2, 5.0),))]) == [2]


def test_end_tokens_wait_for_the_minimum() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.5]])
    assert sample(logits, [sequence(temperature=0.0, min_tokens=1, ends=frozenset({0}))]) == [1]
    assert sample(logits, [sequence(temperature=0.0, min_tokens=1, ends=frozenset({0}), tokens=(0, 2))]) == [0]


def test_logprobs_are_log_softmax_with_the_best_first() -> None:
    (entry,) = logprobs_of(LOGITS[None], [3], 2)
    wanted = [math.log(p) for p in softmax(LOGITS.tolist())]
    assert entry.logprob == pytest.approx(wanted[3], rel=1e-6)  # float32: eight digits of a number of size one
    assert [token for token, _ in entry.top] == [0, 1]
    assert [value for _, value in entry.top] == pytest.approx(wanted[:2], rel=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2},
        {"max_tokens": -1}, {"min_tokens": 100}, {"logprobs": 21}, {"stop": ("",)}, {"presence_penalty": 3.0},
        {"stop": ("a" * 2000,)}, {"logit_bias": ((1, float("nan")),)}, {"logit_bias": ((1, -1e300),)},
        {"logit_bias": tuple((at, 1.0) for at in range(2000))},
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SamplingParams(**params)
