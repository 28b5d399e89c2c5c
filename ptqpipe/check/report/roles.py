"""Groups weights of one role and format, and describes weights in a few words, for every section of a report."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from markupsafe import Markup, escape

from ptqpipe.check.report.content import Codes, Report, ReportedWeight, ScaleChoice, pooled_mse
from ptqpipe.check.report.svg import ROLES
from ptqpipe.errors import one_line
from ptqpipe.run.quantities import decibels

_WALK = (
    *("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate", "router"),
    *("gate_up_proj", "gate_proj", "w1", "up_proj", "w3", "down_proj", "w2"),
)
_FAMILIES = ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8")


def shown(name: str) -> str:
    """A name from a file on one printable line of bounded length."""
    return one_line(name, limit=300)


def breakable(name: str) -> Markup:
    """The same, escaped, with places after its dots where a line may break."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[._])", shown(name)))


def family(fmt: str) -> str:
    """The class of a format's colour: a letter-only word, whatever the format's name."""
    return next((name for name in _FAMILIES if fmt.startswith(name)), "other")


def how(weight: ReportedWeight) -> str:
    """How a weight's scales and codes were chosen, in a few words."""
    words = [weight.search]
    words += [weight.algorithm] if weight.algorithm not in ("", "rtn") else []
    words += [f"{weight.weighting} weights"] if weight.weighting not in ("", "none") else []
    words += ["keeps plain rounding"] if weight.reverted else []
    words += ["proven"] if weight.proven else []
    return ", ".join(word for word in words if word)


def place(role: str) -> tuple[int, str]:
    """The order of a decoder layer's walk; unknown roles last, by name."""
    leaf = role.rpartition(".")[2]
    return (_WALK.index(leaf) if leaf in _WALK else len(_WALK), role)


@dataclass(frozen=True, slots=True)
class RoleRow:
    """The weights of one role and format together. ``choices`` are means over the weights.

    index  of the role: its colour and its mark, the same in every drawing
    """

    role: str
    format: str
    index: int
    weights: tuple[ReportedWeight, ...]
    sqnr_db: float | None
    worst: ReportedWeight | None
    choices: tuple[ScaleChoice, ...]

    @property
    def codes(self) -> Codes:
        """Sums over its weights; None for counts that no weight has."""
        return Codes(*(_sum(getattr(w.codes, field.name) for w in self.weights) for field in fields(Codes)))  # type: ignore[arg-type]

    @property
    def gains(self) -> list[float]:
        """Output errors of its calibrated weights relative to those of plain rounding."""
        return [w.versus_rtn for w in self.weights if w.versus_rtn is not None]

    @property
    def reverted(self) -> int:
        """Number of its weights that keep plain rounding, since calibration did not help."""
        return sum(w.reverted for w in self.weights)


def _sum(values: Iterable[int | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def by_role(report: Report) -> list[RoleRow]:
    """Roles with the worst error first; unknown errors in the order of the files."""
    groups: dict[tuple[str, str], list[ReportedWeight]] = defaultdict(list)
    for weight in report.weights:
        groups[(shown(weight.role), weight.format)].append(weight)
    ranked = sorted(groups.items(), key=lambda item: -(pooled_mse(item[1]) or 0.0))
    indices = {role: index % ROLES for index, role in enumerate(sorted({role for role, _ in groups}, key=place))}
    rows = []
    for (role, fmt), members in ranked:
        measured = [w for w in members if w.relative_mse is not None]
        worst = max(measured, key=lambda w: w.relative_mse or 0.0) if measured else None
        pooled = decibels(pooled_mse(members))
        rows.append(RoleRow(role, fmt, indices[role], tuple(members), pooled, worst, mean_choices(report, members)))
    return rows


def mean_choices(report: Report, weights: Sequence[ReportedWeight]) -> tuple[ScaleChoice, ...]:
    """Each choice's mean over the weights that have it."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for weight in weights:
        for choice in weight.choices:
            ratios[choice.name].append(choice.versus_absmax)
    return tuple(ScaleChoice(n, sum(ratios[n]) / len(ratios[n])) for n in report.choice_names if n in ratios)


def row_label(row: RoleRow, rows: Sequence[RoleRow]) -> str:
    """The role, with its format where a role has several."""
    return row.role if sum(other.role == row.role for other in rows) == 1 else f"{row.role} {row.format}"
