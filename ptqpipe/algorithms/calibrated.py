"""A unit quantized with what calibration knows of its input: weighted scales, error feedback, and a gate against RTN.

The walk: one global scale for the unit, searched with the weighted objective; for every run of rows the block scales,
then the codes; per weight, the output error of the result beside that of plain round to nearest, and the better of
the two. Rows are quantized in runs whose size depends on the shape alone, and every product runs over whole runs, so
the bytes do not depend on workers. Codes wait in memory until the gate has spoken; the float weights do not.

Knows tensors, formats and moments; must not know recipes, statistics files or containers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ptqpipe.algorithms import block_objective, gptq
from ptqpipe.algorithms.metric import DAMPING, Metric, descending, make_metric, output_error
from ptqpipe.algorithms.refine import refine
from ptqpipe.algorithms.rows import (
    checked_amax,
    chunks,
    encode_rows,
    measure,
    quantize_rows,
    search_scales,
    total_error,
)
from ptqpipe.algorithms.rtn import ROUNDING_MARGIN, Promise, Sink, UnitResult, Weight, WeightError, gather, joint
from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.formats import WHOLE, Format
from ptqpipe.global_scale import absmax_global, pick, sample_rows
from ptqpipe.qtensor import QTensor
from ptqpipe.search import get_search


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What is known of a weight's input x: moments over tokens, float32 on the CPU.

    second_moment  [K] E[x^2]
    block_moment   [K/16, 16, 16] E[x x^T] in blocks, None where no option asks for it
    full_moment    [K, K] E[x x^T], None where no option asks for it
    held           the same of samples that none of these have seen: what the gate judges by, where it is there
    """

    second_moment: torch.Tensor
    block_moment: torch.Tensor | None = None
    full_moment: torch.Tensor | None = None
    held: "LayerInput | None" = None


