"""plan: which weights get which format under a budget. A recipe that converts directly, and its exact size.

Sensitivities come from ``cost.py`` or ``measure.py``, the choice from ``recipe/knapsack.py``; this file turns a
budget into bytes, asks for the choice, and makes sure that the recipe does what the plan says, to the byte.
"""

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import check_file, name_of, resolve_source, write_file
from ptqpipe.conversion.same_model import check_model
from ptqpipe.errors import UsageError, arg, argv
from ptqpipe.models.layout_issues import layout_warnings
from ptqpipe.models.source import Source
from ptqpipe.pipeline.budget.cost import Costs, choose_moment, estimate, knows_outputs
from ptqpipe.pipeline.budget.measure import Measurement, measure, sensitivity
from ptqpipe.pipeline.budget.plan_units import DEFAULT_FORMATS, Group, find_groups, forecast, recipe_content, schemes_of
from ptqpipe.pipeline.options import PlanCommand
from ptqpipe.pipeline.validate import container_of_all, formats_for
from ptqpipe.recipe.file import recipe_text
from ptqpipe.recipe.knapsack import Allocation, require_scipy, solve
from ptqpipe.run.machine import Machine
from ptqpipe.run.quantities import bytes_of, disk_size, option_size

POINTS = 9  # of the Pareto curve
_MARK = "# Converts to "
_SMALL = re.compile(r"\d{1,2}(?:\.\d+)?|\d*\.\d+")  # bytes that no model fits in
_BITS = re.compile(r"(\d+(?:\.\d+)?)\s*(?:bits?|bpw)", re.IGNORECASE)
_ATTEMPTS = 64
_SLACK = 64  # upper bound of the error of estimated headers: 64 bytes, and 4 bytes per group


@dataclass(frozen=True, slots=True)
class Budget:
    """Bits per weight over all weights that could be quantized, or bytes of weights and index on disk; one of them."""

    bits: float | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """A budget as it is typed: 4.75bits, 9GB. UsageError for anything else."""
        match, nbytes = _BITS.fullmatch(text.strip()), bytes_of(text)
        if match is not None:
            return cls(bits=float(match[1]))
        if _SMALL.fullmatch(text.strip()) is not None:
            raise UsageError(
                f"{arg('budget', text.strip())} is a number without a unit; write {text.strip()}bits, or a size such "
                "as 9GB"
            )
        if nbytes is None:
            raise UsageError(f"{arg('budget', text)} is neither bits nor bytes; write 4.75bits, 9GB or 800MiB")
        return cls(nbytes=nbytes)

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.nbytes is None):
            raise UsageError(f"{arg('budget')} is bits per weight or bytes, one of them: 4.75bits, 9GB")
        if self.bits is not None and not 0 < self.bits <= 64:
            raise UsageError(
                f"{arg('budget', f'{self.bits:g}bits')} is out of range; expected more than 0 and at most 64"
            )


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """A decided plan, whose recipe is ``content``.

    chosen      group id -> the name of its option
    meaning     what costs mean
    solution    the choice; one of ``curve``, the choices at other budgets, the smallest first
    file_bytes  of weights and index that the recipe converts to, exactly
    stats       the statistics that converting needs, None for none
    warnings    what readers get wrong about the checkpoint that the recipe converts to
    """

    source: str
    groups: tuple[Group, ...]
    chosen: Mapping[str, str]
    costs: Costs
    meaning: str
    solution: Allocation
    curve: tuple[Allocation, ...]
    file_bytes: int
    content: Mapping[str, Any]
    stats: Path | None = None
    warnings: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return sum(group.elements for group in self.groups)

    def bits(self, solution: Allocation) -> float:
        """Bits per weight of a choice: of its tensors alone, without their headers."""
        return 8 * sum(g.options[o].nbytes for g, o in zip(self.groups, solution.chosen, strict=True)) / self.elements

    def counts(self, solution: Allocation) -> dict[str, int]:
        """Option -> how many weights have it in a choice."""
        counts: dict[str, int] = defaultdict(int)
        for group, o in zip(self.groups, solution.chosen, strict=True):
            counts[group.options[o].name] += len(group.members)
        return dict(counts)


def plan(
    options: PlanCommand, *, machine: Machine | None = None, log: Callable[[str], None] | None = None
) -> MixedPlan:
    """Chooses a format for every layer as the options say, and writes the recipe. Raises what `plan_mixed` raises, and
    before that OutputError for a file that is there and no recipe."""
    costs = sensitivity(options.stats, options.measure, options.out, tokens=options.max_tokens, seqlen=options.seqlen)
    check_recipe_target(options.out)
    formats = formats_for(options.reader, options.formats)
    allocation = plan_mixed(
        options.model,
        Budget.parse(options.budget),
        formats=formats,
        sensitivity=costs,
        machine=machine,
        container=None if options.reader is None else container_of_all(options.reader, formats),
        log=log,
    )
    write_recipe(allocation, options.out)
    return allocation


