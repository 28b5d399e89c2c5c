"""Plans are made here: candidates, the recipe's rule for each, whole groups, units.

Candidates are told from names, dtypes, shapes and config alone: a 2-D float matrix called ``<module>.weight``, or a 3-D
stack of experts called ``...experts.<projection>`` (Step-3: ``...moe.<projection>.weight``; Granite: ``input_linear``
and ``output_linear``). Stacks come in both orientations, [E, out, in] and [E, in, out];
the shapes of the two projections of one MLP tell which. GPT-2's Conv1D keeps weights as [in, out]: it is
recognized by a bias as long as its columns.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptqpipe.checkpoint.dtypes import FLOAT_DTYPES
from ptqpipe.errors import CheckpointError, RecipeError, UsageError, arg, did_you_mean
from ptqpipe.models.families import OUTSIDE, check_config, family_of, head_counts, uncounted_layers
from ptqpipe.models.slices import Member, Shapes, Slice
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.schemes import Capabilities, Scheme
from ptqpipe.recipe.plan.groups import (
    fused_groups,
    keep_short_blocks,
    keep_whole_groups,
    reject_split_stacks,
    siblings_outside,
)
from ptqpipe.recipe.plan.types import Kept, Plan, Unit
from ptqpipe.recipe.recipe import BY_RECIPE, IGNORED, Recipe, Rule, matches

# Stacks of Granite and JetMoE: a gate's and an up part's rows, and what follows them.
_LINEARS = ("input_linear", "output_linear")
_PROJECTIONS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def find_candidates(
    tensors: Shapes, config: Mapping[str, Any], *, capabilities: Capabilities
) -> tuple[dict[str, Member], dict[str, str]]:
    """Matrices that may be quantized, by key (weight name, with the expert where stacks stay whole), in the order of
    the source; and reasons of those that cannot be."""
    conv1d = conv1d_leaves(tensors)
    candidates: dict[str, Member] = {}
    reasons: dict[str, str] = {}
    for name, (dtype, shape) in tensors.items():
        if 0 in shape:
            reasons[name] = "empty"
        elif len(shape) == 3 and _is_stack(name, tensors):
            members, reason = _expert_members(name, tensors, config, capabilities)
            for member in members:
                if member.stack is None and member.weight in tensors:
                    raise CheckpointError(
                        f"{member.weight!r} exists next to the stack {name!r}, which has that weight, too; remove one"
                    )
                candidates[member.key] = member
            reasons.update({name: reason} if reason else {})
        elif dtype not in FLOAT_DTYPES:
            reasons[name] = f"{dtype} numbers, not weights"
        elif len(shape) != 2 or not name.endswith(".weight"):
            reasons[name] = "not a matrix" if len(shape) != 2 else "not a weight of a linear layer"
        elif not capabilities.matrices:
            reasons[name] = "this container stores stacks of experts only"
        elif name.removesuffix(".weight").rpartition(".")[2] not in conv1d:
            candidates[name] = Member(name, (shape[0], shape[1]), Slice(name))
        elif capabilities.transposed:
            candidates[name] = Member(name, (shape[1], shape[0]), Slice(name, transposed=True))
        else:
            reasons[name] = (
                "Conv1D keeps its weight as [in, out], which no reader of this layout expects; use container ptqpipe"
            )
    return candidates, reasons


def conv1d_leaves(tensors: Shapes) -> frozenset[str]:
    """Leaf names of modules that are Conv1D: somewhere such a module's bias fits its columns and not its rows."""
    proven = set()
    for name, (_, shape) in tensors.items():
        bias = tensors.get(name.removesuffix("weight") + "bias")
        if name.endswith(".weight") and len(shape) == 2 and bias is not None and len(bias[1]) == 1:
            size = bias[1][0]
            if size == shape[1] and size != shape[0]:
                proven.add(name.removesuffix(".weight").rpartition(".")[2])
    return frozenset(proven)


