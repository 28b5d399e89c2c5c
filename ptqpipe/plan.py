"""The plan: the fate of every tensor of a checkpoint, decided from names, dtypes, shapes and config alone.

Every tensor ends either in exactly one *unit* (tensors quantized together, since they share one global scale) or among
the *kept* ones, with the reason. No weight is read. The plan must not know how a weight is spelled on disk
(containers) nor how its scales are found (search).

A tensor is a candidate when it is a 2-D float matrix called ``<module>.weight``, or a 3-D stack of experts called
``...experts.<projection>``. Stacks come in both orientations, [E, out, in] and [E, in, out]; the shapes of the two
projections of one MLP tell which. GPT-2's Conv1D keeps weights as [in, out]; its bias betrays it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptqpipe.errors import CheckpointError, RecipeError, UsageError
from ptqpipe.recipe import DEFAULT_KEEP, Recipe, Rule, matches
from ptqpipe.schemes import Scheme

FLOAT_DTYPES = frozenset({"BF16", "F16", "F32"})
# Numbers of linear layers that are not quantized here, though readers could look for them.
_OTHER_FLOAT_DTYPES = frozenset({"F64", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"})

# Architectures whose fused gate_up_proj alternates gate and up rows instead of stacking them: a fact of the published
# files that no shape shows.
INTERLEAVED_GATE_UP = frozenset({"gpt_oss"})

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (safetensors dtype, shape) of the tensors of a checkpoint, as a reader of plain weights sees them."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a layout can store, beside the number formats.

    matrices    weights of linear layers, one tensor each
    stacks      3-D stacks of experts as one tensor; without it each expert is ``...experts.<e>.<projection>.weight``
    transposed  weights that the model holds as [in, out] (Conv1D), marked as such
    """

    matrices: bool = True
    stacks: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """Where the rows of a weight lie in a source tensor: rows start, start+step, ... of [out, in].

    ``expert`` selects from a 3-D stack; ``transposed`` says the tensor (or each expert) is [in, out].
    """

    tensor: str
    start: int = 0
    step: int = 1
    expert: int | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """One weight of a unit. ``weight`` is its logical name; ``shape`` is (N, K) = (out, in).

    With ``stack`` the weight is expert number ``source.expert`` of a 3-D weight that stays one tensor of ``stack``
    experts on disk, and ``weight`` names that stack.
    """

    weight: str
    shape: tuple[int, int]
    source: Slice
    stack: int | None = None

    @property
    def module(self) -> str:
        """The module's name: the weight's without ``.weight``."""
        return self.weight.removesuffix(".weight")

    @property
    def key(self) -> str:
        """What names it in records: the weight's name, with the expert in brackets in a stack."""
        return self.weight if self.stack is None else f"{self.weight}[{self.source.expert}]"

    @property
    def elements(self) -> int:
        """How many weights it holds."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are quantized together and share one global scale."""

    id: str
    members: tuple[Member, ...]
    rule: Rule

    @property
    def scheme(self) -> Scheme:
        """The scheme of every member."""
        scheme = self.rule.stored_scheme
        if scheme is None:  # units are built from quantizing rules only
            raise AssertionError(self.id)
        return scheme

    @property
    def elements(self) -> int:
        """How many weights the unit holds."""
        return sum(member.elements for member in self.members)


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that keeps its bytes (or its decoded numbers, if the source stores it quantized), and why."""

    name: str
    reason: str
    matrix: bool  # whether readers could look for it among the linear layers


@dataclass(frozen=True, slots=True)
class Plan:
    """The fate of every tensor: ``units`` and ``kept``, each in the order of the source files."""

    units: tuple[Unit, ...]
    kept: tuple[Kept, ...]
    tied_head: bool  # the head is the embedding, so no tensor of its own names it

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """Modules with a kept matrix, and ``lm_head``: what config files must list as not quantized."""
        modules = [kept.name.removesuffix(".weight") for kept in self.kept if kept.matrix]
        return tuple(dict.fromkeys(modules + ["lm_head"] * self.tied_head))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A matrix that may be quantized, before the rules have spoken. ``order`` is its place in the source."""

    member: Member
    order: int


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
    candidates, reasons = _candidates(tensors, config, abilities=abilities or Abilities())
    rules: dict[str, Rule] = {}
    for name, candidate in candidates.items():
        reason = _decide(candidate.member, recipe, rules, name)
        if reason:
            reasons[name] = reason
    groups = _fused_groups(candidates, recipe.fuse)
    outsiders = {group[0]: _outsiders(candidates, group, tensors, recipe.fuse) for group in groups}
    _keep_whole_groups(groups, outsiders, rules=rules, reasons=reasons)
    _reject_split_stacks(candidates, rules=rules, reasons=reasons)
    units = _units(candidates, groups, rules)
    quantized = {member.source.tensor for unit in units for member in unit.members}
    kept = tuple(_kept(name, tensors[name], reasons) for name in tensors if name not in quantized)
    if not units:
        raise UsageError(_nothing_to_do(kept))
    return Plan(units, kept, "lm_head.weight" not in tensors)


