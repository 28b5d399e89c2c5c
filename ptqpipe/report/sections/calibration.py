"""What calibration bought: the error of outputs beside plain rounding."""

from collections.abc import Sequence

from ptqpipe.report import charts, numbers
from ptqpipe.report.sections.drawn import Drawn
from ptqpipe.report.sections.roles import RoleRow, row_label
from ptqpipe.report.sections.words import how, shown


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
