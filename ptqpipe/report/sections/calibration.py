"""What data bought: the error of outputs beside plain rounding, or beside what tune started from."""

from collections.abc import Sequence
from dataclasses import dataclass

from ptqpipe.report import charts, numbers
from ptqpipe.report.content import Report
from ptqpipe.report.sections.drawn import Drawn
from ptqpipe.report.sections.roles import RoleRow, row_label
from ptqpipe.report.sections.words import how, shown


@dataclass(frozen=True, slots=True)
class Gain:
    """The calibrated weights of a role: mean and largest output error beside plain rounding's, how many went back."""

    role: str
    format: str
    count: int
    mean: float
    largest: float
    reverted: int


def gains(rows: Sequence[RoleRow]) -> list[Gain]:
    """The roles that have calibrated weights."""
    found = []
    for row in rows:
        known = [w.versus_rtn for w in row.weights if w.versus_rtn is not None]
        if known:
            back = sum(w.reverted for w in row.weights)
            found.append(Gain(row.role, row.format, len(known), sum(known) / len(known), max(known), back))
    return found


def tuned(report: Report) -> Drawn | None:
    """Output error of the decoder blocks beside that of what tune started from; None without learned codes."""
    if not report.blocks:
        return None
    values = tuple((b.ratio, f"{shown(b.name)}: {b.ratio:.4f} of {report.blocks_from}") for b in report.blocks)
    mean = sum(value for value, _ in values) / len(values)
    strips = [charts.Strip("blocks", 0, values, mean, numbers.ratio(mean))]
    label = "output error of decoder blocks beside that of what tune started from"
    unit = "output error, start = 1 (left is better)"
    return Drawn.both(lambda wide: charts.strip_chart(strips, wide=wide, label=label, unit=unit, least_span=0.1))


def calibrated(rows: Sequence[RoleRow]) -> Drawn | None:
    """Output error beside plain rounding, by role; None where nothing was calibrated."""
    strips = []
    for row in rows:
        values = tuple(
            (w.versus_rtn, f"{shown(w.name)}: {w.versus_rtn:.4f} of plain rounding, {how(w)}")
            for w in row.weights
            if w.versus_rtn is not None
        )
        if values:
            mean = sum(v for v, _ in values) / len(values)
            back = sum(w.reverted for w in row.weights)
            note = numbers.ratio(mean) + (f", {back} back" if back else "")
            strips.append(charts.Strip(row_label(row, rows), row.index, values, mean, note))
    if not strips:
        return None
    label = "output error beside that of plain rounding, by role"
    unit = "output error, plain rounding = 1 (left is better)"
    return Drawn.both(lambda wide: charts.strip_chart(strips, wide=wide, label=label, unit=unit, least_span=0.1))