def _decide(member: Member, recipe: Recipe, rules: dict[str, Rule], name: str) -> str:
    """Enters the rule of a candidate, or returns why it is kept."""
    rule, reason = recipe.rule_for(member.module)
    if rule is None or rule.scheme is None:
        return reason
    fmt = rule.scheme.fmt
    if not fmt.fits(member.shape):
        rows, cols = fmt.block_extent(member.shape)
        return f"{member.shape[0]}x{member.shape[1]} does not divide into {fmt.name} blocks of {rows}x{cols}"
    rules[name] = rule
    return ""


def _candidates(
    tensors: Shapes, config: Mapping[str, Any], *, abilities: Abilities
) -> tuple[dict[str, _Candidate], dict[str, str]]:
    """Candidates by key (weight name, with the expert where stacks stay whole), and reasons of those that cannot be."""
    conv1d = conv1d_leaves(tensors)
    found: dict[str, _Candidate] = {}
    reasons: dict[str, str] = {}
    for order, (name, (dtype, shape)) in enumerate(tensors.items()):
        if 0 in shape:
            reasons[name] = "empty"
        elif len(shape) == 3 and "experts" in name.split("."):
            members, reason = _expert_members(name, tensors, config, stacks=abilities.stacks)
            for member in members:
                if member.stack is None and member.weight in tensors:
                    raise CheckpointError(
                        f"{member.weight!r} lies beside the stack {name!r}, which holds that weight, too; remove one"
                    )
                found[_key(member)] = _Candidate(member, order)
            reasons.update({name: reason} if reason else {})
        elif dtype not in FLOAT_DTYPES:
            reasons[name] = f"{dtype} numbers, not weights"
        elif len(shape) != 2 or not name.endswith(".weight"):
            reasons[name] = "not a matrix" if len(shape) != 2 else "not a weight of a linear layer"
        elif not abilities.matrices:
            reasons[name] = "this container stores stacks of experts only"
        elif name.removesuffix(".weight").rpartition(".")[2] not in conv1d:
            found[name] = _Candidate(Member(name, (shape[0], shape[1]), Slice(name)), order)
        elif abilities.transposed:
            found[name] = _Candidate(Member(name, (shape[1], shape[0]), Slice(name, transposed=True)), order)
        else:
            reasons[name] = (
                "Conv1D keeps its weight as [in, out], which no reader of this layout expects; --container ptqpipe"
            )
    return found, reasons


def _key(member: Member) -> str:
    return member.weight if member.stack is None else f"{member.weight}[{member.source.expert}]"


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


