"""Several checkpoints of one model beside each other: quality against size, layer by layer, role by role."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ptqpipe.check.report import charts, numbers, plots
from ptqpipe.check.report.content import Report, ReportedWeight, pooled_mse
from ptqpipe.check.report.error_charts import LEAST_DB, Drawn, both
from ptqpipe.check.report.quality import worst_text
from ptqpipe.check.report.rendering import page
from ptqpipe.check.report.roles import place, shown
from ptqpipe.conversion.output_error import mean_known
from ptqpipe.run.quantities import decibels


class Row(NamedTuple):
    """One checkpoint: its report, its mark and colour, and the row of the text with its largest divergence, None where
    nobody measured it."""

    report: Report
    mark: int
    kl: Mapping[str, Any] | None

    @property
    def formats(self) -> str:
        """The formats of its weights and their inputs, as ``format`` names them, the one with most numbers first."""
        sizes: dict[str, int] = defaultdict(int)
        for weight in self.report.weights:
            sizes[weight.scheme] += weight.elements
        return ", ".join(sorted(sizes, key=lambda name: (-sizes[name], name)))

    @property
    def perplexity(self) -> float | None:
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
        return page("compare", kind=kind, rows=rows, notes=notes)
    measured = [row for row in rows if row.kl is not None and row.kl["mean"] > 0]
    measure = _measure(rows)
    has_errors = measure is not None and any(measure.of_weights(row, row.report.weights) is not None for row in rows)
    in_roles = measure if has_errors else None
    return page(
        "compare",
        kind=kind,
        described="",
        rows=rows,
        notes=notes,
        measured=sum(row.kl is not None for row in rows),
        size_chart=_size_chart(measured) if len(measured) > 1 else None,
        layers=_by_layer(rows, measure),
        by_data=any(row.report.by_data for row in rows),
        unknown=[row for row in rows if measure is not None and not measure.of_layers(row)],
        roles=_by_role(rows, in_roles),
        of_roles=in_roles.title if in_roles is not None else "",
        choice_names=(),
    )


def _size_chart(rows: Sequence[Row]) -> Drawn:
    spots = [
        plots.Spot(shown(row.report.name), row.mark, row.report.after_bytes, row.kl["mean"], row.kl["interval"])
        for row in rows
        if row.kl is not None
    ]
    return both(lambda wide: plots.size_chart(spots, wide=wide))


class Measure(NamedTuple):
    """By what layers and roles are compared.

    title, unit  in words, of a table and of a drawing
    least_span   of the drawing's axis
    shown        a number as text
    of_weights   of some weights of a checkpoint; None where its record does not say
    of_layers    of its decoder layers
    """

    title: str
    unit: str
    least_span: float
    shown: Callable[[float | None], str]
    of_weights: Callable[[Row, Sequence[ReportedWeight]], float | None]
    of_layers: Callable[[Row], list[tuple[int, float]]]


def _measure(rows: Sequence[Row]) -> Measure | None:
    """The error of the weights where data chose no codes, else output errors in the same format; None where there are
    none of one kind. Data let the error of weights grow where inputs are small: by it the better model is the worse."""
    data = [row.report for row in rows if row.report.by_data]
    if not data:
        sqnr = "SQNR, dB"
        return Measure(sqnr, sqnr, LEAST_DB, numbers.db, _sqnr, lambda row: _by_number(row, _sqnr))
    if len({row.formats for row in rows}) > 1:
        return None
    title = "output error, plain rounding = 1"
    if any(report.versus_rtn is not None for report in data):
        return Measure(title, title, 0.1, numbers.ratio, _output_error, lambda row: _by_number(row, _output_error))
    if any(report.blocks and report.blocks_from == "plain rounding" for report in data):
        return Measure(title, title, 0.1, numbers.ratio, lambda row, weights: None, _tuned_layers)
    return None


def _sqnr(_row: Row, weights: Sequence[ReportedWeight]) -> float | None:
    return decibels(pooled_mse(weights))


def _output_error(row: Row, weights: Sequence[ReportedWeight]) -> float | None:
    """Output error relative to plain rounding: 1 for plain rounding itself, unknown for learned codes."""
    learned = row.report.by_data and row.report.versus_rtn is None
    return None if learned else mean_known(1.0 if weight.plain else weight.versus_rtn for weight in weights)


def _by_number(row: Row, measure: Callable[[Row, Sequence[ReportedWeight]], float | None]) -> list[tuple[int, float]]:
    layers: dict[int, list[ReportedWeight]] = defaultdict(list)
    for weight in row.report.weights:
        if weight.layer is not None:
            layers[weight.layer].append(weight)
    return [(layer, value) for layer, members in sorted(layers.items()) if (value := measure(row, members)) is not None]


def _tuned_layers(row: Row) -> list[tuple[int, float]]:
    """The output errors of decoder layers that tune has recorded; 1 of plain rounding."""
    if not row.report.by_data:
        return [(layer, 1.0) for layer in sorted({w.layer for w in row.report.weights if w.layer is not None})]
    blocks = row.report.blocks if row.report.blocks_from == "plain rounding" else ()
    layers = {
        block.name: next((w.layer for w in row.report.weights if w.name.startswith(f"{block.name}.")), None)
        for block in blocks
    }
    return sorted((layer, b.ratio) for b in blocks if (layer := layers[b.name]) is not None)


def _by_layer(rows: Sequence[Row], measure: Measure | None) -> Drawn | None:
    series = []
    if measure is None:
        return None
    for row in rows:
        name = shown(row.report.name)
        points = tuple((layer, value, f"layer {layer}  {name}: {value:.3f}") for layer, value in measure.of_layers(row))
        series += [charts.Series(name, row.mark, points)] if points else []
    if len({x for line in series for x, _, _ in line.points}) < 2:
        return None
    label, unit, least = "error by layer, one line a checkpoint", measure.unit, measure.least_span
    return both(lambda wide: charts.line_chart(series, wide=wide, label=label, unit=unit, least_span=least))


def _by_role(rows: Sequence[Row], measure: Measure | None) -> list[tuple[str, list[tuple[str, str]]]]:
    """(role, (formats, error) of each checkpoint) in the order of a decoder layer; the error is "" where it is not
    compared."""
    names = sorted({shown(weight.role) for row in rows for weight in row.report.weights}, key=place)
    table = []
    for name in names:
        cells = []
        for row in rows:
            weights = [weight for weight in row.report.weights if shown(weight.role) == name]
            formats = ", ".join(sorted({weight.scheme for weight in weights})) or "not quantized"
            cells.append((formats, measure.shown(measure.of_weights(row, weights)) if measure is not None else ""))
        table.append((name, cells))
    return table
