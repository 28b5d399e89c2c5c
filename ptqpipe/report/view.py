"""From a report's numbers to what a page shows: groups by role and layer, charts, rows of tables. No HTML here."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ptqpipe.errors import one_line
from ptqpipe.report import charts, numbers
from ptqpipe.report.content import Choice, Histogram, Kept, Report, Weight, decibels, pooled_mse

LEAST_DB = 1.0  # how long the axis of decibels is at least
WORST_ROWS = 10
CHOICE_COLOUR = {"abs-max": 7, "OCP floor": 4, "four over six": 1, "exact": 5, "as stored": 0}
_WALK = (
    *("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate", "router"),
    *("gate_up_proj", "gate_proj", "w1", "up_proj", "w3", "down_proj", "w2"),
)
_FAMILIES = ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart for wide and for narrow pages."""

    wide: Markup
    narrow: Markup


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


def shown(name: str) -> str:
    """A name from a file on one printable line of bounded length."""
    return one_line(name, limit=300)


def breakable(name: str) -> Markup:
    """The same, escaped, with places after its dots where a line may break."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[._])", shown(name)))


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
        wide, narrow = (
            charts.line_chart(series, wide=w, label=label, unit="SQNR, dB", least_span=LEAST_DB) for w in (True, False)
        )
        found.append((fmt, Drawn(wide, narrow)))
    return found


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
    wide, narrow = (
        charts.strip_chart(strips, wide=w, label=label, unit="SQNR, dB (right is better)", least_span=LEAST_DB)
        for w in (True, False)
    )
    return Drawn(wide, narrow)


def worst_weights(report: Report) -> list[Weight]:
    """The weights with the largest relative error."""
    known = [w for w in report.weights if w.sqnr_db is not None]
    return sorted(known, key=lambda w: (-(w.relative_mse or 0.0), w.name))[:WORST_ROWS]


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
    wide, narrow = (
        charts.dot_chart(dots, wide=w, label=label, unit="squared error, abs-max = 1 (left is better)")
        for w in (True, False)
    )
    return Drawn(wide, narrow)


def choice_lines(report: Report) -> Drawn | None:
    """The same by layer, a line a choice."""
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
    series = [charts.Series(name, CHOICE_COLOUR.get(name, 2), tuple(values)) for name, values in points.items()]
    label = "squared error of each choice of scales beside that of abs-max, by layer"
    wide, narrow = (
        charts.line_chart(series, wide=w, label=label, unit="squared error, abs-max = 1", least_span=0.1)
        for w in (True, False)
    )
    return Drawn(wide, narrow)


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
    wide, narrow = (
        charts.strip_chart(
            strips, wide=w, label=label, unit="output error, plain rounding = 1 (left is better)", least_span=0.1
        )
        for w in (True, False)
    )
    return Drawn(wide, narrow)


def how(weight: Weight) -> str:
    """How a weight's scales and codes were chosen, in a few words."""
    words = [weight.search]
    words += [weight.algorithm] if weight.algorithm not in ("", "rtn") else []
    words += [f"{weight.weighting} weights"] if weight.weighting not in ("", "none") else []
    words += ["went back to rounding"] if weight.reverted else []
    words += ["proven"] if weight.proven else []
    return ", ".join(word for word in words if word)


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
    wide, narrow = (charts.histogram(h, wide=w, tips=w, label=label) for w in (True, False))
    return shown(h.role), Drawn(wide, narrow)


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


def bought(row: RoleRow) -> str:
    """What the searched global scales saved of the squared error, as recorded; a dash where nothing says so."""
    known = [w.versus_plain_global for w in row.weights if w.versus_plain_global is not None]
    return f"{100 * (1 - sum(known) / len(known)):.2f} %" if known else "–"


def family(fmt: str) -> str:
    """The class of a format's colour: a letter-only word, whatever the format's name."""
    return next((name for name in _FAMILIES if fmt.startswith(name)), "other")


@dataclass(frozen=True, slots=True)
class Map:
    """The mixed-precision map: the drawing, its legend (class, words), and the matrices outside of layers."""

    drawing: Markup | None
    legend: tuple[tuple[str, str], ...]
    outside: tuple[tuple[str, str, str], ...]  # (class, name, what it is)


