"""Weights of one role and format together: the rows of the page's tables and charts."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ptqpipe.report.content import Choice, Report, Weight, decibels, pooled_mse
from ptqpipe.report.sections.words import shown


@dataclass(frozen=True, slots=True)
class RoleRow:
    """The weights of one role and format together. ``choices`` are means over the weights."""

    role: str
    format: str
    index: int
    weights: tuple[Weight, ...]
    sqnr_db: float | None
    worst: Weight | None
    choices: tuple[Choice, ...]


def by_role(report: Report) -> list[RoleRow]:
    """Roles with the worst error first; unknown errors in the order of the files."""
    groups: dict[tuple[str, str], list[Weight]] = defaultdict(list)
    for weight in report.weights:
        groups[(shown(weight.role), weight.format)].append(weight)
    ranked = sorted(groups.items(), key=lambda item: -(pooled_mse(item[1]) or 0.0))
    rows = []
    for index, ((role, fmt), members) in enumerate(ranked):
        known = [w for w in members if w.relative_mse is not None]
        worst = max(known, key=lambda w: w.relative_mse or 0.0) if known else None
        pooled = decibels(pooled_mse(members))
        rows.append(RoleRow(role, fmt, index, tuple(members), pooled, worst, mean_choices(report, members)))
    return rows


def mean_choices(report: Report, weights: Sequence[Weight]) -> tuple[Choice, ...]:
    """Each choice's mean over the weights that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for weight in weights:
        for choice in weight.choices:
            found[choice.name].append(choice.versus_absmax)
    return tuple(Choice(n, sum(found[n]) / len(found[n])) for n in report.choice_names if n in found)


def row_label(row: RoleRow, rows: Sequence[RoleRow]) -> str:
    """The role, with its format where a role has several."""
    return row.role if sum(other.role == row.role for other in rows) == 1 else f"{row.role} {row.format}"
