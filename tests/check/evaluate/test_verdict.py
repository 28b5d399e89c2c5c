"""The verdict on an eval file: its word follows divergence, top tokens and perplexity, its numbers are the file's."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from ptqpipe.check.evaluate.verdict import KNOWN, LEVELS, WORDS, embedder_thresholds, like, thresholds, verdict

NOISE = (-0.1, 0.05)


def result(mean: float, *, interval: tuple[float, float] | None = NOISE, rise: float = -0.0003) -> dict[str, object]:
    """An eval file; ``rise``: of the perplexity, relative."""
    change = {"checkpoint": 10 + 10 * rise, "baseline": 10.0, "difference": 10 * rise, "interval": interval}
    return {
        "perplexity": [{"data": "a.txt", **change}],
        "kl": [{"data": "a.txt", "mean": mean, "top1_agreement": 0.9601}],
    }


def level_of(content: dict[str, object]) -> str:
    found = verdict(content)
    assert found is not None
    return found.level


@pytest.mark.parametrize("place", range(len(LEVELS)))
def test_every_threshold_of_the_divergence_belongs_to_the_better_word(place: int) -> None:
    most = LEVELS[place].kl
    assert level_of(result(most)) == WORDS[place]
    assert level_of(result(most * 1.001)) == WORDS[place + 1]
    assert level_of(result(0.0)) == WORDS[0]


@pytest.mark.parametrize("place", range(len(LEVELS)))
def test_a_small_divergence_is_not_enough_where_other_tokens_are_chosen(place: int) -> None:
    least = LEVELS[place].same
    assert level_of({"kl": [{"data": "a.txt", "mean": 1e-3, "top1_agreement": least}]}) == WORDS[place]
    assert level_of({"kl": [{"data": "a.txt", "mean": 1e-3, "top1_agreement": least - 0.001}]}) == WORDS[place + 1]


@pytest.mark.parametrize("place", range(len(LEVELS)))
def test_a_significant_rise_of_the_perplexity_lowers_the_word(place: int) -> None:
    most = LEVELS[place].perplexity
    sure = (0.001, 10.0)
    assert level_of(result(1e-4, rise=most, interval=sure)) == WORDS[place]
    assert level_of(result(1e-4, rise=most * 1.01, interval=sure)) == WORDS[place + 1]


@pytest.mark.parametrize(
    ("rise", "interval"),
    [(0.3, (-0.1, 7.0)), (0.3, (0.0, 7.0)), (0.3, None), (0.3, (None, None)), (-0.3, (-4.0, -2.0))],
    ids=["noise", "zero is inside", "no interval", "not finite", "lower"],
)
def test_a_perplexity_that_may_not_have_risen_changes_no_word(rise: float, interval: tuple[float, float]) -> None:
    assert level_of(result(1e-4, rise=rise, interval=interval)) == "near-lossless"


@pytest.mark.parametrize(
    ("mean", "same", "rise", "level"),
    [
        (0.0806, 0.851, 0.0598, "visibly worse"),
        (0.0092, 0.93, 0.0372, "visibly worse"),
        (0.00092, 0.971, 9e-4, "near-lossless"),
    ],
)
def test_models_of_a_visible_loss_are_not_called_good(mean: float, same: float, rise: float, level: str) -> None:
    content = result(mean, rise=rise, interval=(0.0001, 5.0))
    content["kl"] = [{"data": "a.txt", "mean": mean, "top1_agreement": same}]
    assert level_of(content) == level


def test_each_word_asks_for_less_than_the_one_before() -> None:
    for better, worse in pairwise(LEVELS):
        assert better.kl < worse.kl
        assert better.same > worse.same
        assert better.perplexity < worse.perplexity
        assert better.cosine > worse.cosine
        assert better.rank > worse.rank


def test_the_thresholds_of_embedders_are_those_of_the_documentation_and_of_the_report() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "using.md").read_text(encoding="utf-8")
    row = r"^\| ([\w -]+) \| at least ([\d.]+) \| at least ([\d.]+) \| at least ([\d.]+) % \|"
    numbers = [(one.word, f"{one.cosine:g}", f"{one.rank:g}", f"{100 * one.same:g}") for one in LEVELS]
    assert re.findall(row, page, re.M) == numbers
    assert all(f"{word}: {cosine}, {rank}, {same} %" in embedder_thresholds() for word, cosine, rank, same in numbers)


@pytest.mark.parametrize("key", ["cosine", "spearman", "same_nearest"])
def test_the_worst_number_of_an_embedder_decides(key: str) -> None:
    row = {"data": "p.tsv", "pairs": 9, "cosine": 0.9999, "spearman": 0.9999, "same_nearest": 0.99}
    assert level_of({"embeddings": [row]}) == "near-lossless"
    for level, worse in pairwise(LEVELS):
        least = {"cosine": level.cosine, "spearman": level.rank, "same_nearest": level.same}[key]
        assert level_of({"embeddings": [{**row, key: least}]}) == level.word
        assert level_of({"embeddings": [row, {**row, key: least - 1e-4}]}) == worse.word
    assert level_of({"embeddings": [{**row, key: 0.1}]}) == "damaged"


def test_the_thresholds_are_those_of_the_documentation_and_of_the_report() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "using.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w -]+) \| at most ([\d.]+) \| at least ([\d.]+) % \| at most ([\d.]+) % \|", page, re.M)
    numbers = [(word, f"{kl:g}", f"{100 * same:g}", f"{100 * rise:g}") for word, kl, same, rise, *_ in LEVELS]
    assert rows == numbers
    assert all(f"{word}: {kl}, {same} %, {rise} %" in thresholds() for word, kl, same, rise in numbers)
    known = re.findall(r"^\| (\w+) \| ([\d.]+) \| \+([\d.]+) % \|(?: ([\d.]+) %)? \| ([\w -]+) \|$", page, re.M)
    assert [(name, float(kl)) for name, kl, *_ in known] == list(KNOWN.items())
    for _, kl, rise, same, word in known:
        content = result(float(kl), rise=float(rise) / 100, interval=(0.001, 10.0))
        content["kl"] = [{"data": "a.txt", "mean": float(kl), "top1_agreement": float(same) / 100 if same else None}]
        assert level_of(content) == word


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        (0.0, "KL below that of Llama 3 8B in llama.cpp's Q8_0"),
        (9e-4, "KL below that of Llama 3 8B in llama.cpp's Q8_0"),
        (9.1e-4, "KL about that of Llama 3 8B in llama.cpp's Q8_0"),
        (0.0107, "KL about that of Llama 3 8B in llama.cpp's Q5_K_M"),
        (0.03, "KL about that of Llama 3 8B in llama.cpp's Q4_K_M"),
        (0.0806, "KL about that of Llama 3 8B in llama.cpp's Q4_0"),
        (0.6, "KL about that of Llama 3 8B in llama.cpp's Q2_K"),
        (0.7, "KL above that of Llama 3 8B in llama.cpp's Q2_K"),
    ],
)
def test_the_divergence_is_compared_with_formats_that_people_know(kl: float, words: str) -> None:
    assert like(kl) == words


def test_the_words_are_the_numbers_of_the_file() -> None:
    words = "KL 1.56e-3, same top token 96.0 %, perplexity -0.03 %"
    assert str(verdict(result(1.56e-3))) == f"{words} (within noise): near-lossless"
    assert str(verdict(result(1.56e-3, interval=(-0.1, -0.01)))) == f"{words}: near-lossless"


def test_the_worst_text_decides_and_without_a_divergence_there_is_no_verdict() -> None:
    two = result(1e-3)
    two["kl"] = [*two["kl"], {"data": "b.txt", "mean": 0.5, "top1_agreement": None}]  # type: ignore[misc]
    assert str(verdict(two)) == "KL 5.00e-1: damaged"
    worse = result(1e-3, rise=0.1, interval=(0.9, 1.1))
    worse["kl"] = [*worse["kl"], {"data": "b.txt", "mean": 4e-3, "top1_agreement": None}]  # type: ignore[misc]
    assert level_of(worse) == "visibly worse"
    assert verdict({"kl": [], "perplexity": []}) is None
    assert verdict({"kl": [{"data": "a", "mean": None}]}) is None
