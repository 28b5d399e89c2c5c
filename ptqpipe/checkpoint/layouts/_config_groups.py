"""compressed-tensors' config groups: which group applies to a module, and whether the groups match what is stored."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ptqpipe.checkpoint.json_values import short_json
from ptqpipe.checkpoint.layouts._config import quantization_config, strings
from ptqpipe.checkpoint.layouts._lists import Lists, by_expressions, listed, matched
from ptqpipe.checkpoint.layouts._types import Target, schemes_of
from ptqpipe.errors import CheckpointError, one_line
from ptqpipe.numerics.schemes import ROTATION_BLOCKS

T = TypeVar("T")

# compressed-tensors' models forbid any other key, so one more is an error in every reader.
_GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_ARGUMENT_KEYS = frozenset(
    (
        *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
        *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
    )
)
LINEAR = frozenset({"Linear", "LinearBase"})
"""What readers call the class of all linear layers."""

_NAIVE = "naive-quantized"  # 8 bits: as int-quantized and float-quantized
_CLASSES = LINEAR | {"Conv1D", "Embedding"}  # targets that readers take for classes of layers with weights


# Formats of compressed-tensors that store no plain codes: what they store, and what to do instead.
_SPARSE = "weights without their zeros, which ptqpipe does not read: start from the dense model"
_UNREAD = {
    "sparse-24-bitmask": _SPARSE,
    "sparse-bitmask": _SPARSE,
    "marlin-24": "2:4 sparse INT4 in the order of a kernel, which ptqpipe does not read: start from the float model",
}
_BITMASKS = (".bitmask", ".compressed", ".row_offsets")


def check_formats(described: Mapping[str, Any], names: Iterable[str]) -> None:
    """CheckpointError for weights in a format of compressed-tensors that is not read, saying what it stores."""
    groups, sparsity = described.get("config_groups"), described.get("sparsity_config")
    holders = [described, *(groups.values() if isinstance(groups, Mapping) else ())]
    formats = [str(holder.get("format")) for holder in holders if isinstance(holder, Mapping)]
    sparse = next((name for name in names if name.endswith(_BITMASKS)), None)
    if sparse is not None and isinstance(sparsity, Mapping):
        formats.append(str(sparsity.get("format")))
    unread = next((kind for kind in formats if kind in _UNREAD), None)
    if unread is not None:
        raise CheckpointError(f"config.json says format {unread!r}: {_UNREAD[unread]}")
    if sparse is not None:
        raise CheckpointError(f"{one_line(sparse, limit=200)!r} is a part of sparse weights: {_SPARSE}")
    for group in holders[1:]:
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else 8
        if weights is not None and (group.get("format") or formats[0]) == _NAIVE and isinstance(bits, int) and bits < 8:
            raise CheckpointError(
                f"config.json says format {_NAIVE!r} of {bits} bits: one code in a byte, which ptqpipe reads of 8 bits "
                "alone: start from the float model"
            )


def as_written_today(group: Any) -> Any:
    """A group whose format has an older name of the same bytes by its newer one."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or group.get("format") != _NAIVE:
        return group
    return {**group, "format": "int-quantized" if weights.get("type") == "int" else "float-quantized"}


def lists(config: Mapping[str, Any]) -> Lists:
    """What readers take for excluded: exact names, expressions, classes of layers; and what the groups target."""
    described = quantization_config(config)
    entries, groups = listed(described, "ignore") or [], described.get("config_groups")
    targets: list[str] = []
    for key, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and group.get("weights") is not None:
            targets += strings(group.get("targets"), f"{key}.targets")
    everything = next((entry for entry in entries if entry in LINEAR), None)
    aimed = resolver([(targets, True)], classes=not LINEAR.isdisjoint(targets))
    return Lists(
        "ignore",
        entries,
        patterns=by_expressions(entries),
        also=None if everything is None else lambda _: f"lists all linear layers under 'ignore' as {everything!r}",
        aims=lambda names: any(map(aimed, names)),
    )


