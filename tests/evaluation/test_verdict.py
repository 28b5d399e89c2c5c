"""The verdict on an eval file: its word follows the KL divergence, its numbers are those of the file."""

import re
from pathlib import Path

import pytest

from ptqpipe.evaluation.verdict import GOOD, NEAR_LOSSLESS, verdict


def result(mean: float, *, interval: tuple[float, float] = (-0.1, 0.05)) -> dict[str, object]:
    return {
        "perplexity": [
            {"data": "a.txt", "checkpoint": 9.997, "baseline": 10.0, "difference": -0.003, "interval": interval}
        ],
        "kl": [{"data": "a.txt", "mean": mean, "top1_agreement": 0.9601}],
    }


@pytest.mark.parametrize(
    ("mean", "level"),
    [
        (0.0, "near-lossless"),
        (NEAR_LOSSLESS[0], "near-lossless"),
        (0.0051, "good"),
        (GOOD[0], "good"),
        (0.11, "damaged"),
    ],
)
def test_the_level_follows_the_mean_divergence(mean: float, level: str) -> None:
    found = verdict(result(mean))
    assert found is not None
    assert found.level == level


def test_the_thresholds_are_those_of_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| at most ([\d.]+) \| at least ([\d.]+) % \|$", page, re.MULTILINE)
    limits = {"near-lossless": NEAR_LOSSLESS, "good": GOOD}
    assert rows == [(name, f"{kl:g}", f"{100 * same:g}") for name, (kl, same) in limits.items()]


@pytest.mark.parametrize(
    ("same", "level"), [(0.95, "near-lossless"), (0.949, "good"), (0.8, "good"), (0.79, "damaged")]
)
def test_a_small_divergence_is_not_enough_where_other_tokens_are_chosen(same: float, level: str) -> None:
    found = verdict({"kl": [{"data": "a.txt", "mean": 1e-3, "top1_agreement": same}]})
    assert found is not None
    assert found.level == level


def test_the_words_are_the_numbers_of_the_file() -> None:
    words = "KL 1.56e-3, same top token 96.0 %, perplexity -0.03 %"
    assert str(verdict(result(1.56e-3))) == f"{words} (within noise): near-lossless"
    assert str(verdict(result(1.56e-3, interval=(-0.1, -0.01)))) == f"{words}: near-lossless"


def test_the_worst_text_decides_and_without_a_divergence_there_is_no_verdict() -> None:
    two = result(1e-3)
    two["kl"] = [*two["kl"], {"data": "b.txt", "mean": 0.5, "top1_agreement": None}]  # type: ignore[misc]
    assert str(verdict(two)) == "KL 5.00e-1: damaged"
    assert verdict({"kl": [], "perplexity": []}) is None
    assert verdict({"kl": [{"data": "a", "mean": None}]}) is None
