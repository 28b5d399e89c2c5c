"""Output errors in a record, by which calibrated and tuned weights are judged.

For a calibrated weight the record has its output error relative to that of plain rounding to nearest; for learned
codes that of each decoder layer, relative to what `ptqpipe tune` started from. The error of the weights themselves says
little of either: both let it grow where inputs are small.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptqpipe.recipe.options import PROPAGATED

HELD_OUT = "held-out samples"
SEEN = "the calibration samples"


@dataclass(frozen=True, slots=True)
class TunedBlock:
    """A decoder layer whose codes were learned: its output error relative to that of the codes that tune started from.

    ratio     1 where what was learned was not better and the start was kept
    held_out  whether the errors are those of samples that nothing was learned from
    """

    name: str
    ratio: float
    held_out: bool


def can_be_proven(algorithm: str, weighting: str) -> bool:
    """Whether optimal scales mean anything: where codes are the nearest ones, and a search chose the scales for them.

    The names are those of a record; "" where it says nothing, since nothing but a search ran.
    """
    return algorithm in ("", "rtn") and weighting != "block"


def mean_known(values: Iterable[float | None]) -> float | None:
    """The mean of the numbers that are not None; None without any."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def judged_by(weights: Mapping[str, Mapping[str, Any]]) -> str:
    """The samples on which convert compared errors, as text, from a record's weights."""
    return samples_text([entry["held_out"] is True for entry in weights.values() if "held_out" in entry])


def samples_text(held_out: Sequence[bool]) -> str:
    """Which samples errors are of, from whether each is of held-out ones."""
    kinds = set(held_out)
    return HELD_OUT if kinds == {True} else f"{HELD_OUT} where there were any" if True in kinds else SEEN


def tuned_blocks(record: Mapping[str, Any]) -> tuple[TunedBlock, ...]:
    """The decoder layers of a checkpoint that learned codes were written into; none for another's, or a damaged one."""
    blocks = _mapping(_mapping(record.get("rounding")).get("blocks"))
    tuned = []
    for name, raw in blocks.items():
        entry = _mapping(raw)
        before, after = _number(entry.get("start_loss")), _number(entry.get("learned_loss"))
        if before is not None and after is not None and before > 0:
            kept = entry.get("kept") is True
            tuned.append(TunedBlock(name, after / before if kept else 1.0, entry.get("held_out") is True))
    return tuple(tuned)


def tuned_from(record: Mapping[str, Any]) -> str:
    """What tune started from, as text: its recipe is the record's."""
    rules = _mapping(record.get("recipe")).get("rules")
    ways = {
        (_mapping(rule).get("algorithm"), _mapping(rule).get("weighting"))
        for rule in (rules if isinstance(rules, list) else [])
        if _mapping(rule).get("scheme") != "keep"
    }
    plain = ways <= {("rtn", "none"), ("rtn", PROPAGATED)} and "start" not in _mapping(record.get("rounding"))
    return "plain rounding" if plain else "the codes before tuning"


def tuned_by(record: Mapping[str, Any]) -> str:
    """The method of tune by which codes were found; "" for none, and where the record does not say."""
    return str(_mapping(record.get("rounding")).get("method") or "")


def chosen_by_data(record: Mapping[str, Any]) -> bool:
    """Whether data chose scales or codes of a checkpoint: the error of its weights then says nothing of its quality."""
    entries = [_mapping(entry) for entry in _mapping(record.get("weights")).values()]
    return isinstance(record.get("rounding"), Mapping) or any("versus_rtn" in entry for entry in entries)


def judgement(record: Mapping[str, Any]) -> list[str]:
    """What calibration data gained, in output errors; nothing without data."""
    weights = record["weights"]
    calibrated = [entry for entry in weights.values() if "versus_rtn" in entry]
    lines = []
    if calibrated:
        ratio, back = mean_known(entry["versus_rtn"] for entry in calibrated), sum(e["reverted"] for e in calibrated)
        lines = [
            f"output error: {ratio:.3f} times that of plain rounding to nearest, on {judged_by(weights)}, mean of "
            f"{len(calibrated)} weights; {back} of them keep plain rounding, since calibration did not help"
        ]
    return [*lines, *tuned_judgement(record)]


def tuned_judgement(record: Mapping[str, Any]) -> list[str]:
    """What tune gained, as its decoder layers' output errors; nothing of other checkpoints, or of a damaged record."""
    blocks = tuned_blocks(record)
    if not blocks:
        return []
    judged = samples_text([block.held_out for block in blocks])
    ratio = mean_known(block.ratio for block in blocks)
    return [
        f"output error of the tuned decoder layers: {ratio:.3f} times that of {tuned_from(record)}, on {judged}, mean "
        f"of {len(blocks)}"
    ]


def _mapping(raw: Any) -> Mapping[str, Any]:
    return raw if isinstance(raw, Mapping) else {}


def _number(raw: Any) -> float | None:
    return float(raw) if isinstance(raw, int | float) and math.isfinite(raw) else None