def plan_mixed(
    model: str | Path,
    budget: Budget,
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
    sensitivity: Path | Measurement | None = None,
    machine: Machine | None = None,
    container: str | None = None,
    follows: bool = False,
    rotations: Mapping[str, int] | None = None,
    requantize: bool = False,
    log: Callable[[str], None] | None = None,
) -> MixedPlan:
    """Chooses a scheme for every group of fused weights.

    formats      the candidates, keep among them or not
    sensitivity  what costs come from. A folder of statistics: weighted output errors, or KL by gradients.
                 A measurement: KL of the model with one group quantized at a time. None: errors of the weights
    container    what the recipe says of it; None: nothing, the usual one
    follows      whether codes will come by error feedback though the statistics do not say so
    rotations    role -> columns of its inputs that the checkpoint rotates together; None: none
    requantize   whether weights that are stored below 8 bits may get a format that cannot hold their numbers
    log          called with what will be decided, before anything is measured

    Raises UsageError for a budget that is too small (with the smallest possible), for statistics of another model, and
    where scipy is missing; what the searches raise for damaged weights.
    """
    require_scipy()
    machine = machine or Machine()
    with Source.open(resolve_source(str(model))) as source:
        groups = find_groups(source, schemes_of(formats), requantize=requantize)
        limits = _Limits.of(source, groups, budget)
        costs: Costs

        def begin(notes: Sequence[str] = ()) -> None:
            if log is not None:
                log("\n".join([_header(source, groups, formats, limits), *notes]))

        options: Mapping[str, str] = {}
        if isinstance(sensitivity, Measurement):
            costs, meaning = measure(source, groups, sensitivity, shown=machine.progress, begin=begin)
        elif sensitivity is not None:
            with Statistics.open(sensitivity) as opened:
                check_model(opened, source)
                moment = choose_moment(opened, groups)
                meaning = _meaning(moment, to_second_order=knows_outputs(opened, groups))
                options = {"algorithm": "gptq"} if moment == "full_moment" else {"objective": "diagonal"}
                follows = follows or moment == "full_moment"
                begin()
                costs = estimate(source, groups, stats=opened, machine=machine, follows=follows, rotations=rotations)
        else:
            meaning = "squared error relative to the mean energy of the role (data-free)"
            begin()
            costs = estimate(source, groups, stats=None, machine=machine, rotations=rotations)
        stats = sensitivity if isinstance(sensitivity, Path) else None
        return replace(_decide(source, groups, costs, meaning, limits, options, container), stats=stats)


def _meaning(moment: str, *, to_second_order: bool) -> str:
    """What costs by statistics mean: of their ``moment`` of inputs and, to second order, of gradients at outputs."""
    what, relative = (
        ("KL divergence to second order", "") if to_second_order else ("output error", " relative to the output")
    )
    return f"{what} of nearest codes{relative}, {moment.replace('_', ' ')} of x"


def _header(source: Source, groups: Sequence[Group], formats: Sequence[str], limits: "_Limits") -> str:
    weights, numbers = sum(len(group.members) for group in groups), sum(group.elements for group in groups)
    return (
        f"{name_of(source.reader.path)}, {weights} weights in {len(groups)} groups, {numbers:,} numbers: each gets one "
        f"of {', '.join(formats)}, for {limits.description} in all"
    )


def check_budget(model: Path, budget: Budget, formats: Sequence[str], *, requantize: bool = False) -> None:
    """UsageError for a budget that is too small, or that the model keeps as it is, and where scipy is missing. Reads
    headers only."""
    require_scipy()
    with Source.open(model) as source:
        if budget.nbytes is not None and budget.nbytes >= source.reader.nbytes:
            raise UsageError(
                f"{arg('budget', option_size(budget.nbytes))} changes nothing: {model} has "
                f"{disk_size(source.reader.nbytes)} as it is; give a smaller budget"
            )
        _Limits.of(source, find_groups(source, schemes_of(formats), requantize=requantize), budget)


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
                small = arg("budget", f"{budget.bits:g}bits")
                raise UsageError(f"{small} is too small; the smallest possible is {bits:.3f}bits")
            _check_not_all_kept(groups, sizes, limit, f"{budget.bits:g}bits")
            return cls(sizes, limit, None, f"{budget.bits:g} bits per weight")
        assert budget.nbytes is not None
        offsets = 2 * len(str(budget.nbytes)) + 1  # of a header entry: two numbers of about as many digits
        sizes = tuple(tuple(o.nbytes + o.header_bytes + offsets * o.tensors for o in g.options) for g in groups)
        least = forecast(source, recipe_content(groups, smallest, description=""), groups, smallest).layout.file_bytes
        if least > budget.nbytes:
            size = f"{least} bytes ({disk_size(least)})"
            small = arg("budget", option_size(budget.nbytes))
            raise UsageError(f"{small} is too small; the smallest possible is {size}")
        fixed = least - sum(row[0] for row in sizes)
        slack = _SLACK + 4 * len(groups)  # header entries are estimates: begin above, exact sizes decide
        _check_not_all_kept(groups, sizes, budget.nbytes - fixed - slack, option_size(budget.nbytes))
        return cls(sizes, budget.nbytes - fixed + slack, budget.nbytes, f"{_in_recipe(budget.nbytes)} on disk")


