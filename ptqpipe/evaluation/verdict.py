"""One sentence on a measured checkpoint: near-lossless, good or damaged, by the mean KL divergence to its baseline and
by how often both find the same token most likely.

The thresholds are the only place where a number becomes a word; terminal, report, model card and Python show the same.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

# The largest mean KL divergence, in nats per token, and the smallest share of tokens with the same top token. A model
# that is unsure of everything has a small divergence whatever it predicts; one that is sure of all, the same top token.
NEAR_LOSSLESS, GOOD = (0.005, 0.95), (0.1, 0.8)


class Verdict(NamedTuple):
    """How a checkpoint compares with its baseline.

    level  "near-lossless", "good" or "damaged"
    words  the numbers behind it, in words: KL, same top token, perplexity
    """

    level: str
    words: str

    def __str__(self) -> str:
        return f"{self.words}: {self.level}"


def verdict(result: Mapping[str, Any]) -> Verdict | None:
    """The verdict on the content of an eval file (``evaluation.result``), by the text with the largest divergence; None
    where no divergence was measured."""
    rows = [row for row in result.get("kl") or () if row.get("mean") is not None]
    if not rows:
        return None
    worst = max(rows, key=lambda row: float(row["mean"]))
    kl, same = float(worst["mean"]), worst.get("top1_agreement")
    words = [f"KL {kl:.2e}".replace("e-0", "e-").replace("e+0", "e+")]
    if same is not None:
        words.append(f"same top token {100 * float(same):.1f} %")
    words += _perplexity(next((row for row in result.get("perplexity") or () if row["data"] == worst["data"]), None))
    reached = [kl <= most and (same is None or same >= least) for most, least in (NEAR_LOSSLESS, GOOD)]
    level = "near-lossless" if reached[0] else "good" if reached[1] else "damaged"
    return Verdict(level, ", ".join(words))


def _perplexity(row: Mapping[str, Any] | None) -> list[str]:
    if row is None or not row.get("baseline") or row.get("difference") is None:
        return []
    interval = row.get("interval")
    noise = interval is not None and None not in interval and interval[0] <= 0 <= interval[1]
    change = 100 * float(row["difference"]) / float(row["baseline"])
    return [f"perplexity {change:+.2f} %" + (" (within noise)" if noise else "")]
