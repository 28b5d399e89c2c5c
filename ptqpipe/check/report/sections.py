"""The page apart from errors: the evaluation, scales and their codes, the precision map, every tensor. No HTML."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ptqpipe.check.report import charts, numbers
from ptqpipe.check.report.content import Histogram, KeptTensor, Report, ReportedWeight, pooled_mse
from ptqpipe.check.report.error_charts import Drawn, both
from ptqpipe.check.report.roles import family, how, place, shown
from ptqpipe.conversion.output_error import mean_known
from ptqpipe.run.quantities import decibels


def recovery(report: Report) -> float | None:
    """The mean recovery of the tasks, percent of the baseline."""
    return mean_known(task["recovery"] for task in (report.evaluation or {}).get("tasks", ()))


def recovery_words(report: Report) -> str:
    """The line below the mean recovery: its 95 % interval, samples, tasks.

    The interval is the mean of the tasks' own: at least as wide as that of the mean, however the tasks hang together.
    """
    tasks = [] if report.evaluation is None else [t for t in report.evaluation["tasks"] if t["recovery"] is not None]
    words = [f"mean over {len(tasks)} task metrics" if len(tasks) != 1 else "one task metric"]
    samples: dict[str, int] = {}
    for task in tasks:
        samples[task["task"]] = max(samples.get(task["task"], 0), task["samples"] or 0)
    if all(samples.values()):
        words.append(f"{sum(samples.values()):,} samples")
    bounds = [bound for bound in map(_recovery_bounds, tasks) if bound is not None]
    if bounds and len(bounds) == len(tasks):
        low, high = (sum(ends) / len(ends) for ends in zip(*bounds, strict=True))
        words.append(f"95 % interval {low:.1f} to {high:.1f} %" if high > low else "the same on every sample")
    return ", ".join(words)


def _recovery_bounds(task: Mapping[str, Any]) -> tuple[float, float] | None:
    """The interval of the difference as one of the recovery, for metrics of which more is better."""
    interval, baseline, recovery = task["interval"], task["baseline"], task["recovery"]
    if interval is None or not baseline or recovery is None:
        return None
    low, high = (100 * (1 + end / baseline) for end in interval)
    return (low, high) if low <= recovery <= high else None


Panel = tuple[str, str, int, list[tuple[str, Drawn]]]
"""(format, codec of its scales, how many blocks, (name, histogram) of all roles together and of each)."""


def scale_panels(report: Report) -> list[Panel]:
    """Histograms of scale codes, a panel for each format."""
    groups: dict[str, list[Histogram]] = defaultdict(list)
    for h in report.histograms:
        groups[h.format].append(h)
    panels: list[Panel] = []
    for fmt, members in groups.items():
        counts = tuple(map(sum, zip(*(h.counts for h in members), strict=True)))
        first = members[0]
        everything = Histogram(fmt, first.codec, "all roles", counts, first.values)
        drawn = [_histogram(everything)] + [_histogram(h) for h in members if len(members) > 1]
        panels.append((fmt, first.codec, sum(counts), drawn))
    return panels


def _histogram(h: Histogram) -> tuple[str, Drawn]:
    label = f"block scales of {h.format} by code, {h.role}"
    return shown(h.role), both(lambda wide: charts.histogram(h, wide=wide, tips=wide, label=label))


def precision_map(report: Report) -> tuple[Markup | None, list[tuple[str, str]], list[tuple[str, str, str]]]:
    """Layers by roles, coloured by format. KeptTensor matrices are squares of their own; vectors are not shown.

    The drawing, its legend (class, words), and the matrices outside of layers (class, name, what it is).
    """
    squares: dict[tuple[str, int], list[ReportedWeight | KeptTensor]] = defaultdict(list)
    outside: dict[tuple[str, str, str], int] = defaultdict(int)
    bits: dict[str, list[ReportedWeight]] = defaultdict(list)
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
    roles = sorted(dict.fromkeys(role for role, _ in squares), key=place)
    layers = sorted({layer for _, layer in squares})
    cells = [
        _cell(layers.index(layer), roles.index(role), role, layer, weights)
        for (role, layer), weights in squares.items()
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
    return drawing, legend, list(outside)[:40]


def _cell(column: int, row: int, role: str, layer: int, tensors: Sequence[ReportedWeight | KeptTensor]) -> charts.Cell:
    names = list(dict.fromkeys(w.format if isinstance(w, ReportedWeight) else "kept" for w in tensors))
    first = tensors[0]
    kind = "mixed" if len(names) > 1 else family(names[0]) if isinstance(first, ReportedWeight) else "kept"
    tip = f"layer {layer}  {role}: {', '.join(names)}"
    weights = [w for w in tensors if isinstance(w, ReportedWeight)]
    if not weights:
        bits = tensors[0].nbytes * 8 // max(1, math.prod(tensors[0].shape))
        return charts.Cell(
            column, row, kind, f"{tip} ({first.dtype})" if isinstance(first, KeptTensor) else tip, f"{bits}"
        )
    size = 8 * sum(w.nbytes for w in weights) / max(1, sum(w.elements for w in weights))
    error = decibels(pooled_mse(weights))
    tip += f", {size:.2f} bits" + (f", {error:.2f} dB" if error is not None else "")
    return charts.Cell(
        column, row, kind, tip + (f", {len(tensors)} weights" if len(tensors) > 1 else ""), f"{int(size)}"
    )


def same_everywhere(report: Report) -> str:
    """The format, where all layers have the same roles in one format and a map would show nothing; else ""."""
    formats = {weight.format for weight in report.weights}
    inside: dict[str, set[int | None]] = defaultdict(set)
    for weight in report.weights:
        inside[weight.role].add(weight.layer)
    kept = any(k.layer is not None and len(k.shape) >= 2 and not k.name.endswith("bias") for k in report.kept)
    layers = set(map(frozenset, inside.values()))
    return next(iter(formats)) if len(formats) == 1 and len(layers) == 1 and not kept else ""


def how_all(report: Report) -> str:
    """How the codes of all weights were chosen, where that is the same for all and known."""
    descriptions = {how(weight) for weight in report.weights}
    return descriptions.pop() if len(descriptions) == 1 else ""


def table_data(report: Report) -> dict[str, object]:
    """Every tensor for the searchable table: columns of indices into lists of words, and numbers."""
    words: dict[str, int] = {}
    common = how_all(report)

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
                word("" if common else how(w)),
                _round(w.versus_rtn, 3),
            ]
        )
    for k in report.kept:
        shape = "x".join(map(str, k.shape)) or "scalar"
        row = [shown(k.name), word(f"kept {k.dtype}"), word(shape), k.nbytes, None, None, None, None]
        rows.append([*row, word(k.reason), None])
    return {"words": list(words), "rows": rows}


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
