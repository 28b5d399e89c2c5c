"""Several checkpoints of one model beside each other: quality against size, layer by layer, role by role."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ptqpipe.quantities import disk_size
from ptqpipe.report import HTML_MARK, MARKDOWN_MARK, charts, numbers, plots
from ptqpipe.report.content import Report, ReportedWeight, decibels, mean_known, pooled_mse
from ptqpipe.report.errors import LEAST_DB, Drawn, both
from ptqpipe.report.html import page
from ptqpipe.report.markdown import escaped, table
from ptqpipe.report.quality import worst_text
from ptqpipe.report.roles import place, shown


class Row(NamedTuple):
    """One checkpoint: its report, its mark and colour, and the row of the text with its largest divergence, None where
    nobody measured it."""

    report: Report
    mark: int
    kl: Mapping[str, Any] | None

    @property
    def formats(self) -> str:
        """The formats of its weights and their inputs, as `--format` names them, the one with most numbers first."""
        sizes: dict[str, int] = defaultdict(int)
        for weight in self.report.weights:
            sizes[weight.scheme] += weight.elements
        return ", ".join(sorted(sizes, key=lambda name: (-sizes[name], name)))

    @property
    def perplexity(self) -> float | None:
        """Of the text that it is judged by."""
        rows = self.report.evaluation["perplexity"] if self.report.evaluation is not None and self.kl else ()
        return next((row["checkpoint"] for row in rows if self.kl is not None and row["data"] == self.kl["data"]), None)


def rows_of(reports: Sequence[Report]) -> list[Row]:
    """The checkpoints in the order in which they are named."""
    return [Row(report, index, worst_text(report)) for index, report in enumerate(reports)]


def render_comparison(reports: Sequence[Report], *, kind: str, notes: Sequence[str] = ()) -> str:
    """The comparison as ``html`` or ``md``.

    notes  what keeps the numbers from being compared
    """
    rows = rows_of(reports)
    if kind == "md":
        return _markdown(rows, notes)
    measured = [row for row in rows if row.kl is not None and row.kl["mean"] > 0]
    return page(
        "compare.html.jinja",
        mark=HTML_MARK,
        described="",
        rows=rows,
        notes=notes,
        measured=sum(row.kl is not None for row in rows),
        size_chart=_size_chart(measured) if len(measured) > 1 else None,
        layers=_by_layer(rows),
        calibrated=_calibrated(rows),
        unknown=_unknown(rows),
        roles=_by_role(rows),
        choice_names=(),
    )


def _size_chart(rows: Sequence[Row]) -> Drawn:
    spots = [
        plots.Spot(shown(row.report.name), row.mark, row.report.after_bytes, row.kl["mean"], row.kl["interval"])
        for row in rows
        if row.kl is not None
    ]
    return both(lambda wide: plots.size_chart(spots, wide=wide))


def _calibrated(rows: Sequence[Row]) -> bool:
    """Whether one is judged by its output error: then layers are compared by it, else by the error of the weights."""
    return any(row.report.versus_rtn is not None for row in rows)


def _error(row: Row, *, calibrated: bool) -> Callable[[Sequence[ReportedWeight]], float | None]:
    """The error of some weights by which checkpoints are compared. Plain rounding's own output error is 1."""
    if calibrated:
        return lambda weights: mean_known(1.0 if weight.plain else weight.versus_rtn for weight in weights)
    return lambda weights: decibels(pooled_mse(weights))


def _unknown(rows: Sequence[Row]) -> list[Row]:
    """Those whose records do not have the error by which layers are compared: tune records one of decoder layers."""
    calibrated = _calibrated(rows)
    return [row for row in rows if _error(row, calibrated=calibrated)(row.report.weights) is None]


def _by_layer(rows: Sequence[Row]) -> Drawn | None:
    """A line a checkpoint; None where fewer than two layers are known."""
    calibrated = _calibrated(rows)
    series = []
    for row in rows:
        layers: dict[int, list[ReportedWeight]] = defaultdict(list)
        for weight in row.report.weights:
            if weight.layer is not None:
                layers[weight.layer].append(weight)
        of = _error(row, calibrated=calibrated)
        known = [(layer, value) for layer, found in sorted(layers.items()) if (value := of(found)) is not None]
        name = shown(row.report.name)
        points = tuple((layer, value, f"layer {layer}  {name}: {value:.3f}") for layer, value in known)
        series += [charts.Series(name, row.mark, points)] if points else []
    if len({x for line in series for x, _, _ in line.points}) < 2:
        return None
    unit, least = ("output error, plain rounding = 1", 0.1) if calibrated else ("SQNR, dB", LEAST_DB)
    label = "error by layer, one line a checkpoint"
    return both(lambda wide: charts.line_chart(series, wide=wide, label=label, unit=unit, least_span=least))


def _by_role(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(role, (formats, error) of each checkpoint) in the order of a decoder layer."""
    calibrated = _calibrated(rows)
    names = sorted({shown(weight.role) for row in rows for weight in row.report.weights}, key=place)
    found = []
    for name in names:
        cells = []
        for row in rows:
            weights = [weight for weight in row.report.weights if shown(weight.role) == name]
            formats = ", ".join(sorted({weight.scheme for weight in weights})) or "not quantized"
            value = _error(row, calibrated=calibrated)(weights)
            cells.append((formats, numbers.ratio(value) if calibrated else numbers.db(value)))
        found.append((name, cells))
    return found


def _markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    body, calibrated = [], _calibrated(rows)
    for row in rows:
        r, kl = row.report, row.kl
        interval = kl["interval"] if kl is not None else None
        span = f"{numbers.sci(interval[0])} to {numbers.sci(interval[1])}" if interval else "–"
        cells = [escaped(r.name), r.verdict[0] if r.verdict else "not measured", row.formats]
        cells += [disk_size(r.after_bytes), numbers.plain(r.bits_per_weight), numbers.sci(kl["mean"] if kl else None)]
        body.append(
            [*cells, span, numbers.plain(row.perplexity), *([numbers.ratio(r.versus_rtn)] if calibrated else [])]
        )
    head = ["checkpoint", "verdict", "formats", "size", "bits", "KL", "95 % interval", "perplexity"]
    head += ["output error"] if calibrated else []
    lines = [MARKDOWN_MARK, "## Checkpoints compared", table(head, body, text_columns=3)]
    return "\n\n".join([*lines, *(f"- note: {escaped(note)}" for note in notes)]) + "\n"
