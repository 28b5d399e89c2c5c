"""One sentence on a measured checkpoint, from near-lossless to damaged: by the mean KL divergence to its baseline, by
how often both find the same token most likely, and by what its perplexity has surely gained. On a sentence embedder: by
the cosine of its embeddings with the baseline's, the rank correlation of similarities, and how often both find the same
sentence nearest.

The thresholds are the only place where a number becomes a word; terminal, report, model card and Python show the same.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Level(NamedTuple):
    """What a word asks for. A model that is unsure of everything has a small divergence whatever it predicts; one that
    is sure of all, the same top token; and one that is as often better as worse, the same perplexity.

    kl          the largest mean KL divergence, in nats per token
    same        the smallest share of tokens with the same top token; of an embedder, of the same nearest sentence
    perplexity  the largest rise of the perplexity, relative; one that is within noise does not count
    cosine      of an embedder: the smallest mean cosine of embeddings
    rank        of an embedder: the smallest rank correlation of the similarities of pairs
    """

    word: str
    kl: float
    same: float
    perplexity: float
    cosine: float
    rank: float


LEVELS = (
    Level("near-lossless", 0.005, 0.95, 0.005, 0.998, 0.998),
    Level("very good", 0.02, 0.90, 0.015, 0.99, 0.99),
    Level("acceptable", 0.05, 0.85, 0.03, 0.98, 0.98),
    Level("visibly worse", 0.2, 0.75, 0.12, 0.95, 0.95),
)
DAMAGED = "damaged"
WORDS = (*(level.word for level in LEVELS), DAMAGED)

# Mean KL divergence of Llama 3 8B in formats of llama.cpp without importance matrix, on WikiText-2: README.md of its
# perplexity tool, revision f364eb6f. Another model may have a fraction of it: Llama 2 7B in Q4_K_M has 0.0127.
KNOWN = {
    "Q8_0": 0.001355,
    "Q6_K": 0.005452,
    "Q5_K_M": 0.010762,
    "Q4_K_M": 0.031273,
    "Q4_0": 0.071940,
    "Q3_K_M": 0.101913,
    "Q2_K": 0.445132,
}
_BEYOND = 1.5  # times the first or the last of them, which are not like it any more


class Verdict(NamedTuple):
    """Comparison of a checkpoint with its baseline.

    level  one of WORDS
    words  the numbers behind it, in words: KL, same top token, perplexity
    like   which format of llama.cpp has about this KL, in words; of an embedder empty
    """

    level: str
    words: str
    like: str

    def __str__(self) -> str:
        return f"{self.words}: {self.level}"


def verdict(result: Mapping[str, Any]) -> Verdict | None:
    """The verdict on the content of an eval file (``evaluation.result``), by the text with the worst one, of several
    that with the largest divergence; None where no divergence was measured."""
    if result.get("embeddings"):
        return _of_embedder(result["embeddings"])
    rows = [row for row in result.get("kl") or () if row.get("mean") is not None]
    if not rows:
        return None
    change = {row["data"]: _Change.of(row) for row in result.get("perplexity") or ()}
    judged = [(_place(row, change.get(row["data"])), float(row["mean"]), i) for i, row in enumerate(rows)]
    place, kl, index = max(judged)
    worst = rows[index]
    words, same = [f"KL {kl:.2e}".replace("e-0", "e-").replace("e+0", "e+")], worst.get("top1_agreement")
    if same is not None:
        words.append(f"same top token {100 * float(same):.1f} %")
    perplexity = change.get(worst["data"])
    words += [str(perplexity)] if perplexity is not None else []
    return Verdict(WORDS[place], ", ".join(words), like(kl))


def _of_embedder(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    place, _, index = max((_place_of_embedder(row), -float(row["cosine"]), i) for i, row in enumerate(rows))
    worst = rows[index]
    words = [
        f"cosine {float(worst['cosine']):.4f}",
        "no rank correlation" if worst.get("spearman") is None else f"rank correlation {float(worst['spearman']):.4f}",
        f"same nearest sentence {100 * float(worst['same_nearest']):.1f} %",
    ]
    return Verdict(WORDS[place], ", ".join(words), "")


def _place_of_embedder(row: Mapping[str, Any]) -> int:
    cosine, same = float(row["cosine"]), float(row["same_nearest"])
    rank = 1.0 if row.get("spearman") is None else float(row["spearman"])  # all similarities are equal
    reached = (cosine >= level.cosine and rank >= level.rank and same >= level.same for level in LEVELS)
    return next((place for place, fits in enumerate(reached) if fits), len(LEVELS))


def like(kl: float) -> str:
    """Which of `KNOWN` has about a mean KL divergence, in words."""
    least, most = next(iter(KNOWN)), next(reversed(KNOWN))
    how, name = "about", ""
    if kl * _BEYOND < KNOWN[least]:
        how, name = "below", least
    elif kl > KNOWN[most] * _BEYOND:
        how, name = "above", most
    name = name or min(KNOWN, key=lambda each: abs(math.log(KNOWN[each] / kl)))
    return f"KL {how} that of Llama 3 8B in llama.cpp's {name}"


def embedder_thresholds() -> str:
    each = [f"{level.word}: {level.cosine:g}, {level.rank:g}, {100 * level.same:g} %" for level in LEVELS]
    return (
        "Thresholds: the smallest mean cosine to the original model's embeddings, the smallest rank correlation of the "
        "similarities of pairs, the smallest share of sentences with the same nearest sentence: "
        f"{'; '.join(each)}; {DAMAGED}: worse."
    )


def thresholds() -> str:
    each = [f"{level.word}: {level.kl:g}, {100 * level.same:g} %, {100 * level.perplexity:g} %" for level in LEVELS]
    return (
        "Thresholds: the largest mean KL to the original model in nats per token, the smallest share of tokens with "
        "the same top token, the largest rise of the perplexity that is not within noise: "
        f"{'; '.join(each)}; {DAMAGED}: worse."
    )


class _Change(NamedTuple):
    """Relative change of a text's perplexity; ``noise``: whether its confidence interval contains zero; None without an
    interval."""

    relative: float
    noise: bool | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "_Change | None":
        if not row.get("baseline") or row.get("difference") is None:
            return None
        interval = row.get("interval")
        noise = None if interval is None or None in interval else bool(interval[0] <= 0 <= interval[1])
        return cls(float(row["difference"]) / float(row["baseline"]), noise)

    def __str__(self) -> str:
        return f"perplexity {100 * self.relative:+.2f} %" + (" (within noise)" if self.noise else "")


def _place(row: Mapping[str, Any], change: _Change | None) -> int:
    kl, same = float(row["mean"]), row.get("top1_agreement")
    rise = change.relative if change is not None and change.noise is False else 0.0
    reached = (
        kl <= level.kl and (same is None or float(same) >= level.same) and rise <= level.perplexity for level in LEVELS
    )
    return next((place for place, fits in enumerate(reached) if fits), len(LEVELS))
