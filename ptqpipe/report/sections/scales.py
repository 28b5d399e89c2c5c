"""Scales, clipping, underflow: histograms of scale codes, and how the weights use their codes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ptqpipe.report import charts
from ptqpipe.report.content import Histogram, Report
from ptqpipe.report.sections.drawn import Drawn
from ptqpipe.report.sections.roles import RoleRow
from ptqpipe.report.sections.words import shown


@dataclass(frozen=True, slots=True)
class ScalePanel:
    """The histograms of one format: all roles together, then each. ``charts`` are (name, chart)."""

    format: str
    codec: str
    blocks: int
    charts: tuple[tuple[str, Drawn], ...]


def scale_panels(report: Report) -> list[ScalePanel]:
    """Histograms of scale codes, a panel a format."""
    groups: dict[str, list[Histogram]] = defaultdict(list)
    for h in report.histograms:
        groups[h.format].append(h)
    panels = []
    for fmt, members in groups.items():
        counts = tuple(map(sum, zip(*(h.counts for h in members), strict=True)))
        first = members[0]
        everything = Histogram(fmt, first.codec, "all roles", counts, first.values)
        drawn = [_histogram(everything)] + [_histogram(h) for h in members if len(members) > 1]
        panels.append(ScalePanel(fmt, first.codec, sum(counts), tuple(drawn)))
    return panels


def _histogram(h: Histogram) -> tuple[str, Drawn]:
    label = f"block scales of {h.format} by code, {h.role}"
    return shown(h.role), Drawn.both(lambda wide: charts.histogram(h, wide=wide, tips=wide, label=label))


@dataclass(frozen=True, slots=True)
class CodesRow:
    """Clipping and underflow of one role and format; parts with what they are parts of."""

    role: str
    format: str
    elements: int
    largest: int
    zero: int
    blocks: int
    saturated: int | None
    subnormal: int | None
    zero_scales: int | None


def codes_rows(rows: Sequence[RoleRow]) -> list[CodesRow]:
    """How the weights of each role use their codes."""
    found = []
    for row in rows:
        of = [w.codes for w in row.weights]
        found.append(
            CodesRow(
                row.role,
                row.format,
                sum(c.elements for c in of),
                sum(c.largest for c in of),
                sum(c.zero for c in of),
                sum(c.blocks for c in of),
                _sum(c.saturated for c in of),
                _sum(c.subnormal for c in of),
                _sum(c.zero_scales for c in of),
            )
        )
    return found


def _sum(values: Iterable[int | None]) -> int | None:
    """Their sum; None where there is none to count."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
