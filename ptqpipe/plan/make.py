"""Makes a plan: candidates, the recipe's rule for each, whole groups, units."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ptqpipe.errors import UsageError
from ptqpipe.plan.candidates import find_candidates
from ptqpipe.plan.groups import fused_groups, keep_whole_groups, reject_split_stacks, siblings_outside
from ptqpipe.plan.types import FLOAT_DTYPES, Kept, Member, Plan, Shapes, Unit
from ptqpipe.recipe import BY_RECIPE, IGNORED, Recipe, Rule, matches
from ptqpipe.schemes import Abilities

# Numbers of linear layers that are not quantized here, though readers could look for them.
_OTHER_FLOAT_DTYPES = frozenset({"F64", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"})


def make_plan(
    tensors: Shapes, config: Mapping[str, Any], *, recipe: Recipe, abilities: Abilities | None = None
) -> Plan:
    """Decides the fate of every tensor.

    tensors    the source's logical tensors (a quantized source: decoded names and shapes)
    config     the source's config.json
    abilities  what the layout can store; by default matrices only

    Raises RecipeError where rules contradict each other, UsageError where nothing would be quantized, CheckpointError
    where a weight is there twice, as such and in a stack.
    """
    candidates, reasons = find_candidates(tensors, config, abilities=abilities or Abilities())
    rules: dict[str, Rule] = {}
    for key, member in candidates.items():
        decided = _rule_or_reason(member, recipe)
        if isinstance(decided, Rule):
            rules[key] = decided
        else:
            reasons[key] = decided
    groups = fused_groups(candidates, recipe.fuse)
    outside = {group[0]: siblings_outside(candidates, group, tensors, recipe.fuse) for group in groups}
    keep_whole_groups(groups, outside, rules=rules, reasons=reasons)
    reject_split_stacks(candidates, rules=rules, reasons=reasons)
    units = _units(candidates, groups, rules)
    quantized = {member.source.tensor for unit in units for member in unit.members}
    kept = tuple(
        Kept(name, reasons[name], is_matrix(name, *entry)) for name, entry in tensors.items() if name not in quantized
    )
    if not units:
        raise UsageError(_nothing_to_do(kept))
    modules = [member.module for member in candidates.values()]
    modules += [name.removesuffix(".weight") for name in tensors]
    tied = "lm_head.weight" not in tensors
    modules += ["lm_head"] * tied
    return Plan(units, kept, tied, tuple(dict.fromkeys(modules)))


def _rule_or_reason(member: Member, recipe: Recipe) -> Rule | str:
    """The rule that quantizes a candidate, or why it is kept."""
    rule, reason = recipe.rule_for(member.module)
    if rule is None or rule.scheme is None:
        return reason
    fmt = rule.scheme.fmt
    if not fmt.fits(member.shape):
        rows, cols = fmt.block_extent(member.shape)
        return f"{member.shape[0]}x{member.shape[1]} does not divide into {fmt.name} blocks of {rows}x{cols}"
    return rule


def _units(
    candidates: Mapping[str, Member], groups: Iterable[list[str]], rules: Mapping[str, Rule]
) -> tuple[Unit, ...]:
    """A unit for every group that is quantized, called after its first module and the leaves of the others."""
    units = []
    for group in groups:
        if group[0] not in rules:
            continue
        members = tuple(candidates[key] for key in group)
        leaves = "+".join([members[0].module, *(member.module.rpartition(".")[2] for member in members[1:])])
        suffix = f"[{members[0].source.expert}]" if members[0].stack is not None else ""
        units.append(Unit(leaves + suffix, members, rules[group[0]]))
    return tuple(units)


def unmatched_patterns(plan: Plan, recipe: Recipe) -> list[str]:
    """Patterns of the recipe's rules and of its own keep list that name no module of the model: most likely typos."""
    own = [keep.pattern for keep in recipe.keep if keep.reason in (IGNORED, BY_RECIPE)]
    patterns = dict.fromkeys([*own, *(rule.match for rule in recipe.rules)])
    return [pattern for pattern in patterns if not _matches_any(pattern, plan)]


def check_ignored(plan: Plan, patterns: Iterable[str]) -> None:
    """UsageError for a pattern of --ignore that names no module of the model, with the nearest one that does."""
    for pattern in patterns:
        if not _matches_any(pattern, plan):
            near = next((near for near in _near(pattern, plan) if _matches_any(near, plan)), None)
            hint = f"names are like {plan.units[0].members[0].module!r}" if near is None else f"did you mean {near!r}?"
            raise UsageError(f"--ignore {pattern!r} matches nothing in the model; {hint}")


def _matches_any(pattern: str, plan: Plan) -> bool:
    return any(matches(pattern, name) for name in plan.modules)


def _near(pattern: str, plan: Plan) -> Iterator[str]:
    """Patterns that may have been meant: not anchored at the name's start, or with the last name corrected."""
    if pattern.startswith("re:"):
        yield f"re:.*{pattern[3:]}"
        return
    yield f"*{pattern}"
    yield f"*{pattern}*"
    pattern = pattern.rstrip("*")
    cut = max(pattern.rfind("."), pattern.rfind("*")) + 1
    words = dict.fromkeys(word for name in plan.modules for word in name.split(".") if not word.isdigit())
    for word in difflib.get_close_matches(pattern[cut:], words, n=3):
        meant = pattern[:cut] + word
        yield from (meant, f"*{meant}", f"{meant}*", f"*{meant}*")


def is_matrix(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether readers could look for a tensor among the linear layers: a float matrix, or a stack of experts."""
    named = name.endswith(".weight") or "experts" in name.split(".")
    return len(shape) >= 2 and named and dtype in FLOAT_DTYPES | _OTHER_FLOAT_DTYPES


def _nothing_to_do(kept: Sequence[Kept]) -> str:
    reasons = [k.reason for k in kept if k.matrix] or [k.reason for k in kept]
    common = max(set(reasons), key=reasons.count) if reasons else "there are no tensors"
    return f"nothing would be quantized: {len(kept)} tensors are kept, mostly because: {common}"
