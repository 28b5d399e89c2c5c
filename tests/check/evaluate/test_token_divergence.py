"""Where a divergence lies: by size, by position and token by token, against plain sums over the same scores."""

from typing import Any

import pytest
import torch

from ptqpipe.check.evaluate.scores import Scores, windows
from ptqpipe.check.evaluate.token_divergence import (
    FIRST,
    PER_DECADE,
    beginnings,
    kl_by_position,
    kl_histogram,
    worst_tokens,
)

COUNT, WINDOW, STRIDE = 75, 16, 12


@pytest.fixture(scope="module")
def scores() -> Scores:
    found = windows(COUNT, WINDOW, stride=STRIDE)
    total = sum(w.scored for w in found)
    g = torch.Generator().manual_seed(3)
    kl = 10 ** (torch.rand(total, generator=g) * 9 - 8.5)
    cluster = torch.cat([torch.full((w.scored,), i) for i, w in enumerate(found)])
    top = torch.arange(total)
    return Scores(WINDOW, STRIDE, cluster, kl + 1, kl + 2, kl, top == top, top, top + 1000)


def places() -> list[tuple[int, int]]:
    """(index, tokens of context) of every scored token, one by one."""
    return [(i, i - w.start) for w in windows(COUNT, WINDOW, stride=STRIDE) for i in range(w.first, w.stop)]


def test_every_token_is_in_its_bin(scores: Scores) -> None:
    assert scores.kl is not None
    counts = kl_histogram(scores)["counts"]
    assert sum(counts) == len(scores.kl)
    edges = [FIRST * 10 ** (i / PER_DECADE) for i in range(len(counts) - 1)]
    for number, (low, high) in enumerate(zip([0.0, *edges], [*edges, float("inf")], strict=True)):
        inside = (scores.kl.double() >= low * (1 - 1e-6)) & (scores.kl.double() < high * (1 - 1e-6))
        assert counts[number] == int(inside.sum()), number


def test_a_kl_that_rounding_makes_zero_or_less_is_in_the_first_bin(scores: Scores) -> None:
    kl = torch.tensor([0.0, -1e-9, 1e30])
    counts = kl_histogram(Scores(4, 4, torch.zeros(3), kl, kl, kl, kl == kl, kl, kl))["counts"]
    assert (counts[0], counts[-1], sum(counts)) == (2, 1, 3)


def test_positions_count_the_tokens_of_context(scores: Scores) -> None:
    assert scores.kl is not None
    rows = kl_by_position(scores, COUNT)
    assert [(row["first"], row["last"]) for row in rows] == [(1, 1), (2, 3), (4, 7), (8, 15)]
    for row in rows:
        kl = [float(k) for k, (_, seen) in zip(scores.kl, places(), strict=True) if row["first"] <= seen <= row["last"]]
        assert row["tokens"] == len(kl)
        assert row["mean"] == pytest.approx(sum(kl) / len(kl))


def test_the_worst_tokens_come_with_the_text_before_them_and_both_models_choices(scores: Scores) -> None:
    assert scores.kl is not None
    tokens = torch.arange(COUNT) + 5000

    def decode(ids: Any) -> str:
        return " ".join(map(str, ids))

    rows = worst_tokens(scores, tokens, decode)
    assert [row["kl"] for row in rows] == pytest.approx(sorted(scores.kl.tolist(), reverse=True)[:10])
    for row in rows:
        i = int((scores.kl == row["kl"]).nonzero()[0])
        index, seen = places()[i]
        assert row["token"] == str(5000 + index)
        assert row["before"].split() == [str(5000 + j) for j in range(index - seen, index)]
        assert (row["checkpoint_top"], row["baseline_top"]) == (str(i), str(1000 + i))
        assert row["checkpoint"] / row["baseline"] == pytest.approx(2.718281828, rel=1e-5)


def test_samples_begin_all_over_the_text() -> None:
    tokens = torch.arange(100)
    assert beginnings(tokens, 3)[:, 0].tolist() == [0, 25, 50]
    assert beginnings(tokens[:20], 3).numel() == 0