def precision_map(report: Report) -> Map:
    """Layers by roles, coloured by format. Kept matrices are squares of their own; vectors are not shown."""
    squares: dict[tuple[str, int], list[Weight | Kept]] = defaultdict(list)
    outside: dict[tuple[str, str, str], int] = defaultdict(int)
    bits: dict[str, list[Weight]] = defaultdict(list)
    for weight in report.weights:
        bits[weight.format].append(weight)
        if weight.layer is None:
            outside[(family(weight.format), shown(weight.name), weight.format)] += 1
        else:
            squares[(shown(weight.role), weight.layer)].append(weight)
    kept_matrices = [k for k in report.kept if len(k.shape) >= 2 and not k.name.endswith("bias")]
    for kept in kept_matrices:
        if kept.layer is None:
            outside[("kept", shown(kept.name), f"{kept.dtype}, {kept.reason or 'kept'}")] += 1
        else:
            squares[(shown(kept.role), kept.layer)].append(kept)
    roles = sorted(dict.fromkeys(role for role, _ in squares), key=_place)
    layers = sorted({layer for _, layer in squares})
    cells = [
        _cell(layers.index(layer), roles.index(role), role, layer, found) for (role, layer), found in squares.items()
    ]
    drawing = None
    if cells:
        drawing = charts.map_chart(cells, layers=layers, rows=roles, label="format of every weight, layers by roles")
    legend = []
    for fmt, members in bits.items():
        elements = sum(w.elements for w in members)
        size = 8 * sum(w.nbytes for w in members) / max(1, elements)
        legend.append((family(fmt), f"{fmt}  {size:.2f} bits, {len(members)} weights, {numbers.count(elements)}"))
    if kept_matrices:
        legend.append(("kept", f"kept  {len(kept_matrices)} matrices"))
    return Map(drawing, tuple(legend), tuple(outside)[:40])


def _place(role: str) -> int:
    """The order of a decoder layer's walk; unknown roles last, in the order of the files."""
    leaf = role.rpartition(".")[2]
    return _WALK.index(leaf) if leaf in _WALK else len(_WALK)


def _cell(column: int, row: int, role: str, layer: int, found: Sequence[Weight | Kept]) -> charts.Cell:
    names = list(dict.fromkeys(w.format if isinstance(w, Weight) else "kept" for w in found))
    first = found[0]
    kind = "mixed" if len(names) > 1 else family(names[0]) if isinstance(first, Weight) else "kept"
    tip = f"layer {layer}  {role}: {', '.join(names)}"
    weights = [w for w in found if isinstance(w, Weight)]
    if not weights:
        held = found[0].nbytes * 8 // max(1, math.prod(found[0].shape))
        return charts.Cell(column, row, kind, f"{tip} ({first.dtype})" if isinstance(first, Kept) else tip, f"{held}")
    size = 8 * sum(w.nbytes for w in weights) / max(1, sum(w.elements for w in weights))
    error = decibels(pooled_mse(weights))
    tip += f", {size:.2f} bits" + (f", {error:.2f} dB" if error is not None else "")
    return charts.Cell(column, row, kind, tip + (f", {len(found)} weights" if len(found) > 1 else ""), f"{int(size)}")


def table_data(report: Report) -> dict[str, object]:
    """Every tensor for the searchable table: columns of indices into lists of words, and numbers."""
    words: dict[str, int] = {}

    def word(value: str) -> int:
        return words.setdefault(shown(value), len(words))

    rows: list[list[object]] = []
    for w in report.weights:
        rows.append(
            [
                shown(w.name),
                word(w.format),
                word("x".join(map(str, w.shape))),
                w.nbytes,
                round(8 * w.nbytes / max(1, w.elements), 3),
                _round(w.sqnr_db, 2),
                _round(w.choices[-1].versus_absmax if w.choices else None, 3),
                round(100 * w.codes.largest / max(1, w.codes.elements), 2),
                word(how(w)),
            ]
        )
    for k in report.kept:
        shape = "x".join(map(str, k.shape)) or "scalar"
        rows.append(
            [shown(k.name), word(f"kept {k.dtype}"), word(shape), k.nbytes, None, None, None, None, word(k.reason)]
        )
    return {"words": list(words), "rows": rows}


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def tiles_of_quality(report: Report) -> Mapping[str, float | None]:
    """The headline numbers of an evaluation: the first of each kind, mean recovery of the tasks."""
    found: dict[str, float | None] = {}
    evaluation = report.evaluation
    if evaluation is None:
        return found
    if evaluation.divergence:
        found["kl"] = evaluation.divergence[0].mean
        found["top1"] = evaluation.divergence[0].top1
    if evaluation.perplexity:
        found["ppl"], found["ppl_base"] = evaluation.perplexity[0].value, evaluation.perplexity[0].baseline
    recoveries = [t.recovery for t in evaluation.tasks if t.recovery is not None]
    if recoveries:
        found["recovery"] = sum(recoveries) / len(recoveries)
    return found
