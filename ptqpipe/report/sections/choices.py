"""What each choice of scales left of the error of abs-max scales, and what searching the global scale saved."""

from collections import defaultdict
from collections.abc import Sequence

from ptqpipe.report import charts
from ptqpipe.report.content import Report, Weight
from ptqpipe.report.sections.drawn import Drawn
from ptqpipe.report.sections.roles import RoleRow, mean_choices, row_label

CHOICE_COLOUR = {"abs-max": 7, "OCP floor": 4, "four over six": 1, "exact": 5, "as stored": 0}


def choice_dots(report: Report, rows: Sequence[RoleRow]) -> Drawn | None:
    """What each choice left of the error of abs-max scales, by role."""
    dots = []
    for row in rows:
        values = [
            (CHOICE_COLOUR.get(c.name, 2), c.versus_absmax, f"{row.role}  {c.name}: {c.versus_absmax:.4f} of abs-max")
            for c in row.choices
        ]
        if values:
            dots.append(charts.Dots(row_label(row, rows), tuple(values)))
    if not dots:
        return None
    label = "squared error of each choice of scales beside that of abs-max, by role"
    unit = "squared error, abs-max = 1 (left is better)"
    return Drawn.both(lambda wide: charts.dot_chart(dots, wide=wide, label=label, unit=unit))


def choice_lines(report: Report) -> Drawn | None:
    """What each choice left, by layer, a line a choice; None where fewer than two layers have choices."""
    layers: dict[int, list[Weight]] = defaultdict(list)
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
        charts.Series(name, CHOICE_COLOUR.get(name, 2), tuple(values), over=name == "as stored")
        for name, values in points.items()
    ]
    label = "squared error of each choice of scales beside that of abs-max, by layer"
    unit = "squared error, abs-max = 1"
    return Drawn.both(lambda wide: charts.line_chart(series, wide=wide, label=label, unit=unit, least_span=0.1))


def bought(row: RoleRow) -> str:
    """What the searched global scales saved of the squared error, as recorded; a dash where nothing says so."""
    known = [w.versus_plain_global for w in row.weights if w.versus_plain_global is not None]
    return f"{100 * (1 - sum(known) / len(known)):.2f} %" if known else "–"