def _check_not_all_kept(groups: Sequence[Group], sizes: Sequence[Sequence[int]], limit: int, budget: str) -> None:
    """UsageError where the budget has room for every weight as it is, which costs nothing, so that no other choice is
    better. Before any weight is read."""
    kept = [
        next((n for o, n in zip(g.options, row, strict=True) if o.scheme is None), None)
        for g, row in zip(groups, sizes, strict=True)
    ]
    if None not in kept and sum(n for n in kept if n is not None) <= limit:
        raise UsageError(
            f"{arg('budget', budget)} has room for every weight as it is, so nothing would be converted; give a "
            f"smaller budget, or leave keep out of {arg('formats')}"
        )


def _in_recipe(nbytes: float) -> str:
    """Bytes as a recipe's description has them: it is part of run ids, so its two decimals stay."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def _decide(
    source: Source,
    groups: list[Group],
    costs: Costs,
    meaning: str,
    limits: _Limits,
    options: Mapping[str, str],
    container: str | None,
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
        description = f"Mixed precision for {limits.description}; {meaning}"
        content = recipe_content(groups, chosen, description=description, options=options)
        content |= {} if container is None else {"container": container}
        outputs = forecast(source, content, groups, chosen)
        size = outputs.layout.file_bytes
        if limits.file_budget is None or size <= limits.file_budget:
            curve = _curve(rows, limits.sizes, solution)
            name = name_of(source.reader.path)
            warnings = tuple(layout_warnings(outputs.container_name, outputs.targets, source.reader.config))
            return MixedPlan(
                name, tuple(groups), chosen, costs, meaning, solution, curve, size, content, warnings=warnings
            )
        limit = solution.nbytes - (1 if attempt < _ATTEMPTS // 2 else max(1, size - limits.file_budget))
    raise UsageError("no choice of formats was found within this budget; give a few kilobytes more")


def _names(groups: Sequence[Group], solution: Allocation) -> dict[str, str]:
    return {group.id: group.options[o].name for group, o in zip(groups, solution.chosen, strict=True)}


def _curve(rows: list[list[float]], sizes: Sequence[Sequence[int]], solution: Allocation) -> tuple[Allocation, ...]:
    """Choices at budgets from the smallest possible to the least that costs nothing more, denser among the small ones;
    the plan is among them."""
    low = sum(min(row) for row in sizes)
    best = [min(range(len(row)), key=lambda o: (row[o], size[o])) for row, size in zip(rows, sizes, strict=True)]
    high = sum(size[o] for size, o in zip(sizes, best, strict=True))
    by_size = {solution.nbytes: solution}
    for step in range(POINTS):
        other = solve(rows, sizes, low + (high - low) * step**2 // (POINTS - 1) ** 2)
        if other is not None:
            by_size.setdefault(other.nbytes, other)
    return tuple(by_size[size] for size in sorted(by_size))


def write_recipe(plan: MixedPlan, path: Path) -> None:
    """Writes the recipe as YAML, which names no folder: it is made to be passed on.

    OutputError where ``path`` exists and is no recipe, or cannot be written.
    """
    check_recipe_target(path)
    text = recipe_text(plan.content)
    options = argv(recipe=path.name, stats=None if plan.stats is None else name_of(plan.stats))
    command = shlex.join(["ptqpipe", "convert", plan.source, *options])
    note = f"{_MARK}{plan.file_bytes} bytes of weights and index: {command}\n"
    write_file(path, note + text)


def check_recipe_target(path: Path) -> None:
    """OutputError unless ``path`` is free or an earlier plan's recipe, where a file can be written."""
    check_file(path, own=lambda head: head.startswith(_MARK.encode()), what="a recipe of ptqpipe plan")
