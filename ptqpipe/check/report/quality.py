"""What a report says of the model's quality: the card at its top, plots of the divergence, texts before and after."""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from ptqpipe.check.report import numbers, plots
from ptqpipe.check.report.content import Report, pooled_mse
from ptqpipe.check.report.error_charts import Drawn, both
from ptqpipe.conversion.output_error import mean_known
from ptqpipe.run.quantities import decibels, disk_size, three_digits


class CardNumber(NamedTuple):
    """A number of the card: what it is, the number, what to know about it; whether it is bad news."""

    what: str
    value: str
    beside: str
    bad: bool = False


def facts(report: Report) -> list[CardNumber]:
    """The numbers beside the verdict: quality where it was measured, else what is known; size; whether verified."""
    row = worst_text(report)
    cards = _measured(report, row) if row is not None else _embedded(report) or _proxies(report)
    return [*cards, _size(report), *_verified(report)]


def worst_text(report: Report) -> Mapping[str, Any] | None:
    """The row of the text with the largest divergence, by which a checkpoint is judged."""
    rows = report.evaluation["kl"] if report.evaluation is not None else []
    return max(rows, key=lambda row: row["mean"], default=None)


def _measured(report: Report, row: Mapping[str, Any]) -> list[CardNumber]:
    assert report.evaluation is not None
    to = f"nats per token of {row['data']}, to {report.evaluation['baseline'] or 'the original'}"
    interval = row["interval"]
    span = f"95 % interval {numbers.sci(interval[0])} to {numbers.sci(interval[1])}; " if interval else ""
    cards = [CardNumber("KL divergence", numbers.sci(row["mean"]), span + to)]
    if row["top1_agreement"] is not None:
        share = 100 * row["top1_agreement"]
        cards.append(CardNumber("Same top token", f"{share:.1f} %", f"of {row['tokens']:,} tokens"))
    return cards + _perplexity(report, str(row["data"]))


def _perplexity(report: Report, data: str) -> list[CardNumber]:
    assert report.evaluation is not None
    row = next((row for row in report.evaluation["perplexity"] if row["data"] == data), None)
    if row is None:
        return []
    base, interval = row["baseline"], row["interval"]
    beside = "no baseline"
    if base:
        noise = interval is not None and interval[0] <= 0 <= interval[1]
        change = f"{100 * (row['checkpoint'] / base - 1):+.2f} %"
        beside = f"from {numbers.plain(base)}, {change}{' (within noise)' if noise else ''}"
    return [CardNumber("Perplexity", numbers.plain(row["checkpoint"]), beside)]


def _embedded(report: Report) -> list[CardNumber]:
    """Of a sentence embedder, on the pairs with the smallest cosine."""
    rows = report.evaluation["embeddings"] if report.evaluation is not None else []
    row = min(rows, key=lambda each: each["cosine"], default=None)
    if row is None or report.evaluation is None:
        return []
    beside = f"of {row['pairs']:,} pairs of {row['data']}, to {report.evaluation['baseline'] or 'the original'}"
    span = row["cosine_interval"]
    between = f"95 % interval {span[0]:.5f} to {span[1]:.5f}; " if span else ""
    cards = [CardNumber("Cosine of embeddings", f"{row['cosine']:.4f}", between + beside)]
    if row["spearman"] is not None:
        rank = f"{row['spearman']:.4f}"
        cards.append(CardNumber("Rank correlation", rank, "of the similarities of pairs (Spearman)"))
    return [*cards, CardNumber("Same nearest sentence", f"{100 * row['same_nearest']:.1f} %", "of the first sentences")]


def _proxies(report: Report) -> list[CardNumber]:
    """The proxy for quality where the model was not evaluated: the error that its codes were chosen to minimize."""
    if report.versus_rtn is not None:
        beside = f"times that of plain rounding, on {report.judged}"
        return [CardNumber("Output error of the layers", numbers.ratio(report.versus_rtn), beside)]
    ratio = mean_known(block.ratio for block in report.blocks)
    if ratio is not None:
        beside = f"times that of {report.blocks_from}, on {report.blocks_judged}"
        return [CardNumber("Output error of the layers", numbers.ratio(ratio), beside)]
    error = decibels(pooled_mse(report.weights))
    return (
        [] if error is None else [CardNumber("Weight error", f"{numbers.db(error)} dB", "signal to quantization noise")]
    )


def _size(report: Report) -> CardNumber:
    before = f"from {disk_size(report.before_bytes)}" + ("" if report.before_measured else " in bfloat16")
    times = report.before_bytes / max(1, report.after_bytes)
    return CardNumber("Size", disk_size(report.after_bytes), f"{before}: {three_digits(times)} times smaller")


def _verified(report: Report) -> list[CardNumber]:
    if report.faults is None:
        return []
    if report.faults:
        return [CardNumber("Verified", f"{report.faults} faults", "ptqpipe verify lists them", bad=True)]
    return [CardNumber("Verified", "no fault", "names, hashes, config files and claims, from the bytes")]


def drawn_texts(report: Report) -> list[tuple[Mapping[str, Any], Drawn | None, Drawn | None]]:
    """For each scored text: its row, the plot over tokens and the plot over positions, where they are known."""
    rows = report.evaluation["kl"] if report.evaluation is not None else []
    return [(row, _over_tokens(row), _over_positions(row.get("positions") or ())) for row in rows]


def _over_tokens(row: Mapping[str, Any]) -> Drawn | None:
    return both(lambda wide: plots.kl_histogram(row, wide=wide)) if row.get("histogram") else None


def _over_positions(rows: Sequence[Mapping[str, Any]]) -> Drawn | None:
    return both(lambda wide: plots.kl_by_position(rows, wide=wide)) if len(rows) > 1 else None


def sample_texts(report: Report) -> list[tuple[str, str, str, str]]:
    """(beginning, what both models wrote, how the original goes on, how this checkpoint does) of each sample."""
    rows = report.evaluation.get("samples", ()) if report.evaluation is not None else ()
    texts = []
    for row in rows:
        pairs = zip(row["baseline"], row["checkpoint"], strict=False)
        same = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same not in (row["baseline"], row["checkpoint"]):  # they part inside of a word: it belongs to the difference
            same = same[: len(same) - len(re.split(r"\s", same)[-1])]
        rest = (row["baseline"][len(same) :], row["checkpoint"][len(same) :])
        texts.append((row["prompt"], same, *rest))
    return texts