def _is_stack(name: str, tensors: Shapes) -> bool:
    """Whether a 3-D tensor is one of the stacks of a layer of experts, by its name and that of its siblings."""
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    siblings = [tensors.get(f"{parent}.{other}.weight", ("", ()))[1] for other in _LINEARS]
    if leaf in _LINEARS and all(len(shape) == 3 for shape in siblings):
        return True
    return "experts" in name.split(".") or (leaf in _PROJECTIONS and parent.rpartition(".")[2] == "moe")


def _expert_members(
    name: str, tensors: Shapes, config: Mapping[str, Any], able: Capabilities
) -> tuple[list[Member], str]:
    """The per-expert weights of one 3-D tensor, or why it is kept."""
    dtype, shape = tensors[name]
    base = name.removesuffix(".weight")
    parent, _, leaf = base.rpartition(".")
    family = family_of(config)
    single = family.single_experts(base)
    if "experts" not in name.split(".") and not (able.matrices and (able.stacks or single)):
        return [], "a stack of experts that its model's readers know as a whole; use container ptqpipe"
    if dtype not in FLOAT_DTYPES or leaf not in (*_PROJECTIONS, *_LINEARS):
        return [], "a 3-D tensor that is no stack of expert projections"
    transposed = _stack_transposed(parent, leaf, tensors, config)
    if transposed is None:
        return [], "the orientation of this stack of experts cannot be told from the shapes"
    rows, cols = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    experts = range(shape[0])
    if able.stacks:
        slices = [Slice(name, expert=e, transposed=transposed) for e in experts]
        return [Member(name, (rows, cols), part, stack=shape[0]) for part in slices], ""
    if any(f"{parent}.{projection}_bias" in tensors for projection in _PROJECTIONS):  # of either: they have one reader
        return [], "readers know no names of single experts with biases; use container gptoss_mxfp4 or ptqpipe"
    if rows % len(single):
        return [], "an odd number of rows cannot be gate and up"
    members = []
    for e in experts:
        for index, module in enumerate(single):
            alternate = family.interleaved and len(single) > 1
            start, step = (index, 2) if alternate else (index * rows // len(single), 1)
            where = Slice(name, start=start, step=step, expert=e, transposed=transposed)
            members.append(Member(f"{module.format(e)}.weight", (rows // len(single), cols), where))
    return members, ""


def _stack_transposed(parent: str, leaf: str, tensors: Shapes, config: Mapping[str, Any]) -> bool | None:
    """Whether a stack is [E, in, out]; None where its sibling's shape and hidden_size leave it open."""

    def dims(name: str) -> tuple[int, int] | None:
        entry = tensors.get(f"{parent}.{name}") or tensors.get(f"{parent}.{name}.weight")
        return (entry[1][1], entry[1][2]) if entry is not None and len(entry[1]) == 3 else None

    fused, down = dims("gate_up_proj") or dims(_LINEARS[0]), dims("down_proj") or dims(_LINEARS[1])
    if fused is not None and down is not None:
        # [2I, H] beside [H, I], or [H, 2I] beside [I, H]: the two cannot both hold.
        if fused == (2 * down[1], down[0]):
            return False
        return True if fused == (down[1], 2 * down[0]) else None
    own = dims(leaf)
    text = config.get("text_config")
    hidden = config.get("hidden_size") or (text.get("hidden_size") if isinstance(text, Mapping) else None)
    if own is None or (own[0] == hidden) == (own[1] == hidden):
        return None
    return own[1] == hidden if leaf in ("down_proj", "w2") else own[0] == hidden


def make_plan(
    tensors: Shapes, config: Mapping[str, Any], *, recipe: Recipe, capabilities: Capabilities | None = None
) -> Plan:
    """Decides the fate of every tensor.

    tensors    the source's logical tensors (a quantized source: decoded names and shapes)
    config     the source's config.json
    capabilities  what the layout can store; by default matrices only

    Raises RecipeError where rules contradict each other, UsageError where nothing would be quantized, CheckpointError
    where a weight is there twice, as such and in a stack, or where the config contradicts the tensors.
    """
    check_config(config, tensors)
    able = capabilities or Capabilities()
    candidates, reasons = find_candidates(tensors, config, capabilities=able)
    if all(matches(OUTSIDE.pattern, member.module) for member in candidates.values()):  # no layer has a number
        recipe = replace(recipe, keep=tuple(keep for keep in recipe.keep if keep != OUTSIDE))
    rules: dict[str, Rule] = {}
    named = recipe.named(member.module for member in candidates.values())
    kind, by_kind = recipe.kind_of(), dict[tuple[str, tuple[int, int]], Rule | str]()
    heads, fused = head_counts(config), {leaf for leaves in recipe.fuse for leaf in leaves}
    drafts = tuple(uncounted_layers(config, tensors))
    for key, member in candidates.items():
        if member.module.startswith(drafts):
            reasons[key] = "multi-token prediction layer that config.json does not count"
            continue
        like = kind(member.module), member.shape
        if like not in by_kind:
            rule, reason = recipe.rule_for(like[0], named)
            single = member.source.expert is None and member.module.rpartition(".")[2] not in fused
            if rule is not None and rule.match != member.module and single and member.shape[0] in heads:
                rule, reason = None, f"{member.shape[0]} outputs, one for each head"  # gates, sinks, step sizes
            by_kind[like] = _rule_or_reason(member, rule, reason, even_blocks=able.even_blocks)
        decided = by_kind[like]
        if isinstance(decided, Rule):
            rules[key] = decided
        else:
            reasons[key] = decided
    groups = fused_groups(candidates, recipe.fuse)
    outside = {group[0]: siblings_outside(candidates, group, tensors, recipe.fuse) for group in groups}
    keep_short_blocks(groups, candidates, config, rules=rules, reasons=reasons)
    keep_whole_groups(groups, outside, rules=rules, reasons=reasons)
    reject_split_stacks(candidates, rules=rules, reasons=reasons)
    units = _units(candidates, groups, rules)
    quantized = {member.source.tensor for unit in units for member in unit.members}
    kept = tuple(
        Kept(name, reasons[name], is_matrix(name, *entry)) for name, entry in tensors.items() if name not in quantized
    )
    if not units:
        raise UsageError(_nothing_to_do(kept))
    rotated = {m.module.rpartition(".")[2] for unit in units for m in unit.members if unit.scheme.rotation}
    idle = sorted(recipe.rotations.keys() - rotated)
    if idle:
        leaf_names = sorted({m.module.rpartition(".")[2] for unit in units for m in unit.members})
        raise UsageError(f"rotate: no layer {idle[0]!r} is quantized; {did_you_mean(idle[0], leaf_names, listed=True)}")
    modules = [member.module for member in candidates.values()]
    modules += [name.removesuffix(".weight") for name in tensors]
    tied = "lm_head.weight" not in tensors
    modules += ["lm_head"] * tied
    return Plan(units, kept, tied, tuple(dict.fromkeys(modules)))


def _rule_or_reason(member: Member, rule: Rule | None, reason: str, *, even_blocks: bool) -> Rule | str:
    """The rule that quantizes a candidate, or why it is kept, after what the recipe says of its name."""
    if rule is None or rule.scheme is None:
        return reason
    fmt = rule.scheme.fmt
    if not fmt.fits(member.shape):
        rows, cols = fmt.block_extent(member.shape)
        return f"{member.shape[0]}x{member.shape[1]} does not divide into {fmt.name} blocks of {rows}x{cols}"
    if even_blocks and misread_rows(member.shape[0], fmt):
        return f"transformers misreads {member.shape[0]} rows in blocks of {fmt.step(0)}"
    _check_rotation(member, rule.scheme)
    return rule


def _check_rotation(member: Member, scheme: Scheme) -> None:
    if scheme.rotation and member.shape[1] % scheme.rotation:
        raise RecipeError(
            f"rotate: {member.module} has {member.shape[1]} columns, which blocks of {scheme.rotation} do not divide; "
            "choose a smaller block, or leave this role out"
        )
    if scheme.rotation and scheme.needs_input_global_scale:
        raise RecipeError(
            f"rotate: {scheme.name} stores a static scale of each input, which is not known of a rotated one; leave "
            "rotate out, or choose a format with dynamic scales, such as mxfp4"
        )


def misread_rows(rows: int, fmt: Format) -> bool:
    """Whether a reader that divides the rows by the height of the scale grid gets smaller blocks than these without
    noticing it."""
    block = fmt.step(0)
    return rows > block and rows % block > 0 and rows % -(-rows // block) == 0


def _units(
    candidates: Mapping[str, Member], groups: Iterable[list[str]], rules: Mapping[str, Rule]
) -> tuple[Unit, ...]:
    """A unit for every group that is quantized, called after its first module and the leaves of the others."""
    units = []
    for group in groups:
        if group[0] not in rules:
            continue
        members = tuple(_rotated(candidates[key], rules[group[0]].scheme) for key in group)
        leaves = "+".join([members[0].module, *(member.module.rpartition(".")[2] for member in members[1:])])
        suffix = f"[{members[0].source.expert}]" if members[0].stack is not None else ""
        units.append(Unit(leaves + suffix, members, rules[group[0]]))
    return tuple(units)


def _rotated(member: Member, scheme: Scheme | None) -> Member:
    if scheme is None or not scheme.rotation:
        return member
    return replace(member, source=replace(member.source, rotation=scheme.rotation))


def unmatched_patterns(plan: Plan, recipe: Recipe) -> list[str]:
    """Patterns of the recipe's rules and of its own keep list that name no module of the model: most likely typos."""
    own = [keep.pattern for keep in recipe.keep if keep.reason in (IGNORED, BY_RECIPE)]
    of_family = {keep.pattern for keep in recipe.keep}.difference(own)  # of the family: a rule for its MTP layers
    patterns = dict.fromkeys([*own, *(rule.match for rule in recipe.rules if rule.match not in of_family)])
    return [pattern for pattern in patterns if not _matches_any(pattern, plan)]


def check_ignored(plan: Plan, patterns: Iterable[str]) -> None:
    """UsageError for a pattern of ``ignore`` that names no module of the model, with the nearest one that does."""
    for pattern in patterns:
        if not _matches_any(pattern, plan):
            hint = pattern_hint(pattern, plan) or f"names are like {plan.units[0].members[0].module!r}"
            raise UsageError(f"{arg('ignore', [pattern])} matches nothing in the model; {hint}")


def pattern_hint(pattern: str, plan: Plan) -> str:
    """The question what a pattern that matches nothing was meant to be: did you mean '*down_proj'? Or empty."""
    near = next((near for near in _near(pattern, plan) if _matches_any(near, plan)), None)
    return "" if near is None else f"did you mean {near!r}?"


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
    """Whether readers could look for a tensor among the linear layers: a float matrix, or a stack of experts. Those of
    8 bits are no plain tensors: a source that has some is refused."""
    named = name.endswith(".weight") or "experts" in name.split(".")
    return len(shape) >= 2 and named and (dtype in FLOAT_DTYPES or dtype == "F64")


def _nothing_to_do(kept: Sequence[Kept]) -> str:
    reasons = [k.reason for k in kept if k.matrix] or [k.reason for k in kept]
    common = max(set(reasons), key=reasons.count) if reasons else "there are no tensors"
    return f"nothing would be quantized: {len(kept)} tensors are kept, mostly because: {common}"