@dataclass(frozen=True, slots=True)
class Options:
    """How a unit is quantized; the names are those of a recipe's rule.

    algorithm  "rtn": nearest codes; "gptq": codes by error feedback, which needs the full moment
    weighting  what the scales minimize: "none", "diagonal" (sum h_i r_i^2), "block" (r^T H_b r)
    order      gptq visits columns "static" (by second moment, the largest first) or "none" (as they are)
    damping    share of the mean diagonal that is added to the moment
    scales     gptq chooses block scales "first" (weighted search, then the codes), at block "entry", or "auto": at
               entry where scales are finer than powers of two
    refine     sweeps of coordinate descent over scales and codes after gptq
    """

    algorithm: str = "rtn"
    weighting: str = "diagonal"
    order: str = "static"
    damping: float = DAMPING
    scales: str = "auto"
    refine: int = 3

    def at_entry(self, fmt: Format) -> bool:
        """Whether gptq chooses the scales of this format at block entry."""
        if self.algorithm != "gptq" or not gptq.has_block_scales(fmt):
            return False
        return self.scales == "entry" or (self.scales == "auto" and not fmt.scale.power_of_two)

    @property
    def needs_full(self) -> bool:
        """Whether the full moment is read."""
        return self.algorithm == "gptq"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What calibration made of one weight. Errors are those of held-out samples where there are any.

    weighted_error  sum of h_i r_i^2 over all rows, h the second moment: what is expected at the output but for
                    correlations
    output_error    tr(E H E^T) with the moment that was at hand (full, else blocks, else the diagonal), undamped
    versus_rtn      output_error divided by that of plain round to nearest at the unit's global scale
    damping         what the factorization took, None without one
    reverted        whether the gate went back to round to nearest
    held_out        whether the errors, and with them the gate, are those of samples that were held out
    """

    weighted_error: float
    output_error: float
    versus_rtn: float
    damping: float | None
    reverted: bool
    held_out: bool


@dataclass(frozen=True, slots=True)
class CalibratedResult:
    """``UnitResult`` and, for every weight, what calibration made of it."""

    unit: UnitResult
    outcomes: tuple[Outcome, ...]


def quantize(
    weights: Sequence[Weight],
    fmt: Format,
    *,
    names: Sequence[str],
    inputs: Sequence[LayerInput],
    options: Options,
    search: str,
    search_global: bool,
    sink: Sink,
    device: torch.device | None = None,
) -> CalibratedResult:
    """Quantizes the weights of one unit and sends their rows to ``sink``, each once.

    inputs  of each weight; weights that share an input share the object, and its factorization

    Raises NumericsError for unusable weights or moments, FormatError for moments of another width.
    """
    device = device or torch.device("cpu")
    for weight, known, name in zip(weights, inputs, names, strict=True):
        _check_width(weight, known, name)
    plain, g, versus_plain = _global_scale(weights, fmt, names, inputs, options, search, search_global, device)
    shared = _joint_scales(weights, fmt, inputs[0], options, search, device) if fmt.block == (WHOLE, WHOLE) else None
    errors, outcomes = [], []
    metric: Metric | None = None
    for index, (weight, known, name) in enumerate(zip(weights, inputs, names, strict=True)):
        if options.needs_full and (index == 0 or known is not inputs[index - 1]):
            metric = _metric(known, options, fmt, name, device)
        rows, error, outcome = _weight(
            weight, fmt, known, options=options, search=search, g=g, plain=plain, joint=shared, metric=metric
        )
        for start, q in rows:
            sink(index, start, q)
        errors.append(error)
        outcomes.append(outcome)
    proven = options.algorithm == "rtn" and options.weighting != "block" and get_search(search).PROVEN
    proven = proven and not any(outcome.reverted for outcome in outcomes)
    promises = tuple(
        _promise(fmt, inputs[0] if shared is not None else known, options, search, reverted=outcome.reverted)
        for known, outcome in zip(inputs, outcomes, strict=True)
    )
    return CalibratedResult(
        UnitResult(None if g is None else float(g), versus_plain, tuple(errors), proven, promises), tuple(outcomes)
    )


def _promise(fmt: Format, known: LayerInput, options: Options, search: str, *, reverted: bool) -> Promise:
    """What holds of a weight, whose scales ``known`` weighted. One scale for all weights is found but once."""
    proven = get_search(search).PROVEN
    importance = _importance(known, options)
    if reverted:
        return Promise(scales=proven, codes=True, importance=importance if fmt.block == (WHOLE, WHOLE) else None)
    moved = options.algorithm == "gptq" and (
        options.at_entry(fmt) or bool(options.refine and gptq.has_block_scales(fmt))
    )
    searched = proven and options.weighting != "block" and not moved
    return Promise(scales=searched, codes=options.algorithm == "rtn", importance=importance)


def _global_scale(
    weights: Sequence[Weight],
    fmt: Format,
    names: Sequence[str],
    inputs: Sequence[LayerInput],
    options: Options,
    search: str,
    search_global: bool,
    device: torch.device,
) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    """(the plain global scale, the one to use, weighted error at that divided by that at the plain one)."""
    amax = max(_amax(weight, fmt, name) for weight, name in zip(weights, names, strict=True))
    if not fmt.has_global:
        return None, None, 1.0
    plain = absmax_global(amax, fmt)
    if not search_global or amax == 0:
        return plain, plain, 1.0
    pairs = list(zip(weights, (_importance(known, options) for known in inputs), strict=True))
    samples = [(torch.cat([w.rows(*run) for run in sample_rows(w.shape, fmt)]).to(device), h) for w, h in pairs]

    def sampled(c: torch.Tensor) -> float:
        return sum(_scaled_error(s, fmt, search, c, h) for s, h in samples)

    def whole(c: torch.Tensor) -> float:
        return sum(
            _scaled_error(w.rows(*run).to(device), fmt, search, c, h) for w, h in pairs for run in chunks(w.shape, fmt)
        )

    g = pick(plain, fmt, total=sampled)
    if torch.equal(g, plain):
        return plain, plain, 1.0
    at_plain, at_g = whole(plain), whole(g)
    return (plain, g, at_g / at_plain) if at_g < at_plain * (1 - ROUNDING_MARGIN) else (plain, plain, 1.0)


def _scaled_error(w: torch.Tensor, fmt: Format, search: str, g: torch.Tensor, importance: torch.Tensor | None) -> float:
    """``total_error``; with importance in its own unit, so that weights with different inputs add up."""
    total = total_error(w, fmt, search=search, global_scale=g, importance=importance)
    if importance is None:
        return total
    top = float(importance.amax())
    return total * (2.0 ** (math.frexp(top)[1] - 1) if top > 0 else 1.0)


def _importance(known: LayerInput, options: Options) -> torch.Tensor | None:
    """Column weights of the scale search; None where the option or an all-zero moment says so."""
    if options.weighting == "none" or not bool((known.second_moment > 0).any()):
        return None
    return known.second_moment


def _joint_scales(
    weights: Sequence[Weight], fmt: Format, known: LayerInput, options: Options, search: str, device: torch.device
) -> torch.Tensor:
    """The one scale of a unit whose readers keep one for all of its weights."""
    return search_scales(joint(gather(weights, device)), fmt, search=search, importance=_importance(known, options))


def _metric(known: LayerInput, options: Options, fmt: Format, name: str, device: torch.device) -> Metric:
    if known.full_moment is None:
        raise NumericsError(
            f"gptq needs the full second moment of the input of '{name}'; calibrate with --moments "
            "diagonal,full, or convert with --algorithm rtn"
        )
    moment = known.full_moment.to(device)
    group = fmt.block[1] if options.at_entry(fmt) else 1
    order = descending(moment, group=group) if options.order == "static" else None
    return make_metric(moment, damping=options.damping, order=order, name=f"the input of '{name}'")


def _weight(
    weight: Weight,
    fmt: Format,
    known: LayerInput,
    *,
    options: Options,
    search: str,
    g: torch.Tensor | None,
    plain: torch.Tensor | None,
    joint: torch.Tensor | None,
    metric: Metric | None,
) -> tuple[list[tuple[int, QTensor]], WeightError, Outcome]:
    """(row runs of the better of the calibrated and the plain weight, its errors, what became of it)."""
    judge = _Judge.of(known, device := torch.device("cpu") if metric is None else metric.moment.device)
    h = _importance(known, options)
    moments = None
    if options.weighting == "block":
        moments = block_objective.moments_for(fmt, full=known.full_moment, blocks=known.block_moment).to(device)
    made: list[tuple[int, QTensor]] = []
    simple: list[tuple[int, QTensor]] = []
    errors, base = _Errors(), _Errors()
    absmax = 0.0
    for start, stop in chunks(weight.shape, fmt):
        w = weight.rows(start, stop).to(device)
        absmax += total_error(w, fmt, search="absmax", global_scale=plain)
        rtn = _rtn(w, fmt, search=search, g=g, joint=joint, importance=None)
        if metric is not None and options.at_entry(fmt):
            q = gptq.quantize_at_entry(w, fmt, metric=metric, global_scale=g)
        else:
            if moments is None:
                q = _rtn(w, fmt, search=search, g=g, joint=joint, importance=h)
            else:
                scales = block_objective.search(w, fmt, moments=moments, global_scale=g)
                q = encode_rows(w, scales, fmt, global_scale=g)
            if metric is not None:
                q = gptq.quantize(w, q.scales, fmt, metric=metric, global_scale=g)
        if metric is not None and options.refine:
            q = refine(q, w, moment=metric.moment, sweeps=options.refine)
        made.append((start, q))
        simple.append((start, rtn))
        errors.add(q, w, judge)
        base.add(rtn, w, judge)
    reverted = errors.output > base.output
    taken, rows = (base, simple) if reverted else (errors, made)
    error = WeightError(taken.squared, taken.energy, taken.squared / absmax if absmax else 1.0)
    versus = taken.output / base.output if base.output else 1.0
    damping = None if metric is None else metric.damping
    return rows, error, Outcome(taken.weighted, taken.output, versus, damping, reverted, known.held is not None)


def _rtn(
    w: torch.Tensor,
    fmt: Format,
    *,
    search: str,
    g: torch.Tensor | None,
    joint: torch.Tensor | None,
    importance: torch.Tensor | None,
) -> QTensor:
    if joint is not None:
        return encode_rows(w, joint, fmt)
    return quantize_rows(w, fmt, search=search, global_scale=g, importance=importance)


@dataclass(frozen=True, slots=True)
class _Judge:
    """The best moment at hand, which the gate judges by: of samples that were held out, where there are any."""

    second: torch.Tensor
    block: torch.Tensor | None
    full: torch.Tensor | None

    @classmethod
    def of(cls, known: LayerInput, device: torch.device) -> "_Judge":
        """On ``device``; of held-out samples where there are any."""
        known = known if known.held is None else known.held
        block, full = (None if m is None else m.to(device) for m in (known.block_moment, known.full_moment))
        return cls(known.second_moment.to(device), None if full is not None else block, full)

    def output_error(self, error: torch.Tensor, weighted: float) -> float:
        """tr(E H E^T) of ``error`` float32 [n, K], of which ``weighted`` is the diagonal's part."""
        if self.full is not None:
            return output_error(error, self.full)
        if self.block is not None:
            return output_error(error, self.block)
        return weighted


