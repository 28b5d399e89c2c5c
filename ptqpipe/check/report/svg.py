"""The few pieces of SVG that the charts are made of: nodes, axes, markers. Every value is escaped here.

Colours are classes (``s1`` ...), so that one drawing serves light and dark pages.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

ROLES = 12  # colours of roles; those after them are of other things, such as searches
COLOURS = 17


def node(tag: str, attributes: Mapping[str, object], content: str = "") -> Markup:
    """``<tag ...>content</tag>``; ``content`` is escaped unless it is Markup, attribute values always are."""
    text = "".join(f' {key}="{escape(_text(value))}"' for key, value in attributes.items())
    return Markup(f"<{tag}{text}>{escape(content)}</{tag}>" if content else f"<{tag}{text}/>")


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)


def join(parts: Sequence[str]) -> Markup:
    return Markup("").join(parts)


def canvas(width: float, height: float, label: str, parts: Sequence[str], *, kind: str) -> Markup:
    """The outer node; ``label`` is what a screen reader reads."""
    attributes = {"class": f"chart {kind}", "viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": label}
    return node("svg", attributes, join(parts))


def text(x: float, y: float, content: str, *, kind: str = "tick", anchor: str = "start") -> Markup:
    return node("text", {"x": x, "y": y, "class": kind, "text-anchor": anchor}, content)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return node("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": kind})


def marker(index: int, x: float, y: float, *, kind: str, tip: str = "", radius: float = 3.6) -> Markup:
    """One of eight shapes, so that colour is never the only difference."""
    r = radius
    shapes = (
        f"M{x - r:.1f},{y:.1f}a{r:g},{r:g} 0 1,0 {2 * r:g},0a{r:g},{r:g} 0 1,0 {-2 * r:g},0z",
        f"M{x - r:.1f},{y - r:.1f}h{2 * r:g}v{2 * r:g}h{-2 * r:g}z",
        f"M{x:.1f},{y - 1.25 * r:.1f}l{1.25 * r:g},{2.2 * r:g}h{-2.5 * r:g}z",
        f"M{x:.1f},{y - 1.4 * r:.1f}l{1.4 * r:g},{1.4 * r:g}l{-1.4 * r:g},{1.4 * r:g}l{-1.4 * r:g},{-1.4 * r:g}z",
        f"M{x:.1f},{y + 1.25 * r:.1f}l{1.25 * r:g},{-2.2 * r:g}h{-2.5 * r:g}z",
        f"M{x - 1.3 * r:.1f},{y - 0.6 * r:.1f}h{2.6 * r:g}v{1.2 * r:g}h{-2.6 * r:g}z",
        f"M{x - 0.45 * r:.1f},{y - 1.3 * r:.1f}h{0.9 * r:g}v{0.85 * r:g}h{0.85 * r:g}v{0.9 * r:g}h{-0.85 * r:g}"
        f"v{0.85 * r:g}h{-0.9 * r:g}v{-0.85 * r:g}h{-0.85 * r:g}v{-0.9 * r:g}h{0.85 * r:g}z",
        f"M{x - 0.6 * r:.1f},{y - 1.3 * r:.1f}h{1.2 * r:g}v{2.6 * r:g}h{-1.2 * r:g}z",
    )
    attributes = {"d": shapes[index % len(shapes)], "class": f"mark {kind}"}
    return node("path", attributes | ({"data-tip": tip} if tip else {}))


def colour(index: int) -> str:
    return f"s{index % COLOURS + 1}"


@dataclass(frozen=True, slots=True)
class Axis:
    """Numbers ``low`` .. ``high`` onto pixels ``start`` .. ``stop``, with round ticks."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]
    step: float

    @classmethod
    def over(cls, values: Sequence[float], *, start: float, stop: float, count: int, least_span: float) -> "Axis":
        """An axis that holds ``values``, at least ``least_span`` long: small differences stay small on paper."""
        low, high = min(values), max(values)
        spare = max(0.0, least_span - (high - low)) / 2
        low, high = low - spare, high + spare
        step = _nice((high - low) / count or 1.0)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        if high <= low:
            high = low + step
        ticks = tuple(low + i * step for i in range(round((high - low) / step) + 1))
        return cls(low, high, start, stop, ticks, step)

    def pixel(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def label(self, value: float) -> str:
        """A tick's text, with the digits that the step needs."""
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return f"{value:.{digits}f}"


def _nice(raw: float) -> float:
    """The next of 1, 2, 5 x 10^k."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def spread(positions: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Positions moved apart to at least ``gap``, in their order, within [low, high] as far as there is room."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [0.0] * len(positions)
    last = low - gap
    for i in order:
        last = max(positions[i], last + gap)
        placed[i] = last
    ceiling = high
    for i in reversed(order):
        if placed[i] > ceiling:
            placed[i] = ceiling
        ceiling = placed[i] - gap
    return placed