def _expert_members(name: str, tensors: Shapes, config: Mapping[str, Any], *, stacks: bool) -> tuple[list[Member], str]:
    """The per-expert weights of one 3-D tensor, or why it is kept."""
    dtype, shape = tensors[name]
    base = name.removesuffix(".weight")
    parent, _, leaf = base.rpartition(".")
    if dtype not in FLOAT_DTYPES or leaf not in ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"):
        return [], "a 3-D tensor that is no stack of expert projections"
    transposed = _stack_transposed(parent, leaf, tensors, config)
    if transposed is None:
        return [], "the orientation of this stack of experts cannot be told from the shapes"
    rows, cols = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    experts = range(shape[0])
    if stacks:
        slices = [Slice(name, expert=e, transposed=transposed) for e in experts]
        return [Member(name, (rows, cols), part, stack=shape[0]) for part in slices], ""
    if leaf != "gate_up_proj":
        return [
            Member(f"{parent}.{e}.{leaf}.weight", (rows, cols), Slice(name, expert=e, transposed=transposed))
            for e in experts
        ], ""
    if base + "_bias" in tensors:
        return [], "experts with biases have no per-expert spelling that readers know; use --container gptoss_mxfp4"
    if rows % 2:
        return [], "an odd number of rows cannot be gate and up"
    interleaved = str(config.get("model_type")) in INTERLEAVED_GATE_UP
    members = []
    for e in experts:
        for index, part in enumerate(("gate_proj", "up_proj")):
            start, step = (index, 2) if interleaved else (index * rows // 2, 1)
            where = Slice(name, start=start, step=step, expert=e, transposed=transposed)
            members.append(Member(f"{parent}.{e}.{part}.weight", (rows // 2, cols), where))
    return members, ""


def _stack_transposed(parent: str, leaf: str, tensors: Shapes, config: Mapping[str, Any]) -> bool | None:
    """Whether a stack is [E, in, out]; None where its sibling's shape and hidden_size leave it open."""

    def dims(name: str) -> tuple[int, int] | None:
        entry = tensors.get(f"{parent}.{name}") or tensors.get(f"{parent}.{name}.weight")
        return (entry[1][1], entry[1][2]) if entry is not None and len(entry[1]) == 3 else None

    fused, down = dims("gate_up_proj"), dims("down_proj")
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


def _fused_groups(candidates: Mapping[str, _Candidate], fuse: Sequence[Sequence[str]]) -> list[list[str]]:
    """Every candidate in exactly one group; groups and members in the order of the source, then of the fuse table."""
    table = {leaf: (index, place) for index, leaves in enumerate(fuse) for place, leaf in enumerate(leaves)}
    groups: dict[tuple[str, int, int], list[tuple[int, str]]] = {}
    singles: list[tuple[int, list[str]]] = []
    for key, candidate in candidates.items():
        parent, _, leaf = candidate.member.module.rpartition(".")
        if leaf in table and candidate.member.stack is None:
            index, place = table[leaf]
            columns = candidate.member.shape[1]  # runtimes stack rows, so only equal columns fuse
            groups.setdefault((parent, index, columns), []).append((place, key))
        else:
            singles.append((candidate.order, [key]))
    fused = [(min(candidates[k].order for _, k in group), [k for _, k in sorted(group)]) for group in groups.values()]
    return [keys for _, keys in sorted(fused + singles, key=lambda item: item[0])]


def _outsiders(
    candidates: Mapping[str, _Candidate], group: Sequence[str], tensors: Shapes, fuse: Sequence[Sequence[str]]
) -> list[str]:
    """Matrices that runtimes fuse with a group though they are no candidates (of a dtype that is not quantized)."""
    first = candidates[group[0]].member
    parent, dot, leaf = first.module.rpartition(".")
    leaves = next((leaves for leaves in fuse if leaf in leaves), ())
    siblings = [f"{parent}{dot}{other}.weight" for other in leaves]
    return [
        name
        for name in siblings
        if name in tensors and name not in candidates and tensors[name][1][1:] == (first.shape[1],)
    ]


def _keep_whole_groups(
    groups: Iterable[list[str]], outsiders: Mapping[str, list[str]], *, rules: dict[str, Rule], reasons: dict[str, str]
) -> None:
    """Fused weights have one fate: one that is kept keeps its siblings; two schemes in one group contradict."""
    for group in groups:
        kept = [key for key in group if key not in rules] + outsiders[group[0]]
        if kept:
            for key in group:
                if rules.pop(key, None) is not None:
                    reasons[key] = f"fused with {kept[0]}, which is kept ({reasons[kept[0]]})"
        elif len({rules[key] for key in group}) > 1:
            first, other = rules[group[0]], next(rules[key] for key in group if rules[key] != rules[group[0]])
            raise RecipeError(
                f"{group[0]} and its fused siblings get two rules ({first.match!r} and {other.match!r}); "
                "runtimes keep one matrix of them, so write one rule for all"
            )


def _reject_split_stacks(
    candidates: Mapping[str, _Candidate], *, rules: dict[str, Rule], reasons: dict[str, str]
) -> None:
    """A 3-D source tensor is quantized as a whole or kept as a whole."""
    by_tensor: dict[str, list[str]] = {}
    for key, candidate in candidates.items():
        by_tensor.setdefault(candidate.member.source.tensor, []).append(key)
    for tensor, keys in by_tensor.items():
        kept = [key for key in keys if key not in rules]
        if not kept:
            continue
        reason = reasons[kept[0]]
        if len(kept) < len(keys) and not reason.startswith("fused with"):
            reason = f"{kept[0]} is kept ({reason}), and the stack has one fate"
        reasons[tensor] = reason
        for key in keys:
            rules.pop(key, None)


def _units(
    candidates: Mapping[str, _Candidate], groups: Iterable[list[str]], rules: Mapping[str, Rule]
) -> tuple[Unit, ...]:
    units = []
    for group in groups:
        if group[0] not in rules:
            continue
        members = tuple(candidates[key].member for key in group)
        if rules[group[0]].scheme is None:
            continue
        leaves = "+".join([members[0].module, *(member.module.rpartition(".")[2] for member in members[1:])])
        suffix = f"[{members[0].source.expert}]" if members[0].stack is not None else ""
        units.append(Unit(leaves + suffix, members, rules[group[0]]))
    return tuple(units)


def unmatched_patterns(plan: Plan, recipe: Recipe) -> list[str]:
    """Patterns of the recipe's rules and of its own keep list that name no module of the model: most likely typos."""
    names = [member.module for unit in plan.units for member in unit.members]
    names += [kept.name.removesuffix(".weight") for kept in plan.kept]
    own = [pattern for pattern, reason in recipe.keep if (pattern, reason) not in DEFAULT_KEEP]
    patterns = dict.fromkeys([*own, *(rule.match for rule in recipe.rules)])
    return [pattern for pattern in patterns if not any(matches(pattern, name) for name in names)]


def _kept(name: str, entry: tuple[str, tuple[int, ...]], reasons: Mapping[str, str]) -> Kept:
    return Kept(name, reasons[name], is_matrix(name, *entry))


def is_matrix(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether readers could look for a tensor among the linear layers: a float matrix, or a stack of experts."""
    named = name.endswith(".weight") or "experts" in name.split(".")
    return len(shape) >= 2 and named and dtype in FLOAT_DTYPES | _OTHER_FLOAT_DTYPES


def _nothing_to_do(kept: Sequence[Kept]) -> str:
    reasons = [k.reason for k in kept if k.matrix] or [k.reason for k in kept]
    common = max(set(reasons), key=reasons.count) if reasons else "there are no tensors"
    return f"nothing would be quantized: {len(kept)} tensors are kept, mostly because: {common}"
