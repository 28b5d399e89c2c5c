"""What the solvers of `transform` read: a component's weights with all changes so far, and the statistics of its
inputs.

Reads runs of rows; holds one run, and the sample of rows that a search was promised.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ptqpipe.calibration.inputs import InputStatistics
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.errors import NumericsError, UsageError
from ptqpipe.models.folded import FoldedTensors, encoded
from ptqpipe.models.folding import Edge, Matrix, move_factors
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.global_scale import absmax_global
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.schemes import Activation, get_scheme
from ptqpipe.quantization import quantize_rows
from ptqpipe.quantization.transforms import Consumer, Problem, Quantize, Solution, SolveOptions, get_scaling
from ptqpipe.runtime.input_quantizers import InputQuantizer

SAMPLE_ELEMENTS = 1 << 21  # of all weights of a problem, for searches; four times as many choose 0.02 % better
FULL_ELEMENTS = 1 << 26  # of the full moments of a problem; beyond it blocks of 16 columns have to do
SAMPLE_ROWS = 16  # adjacent rows of a sample


@dataclass(slots=True)
class Weights:
    """The tensors of one component with what has been folded into them so far.

    inputs  edge -> factors [channels] that its inputs were divided by
    """

    tensors: FoldedTensors
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def divide_inputs(self, edge: Edge, factors: torch.Tensor) -> None:
        """Remembers that the inputs of an edge's consumers are smaller now."""
        self.inputs[edge.id] = self.inputs.get(edge.id, torch.ones(edge.channels, dtype=torch.float64)) * factors

    def whole(self, name: str) -> torch.Tensor:
        """A small tensor (a norm) as it is by now, float64."""
        return torch.cat([rows for _, rows in self.tensors.runs(name)])

    def rows(self, matrix: Matrix) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, float64 rows) of a logical [out, in] weight. NumericsError for NaN and inf."""
        n, _ = matrix.shape
        if matrix.transposed:
            stored = torch.cat([rows for _, rows in self.tensors.runs(matrix.tensor, expert=matrix.expert)])
            runs = iter([(0, stored[:, matrix.start : matrix.start + n].t())])
        else:
            runs = self._logical(matrix)
        for first, rows in runs:
            if not bool(torch.isfinite(rows).all()):
                raise NumericsError(f"'{matrix.tensor}' has NaN or inf; the source checkpoint is damaged")
            yield first, rows

    def _logical(self, matrix: Matrix) -> Iterator[tuple[int, torch.Tensor]]:
        begin, end = matrix.start, matrix.start + matrix.shape[0]
        for first, rows in self.tensors.runs(matrix.tensor, expert=matrix.expert, start=begin, stop=end):
            low, high = max(first, begin), min(first + rows.shape[0], end)
            yield low - begin, rows[low - first : high - first]

    def column_amax(self, matrix: Matrix) -> torch.Tensor:
        """float64 [K]: the largest magnitude of each column."""
        amax = torch.zeros(matrix.shape[1], dtype=torch.float64)
        for _, rows in self.rows(matrix):
            amax = torch.maximum(amax, rows.abs().amax(dim=0))
        return amax

    def sample(self, matrix: Matrix, elements: int) -> torch.Tensor:
        """float32 [n, K]: a weight of at most ``elements`` whole, of a larger one runs of 16 rows spread evenly."""
        n, k = matrix.shape
        wanted = min(n, max(SAMPLE_ROWS, elements // max(1, k)))
        if wanted == n:
            return torch.cat([rows.float() for _, rows in self.rows(matrix)])
        runs = max(1, wanted // SAMPLE_ROWS)
        starts = torch.linspace(0, n - SAMPLE_ROWS, runs).long()
        chosen = torch.zeros(n, dtype=torch.bool)
        chosen[(starts[:, None] + torch.arange(SAMPLE_ROWS)).reshape(-1)] = True
        return torch.cat([rows[chosen[first : first + rows.shape[0]]].float() for first, rows in self.rows(matrix)])


def make_problem(
    edge: Edge, weights: Weights, statistics: Statistics, *, search_for: Format | None = None
) -> Problem | None:
    """An edge as a problem; None where nothing that reads it will be quantized.

    search_for  for searches: the format, which not every shape divides into. The problem then holds samples of the
                weights, and the second moments that the folder has

    UsageError where the statistics lack a consumer, NumericsError for statistics that are not finite.
    """
    searched = search_for is not None
    columns = weights.inputs.get(edge.id, torch.ones(edge.channels, dtype=torch.float64))[edge.channel_of()]
    quantized = [
        consumer
        for consumer in edge.consumers
        if consumer.quantized and (search_for is None or search_for.fits(consumer.shape))
    ]
    if not quantized:
        return None
    inputs, consumers = [], []
    groups = list(dict.fromkeys(consumer.group for consumer in quantized))
    full = searched and len(groups) * columns.numel() ** 2 <= FULL_ELEMENTS
    for group in groups:
        members = [consumer for consumer in quantized if consumer.group == group]
        inputs += [_inputs(member, statistics, columns, full=False, block=False) for member in members]
        if searched:
            rows = torch.cat([weights.sample(member, SAMPLE_ELEMENTS // len(quantized)) for member in members])
            consumers.append(Consumer(rows, _inputs(members[0], statistics, columns, full=full, block=True)))
    return Problem(
        edge.id,
        edge.channels,
        edge.channel_of(),
        torch.stack([side.amax for side in inputs]).amax(dim=0),
        torch.cat([side.weights for side in consumers]).abs().amax(dim=0).double()
        if searched
        else torch.stack([weights.column_amax(consumer) for consumer in quantized]).amax(dim=0),
        tuple(consumers),
    )


def _inputs(
    consumer: Matrix, statistics: Statistics, columns: torch.Tensor, *, full: bool, block: bool
) -> InputStatistics:
    """Statistics of a consumer's inputs after all changes so far; ``full`` and ``block``: which moments may be read."""
    module = next((name for name in consumer.modules if name in statistics.modules), consumer.modules[0])
    full = full and statistics.has(module, "full_moment")
    block = block and not full and statistics.has(module, "block_moment")
    stored = statistics.of(module, block=block, full=full)
    if stored.amax.shape != columns.shape:
        raise UsageError(
            f"{statistics.path} saw {stored.amax.numel()} input channels of '{module}', expected {columns.numel()}; "
            "calibrate this model"
        )
    if not bool(torch.isfinite(stored.amax).all() and torch.isfinite(stored.second_moment).all()):
        raise NumericsError(f"{statistics.path} has NaN or inf for '{module}'; calibrate again")
    inverse = (1.0 / columns).float()
    blocks = inverse.reshape(-1, 16) if stored.block_moment is not None else None
    return InputStatistics(
        tokens=stored.tokens,
        amax=stored.amax * inverse,
        mean=stored.mean * inverse,
        second_moment=stored.second_moment * inverse**2,
        block_moment=None if stored.block_moment is None or blocks is None
        else stored.block_moment * blocks[:, :, None] * blocks[:, None, :],
        full_moment=None if stored.full_moment is None else stored.full_moment * inverse[:, None] * inverse[None, :],
    )  # fmt: skip


