"""What was measured, for the section of the model card that is left for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptqpipe.check.evaluate.verdict import Verdict, verdict
from ptqpipe.conversion.card import cell, code, write_section


def write_quality(ckpt: Path, result: Mapping[str, Any]) -> bool:
    """Puts what an eval file's content says into a checkpoint's card, where that has a place for it; whether it did.

    OutputError where it cannot be written.
    """
    judged = verdict(result)
    if judged is None:
        return False
    if result.get("embeddings"):
        return write_section(ckpt, _of_embedder(result, judged))
    baseline = result.get("baseline") or {}
    name = baseline.get("name") if isinstance(baseline, Mapping) else baseline
    rows = "".join(
        f"| {cell(code(row['data']))} | {row['tokens']:,} | {_number(row['mean'])} | {_span(row.get('interval'))} |\n"
        for row in result["kl"]
    )
    against = code(name or "the original model")
    return write_section(
        ckpt,
        f"## Quality\n\n**{judged.level.capitalize()}**: {judged.words}, against {against}.\n"
        f"{judged.like}.\n"
        f"\n| text | tokens | KL divergence, nats per token | 95 % interval |\n|---|---:|---:|---:|\n{rows}\n",
    )


def _of_embedder(result: Mapping[str, Any], judged: Verdict) -> str:
    rows = "".join(
        f"| {cell(code(row['data']))} | {row['pairs']:,} | {row['cosine']:.5f} | {_correlation(row['spearman'])} | "
        f"{100 * row['same_nearest']:.1f} % |\n"
        for row in result["embeddings"]
    )
    against = code((result.get("baseline") or {}).get("name") or "the original model")
    return (
        f"## Quality\n\n**{judged.level.capitalize()}**: {judged.words}, against {against}.\n"
        f"\n| sentences | pairs | cosine of embeddings | rank correlation of similarities | same nearest sentence |\n"
        f"|---|---:|---:|---:|---:|\n{rows}\n"
    )


def _correlation(value: float | None) -> str:
    return "–" if value is None else f"{value:.5f}"


def _number(value: float) -> str:
    return f"{value:.2e}".replace("e-0", "e-")


def _span(interval: Any) -> str:
    return f"{_number(interval[0])} to {_number(interval[1])}" if interval and None not in interval else "–"