class _Errors:
    """Sums over the runs of one weight, float64."""

    def __init__(self) -> None:
        self.squared = self.energy = self.weighted = self.output = 0.0

    def add(self, q: QTensor, w: torch.Tensor, judge: _Judge) -> None:
        """Adds a run of rows."""
        squared, energy = measure(q, w)
        error = w.float() - q.dequantize()
        weighted = float((error.double().square().sum(dim=0) * judge.second.double()).sum())
        self.squared, self.energy = self.squared + squared, self.energy + energy
        self.weighted += weighted
        self.output += judge.output_error(error, weighted)


def _amax(weight: Weight, fmt: Format, name: str) -> float:
    return max(checked_amax(weight.rows(start, stop), name) for start, stop in chunks(weight.shape, fmt))


def _check_width(weight: Weight, known: LayerInput, name: str) -> None:
    if known.second_moment.shape != (weight.shape[1],):
        raise FormatError(
            f"the statistics of '{name}' are of {known.second_moment.shape[0]} columns, the weight has "
            f"{weight.shape[1]}; calibrate this model"
        )
    if known.held is not None:
        _check_width(weight, known.held, name)
    if not bool(torch.isfinite(known.second_moment).all()) or bool((known.second_moment < 0).any()):
        raise NumericsError(f"the second moment of the input of '{name}' is not finite or negative; calibrate again")