def weight_quantizer(fmt: Format) -> Quantize:
    """The exact search at the abs-max global scale: what convert does, but for the search of global scales."""

    def quantize(w: torch.Tensor) -> torch.Tensor:
        g = absmax_global(float(w.abs().amax()), fmt) if fmt.has_global else None
        return decoded(quantize_rows(w.contiguous(), fmt, search="exact", global_scale=g))

    return quantize


def input_quantizer(activation: Activation) -> Quantize | None:
    """What readers do with activations, the static scale being that of the largest input; None where they stay."""
    return None if activation is Activation.NONE else lambda x: InputQuantizer.fitted(activation, x)(x)


def solve_edge(
    name: str, edge: Edge, weights: Weights, statistics: Statistics, options: TransformOptions
) -> dict[str, Any]:
    """Finds the factors that one scaling moves across an edge, and adds them to ``weights``; the journal's entry."""
    scaling = get_scaling(name)
    search_for = get_scheme(options.format).fmt if scaling.NEEDS_QUANTIZER else None
    problem = make_problem(edge, weights, statistics, search_for=search_for)
    if problem is None:
        return {"transform": name, "edge": edge.id, "kind": edge.kind, "skipped": "nothing is quantized"}
    solution = scaling.solve(problem, _solve_options(options, name))
    weights.tensors.add(move_factors(edge, solution.factors))
    weights.divide_inputs(edge, solution.factors)
    return {**_entry(name, edge, solution), "factors": encoded(solution.factors)}


def _entry(name: str, edge: Edge, solution: Solution) -> dict[str, Any]:
    factors = solution.factors
    entry: dict[str, Any] = {
        "transform": name,
        "edge": edge.id,
        "kind": edge.kind,
        "channels": edge.channels,
        "least": float(factors.amin()),
        "largest": float(factors.amax()),
        "changed": int((factors != 1).sum()),
        "tensors": edge.tensors(),
        **solution.facts,
    }
    return entry if solution.error is None else entry | {"error": solution.error, "plain_error": solution.plain_error}


def _solve_options(options: TransformOptions, name: str) -> SolveOptions:
    scaling = get_scaling(name)
    alpha = SolveOptions().alpha if options.alpha is None else options.alpha
    if not scaling.NEEDS_QUANTIZER:
        return SolveOptions(alpha=alpha, powers_of_two=options.power_of_two)
    scheme = get_scheme(options.format)
    return SolveOptions(
        powers_of_two=options.power_of_two,
        quantize=weight_quantizer(scheme.fmt),
        quantize_inputs=input_quantizer(scheme.activation) if scaling.NEEDS_INPUT_QUANTIZER else None,
    )
