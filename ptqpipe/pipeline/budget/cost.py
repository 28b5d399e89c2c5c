"""What each scheme costs each group in accuracy: estimated from the weights, or measured with the model.

*Estimated*: every scheme is tried with the searches that convert runs. For a group g with weights m of roles r (each
role's weights in one group, the experts of an MLP, count as their mean):

    data-free    cost = sum_r mean_m ||W - What||^2 / E_r          E_r: mean ||W||^2 of the weights of that role
    statistics   cost = sum_r mean_m E||(W - What) x||^2 / E||W x||^2

with the expectation from the full, block or diagonal second moment of the input, the richest that all weights have.
Data-free compares weights of one role by their absolute error, since the layers of one role see inputs of one kind.
A format that quantizes the inputs adds what that does to the output: the relative error of normal numbers in that
format, times E||W x||^2 of inputs that do not depend on each other. It counts INPUTS times, since the same input goes
into several weights and all of their rows, and more where codes come by error feedback, which leaves GPTQ_SHARE of the
weights' part and all of the inputs'.

    both sides   cost = sum_r sum_m of the KL divergence that the error causes, to second order

Weights whose inputs will be rotated are compared rotated, with the moments of rotated inputs.

The last is for statistics with gradient moments (``moments="kl"`` of `calibrate`), and compares layers by what they
cost the model. How is in ``error_metric.py``; what is measured with the model instead, in ``measure.py``.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from ptqpipe.calibration.inputs import InputStatistics, WeightGradients
from ptqpipe.calibration.statistics import BLOCK, Statistics
from ptqpipe.checkpoint.tensor_names import role_of
from ptqpipe.conversion.input_moments import module_of
from ptqpipe.errors import CheckpointError, UsageError, arg
from ptqpipe.models.slices import Member
from ptqpipe.models.source import Source, SourceRows
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.rotation import rotated
from ptqpipe.numerics.schemes import Scheme
from ptqpipe.pipeline.budget.error_metric import ByTokens, ByWindows, Total, input_noise, joint
from ptqpipe.pipeline.budget.plan_units import Group, quantize_as
from ptqpipe.quantization import gathered_bytes
from ptqpipe.recipe.plan import Unit
from ptqpipe.run.machine import BASE_BYTES, WORKER_BYTES, Machine, MemoryPool, counting_bar, one_thread_each

Costs = Mapping[tuple[str, str], float]
"""(group id, option name) -> cost. Keeping costs nothing and is left out."""

CACHE_BYTES = 256 << 20  # of a unit; a larger one is read as often as its passes need it
# KL for each unit of output error by inputs, over that by weights: 2.3 in NVFP4, 3.2 in MXFP4, 3 in FP8 (bench-4m).
INPUTS = 3.0
GPTQ_SHARE = 0.2  # of the KL of nearest codes: 0.18 to 0.21 with data, nvfp4 and mxfp4a16 in benchmarks/quality.md
MOMENTS = ("full_moment", "block_moment", "second_moment")


@dataclass(frozen=True, slots=True)
class _Error:
    group: str
    scheme: str
    role: str
    weight: str
    total: Total


def choose_moment(stats: Statistics, groups: Iterable[Group]) -> str:
    """The richest moment that every weight has. UsageError where one has no statistics at all."""
    modules = [module_of(member) for group in groups for member in group.members]
    for moment in MOMENTS:
        if all(stats.has(module, moment) for module in modules):
            return moment
    lost = next(module for module in modules if not stats.has(module, "second_moment"))
    raise UsageError(f"{stats.path} has no statistics of '{lost}'; calibrate this model")


def knows_outputs(stats: Statistics, groups: Iterable[Group]) -> bool:
    """Whether the statistics have gradient moments for every weight."""
    return all(stats.output_moment(module_of(m), m.shape[0]) is not None for group in groups for m in group.members)


def estimate(
    source: Source,
    groups: Sequence[Group],
    *,
    stats: Statistics | None,
    machine: Machine,
    follows: bool = False,
    rotations: Mapping[str, int] | None = None,
) -> Costs:
    """The cost of every option but keep; in nats of KL divergence where the statistics `knows_outputs`.

    follows    whether codes will come by error feedback: inputs then count more
    rotations  role -> columns of its inputs that will be rotated together: weights and inputs are compared rotated

    NumericsError for damaged weights, UsageError where one unit alone needs more than the machine's memory.
    """
    moment = "" if stats is None else choose_moment(stats, groups)
    both = stats is not None and knows_outputs(stats, groups)
    jobs = [(group, unit) for group in groups for unit in group.units]
    if not jobs:
        return {}
    needs = {unit.id: _bytes(group, unit, stats, moment) for group, unit in jobs}
    most = max(needs, key=lambda name: needs[name])
    machine.require(BASE_BYTES + WORKER_BYTES + needs[most], most)
    share = machine.divide_memory(0, len(jobs), reserved_bytes=needs[most])
    memory = MemoryPool(share.pool_bytes)

    def work(job: tuple[Group, Unit]) -> list[_Error]:
        with memory.reserve(needs[job[1].id]):
            share = GPTQ_SHARE if follows else 1.0
            by_role = {} if rotations is None else rotations
            return _unit_errors(source, *job, stats=stats, moment=moment, both=both, share=share, rotations=by_role)

    errors: list[_Error] = []
    with (
        counting_bar(len(jobs), "units", shown=machine.progress, title="errors") as advance,
        one_thread_each(),
        ThreadPoolExecutor(max_workers=share.workers) as pool,
    ):
        for (_, unit), unit_errors in zip(jobs, pool.map(work, jobs), strict=True):
            errors += unit_errors
            advance(1, unit.id)
    return _sum(errors, relative=stats is not None, both=both)


def _bytes(group: Group, unit: Unit, stats: Statistics | None, moment: str) -> int:
    """About how many bytes a unit takes besides what every worker has: its kept weights and its moments."""
    shapes = [member.shape for member in unit.members]
    formats = [option.scheme.fmt for option in group.options if option.scheme is not None]
    whole = [gathered_bytes(shapes, fmt, element_bytes=4) for fmt in formats if fmt.one_scale]
    weights = (unit.elements * 4 if _cached(unit) else 0) + max(whole, default=0)
    if stats is None:
        return weights
    columns = {stats.key(module_of(member)): member.shape[1] for member in unit.members}
    width = {"full_moment": 0, "block_moment": BLOCK, "second_moment": 1}[moment]
    return weights + sum(4 * k * (width or k) for k in columns.values())


def _cached(unit: Unit) -> bool:
    return unit.elements * 4 <= CACHE_BYTES


def _unit_errors(
    source: Source,
    group: Group,
    unit: Unit,
    *,
    stats: Statistics | None,
    moment: str,
    both: bool,
    share: float,
    rotations: Mapping[str, int],
) -> list[_Error]:
    blocks = [rotations.get(member.module.rpartition(".")[2], 0) for member in unit.members]
    weights = [
        SourceRows(source, replace(m.source, rotation=block), shape=m.shape, cache=_cached(unit))
        for m, block in zip(unit.members, blocks, strict=True)
    ]
    metrics = [None] * len(weights) if stats is None else _metrics(stats, unit, moment, blocks, both=both)
    unit_errors = []
    for option in group.options:
        if option.scheme is None:
            continue
        noise = INPUTS * input_noise(option.scheme.activation) / share
        for weight, total in _scheme_errors(weights, metrics, unit, option.scheme, noise):
            unit_errors.append(_Error(group.id, option.name, role_of(weight), weight, total))
    return unit_errors


def _metrics(
    stats: Statistics, unit: Unit, moment: str, blocks: Sequence[int], *, both: bool
) -> list[ByTokens | ByWindows]:
    """Error metrics of a unit's members, inputs rotated by ``blocks`` (0: not): input moments, or input and gradient
    moments if ``both``. The moment that several members share is read once."""
    moments: dict[tuple[str, int], torch.Tensor] = {}
    metrics: list[ByTokens | ByWindows] = []
    for member, block in zip(unit.members, blocks, strict=True):
        key = (stats.key(module_of(member)), block)
        if key not in moments:
            moments[key] = _rotated(_input(stats, module_of(member), moment), block)
        h = moments[key]
        if not both:
            metrics.append(ByTokens(h, _diagonal(h)))
            continue
        inputs = ByTokens(h, _diagonal(h), _root(stats, member))
        gradients = _gradients(stats, member)
        if gradients is None:
            metrics.append(inputs)
        else:
            gradients = replace(gradients, columns=_rotated(gradients.columns, block))
            metrics.append(ByWindows.of(gradients, inputs, diagonal=_rotated(inputs.diagonal, block)))
    return metrics


def _rotated(moment: torch.Tensor, block: int) -> torch.Tensor:
    """The moment of rotated inputs: of a full one exactly; else the second moments [K] of inputs whose columns do not
    depend on each other, which a rotation makes equal in each of its blocks."""
    if not block:
        return moment
    if moment.dim() == 2:
        return rotated(rotated(moment.double(), block).t(), block).float()
    return _diagonal(moment).reshape(-1, block).mean(1).repeat_interleave(block)


def _input(stats: Statistics, module: str, moment: str) -> torch.Tensor:
    moments: InputStatistics = stats.of(module, block=moment == "block_moment", full=moment == "full_moment")
    value = getattr(moments, moment)
    if not isinstance(value, torch.Tensor) or not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"the {moment} of '{module}' in {stats.path} is not finite; calibrate again")
    return value


def _root(stats: Statistics, member: Member) -> torch.Tensor:
    """float32 [N, 1]: the root of what an error at each output of a weight costs."""
    moment = stats.output_moment(module_of(member), member.shape[0])
    if moment is None or not bool(torch.isfinite(moment).all()) or bool((moment < 0).any()):
        raise CheckpointError(
            f"the output moment of '{module_of(member)}' in {stats.path} is not finite or negative; calibrate again"
        )
    return moment.sqrt().unsqueeze(1)


def _gradients(stats: Statistics, member: Member) -> WeightGradients | None:
    """Of a weight; None where the statistics have none of it."""
    gradients = stats.weight_gradients(module_of(member), member.shape)
    if gradients is None:
        return None
    squares = torch.cat((gradients.rows, gradients.columns))
    if not bool(torch.isfinite(torch.cat((squares, gradients.along))).all()) or bool((squares < 0).any()):
        raise CheckpointError(
            f"the gradients of '{module_of(member)}' in {stats.path} are not finite or negative; calibrate again"
        )
    return gradients


def _scheme_errors(
    weights: Sequence[SourceRows],
    metrics: Sequence[ByTokens | ByWindows | None],
    unit: Unit,
    scheme: Scheme,
    noise: float,
) -> list[tuple[str, Total]]:
    """Of each weight what its error costs; ``noise`` is the relative squared error of its inputs."""
    sums: dict[tuple[int, int], torch.Tensor] = {}

    def write_rows(member: int, row: int, q: QTensor) -> None:  # rows that come again replace what they gave before
        metric = metrics[member]
        if metric is not None:
            w = weights[member].rows(row, row + q.shape[0]).float()
            sums[(member, row)] = metric.sums(q.dequantize() - w, w, row, noise)

    result = quantize_as(weights, unit, scheme, write_rows)
    totals = []
    for index, (member, metric, error) in enumerate(zip(unit.members, metrics, result.errors, strict=True)):
        if metric is None:
            total = Total(error.squared_error + noise * error.energy, error.energy)
        else:
            total = metric.total(torch.stack([sums[key] for key in sorted(sums) if key[0] == index]).sum(0))
            if not total.is_finite():
                raise CheckpointError(
                    f"what the statistics say of '{module_of(member)}' is too large or too small for a cost; calibrate "
                    f"again, check the model's weights, or plan without {arg('stats')}"
                )
        totals.append((member.weight, total))
    return totals


def _diagonal(moment: torch.Tensor) -> torch.Tensor:
    """The second moment [K] of each input, from what `output_error` takes."""
    return moment if moment.dim() == 1 else torch.diagonal(moment, dim1=-2, dim2=-1).flatten()


def _sum(errors: Sequence[_Error], *, relative: bool, both: bool) -> dict[tuple[str, str], float]:
    """Costs of groups from errors of weights: half of them where ``both`` sides are known, beside errors of all other
    weights; else ``relative`` to each weight's own signal, or to its role's mean."""
    signals: dict[str, dict[str, float]] = defaultdict(dict)
    of_weights: dict[str, list[Total]] = defaultdict(list)
    for e in errors:
        signals[e.role][e.weight] = e.total.whole
        of_weights[e.weight].append(e.total)
    mean = {role: sum(energies.values()) / len(energies) for role, energies in signals.items()}
    others = joint(of_weights.values())
    parts: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for e in errors:
        scale = 2.0 if both else e.total.whole if relative else mean[e.role]
        parts[(e.group, e.scheme)][e.role].append(max(0.0, e.total.beside(others)) / scale if scale > 0 else 0.0)
    return {key: sum(sum(v) / (1 if both else len(v)) for v in roles.values()) for key, roles in parts.items()}
