"""The charts of quantization errors: by layer and role, and what choices of scales and calibration gained."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from markupsafe import Markup

from ptqpipe.check.report import charts, numbers
from ptqpipe.check.report.content import Report, ReportedWeight, pooled_mse
from ptqpipe.check.report.roles import RoleRow, how, mean_choices, row_label, shown
from ptqpipe.run.quantities import decibels

LEAST_DB = 1.0  # how long the axis of decibels is at least
WORST_ROWS = 10
CHOICE_COLOUR = {"abs-max": 12, "OCP floor": 13, "four over six": 14, "exact": 15, "as stored": 16}

Drawn = tuple[Markup, Markup]
"""A chart for wide and for narrow pages; the page shows the one that fits."""


def both(draw: Callable[[bool], Markup]) -> Drawn:
    """Draws a chart twice, for a wide and a narrow page; ``draw`` gets whether it is the wide one."""
    return draw(True), draw(False)


def error_lines(rows: Sequence[RoleRow]) -> Drawn | None:
    """SQNR by layer, a line a role through all its formats, on one axis; the marks of further formats are rings.

    None where fewer than two layers are known.
    """
    formats = list(dict.fromkeys(row.format for row in rows))
    roles = list(dict.fromkeys(row.role for row in rows))
    lines = [_error_line([row for row in rows if row.role == role], formats[0]) for role in roles]
    series = [line for line in lines if line is not None]
    if len({x for s in series for x, _, _ in s.points}) < 2:
        return None
    label = "signal to quantization noise ratio of the weights by layer, one line a role"
    return both(lambda wide: charts.line_chart(series, wide=wide, label=label, unit="SQNR, dB", least_span=LEAST_DB))


def _error_line(rows: Sequence[RoleRow], first: str) -> charts.Series | None:
    """The line of one role. ``first``: the format whose marks are filled."""
    layers: dict[int, list[ReportedWeight]] = defaultdict(list)
    for weight in (weight for row in rows for weight in row.weights):
        if weight.layer is not None and weight.sqnr_db is not None:
            layers[weight.layer].append(weight)
    points, ranges, rings = [], [], set()
    for layer, members in sorted(layers.items()):
        pooled = decibels(pooled_mse(members))
        if pooled is None:
            continue
        values = [w.sqnr_db for w in members if w.sqnr_db is not None]
        formats = ", ".join(dict.fromkeys(w.format for w in members))
        spread = f" ({len(members)} weights, {min(values):.2f} to {max(values):.2f})" if len(members) > 1 else ""
        points.append((layer, pooled, f"layer {layer}  {rows[0].role}  {formats}: {pooled:.2f} dB{spread}"))
        ranges.append((layer, min(values), max(values)))
        rings |= {layer} if formats != first else set()
    series = charts.Series(rows[0].role, rows[0].index, tuple(points), tuple(ranges), rings=frozenset(rings))
    return series if points else None


def error_strips(rows: Sequence[RoleRow]) -> Drawn | None:
    """SQNR by role, a dot per weight; None where errors are unknown."""
    strips = []
    for row in rows:
        values = tuple(
            (w.sqnr_db, f"{shown(w.name)}: {w.sqnr_db:.2f} dB") for w in row.weights if w.sqnr_db is not None
        )
        if values and row.sqnr_db is not None:
            strips.append(
                charts.StripRow(row_label(row, rows), row.index, values, row.sqnr_db, f"{row.sqnr_db:.2f} dB")
            )
    if not strips:
        return None
    label = "signal to quantization noise ratio by role, a dot per weight"
    unit = "SQNR, dB (right is better)"
    return both(lambda wide: charts.strip_chart(strips, wide=wide, label=label, unit=unit, least_span=LEAST_DB))


def worst_weights(report: Report) -> list[ReportedWeight]:
    measured = [w for w in report.weights if w.sqnr_db is not None]
    return sorted(measured, key=lambda w: (-(w.relative_mse or 0.0), w.name))[:WORST_ROWS]


def choice_dots(report: Report, rows: Sequence[RoleRow]) -> Drawn | None:
    """Error of each scale search relative to abs-max scales, by role."""
    dots: list[charts.Dots] = []
    for row in rows:
        values = [
            (CHOICE_COLOUR.get(c.name, 13), c.versus_absmax, f"{row.role}  {c.name}: {c.versus_absmax:.4f} of abs-max")
            for c in row.choices
        ]
        if values:
            dots.append((row_label(row, rows), values))
    if not dots:
        return None
    label = "squared error of each choice of scales relative to that of abs-max, by role"
    unit = "squared error, abs-max = 1 (left is better)"
    return both(lambda wide: charts.dot_chart(dots, wide=wide, label=label, unit=unit))


def choice_lines(report: Report) -> Drawn | None:
    """Error of each scale search by layer, a line each; None where fewer than two layers have choices."""
    layers: dict[int, list[ReportedWeight]] = defaultdict(list)
    for weight in report.weights:
        if weight.layer is not None and weight.choices:
            layers[weight.layer].append(weight)
    if len(layers) < 2:
        return None
    points: dict[str, list[tuple[int, float, str]]] = defaultdict(list)
    for layer, members in sorted(layers.items()):
        for choice in mean_choices(report, members):
            tip = f"layer {layer}  {choice.name}: {choice.versus_absmax:.4f} of abs-max"
            points[choice.name].append((layer, choice.versus_absmax, tip))
    series = [
        charts.Series(name, CHOICE_COLOUR.get(name, 13), tuple(values), over=name == "as stored")
        for name, values in points.items()
    ]
    label = "squared error of each choice of scales relative to that of abs-max, by layer"
    unit = "squared error, abs-max = 1"
    return both(lambda wide: charts.line_chart(series, wide=wide, label=label, unit=unit, least_span=0.1))


def saved_by_global_scale(row: RoleRow) -> str:
    """Squared error saved by searched global scales, from the record; a dash where it is not recorded."""
    ratios = [w.versus_plain_global for w in row.weights if w.versus_plain_global is not None]
    return f"{100 * (1 - sum(ratios) / len(ratios)):.2f} %" if ratios else "–"


def tuned(report: Report) -> Drawn | None:
    """Output error of the decoder layers relative to that of what tune started from; None without learned codes."""
    if not report.blocks:
        return None
    values = tuple((b.ratio, f"{shown(b.name)}: {b.ratio:.4f} of {report.blocks_from}") for b in report.blocks)
    mean = sum(value for value, _ in values) / len(values)
    strips = [charts.StripRow("layers", 0, values, mean, numbers.ratio(mean))]
    label = "output error of decoder layers relative to that of what tune started from"
    unit = "output error, start = 1 (left is better)"
    return both(lambda wide: charts.strip_chart(strips, wide=wide, label=label, unit=unit, least_span=0.1))


def calibrated(rows: Sequence[RoleRow]) -> Drawn | None:
    """Output error relative to plain rounding, by role; None where nothing was calibrated."""
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
            note = numbers.ratio(mean) + (f", {back} plain" if back else "")
            strips.append(charts.StripRow(row_label(row, rows), row.index, values, mean, note))
    if not strips:
        return None
    label = "output error relative to that of plain rounding, by role"
    unit = "output error, plain rounding = 1 (left is better)"
    return both(lambda wide: charts.strip_chart(strips, wide=wide, label=label, unit=unit, least_span=0.1))
