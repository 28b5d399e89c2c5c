"""What plan prints at its end: text for a terminal, a dict for JSON."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ptqpipe.checkpoint.tensor_names import layer_of, role_of
from ptqpipe.models.slices import Member
from ptqpipe.pipeline.budget.command import MixedPlan
from ptqpipe.pipeline.budget.plan_units import KEEP
from ptqpipe.run.quantities import disk_size, number, scientific, table

NO_GAP = 1e-9  # of the cost: below it is the rounding of sums


def render(plan: MixedPlan) -> str:
    """The plan for a terminal: what became what, the Pareto curve, how far from optimal it could be."""
    groups = defaultdict(list)
    for group in plan.groups:
        for member in group.members:
            groups[(role_of(member.weight), plan.chosen[group.id])].append(member)
    rows = [
        [role, name, str(len(members)), f"{sum(m.elements for m in members):,}", _layers(members)]
        for (role, name), members in sorted(groups.items())
    ]
    names = sorted({name for solution in plan.curve for name in plan.counts(solution)})
    base, gaps = plan.curve[0].cost or 1.0, any(solution.gap >= NO_GAP for solution in plan.curve)
    curve = [
        [
            f"{'*' if solution is plan.solution else ''}{plan.bits(solution):.3f}",
            disk_size(solution.nbytes),
            number(solution.cost),
            f"{solution.cost / base:.3f}",
            *(str(plan.counts(solution).get(name, 0)) for name in names),
            *(["0" if solution.gap < NO_GAP else scientific(solution.gap, 2)] if gaps else []),
        ]
        for solution in plan.curve
    ]
    head = ["bits", "size", "cost", "of most", *names, *(["gap"] if gaps else [])]
    within = "" if plan.solution.gap < NO_GAP else f" to within {scientific(plan.solution.gap, 2)}"
    return "\n".join(
        [
            f"{plan.source}: {len(plan.groups)} groups, {plan.elements:,} numbers; cost: {plan.meaning}",
            table(["role", "format", "weights", "params", "layers"], rows, left=2),
            "",
            "What other budgets would give (sizes of the groups; * is the plan):",
            table(head, curve, left=0),
            "",
            f"{plan.bits(plan.solution):.4f} bits per weight, cost {number(plan.solution.cost)}, optimal{within}; "
            f"converts to {disk_size(plan.file_bytes)} of weights and index",
            *(f"warning: {line}" for line in plan.warnings),
        ]
    )


def _layers(members: Sequence[Member]) -> str:
    """The numbers of layers, runs shortened: 0-3, 7."""
    numbers = sorted({layer for m in members if (layer := layer_of(m.module)) is not None})
    runs: list[list[int]] = []
    for layer in numbers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(text) <= 40 else f"{len(numbers)} layers"


def to_json(plan: MixedPlan) -> dict[str, Any]:
    """The plan as data: every group's choice and costs, the curve."""
    return {
        "model": plan.source,
        "how": plan.meaning,
        "bits_per_weight": plan.bits(plan.solution),
        "bytes": plan.file_bytes,
        "cost": plan.solution.cost,
        "gap": plan.solution.gap,
        "warnings": list(plan.warnings),
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
                "bits": plan.bits(solution),
                "bytes": solution.nbytes,
                "cost": solution.cost,
                "gap": solution.gap,
                "weights": plan.counts(solution),
            }
            for solution in plan.curve
        ],
    }
