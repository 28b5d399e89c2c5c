"""Error by layer and role, and the weights with the largest."""

from collections import defaultdict
from collections.abc import Sequence

from ptqpipe.report import charts
from ptqpipe.report.content import Report, Weight, decibels, pooled_mse
from ptqpipe.report.sections.drawn import Drawn
from ptqpipe.report.sections.roles import RoleRow, row_label
from ptqpipe.report.sections.words import shown

LEAST_DB = 1.0  # how long the axis of decibels is at least
WORST_ROWS = 10


def error_lines(rows: Sequence[RoleRow]) -> list[tuple[str, Drawn]]:
    """(format, chart): SQNR by layer, a line a role. None of a format whose names have no layers or errors are unknown.

    A chart a format: formats lie decibels apart, and layers of one differ by tenths.
    """
    found = []
    for fmt in dict.fromkeys(row.format for row in rows):
        series = [line for line in (_error_line(row) for row in rows if row.format == fmt) if line is not None]
        if len({x for s in series for x, _, _ in s.points}) < 2:
            continue
        label = f"signal to quantization noise ratio of {fmt} weights by layer, one line a role"
        found.append((fmt, _line_chart(series, label)))
    return found


def _line_chart(series: Sequence[charts.Series], label: str) -> Drawn:
    return Drawn.both(
        lambda wide: charts.line_chart(series, wide=wide, label=label, unit="SQNR, dB", least_span=LEAST_DB)
    )


def _error_line(row: RoleRow) -> charts.Series | None:
    layers: dict[int, list[Weight]] = defaultdict(list)
    for weight in row.weights:
        if weight.layer is not None and weight.sqnr_db is not None:
            layers[weight.layer].append(weight)
    points, ranges = [], []
    for layer, members in sorted(layers.items()):
        pooled = decibels(pooled_mse(members))
        if pooled is None:
            continue
        values = [w.sqnr_db for w in members if w.sqnr_db is not None]
        of = f" ({len(members)} weights, {min(values):.2f} to {max(values):.2f})" if len(members) > 1 else ""
        points.append((layer, pooled, f"layer {layer}  {row.role}  {row.format}: {pooled:.2f} dB{of}"))
        ranges.append((layer, min(values), max(values)))
    return charts.Series(row.role, row.index, tuple(points), tuple(ranges)) if points else None


def error_strips(rows: Sequence[RoleRow]) -> Drawn | None:
    """SQNR by role, a dot a weight; None where errors are unknown."""
    strips = []
    for row in rows:
        values = tuple(
            (w.sqnr_db, f"{shown(w.name)}: {w.sqnr_db:.2f} dB") for w in row.weights if w.sqnr_db is not None
        )
        if values and row.sqnr_db is not None:
            strips.append(charts.Strip(row_label(row, rows), row.index, values, row.sqnr_db, f"{row.sqnr_db:.2f} dB"))
    if not strips:
        return None
    label = "signal to quantization noise ratio by role, a dot a weight"
    unit = "SQNR, dB (right is better)"
    return Drawn.both(lambda wide: charts.strip_chart(strips, wide=wide, label=label, unit=unit, least_span=LEAST_DB))


def worst_weights(report: Report) -> list[Weight]:
    """The weights with the largest relative error."""
    known = [w for w in report.weights if w.sqnr_db is not None]
    return sorted(known, key=lambda w: (-(w.relative_mse or 0.0), w.name))[:WORST_ROWS]