def resolver(groups: Iterable[tuple[Iterable[str], T]], *, classes: bool = True) -> Callable[[str], T | None]:
    """Which entry speaks for a module, as compressed-tensors decides: exact names, then expressions in alphabetical
    order, then (with ``classes``) classes of layers.

    Names do not tell which class a module has, so the first target that is written like one (one word, its first letter
    a capital) speaks for every other module. None where nothing does.
    """
    exact = {target: entry for targets, entry in groups for target in targets}
    expressions = sorted(target for target in exact if target.startswith("re:"))
    others = (entry for target, entry in exact.items() if target[:1].isupper() and "." not in target)
    by_class = next(others, None) if classes else None

    def find(module: str) -> T | None:
        if module in exact:
            return exact[module]
        return next((exact[target] for target in expressions if matches(target, module)), by_class)

    return find


def matches(target: str, module: str) -> bool:
    """Whether an expression (``re:...``) matches a module's name; CheckpointError where that takes too long."""
    return matched(target.removeprefix("re:"), module, entry=target)


def group_faults(
    groups: Mapping[str, Any], wanted: Sequence[Mapping[str, Any]], modules: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """(key, message) where ``groups`` do not describe what is stored, in values that readers accept.

    wanted   the groups of the stored schemes, as they should be
    modules  those that are stored quantized
    """
    targets: list[str] = []
    for name, group in groups.items():
        where = f"config_groups.{name}"
        yield from ((where, message) for message in _unknown_keys(group))
        if group.get("weights") is not None and all(_difference(group, other) for other in wanted):
            closest = max(wanted, key=lambda other: _agreement(group, other))
            yield where, f"does not describe what is stored: {_difference(group, closest)}"
        targets += group.get("targets") or []
    if len(targets) != len(set(targets)):
        twice = next(target for target in targets if targets.count(target) > 1)
        yield "config_groups", f"two groups target {twice!r}; readers differ in which one they take"
    yield from _target_faults(groups, modules)


def _target_faults(groups: Mapping[str, Any], modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every stored weight is targeted, and every group targets one: by a module's name, or a class that layers have."""
    aimed: set[str] = set()
    for name, group in groups.items():
        targets = [str(target) for target in group.get("targets") or []]
        exact, patterns = set(targets), [target for target in targets if target.startswith("re:")]
        everything = not _CLASSES.isdisjoint(exact)
        covered = [m for m in modules if everything or m in exact or any(matches(p, m) for p in patterns)]
        aimed.update(covered)
        if not covered and group.get("weights") is not None:
            shown = short_json(targets)
            message = f"targets {shown}: neither a quantized module nor a class of layers; readers drop it"
            yield f"config_groups.{name}", message
    lost = [module for module in modules if module not in aimed]
    if lost:
        message = f"target neither {lost[0]!r} nor its class ({len(lost)} such modules); readers drop what is stored"
        yield "config_groups", message


def _unknown_keys(group: Mapping[str, Any]) -> Iterator[str]:
    unknown = sorted(set(group) - _GROUP_KEYS)
    for part in ("weights", "input_activations", "output_activations"):
        arguments = group.get(part)
        if isinstance(arguments, Mapping):
            unknown += [f"{part}.{key}" for key in sorted(set(arguments) - _ARGUMENT_KEYS)]
    if unknown:
        yield f"has the unknown key {unknown[0]!r}; compressed-tensors refuses it"


def _pairs(group: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {"format": group.get("format")}
    for part in ("weights", "input_activations"):
        arguments = group.get(part)
        flat[part] = None if arguments is None else "given"
        if isinstance(arguments, Mapping):
            flat.update({f"{part}.{key}": value for key, value in arguments.items() if value is not None})
    return flat


def _agreement(group: Mapping[str, Any], wanted: Mapping[str, Any]) -> int:
    actual = _pairs(group)
    return sum(actual.get(key) == value for key, value in _pairs(wanted).items())


def _difference(group: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first decisive setting that differs, as text; empty where none does."""
    actual, expected = _pairs(group), _pairs(wanted)
    defaults = {"symmetric": True, "dynamic": False, "type": "float"}
    decisive = ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "scale_dtype")
    for key in dict.fromkeys([*expected, *(k for k in actual if k.rpartition(".")[2] in decisive)]):
        default = defaults.get(key.rpartition(".")[2])
        if actual.get(key, default) != expected.get(key, default):
            return f"{key} is {actual.get(key)!r}, expected {expected.get(key)!r}"
    return ""


# transform_config: whose inputs are rotated by block Hadamard matrices while a model runs. A rotation by blocks of 64
# columns is the group
#
#     {"type": "hadamard", "head_dim": 64, "apply": [{"targets": [...], "location": "input"},
#                                                    {"targets": [...], "location": "weight_input", "inverse": true}]}
#
# whose second entry says that the stored weights are rotated already. No matrix is stored: its name stands for it, and
# vLLM's kernel takes none. Read and written are rotations of inputs by the blocks of `ROTATION_BLOCKS`; every other
# change of inputs or outputs makes another model than the weights alone, so that it is refused.

TRANSFORM_CONFIG = "transform_config"
_IN_WEIGHTS = ("weight_input", "weight_output")  # what is done to weights is in them already


def described_rotations(targets: Sequence[Target], kept: Sequence[str]) -> dict[str, Any]:
    """The entry of a config for these targets, ``kept`` being the modules that are not quantized; empty for none."""
    names = [*kept, *(target.module for target in targets)]
    groups, used = {}, {scheme.rotation for scheme in schemes_of(targets)}
    for block in ROTATION_BLOCKS:
        if block in used:
            rotated = [target.module for target in targets if target.scheme.rotation == block]
            patterns = name_patterns(rotated, [name for name in names if name not in set(rotated)])
            uses: list[dict[str, Any]] = [{"targets": patterns, "location": "input"}]
            uses += [{"targets": patterns, "location": "weight_input", "inverse": True}]
            groups[f"rotate_{block}"] = {"type": "hadamard", "head_dim": block, "apply": uses}
    return {TRANSFORM_CONFIG: {"config_groups": groups}} if groups else {}


def stored_rotations(config: Mapping[str, Any], described: Mapping[str, Any]) -> Callable[[str], int]:
    """What gives the columns that are rotated together of a module's input; 0: none.

    CheckpointError for a ``transform_config`` that changes inputs or outputs in any other way.
    """
    blocks: list[tuple[list[str], int]] = []
    for holder in (config, described):
        entry = holder.get(TRANSFORM_CONFIG) or {}
        groups = entry.get("config_groups") or {} if isinstance(entry, Mapping) else None
        if not isinstance(groups, Mapping):
            raise CheckpointError(
                f"{TRANSFORM_CONFIG} in config.json is damaged; expected an object with config_groups"
            )
        for name, group in groups.items():
            blocks += [
                (strings(use.get("targets"), f"{TRANSFORM_CONFIG} {name!r}"), block)
                for use, block in _inputs(name, group)
            ]
    find = resolver(blocks, classes=False)
    return lambda module: find(module) or 0


def _inputs(name: str, group: Any) -> Iterator[tuple[Mapping[str, Any], int]]:
    """(entry, block) of everything that a group does while the model runs."""
    described: Mapping[str, Any] = group if isinstance(group, Mapping) else {}
    uses, block = described.get("apply"), described.get("head_dim")
    for use in uses if isinstance(uses, list) else [{}]:
        place = use.get("location") if isinstance(use, Mapping) else None
        if place in _IN_WEIGHTS:
            continue
        supported = place == "input" and described.get("type") == "hadamard" and not described.get("randomize")
        if not supported or block not in ROTATION_BLOCKS or use.get("ignore"):
            raise CheckpointError(
                f"{TRANSFORM_CONFIG} in config.json has {name!r} at {place!r}: a change of the activations that "
                f"ptqpipe does not read, which are Hadamard rotations of inputs by blocks of "
                f"{', '.join(map(str, ROTATION_BLOCKS))}; start from the float checkpoint"
            )
        yield use, int(block)


# Sets of module names as regular expressions, for configs that give different modules different schemes. Readers match
# such expressions with ``re.match`` against a module's name.

Indexes = tuple[str, ...]
"""The counted components of a name: ("0", "12") for model.layers.0.mlp.experts.12.up_proj."""

_COUNTED = "{}"


def name_patterns(modules: Sequence[str], others: Iterable[str], *, ignored: Iterable[str] = ()) -> list[str]:
    r"""Expressions that match all of ``modules`` and none of ``others``.

    Names are grouped by their form (digits aside) and by the sets of their indexes: layers.0.mlp.up_proj and
    layers.1.mlp.up_proj become ``^(.*\.)?layers\.(0|1)\.mlp\.up_proj$``, or ``layers\.\d+`` where that is as exact.
    What stands before the first counted component is left open, since readers rename it (model.language_model. is
    language_model.model. in vLLM, which maps names but not expressions), unless that would match one of ``others``.
    ``ignored`` are avoided, too, but not at that price: readers look at what a config ignores first.
    """
    inside = set(modules)
    outside = [name for name in dict.fromkeys(others) if name not in inside]
    avoided = [*outside, *(name for name in dict.fromkeys(ignored) if name not in inside)]
    forms: dict[str, set[Indexes]] = defaultdict(set)
    for name in modules:
        forms[_form(name)].add(_indexes(name))
    # Projections of one parent that occur with the same indexes share an expression.
    shared: dict[tuple[str, frozenset[Indexes]], list[str]] = defaultdict(list)
    for form, indexes in forms.items():
        parent, dot, leaf = form.rpartition(".")
        if leaf == _COUNTED:
            parent, dot, leaf = form, "", ""
        shared[(parent + dot, frozenset(indexes))].append(leaf)
    return [
        _pattern(parent, sorted(leaves), box, outside, avoided)
        for (parent, indexes), leaves in shared.items()
        for box in _boxes(indexes)
    ]


def _form(name: str) -> str:
    return ".".join(_COUNTED if piece.isdigit() else piece for piece in name.split("."))


def _indexes(name: str) -> Indexes:
    return tuple(piece for piece in name.split(".") if piece.isdigit())


def _boxes(indexes: frozenset[Indexes]) -> list[list[list[str]]]:
    """``indexes`` as a disjoint union of products of sets: [[layers, experts], ...]."""
    width = len(next(iter(indexes)))
    if width == 0:
        return [[]]
    axes = [sorted({index[axis] for index in indexes}, key=int) for axis in range(width)]
    if len(indexes) == math.prod(len(axis) for axis in axes):
        return [axes]
    tails: dict[frozenset[Indexes], list[str]] = defaultdict(list)
    for head in axes[0]:
        tails[frozenset(index[1:] for index in indexes if index[0] == head)].append(head)
    return [[heads, *box] for tail, heads in tails.items() for box in _boxes(tail)]


def _pattern(
    parent: str, leaves: Sequence[str], box: Sequence[Sequence[str]], others: Sequence[str], avoided: Sequence[str]
) -> str:
    """The first candidate that matches nothing else; the last one, with all names listed, if there is none."""
    listed = [_alternatives(axis) for axis in box]
    counted = [r"\d+" if len(axis) > 1 else _alternatives(axis) for axis in box]
    spellings = (counted, [*listed[:1], *counted[1:]], listed)
    for open_root, names in ((True, avoided), (True, others), (False, avoided)):
        for spelling in spellings:
            candidate = _expression(parent, leaves, spelling, open_root=open_root)
            expression = re.compile(candidate)
            if not any(expression.match(name) for name in names):
                return f"re:{candidate}"
    return f"re:{_expression(parent, leaves, listed, open_root=False)}"


def _expression(parent: str, leaves: Sequence[str], axes: Sequence[str], *, open_root: bool) -> str:
    pieces = parent.removesuffix(".").split(".") if parent else []
    first = pieces.index(_COUNTED) if _COUNTED in pieces else 0
    spelled = iter(axes)
    body = [next(spelled) if piece == _COUNTED else re.escape(piece) for piece in pieces]
    if leaves != [""]:
        body.append(_alternatives(leaves))
    if open_root and first >= 1:
        return r"^(.*\.)?" + r"\.".join(body[first - 1 :]) + "$"
    return "^" + r"\.".join(body) + "$"


def _alternatives(words: Iterable[str]) -> str:
    escaped = [re.escape(word) for word in words]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
