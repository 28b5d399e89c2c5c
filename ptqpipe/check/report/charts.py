"""The charts of a report as inline SVG. Numbers in, Markup out; each is drawn once for wide and once for narrow pages.

Titles, captions and legends are the template's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ptqpipe.check.report import numbers
from ptqpipe.check.report.content import Histogram, WorstBlock
from ptqpipe.check.report.svg import COLOURS, Axis, canvas, colour, join, line, marker, node, spread, text

WIDE, NARROW = 960, 360
Position = Callable[[int], float]
_MANY = 48  # points of a line beyond which it has no markers


@dataclass(frozen=True, slots=True)
class Series:
    """One line: (x, y, the text of the tooltip), and the range that each point stands for, if it stands for several.

    over   drawn as dashes and rings, so that a line beneath it is still seen
    rings  where the marks are rings
    """

    name: str
    index: int
    points: tuple[tuple[int, float, str], ...]
    ranges: tuple[tuple[int, float, float], ...] = ()
    over: bool = False
    rings: frozenset[int] = frozenset()


_NAME = 17  # letters of a name at the end of a line
_LETTER = 8.8  # the width of a bold one, as of those of capitals and digits


def line_chart(series: Sequence[Series], *, wide: bool, label: str, unit: str, least_span: float) -> Markup:
    """One line a series over whole numbers (layers); direct labels on wide pages."""
    width, height = (WIDE, 340) if wide else (NARROW, 260)
    names = [_short(s.name, _NAME) for s in series]
    left, right, top, bottom = 46, max(132, 18 + _LETTER * max(map(len, names))) if wide else 12, 26, 34
    ys = [y for s in series for _, y, _ in s.points] + [v for s in series for _, lo, hi in s.ranges for v in (lo, hi)]
    xs = sorted({x for s in series for x, _, _ in s.points})
    y_axis = Axis.over(ys, start=height - bottom, stop=top, count=5 if wide else 4, least_span=least_span)
    span = max(1, xs[-1] - xs[0])
    inner = width - left - right - 16

    def pixel(x: int) -> float:
        return left + 8 + (x - xs[0]) / span * inner if len(xs) > 1 else left + 8 + inner / 2

    parts = [text(left - 8, 14, unit, kind="unit", anchor="start")]
    parts += _levels(y_axis, left, width - right)
    step = _whole_step(len(xs), 16 if wide else 7)
    parts += [text(pixel(x), height - 12, str(x), anchor="middle") for x in xs[::step]]
    parts += [_series(s, pixel, y_axis) for s in series]
    if wide:
        parts.append(_end_labels(series, width - right, y_axis, pixel, top, height - bottom))
    return canvas(width, height, label, parts, kind="wide" if wide else "narrow")


def _series(s: Series, pixel: Position, y_axis: Axis) -> Markup:
    shade = colour(s.index)
    parts = []
    if s.ranges and any(hi > lo for _, lo, hi in s.ranges):
        above = [f"{pixel(x):.1f},{y_axis.pixel(hi):.1f}" for x, _, hi in s.ranges]
        below = [f"{pixel(x):.1f},{y_axis.pixel(lo):.1f}" for x, lo, _ in reversed(s.ranges)]
        parts.append(node("polygon", {"points": " ".join(above + below), "class": f"band {shade}"}))
    points = " ".join(f"{pixel(x):.1f},{y_axis.pixel(y):.1f}" for x, y, _ in s.points)
    dashed = " dashed" if s.over else ""
    parts.append(node("polyline", {"points": points, "class": f"line {shade}{dashed}"}))
    radius = 3.6 if len(s.points) <= _MANY else 2.2
    radius *= 1.8 if s.over else 1
    for x, y, tip in s.points:
        kind = f"ring {shade}" if s.over or x in s.rings else shade
        parts.append(marker(s.index, pixel(x), y_axis.pixel(y), kind=kind, tip=tip, radius=radius))
    return node("g", {"class": "series", "data-series": s.name}, join(parts))


def _end_labels(series: Sequence[Series], x: float, y_axis: Axis, pixel: Position, top: float, bottom: float) -> Markup:
    ends = [y_axis.pixel(s.points[-1][1]) for s in series]
    gap = min(16.0, (bottom - top) / max(1, len(series)))
    parts = []
    for s, y, placed in zip(series, ends, spread(ends, gap=gap, low=top, high=bottom), strict=True):
        start = pixel(s.points[-1][0])  # a line may end before the last layer
        leader = f"M{start + 6:.1f},{y:.1f}L{x + 2:.1f},{y:.1f}L{x + 14:.1f},{placed:.1f}"
        inside = [node("path", {"d": leader, "class": f"leader {colour(s.index)}"})]
        inside.append(text(x + 18, placed + 4, _short(s.name, _NAME), kind=f"end {colour(s.index)}"))
        parts.append(node("g", {"class": "series", "data-series": s.name}, join(inside)))
    return join(parts)


def _short(name: str, limit: int) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _whole_step(count: int, most: int) -> int:
    """Every how many of ``count`` labels fit, when ``most`` do."""
    if count <= most:
        return 1
    return next(step for step in (2, 4, 5, 8, 10, 16, 20, 25, 50, 100, 1000, 10**6) if count / step <= most)


@dataclass(frozen=True, slots=True)
class StripRow:
    """One row of a strip chart: every value with its tooltip, and the pooled one."""

    name: str
    index: int
    values: tuple[tuple[float, str], ...]
    pooled: float
    note: str


def strip_chart(rows: Sequence[StripRow], *, wide: bool, label: str, unit: str, least_span: float) -> Markup:
    """One row a name: a dot for each value (their range where they are many), a bar at the pooled value."""

    def row(number: int, axis: Axis, y: float, name: Markup) -> Markup:
        r = rows[number]
        low, high = min(v for v, _ in r.values), max(v for v, _ in r.values)
        parts = [name, line(axis.pixel(low), y, axis.pixel(high), y, f"range {colour(r.index)}")]
        shown = r.values if len(r.values) <= 160 else (min(r.values), max(r.values))
        parts += [marker(0, axis.pixel(v), y, kind=f"soft {colour(r.index)}", tip=tip, radius=4) for v, tip in shown]
        x = axis.pixel(r.pooled)
        parts.append(line(x, y - 9, x, y + 9, f"pooled {colour(r.index)}"))
        parts.append(text(axis.stop + 12, y + 4, r.note, kind="value"))
        return node("g", {"class": "series", "data-series": r.name}, join(parts))

    values = [v for r in rows for v, _ in r.values] + [r.pooled for r in rows]
    names, right = [r.name for r in rows], 96 if wide else 58
    return _rows(names, values, row, height=34, right=right, least_span=least_span, wide=wide, label=label, unit=unit)


Dots = tuple[str, Sequence[tuple[int, float, str]]]
"""One row of a dot chart: its name, and (index of the choice, value, tooltip)."""


def dot_chart(rows: Sequence[Dots], *, wide: bool, label: str, unit: str) -> Markup:
    """One row a role, one shape a choice, joined: how far each choice moves the error from 1."""

    def row(number: int, axis: Axis, y: float, name: Markup) -> Markup:
        dots = rows[number][1]
        xs = [axis.pixel(v) for _, v, _ in dots]
        parts = [name, line(min(xs), y, max(xs), y, "link")]
        for (index, _, tip), x in zip(dots, xs, strict=True):
            ring = index == COLOURS - 1  # what is stored
            kind = f"ring {colour(index)}" if ring else colour(index)
            parts.append(marker(index, x, y, kind=kind, tip=tip, radius=7 if ring else 5))
        return join([*parts, text(axis.stop + 12, y + 4, numbers.ratio(dots[-1][1]), kind="value")])

    values = [1.0, *(v for _, dots in rows for _, v, _ in dots)]
    names, right = [name for name, _ in rows], 70 if wide else 48
    return _rows(
        names, values, row, height=32, right=right, least_span=0.1, wide=wide, label=label, unit=unit, strong=1.0
    )


def _rows(
    names: Sequence[str],
    values: Sequence[float],
    row: Callable[[int, Axis, float, Markup], Markup],
    *,
    height: int,
    right: int,
    least_span: float,
    wide: bool,
    label: str,
    unit: str,
    strong: float | None = None,
) -> Markup:
    """Named rows over one axis of numbers.

    row     draws a row: its number, the axis, its middle, its name as it is drawn
    height  of a row; ``right``: the room right of the axis
    strong  the number whose line of the grid stands out
    """
    longest = max((len(name) for name in names), default=0)
    top, width = 14, WIDE if wide else NARROW
    left = 128 if wide else 92 if longest <= 13 else 124
    axis = Axis.over(values, start=left, stop=width - right, count=8 if wide else 4, least_span=least_span)
    base = top + height * len(names)
    parts = []
    for tick in axis.ticks:
        x = axis.pixel(tick)
        kind = "grid strong" if strong is not None and abs(tick - strong) < 1e-9 else "grid"
        parts += [line(x, top - 4, x, base, kind), text(x, base + 16, axis.label(tick), anchor="middle")]
    parts.append(text(axis.stop, base + 34, unit, kind="unit", anchor="end"))
    for number, name in enumerate(names):
        y = top + height * number + height / 2
        drawn = text(left - 12, y + 4, _short(name, 18), kind="row", anchor="end")
        parts.append(row(number, axis, y, drawn))
    return canvas(width, base + 40, label, parts, kind="wide" if wide else "narrow")


def _levels(axis: Axis, left: float, right: float) -> list[Markup]:
    parts = []
    for tick in axis.ticks:
        y = axis.pixel(tick)
        parts += [line(left, y, right, y, "grid"), text(left - 8, y + 4, axis.label(tick), anchor="end")]
    return parts


def histogram(h: Histogram, *, wide: bool, tips: bool, label: str) -> Markup:
    """Share of the block scales at each code; the zones where scales lose precision or saturate are marked."""
    width, height = (WIDE, 250) if wide else (NARROW, 220)
    left, right, top, bottom = 46, 14, 26, 44
    total = sum(h.counts) or 1
    first, last = _code_range(h)
    peak = max(h.counts[first : last + 1]) / total * 100 or 1.0
    axis = Axis.over([0.0, peak], start=height - bottom, stop=top, count=4, least_span=0.0)
    pitch = (width - left - right) / (last - first + 1)
    parts = [text(left - 8, 14, "% of block scales", kind="unit")]
    parts += _zones(h, first, last, left, pitch, top, height - bottom)
    parts += _levels(axis, left, width - right)
    bars = []
    for code in range(first, last + 1):
        amount = h.counts[code]
        if not amount:
            continue
        y = min(axis.pixel(100 * amount / total), height - bottom - 0.6)
        x, thick = left + (code - first) * pitch, max(pitch - (1.0 if pitch > 3 else 0.2), 0.8)
        attributes: dict[str, object] = {"x": x, "y": y, "width": thick, "height": height - bottom - y, "class": "bar"}
        if tips:
            where = f"code {code}, " if h.codec != "float" else ""
            attributes["data-tip"] = f"{where}scale {h.values[code]:g}: {amount:,} ({numbers.share(amount, total)})"
        bars.append(node("rect", attributes))
    parts.append(join(bars))
    parts += _code_ticks(h, first, last, left, pitch, height, wide=wide)
    return canvas(width, height, label, parts, kind="wide" if wide else "narrow")


def _code_range(h: Histogram) -> tuple[int, int]:
    """E4M3-like codes are shown whole: the room above and below is the point. Exponents: those in use, and a margin."""
    used = [code for code, amount in enumerate(h.counts) if amount]
    if h.codec not in ("e8m0", "float") and len(h.counts) <= 256:
        return 0, len(h.counts) - 1
    first, last = (used[0], used[-1]) if used else (0, 0)
    middle, half = (first + last) // 2, 8 if h.codec == "e8m0" else 16
    return max(0, min(first - 3, middle - half)), min(len(h.counts) - 1, max(last + 3, middle + half))


def _zones(h: Histogram, first: int, last: int, left: float, pitch: float, top: float, bottom: float) -> list[Markup]:
    if h.codec in ("e8m0", "float"):
        return []
    even = next((c for c, v in enumerate(h.values) if v != c * h.values[1]), len(h.values))
    normal = max(1, (even - 1) // 2)
    zones = [(0, normal, "subnormal", "start", 4.0)]
    top_code = len(h.values) - 1
    zones.append((top_code, top_code + 1, "largest", "end", 0.0))
    parts = []
    for begin, end, name, anchor, shift in zones:
        x, wide = left + (begin - first) * pitch, (end - begin) * pitch
        parts.append(node("rect", {"x": x, "y": top, "width": wide, "height": bottom - top, "class": "zone"}))
        parts.append(text(x + shift if anchor == "start" else x - 4, top + 12, name, kind="zone-label", anchor=anchor))
    return parts


def _code_ticks(
    h: Histogram, first: int, last: int, left: float, pitch: float, height: float, *, wide: bool
) -> list[Markup]:
    places = [code for code in range(first, last + 1) if h.values[code] > 0 and math.frexp(h.values[code])[0] == 0.5]
    apart, drawn = 34 if wide else 40, math.inf
    parts = []
    for code in reversed(places):
        x = left + (code - first + 0.5) * pitch
        if drawn - x < apart:
            continue
        drawn = x
        exponent = math.frexp(h.values[code])[1] - 1
        raised = node("tspan", {"dy": -4, "class": "raised"}, str(exponent).replace("-", "−"))
        parts.append(
            node("text", {"x": x, "y": height - 24, "class": "tick", "text-anchor": "middle"}, Markup("2") + raised)
        )
    parts.append(text(left, height - 6, "scale", kind="unit"))
    return parts


def block_chart(block: WorstBlock) -> Markup:
    """The values of a block: bars of the source, marks of what they decode to."""
    width, height, middle = 320.0, 110.0, 55.0
    top = max((abs(v) for v in (*block.source, *block.decoded)), default=0.0) or 1.0
    pitch = width / max(1, len(block.source))
    parts = [line(0, middle, width, middle, "axis")]
    for i, (value, decoded) in enumerate(zip(block.source, block.decoded, strict=True)):
        x, y, z = i * pitch, middle - value / top * 50, middle - decoded / top * 50
        row, column = block.offsets[i]
        tip = f"[{row}, {column}]  source {value:.5g}, decoded {decoded:.5g}, error {decoded - value:+.2g}"
        bar = {"x": x + 2, "y": min(y, middle), "width": pitch - 4, "height": abs(y - middle), "class": "bar source"}
        inside = [node("rect", {"x": x, "y": 0, "width": pitch, "height": height, "class": "hit", "data-tip": tip})]
        inside += [node("rect", bar), line(x + 1, z, x + pitch - 1, z, "decoded")]
        parts += inside
    return canvas(width, height, "values of the block and what they decode to", parts, kind="block")


@dataclass(frozen=True, slots=True)
class Cell:
    """One square of the map: which layer and role, the class of its format, the text of the tooltip."""

    column: int
    row: int
    kind: str
    tip: str
    short: str


def map_chart(cells: Sequence[Cell], *, layers: Sequence[int], rows: Sequence[str], label: str) -> Markup:
    """Layers by roles, coloured by format, the bits written inside where there is room."""
    left, top = 128, 8
    size = max(11.0, min(38.0, (WIDE - left) / max(1, len(layers))))
    tall = 26.0
    width, height = max(left + size * len(layers) + 4, 300), top + tall * len(rows) + 34
    parts = [
        text(left - 12, top + tall * i + 17, _short(name, 18), kind="row", anchor="end") for i, name in enumerate(rows)
    ]
    for cell in cells:
        x, y = left + cell.column * size, top + cell.row * tall
        square = {
            "x": x + 1,
            "y": y + 1,
            "width": size - 2,
            "height": tall - 2,
            "rx": 3,
            "class": f"cell {cell.kind}",
            "data-tip": cell.tip,
        }
        parts.append(node("rect", square))
        if size >= 22:
            parts.append(text(x + size / 2, y + 17, cell.short, kind=f"cell-label {cell.kind}", anchor="middle"))
    step = _whole_step(len(layers), max(8, int((WIDE - left) / 34)))
    base = top + tall * len(rows) + 16
    parts += [text(left + (i + 0.5) * size, base, str(layers[i]), anchor="middle") for i in range(0, len(layers), step)]
    parts.append(text(left - 12, base, "layer", kind="unit", anchor="end"))
    return node(
        "svg",
        {
            "class": "chart map",
            "viewBox": f"0 0 {width:g} {height:g}",
            "style": f"width:{width:.0f}px",
            "role": "img",
            "aria-label": label,
        },
        join(parts),
    )
