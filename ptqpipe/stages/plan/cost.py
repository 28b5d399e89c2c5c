"""What each scheme costs each group in accuracy, estimated from the weights: data-free, or with statistics.

Every scheme is tried with the searches that convert runs. For a group g with weights m of roles r (each role's weights
in one group, the experts of an MLP, count as their mean):

    data-free    cost = sum_r mean_m ||W - What||^2 / E_r          E_r: mean ||W||^2 of the weights of that role
    statistics   cost = sum_r mean_m E||(W - What) x||^2 / E||W x||^2

with the expectation from the full, block or diagonal second moment of the input, the richest that all weights have.
Data-free compares weights of one role by their absolute error, since the layers of one role see inputs of one kind.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ptqpipe.algorithms.metric import output_error
from ptqpipe.algorithms.unit import gathered_bytes
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.inputs import InputStatistics
from ptqpipe.plan import Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.schemes import Scheme
from ptqpipe.source import Source, SourceRows
from ptqpipe.stages.common import BASE_BYTES, WORKER_BYTES, Machine, MemoryPool, mebibytes, one_thread_each, role_of
from ptqpipe.stages.plan.units import Group, quantize_as
from ptqpipe.statistics import BLOCK, Statistics

Costs = Mapping[tuple[str, str], float]
"""(group id, option name) -> cost. Keeping costs nothing and is left out."""

CACHE_BYTES = 256 << 20  # of a unit; a larger one is read as often as its passes need it
MOMENTS = ("full_moment", "block_moment", "second_moment")


@dataclass(frozen=True, slots=True)
class _Error:
    """One weight at one scheme: its error and what it is relative to."""

    group: str
    scheme: str
    role: str
    weight: str
    error: float
    signal: float


def choose_moment(stats: Statistics, groups: Iterable[Group]) -> str:
    """The richest moment that every weight has. UsageError where one has no statistics at all."""
    modules = [member.module for group in groups for member in group.members]
    for moment in MOMENTS:
        if all(stats.has(module, moment) for module in modules):
            return moment
    lost = next(module for module in modules if not stats.has(module, "second_moment"))
    raise UsageError(f"{stats.path} has no statistics of '{lost}'; calibrate this model")


def estimate(
    source: Source,
    groups: Sequence[Group],
    *,
    stats: Statistics | None,
    machine: Machine,
) -> Costs:
    """The cost of every option but keep. NumericsError for damaged weights, UsageError where one unit alone needs more
    than the machine's memory."""
    moment = "" if stats is None else choose_moment(stats, groups)
    jobs = [(group, unit) for group in groups for unit in group.units]
    if not jobs:
        return {}
    needs = {unit.id: _bytes(group, unit, stats, moment) for group, unit in jobs}
    most = max(needs, key=lambda name: needs[name])
    least = BASE_BYTES + WORKER_BYTES + needs[most]
    if least > machine.memory_bytes:
        raise UsageError(
            f"--max-memory {mebibytes(machine.memory_bytes)} is too small for {most}; give --max-memory "
            f"{mebibytes(least)}"
        )
    share = machine.divide_memory(0, len(jobs), reserved_bytes=needs[most])
    memory = MemoryPool(share.pool_bytes)

    def work(job: tuple[Group, Unit]) -> list[_Error]:
        with memory.taken(needs[job[1].id]):
            return _unit_errors(source, *job, stats=stats, moment=moment)

    with one_thread_each(), ThreadPoolExecutor(max_workers=share.workers) as pool:
        errors = [error for found in pool.map(work, jobs) for error in found]
    return _sum(errors, relative=stats is not None)


def _bytes(group: Group, unit: Unit, stats: Statistics | None, moment: str) -> int:
    """About what a unit takes beside what every worker has: its weights where they are kept, and its moments."""
    shapes = [member.shape for member in unit.members]
    formats = [option.scheme.fmt for option in group.options if option.scheme is not None]
    whole = [gathered_bytes(shapes, fmt, element_bytes=4) for fmt in formats if fmt.one_scale]
    weights = (unit.elements * 4 if _cached(unit) else 0) + max(whole, default=0)
    if stats is None:
        return weights
    columns = {stats.key(member.module): member.shape[1] for member in unit.members}
    width = {"full_moment": 0, "block_moment": BLOCK, "second_moment": 1}[moment]
    return weights + sum(4 * k * (width or k) for k in columns.values())


def _cached(unit: Unit) -> bool:
    return unit.elements * 4 <= CACHE_BYTES


def _unit_errors(source: Source, group: Group, unit: Unit, *, stats: Statistics | None, moment: str) -> list[_Error]:
    weights = [SourceRows(source, m.source, shape=m.shape, cache=_cached(unit)) for m in unit.members]
    inputs = _inputs(stats, [member.module for member in unit.members], moment)
    found = []
    for option in group.options:
        if option.scheme is None:
            continue
        for member, error, signal in _scheme_errors(weights, inputs, unit, option.scheme):
            found.append(_Error(group.id, option.name, role_of(member), member, error, signal))
    return found


def _inputs(stats: Statistics | None, modules: Sequence[str], moment: str) -> list[torch.Tensor | None]:
    """Of every module; what several modules share is read once."""
    if stats is None:
        return [None] * len(modules)
    first = {stats.key(module): module for module in reversed(modules)}
    found = {key: _input(stats, module, moment) for key, module in first.items()}
    return [found[stats.key(module)] for module in modules]


def _input(stats: Statistics, module: str, moment: str) -> torch.Tensor:
    found: InputStatistics = stats.of(module, block=moment == "block_moment", full=moment == "full_moment")
    value = getattr(found, moment)
    if not isinstance(value, torch.Tensor) or not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"the {moment} of '{module}' in {stats.path} is not finite; calibrate again")
    return value


def _scheme_errors(
    weights: Sequence[SourceRows],
    inputs: Sequence[torch.Tensor | None],
    unit: Unit,
    scheme: Scheme,
) -> list[tuple[str, float, float]]:
    """(weight, error, signal) of each member."""
    sums: dict[tuple[int, int], tuple[float, float]] = {}

    def take(member: int, row: int, q: QTensor) -> None:  # rows that come again replace what they gave before
        h = inputs[member]
        if h is not None:
            w = weights[member].rows(row, row + q.shape[0]).float()
            sums[(member, row)] = (output_error(q.dequantize() - w, h), output_error(w, h))

    result = quantize_as(weights, unit, scheme, take)
    if inputs[0] is None:
        errors = [(error.squared_error, error.energy) for error in result.errors]
    else:
        errors = []
        for index in range(len(unit.members)):
            rows = [value for (member, _), value in sorted(sums.items()) if member == index]
            errors.append((sum(e for e, _ in rows), sum(s for _, s in rows)))
    return [(m.weight, *pair) for m, pair in zip(unit.members, errors, strict=True)]


def _sum(errors: Sequence[_Error], *, relative: bool) -> dict[tuple[str, str], float]:
    """Costs of groups from errors of weights; ``relative``: to each weight's own signal, else to its role's mean."""
    signals: dict[str, dict[str, float]] = defaultdict(dict)
    for e in errors:
        signals[e.role][e.weight] = e.signal
    mean = {role: sum(of.values()) / len(of) for role, of in signals.items()}
    parts: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for e in errors:
        scale = e.signal if relative else mean[e.role]
        parts[(e.group, e.scheme)][e.role].append(max(0.0, e.error) / scale if scale > 0 else 0.0)
    return {key: sum(sum(v) / len(v) for v in roles.values()) for key, roles in parts.items()}
