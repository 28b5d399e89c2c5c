"""plan: which weights get which format under a budget. A recipe that converts directly, and its exact size.

Sensitivities come from ``cost.py`` or ``measure.py``, the choice from ``solve.py``; this file turns
a budget into bytes, asks for the choice, and makes sure that the recipe does what the plan says, to the byte.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint.single_file import check_file, write_file
from ptqpipe.checkpoint.source import resolve_source
from ptqpipe.errors import UsageError
from ptqpipe.plan import Member
from ptqpipe.source import Source
from ptqpipe.stages.common.identity import check_model, name_of
from ptqpipe.stages.common.machine import Machine
from ptqpipe.stages.common.text import layer_of, role_of, size_text, table
from ptqpipe.stages.plan.cost import Costs, choose_moment, estimate
from ptqpipe.stages.plan.measure import Measurement, measure
from ptqpipe.stages.plan.solve import Solution, require_scipy, solve
from ptqpipe.stages.plan.units import DEFAULT_FORMATS, KEEP, Group, find_groups, forecast, recipe_content, schemes_of
from ptqpipe.statistics import Statistics

POINTS = 9  # of the Pareto curve
NO_GAP = 1e-9  # of the cost: below it is the rounding of sums
_MARK = "# Converts to "
_ATTEMPTS = 64
_SLACK = 64  # bytes: by so much header entries may be overestimated, and 4 a group


@dataclass(frozen=True, slots=True)
class Budget:
    """Bits per weight over all weights that could be quantized, or bytes of weights and index on disk; one of them."""

    bits: float | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.nbytes is None):
            raise UsageError("--budget is bits per weight or bytes, one of them: 4.75bits, 9GB")
        if self.bits is not None and not 0 < self.bits <= 64:
            raise UsageError(f"--budget {self.bits:g}bits is out of range; expected more than 0 and at most 64")


@dataclass(frozen=True, slots=True)
class Point:
    """One choice of the Pareto curve. ``file_bytes`` is exact for the chosen one, about right (None) for the others."""

    bits: float
    solution: Solution
    counts: Mapping[str, int]  # weights by option


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """A decided plan, whose recipe is ``content``.

    groups, chosen  parallel: groups, and the names of their options
    how             what costs mean
    stats           the statistics that converting needs, None for none
    """

    source: str
    groups: tuple[Group, ...]
    chosen: Mapping[str, str]
    costs: Costs
    how: str
    point: Point
    curve: tuple[Point, ...]
    file_bytes: int
    content: Mapping[str, Any]
    stats: Path | None = None

    @property
    def elements(self) -> int:
        """How many numbers could be quantized."""
        return sum(group.elements for group in self.groups)


def plan_mixed(
    model: str | Path,
    budget: Budget,
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
    stats: Path | None = None,
    measurement: Measurement | None = None,
    machine: Machine | None = None,
) -> MixedPlan:
    """Chooses a scheme for every group of fused weights.

    formats      the candidates, keep among them or not
    stats        statistics of the inputs: costs are weighted output errors
    measurement  what to measure instead: KL of the model with one group quantized at a time

    Raises UsageError for a budget that is too small (with the smallest possible), for statistics of another model, and
    where scipy is missing; what the searches raise for damaged weights.
    """
    require_scipy()
    if stats is not None and measurement is not None:
        raise UsageError("--stats and --measure are two kinds of sensitivity; give one of them")
    schemes = schemes_of(formats)
    with Source.open(resolve_source(str(model))) as source:
        source.check_requantizable()
        groups = find_groups(source, schemes)
        limits = _Limits.of(source, groups, budget)
        costs: Costs
        options: Mapping[str, str] = {}
        if measurement is not None:
            costs, how = measure(source, groups, measurement)
        elif stats is not None:
            with Statistics.open(stats) as opened:
                check_model(opened, source)
                moment = choose_moment(opened, groups)
                how = f"output error of nearest codes relative to the output, {moment.replace('_', ' ')} of x"
                options = {"algorithm": "gptq"} if moment == "full_moment" else {"weighting": "diagonal"}
                costs = estimate(source, groups, stats=opened, machine=machine or Machine())
        else:
            how = "squared error relative to the mean energy of the role (data-free)"
            costs = estimate(source, groups, stats=None, machine=machine or Machine())
        return replace(_decide(source, groups, costs, how, limits, options), stats=stats)


@dataclass(frozen=True, slots=True)
class _Limits:
    """A budget in the sizes that the solver adds up. ``file_budget`` None: the sizes are the whole story."""

    sizes: tuple[tuple[int, ...], ...]
    limit: int
    file_budget: int | None
    description: str

    @classmethod
    def of(cls, source: Source, groups: Sequence[Group], budget: Budget) -> "_Limits":
        """UsageError, with the smallest possible budget, where nothing fits. Before any weight is read."""
        elements = sum(group.elements for group in groups)
        smallest = {group.id: group.options[0].name for group in groups}
        if budget.bits is not None:
            sizes = tuple(tuple(option.nbytes for option in group.options) for group in groups)
            least = sum(row[0] for row in sizes)
            limit = math.floor(budget.bits * elements / 8)
            if least > limit:
                bits = math.ceil(8e3 * least / elements) / 1e3
                raise UsageError(f"--budget {budget.bits:g}bits is too small; the smallest possible is {bits:.3f}bits")
            return cls(sizes, limit, None, f"{budget.bits:g} bits per weight")
        assert budget.nbytes is not None
        offsets = 2 * len(str(budget.nbytes)) + 1  # of a header entry: two numbers of about so many digits
        sizes = tuple(tuple(o.nbytes + o.header_bytes + offsets * o.tensors for o in g.options) for g in groups)
        least = forecast(source, recipe_content(groups, smallest, description=""), groups, smallest)
        if least > budget.nbytes:
            size = f"{least} bytes ({size_text(least)})"
            raise UsageError(f"--budget {size_text(budget.nbytes)} is too small; the smallest possible is {size}")
        fixed = least - sum(row[0] for row in sizes)
        slack = _SLACK + 4 * len(groups)  # header entries are estimates: begin above, exact sizes decide
        return cls(sizes, budget.nbytes - fixed + slack, budget.nbytes, f"{size_text(budget.nbytes)} on disk")


def _decide(
    source: Source, groups: list[Group], costs: Costs, how: str, limits: _Limits, options: Mapping[str, str]
) -> MixedPlan:
    """The cheapest choice within the limits; the recipe asks for what ``options`` say.

    Codes by error feedback cost a like share of what nearest ones do in every format, so nearest ones decide.
    """
    rows = [[costs[(g.id, o.name)] if o.scheme is not None else 0.0 for o in g.options] for g in groups]
    limit = limits.limit
    for attempt in range(_ATTEMPTS):
        solution = solve(rows, limits.sizes, limit)
        if solution is None:
            break
        chosen = _names(groups, solution)
        description = f"Mixed precision for {limits.description}; {how}"
        content = recipe_content(groups, chosen, description=description, options=options)
        size = forecast(source, content, groups, chosen)
        if limits.file_budget is None or size <= limits.file_budget:
            point = _point(groups, solution)
            curve = _curve(groups, rows, limits.sizes, point)
            name = name_of(source.reader.path)
            return MixedPlan(name, tuple(groups), chosen, costs, how, point, curve, size, content)
        limit = solution.nbytes - (1 if attempt < _ATTEMPTS // 2 else max(1, size - limits.file_budget))
    raise UsageError("no choice of formats was found within this budget; give a few kilobytes more")


def _names(groups: Sequence[Group], solution: Solution) -> dict[str, str]:
    return {group.id: group.options[o].name for group, o in zip(groups, solution.chosen, strict=True)}


def _point(groups: Sequence[Group], solution: Solution) -> Point:
    counts: dict[str, int] = defaultdict(int)
    nbytes = 0
    for group, o in zip(groups, solution.chosen, strict=True):
        counts[group.options[o].name] += len(group.members)
        nbytes += group.options[o].nbytes
    return Point(8 * nbytes / sum(group.elements for group in groups), solution, dict(counts))


def _curve(
    groups: Sequence[Group], rows: list[list[float]], sizes: Sequence[Sequence[int]], point: Point
) -> tuple[Point, ...]:
    """Choices at budgets from the smallest possible to the least that costs nothing more, denser among the small ones;
    the plan is among them."""
    low = sum(min(row) for row in sizes)
    best = [min(range(len(row)), key=lambda o: (row[o], size[o])) for row, size in zip(rows, sizes, strict=True)]
    high = sum(size[o] for size, o in zip(sizes, best, strict=True))
    found = {point.solution.nbytes: point}
    for step in range(POINTS):
        solution = solve(rows, sizes, low + (high - low) * step**2 // (POINTS - 1) ** 2)
        if solution is not None:
            found.setdefault(solution.nbytes, _point(groups, solution))
    return tuple(found[size] for size in sorted(found))


def write_recipe(plan: MixedPlan, path: Path) -> None:
    """Writes the recipe as YAML, which names no folder: it is made to be passed on.

    OutputError where ``path`` exists and is no recipe, or cannot be written.
    """
    check_recipe_target(path)
    text = recipe_text(plan.content)
    command = f"ptqpipe convert {plan.source} --recipe {path.name}"
    command += "" if plan.stats is None else f" --stats {name_of(plan.stats)}"
    note = f"{_MARK}{plan.file_bytes} bytes of weights and index: {command}\n"
    write_file(path, note + text)


def recipe_text(content: Mapping[str, Any]) -> str:
    """A recipe as YAML, in the style of recipes/*.yaml. JSON's strings are YAML's double-quoted ones."""
    lines = [f"version: {content['version']}", f"description: {_quoted(content['description'])}", "rules:"]
    for rule in content["rules"]:
        more = [f"    {key}: {value}" for key, value in rule.items() if key != "match"]
        lines += [f"  - match: {_quoted(rule['match'])}", *more]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def check_recipe_target(path: Path) -> None:
    """OutputError unless ``path`` is free or an earlier plan's recipe, where a file can be written."""
    check_file(path, own=lambda head: head.startswith(_MARK.encode()), what="a recipe of ptqpipe plan")


def plan_text(plan: MixedPlan) -> str:
    """The plan for a terminal: what became what, the Pareto curve, how far from optimal it could be."""
    groups = defaultdict(list)
    for group in plan.groups:
        for member in group.members:
            groups[(role_of(member.weight), plan.chosen[group.id])].append(member)
    rows = [
        [role, name, str(len(members)), f"{sum(m.elements for m in members):,}", _layers(members)]
        for (role, name), members in sorted(groups.items())
    ]
    names = sorted({name for point in plan.curve for name in point.counts})
    base = plan.curve[0].solution.cost or 1.0
    curve = [
        [
            "*" if point is plan.point else "",
            f"{point.bits:.3f}",
            size_text(point.solution.nbytes),
            f"{point.solution.cost:.4g}",
            f"{point.solution.cost / base:.3f}",
            *(str(point.counts.get(name, 0)) for name in names),
            "0" if point.solution.gap < NO_GAP else f"{point.solution.gap:.1e}",
        ]
        for point in plan.curve
    ]
    head = ["", "bits", "size", "cost", "of largest", *names, "gap"]
    point = plan.point
    within = "" if point.solution.gap < NO_GAP else f" to within {point.solution.gap:.1e}"
    return "\n".join(
        [
            f"{plan.source}: {len(plan.groups)} groups, {plan.elements:,} numbers; cost: {plan.how}",
            table(["role", "format", "weights", "params", "layers"], rows, left=2),
            "",
            "Pareto curve (sizes of the groups; * is the plan):",
            table(head, curve),
            "",
            f"{point.bits:.4f} bits per weight, cost {point.solution.cost:.4g}, optimal{within}; converts to "
            f"{plan.file_bytes:,} bytes ({size_text(plan.file_bytes)}) of weights and index",
        ]
    )


def _layers(members: Sequence[Member]) -> str:
    """The numbers of layers, runs shortened: 0-3, 7."""
    numbers = sorted({layer for m in members if (layer := layer_of(m.module)) is not None})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(text) <= 40 else f"{len(numbers)} layers"


def plan_json(plan: MixedPlan) -> dict[str, Any]:
    """The plan as data: every group's choice and costs, the curve."""
    return {
        "model": plan.source,
        "how": plan.how,
        "bits_per_weight": plan.point.bits,
        "bytes": plan.file_bytes,
        "cost": plan.point.solution.cost,
        "gap": plan.point.solution.gap,
        "groups": [
            {
                "id": group.id,
                "weights": [member.weight for member in group.members],
                "chosen": plan.chosen[group.id],
                "options": {
                    o.name: {"bytes": o.nbytes, "cost": 0.0 if o.name == KEEP else plan.costs[(group.id, o.name)]}
                    for o in group.options
                },
            }
            for group in plan.groups
        ],
        "curve": [
            {
                "bits": p.bits,
                "bytes": p.solution.nbytes,
                "cost": p.solution.cost,
                "gap": p.solution.gap,
                "weights": dict(p.counts),
            }
            for p in plan.curve
        ],
    }
