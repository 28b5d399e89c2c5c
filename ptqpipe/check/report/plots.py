"""Plots of the divergence from the original model: over tokens, over positions, and against size.

Divergences are in nats per token; their axes are logarithmic where they span
powers of ten.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ptqpipe.check.report import numbers
from ptqpipe.check.report.charts import NARROW, WIDE
from ptqpipe.check.report.svg import Axis, canvas, colour, line, marker, node, text
from ptqpipe.run.quantities import disk_size, scientific

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 26, 44
_LETTER = 6.5  # about the width of one below an axis
_BOLD = 7.0  # and of one beside a level


def _size(wide: bool) -> tuple[float, float]:
    return (WIDE / 2 + 30, 270) if wide else (NARROW, 230)


def _kind(wide: bool) -> str:
    return "wide" if wide else "narrow"


def _upright(axis: Axis, width: float) -> list[Markup]:
    parts = []
    for tick in axis.ticks:
        label = numbers.sci(tick) if tick else "0"
        y = axis.pixel(tick)
        parts += [line(_LEFT, y, width - _RIGHT, y, "grid"), text(_LEFT - 8, y + 4, label, anchor="end")]
    return parts


def kl_histogram(row: Mapping[str, Any], *, wide: bool) -> Markup:
    """Histogram of the tokens' divergences, with median, mean and 99th percentile marked.

    row  of an eval file, with its ``histogram``
    """
    histogram = row["histogram"]
    counts, total = histogram["counts"], sum(histogram["counts"]) or 1
    least, per_decade = float(histogram["first"]), int(histogram["per_decade"])
    used = [place for place, count in enumerate(counts) if count] or [0, 1]
    first, last = max(0, used[0] - 1), min(len(counts) - 1, used[-1] + 1)
    width, height = _size(wide)
    pitch = (width - _LEFT - _RIGHT) / (last - first + 1)

    def edge(place: int) -> float:
        """Where a bin begins, nats."""
        return float(least * 10 ** ((place - 1) / per_decade))

    def pixel(kl: float) -> float:
        exact = math.log10(max(kl, edge(first)) / least) * per_decade + 1
        return _LEFT + (min(exact, last + 1) - first) * pitch

    base = height - _BOTTOM
    axis = Axis.over([0.0, 100 * max(counts) / total], start=base, stop=_TOP + 46, count=4, least_span=0.0)
    parts = [text(0, 14, "% of tokens", kind="unit")]
    for tick in axis.ticks:
        y = axis.pixel(tick)
        parts += [line(_LEFT, y, width - _RIGHT, y, "grid"), text(_LEFT - 8, y + 4, axis.label(tick), anchor="end")]
    for place in range(first, last + 1):
        share = 100 * counts[place] / total
        tip = f"KL {_span(edge(place), edge(place + 1), place, len(counts))}: {counts[place]:,} tokens, {share:.2f} %"
        bar = {"x": _LEFT + (place - first) * pitch, "y": axis.pixel(share), "width": max(pitch - 1, 0.8)}
        parts.append(node("rect", bar | {"height": base - axis.pixel(share), "class": "bar", "data-tip": tip}))
    parts += _decades(edge(first), edge(last + 1), pixel, base, every=1 if wide else 2)
    parts += _levels(row, pixel, base, wide=wide)
    parts.append(text(width - _RIGHT, height - 6, "KL of a token, nats", kind="unit", anchor="end"))
    label = f"tokens by their KL divergence, median {numbers.sci(row['percentiles'].get('50'))}"
    return canvas(width, height, label, parts, kind=_kind(wide))


def _span(low: float, high: float, place: int, count: int) -> str:
    if place == 0:
        return f"below {scientific(high)}"
    return f"above {scientific(low)}" if place == count - 1 else f"{scientific(low)} to {scientific(high)}"


def _decades(low: float, high: float, pixel: Any, base: float, *, every: int) -> list[Markup]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [
        part
        for power in range(first, last + 1, every)
        for part in (
            line(pixel(10.0**power), base, pixel(10.0**power), base + 4, "axis"),
            text(pixel(10.0**power), base + 18, f"1e{power}" if power else "1", anchor="middle"),
        )
    ]


def _levels(row: Mapping[str, Any], pixel: Any, base: float, *, wide: bool) -> list[Markup]:
    """Upright lines at the median, the mean and the 99th percentile, their names in lines of their own, to the right
    where the plot has room: the lines of smaller values cross what is to the left."""
    levels = [("median", row["percentiles"].get("50")), ("mean", row["mean"]), ("99 %", row["percentiles"].get("99"))]
    positive = [(name, value) for name, value in levels if value is not None and value > 0]
    lines, labels = [], []
    for number, (name, value) in enumerate(positive):
        x, words = pixel(value), f"{name} {numbers.sci(value)}"
        anchor = "start" if x + 5 + _BOLD * len(words) < _size(wide)[0] else "end"
        lines.append(line(x, _TOP - 4 + 15 * number, x, base, "level"))
        label = text(
            x + (5 if anchor == "start" else -5), _TOP + 6 + 15 * number, words, kind="level-label", anchor=anchor
        )
        labels.append(label)
    return [*lines, *labels]  # a name to the left stands on the lines that it crosses


def kl_by_position(rows: Sequence[Mapping[str, Any]], *, wide: bool) -> Markup:
    """The mean divergence by how many tokens of context there are, with bars of two standard errors."""
    width, height = _size(wide)
    base = height - _BOTTOM
    tops = [row["mean"] + 2 * (row["standard_error"] or 0.0) for row in rows]
    axis = Axis.over([0.0, *tops], start=base, stop=_TOP, count=4, least_span=0.0)
    pitch = (width - _LEFT - _RIGHT) / len(rows)
    parts = [text(0, 14, "mean KL, nats", kind="unit"), *_upright(axis, width)]
    spots = [(_LEFT + (i + 0.5) * pitch, axis.pixel(row["mean"])) for i, row in enumerate(rows)]
    parts.append(node("polyline", {"points": " ".join(f"{x:.1f},{y:.1f}" for x, y in spots), "class": "line s1"}))
    names = [str(row["first"]) if row["first"] == row["last"] else f"{row['first']}–{row['last']}" for row in rows]
    step = math.ceil(_LETTER * (max(map(len, names)) + 1) / pitch)  # as many names as do not touch
    for i, (row, name, (x, y)) in enumerate(zip(rows, names, spots, strict=True)):
        error = row["standard_error"]
        tip = f"{name} tokens of context: {numbers.sci(row['mean'])}, {row['tokens']:,} tokens"
        if error is not None:
            low, high = max(0.0, row["mean"] - 2 * error), row["mean"] + 2 * error
            parts.append(line(x, axis.pixel(low), x, axis.pixel(high), "range s1"))
        parts.append(marker(0, x, y, kind=colour(0), tip=tip, radius=4))
        if (len(rows) - 1 - i) % step == 0:
            parts.append(text(x, base + 18, name, anchor="middle"))
    parts.append(text(width - _RIGHT, height - 6, "tokens of context", kind="unit", anchor="end"))
    return canvas(width, height, "mean KL divergence by position", parts, kind=_kind(wide))


@dataclass(frozen=True, slots=True)
class Spot:
    """A checkpoint in the plot of divergence against size: its name, bytes, mean KL and the interval of that."""

    name: str
    index: int
    nbytes: int
    kl: float
    interval: tuple[float, float] | None


def size_chart(spots: Sequence[Spot], *, wide: bool) -> Markup:
    """Divergence (logarithmic) against size, a mark for each checkpoint, lower left is better."""
    width, height = (WIDE, 360.0) if wide else (NARROW, 280.0)
    base = height - _BOTTOM
    sizes = [spot.nbytes for spot in spots]
    span = max(sizes) - min(sizes) or max(sizes)
    across = Axis.over(
        [min(sizes) - 0.1 * span, max(sizes) + 0.1 * span],
        start=_LEFT,
        stop=width - _RIGHT - (110 if wide else 20),
        count=6 if wide else 3,
        least_span=0.0,
    )
    bounds = [v for s in spots for v in (s.kl, *(s.interval or ())) if v > 0]
    low, high = math.floor(4 * math.log10(min(bounds))) / 4, math.ceil(4 * math.log10(max(bounds))) / 4
    up = Axis(low, max(high, low + 0.5), base, _TOP, (), 0.25)
    parts = [text(0, 14, "mean KL, nats", kind="unit")]
    for quarter in range(round(4 * up.low), round(4 * up.high) + 1):
        y = up.pixel(quarter / 4)
        parts.append(line(_LEFT, y, width - _RIGHT, y, "grid"))
        parts.append(text(_LEFT - 6, y + 4, scientific(10 ** (quarter / 4), 2), anchor="end"))
    for tick in across.ticks:
        parts.append(text(across.pixel(tick), base + 18, disk_size(max(tick, 0)), anchor="middle"))
    for spot in spots:
        parts += _spot(spot, across.pixel(spot.nbytes), up, wide=wide)
    parts.append(
        text(width - _RIGHT, height - 6, "size of the tensors (lower left is better)", kind="unit", anchor="end")
    )
    return canvas(width, height, "KL divergence against size, a mark a checkpoint", parts, kind=_kind(wide))


def _spot(spot: Spot, x: float, up: Axis, *, wide: bool) -> list[Markup]:
    y = up.pixel(math.log10(spot.kl)) if spot.kl > 0 else up.start
    tip = f"{spot.name}: {numbers.sci(spot.kl)} nats, {disk_size(spot.nbytes)}"
    parts = []
    if spot.interval is not None and spot.interval[0] > 0:
        ends = [up.pixel(math.log10(end)) for end in spot.interval]
        parts.append(line(x, ends[0], x, ends[1], f"range {colour(spot.index)}"))
    parts.append(marker(spot.index, x, y, kind=colour(spot.index), tip=tip, radius=6))
    short = spot.name if len(spot.name) <= (24 if wide else 12) else spot.name[: 23 if wide else 11] + "…"
    return [*parts, text(x + 12, y + 4, short, kind=f"end {colour(spot.index)}")]
