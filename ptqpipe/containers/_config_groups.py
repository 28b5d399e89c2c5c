"""compressed-tensors' config groups: which group applies to a module, and whether the groups match what is stored.

Knows the keys of a group and how readers match targets; must not know formats, nor how a scheme is stored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ptqpipe.containers._lists import matched
from ptqpipe.json_values import short_json

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

_CLASSES = LINEAR | {"Conv1D", "Embedding"}  # targets that readers take for classes of layers with weights


def resolver(groups: Iterable[tuple[Iterable[str], T]], *, classes: bool = True) -> Callable[[str], T | None]:
    """Which entry speaks for a module, as compressed-tensors decides: exact names, then expressions in alphabetical
    order, then (with ``classes``) classes of layers.

    Names do not tell which class a module has, so the first target that is written like one (one word, its first letter
    a capital) speaks for every other module. None where nothing does.
    """
    exact = {target: found for targets, found in groups for target in targets}
    expressions = sorted(target for target in exact if target.startswith("re:"))
    others = (found for target, found in exact.items() if target[:1].isupper() and "." not in target)
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
        found = [m for m in modules if everything or m in exact or any(matches(p, m) for p in patterns)]
        aimed.update(found)
        if not found and group.get("weights") is not None:
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
    """What a group says, flat; targets aside."""
    flat: dict[str, Any] = {"format": group.get("format")}
    for part in ("weights", "input_activations"):
        arguments = group.get(part)
        flat[part] = None if arguments is None else "given"
        if isinstance(arguments, Mapping):
            flat.update({f"{part}.{key}": value for key, value in arguments.items() if value is not None})
    return flat


def _agreement(group: Mapping[str, Any], wanted: Mapping[str, Any]) -> int:
    found = _pairs(group)
    return sum(found.get(key) == value for key, value in _pairs(wanted).items())


def _difference(group: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What readers act on and the group states differently, as text; empty when there is nothing."""
    found, expected = _pairs(group), _pairs(wanted)
    defaults = {"symmetric": True, "dynamic": False, "type": "float"}
    decisive = ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "scale_dtype")
    for key in dict.fromkeys([*expected, *(k for k in found if k.rpartition(".")[2] in decisive)]):
        default = defaults.get(key.rpartition(".")[2])
        if found.get(key, default) != expected.get(key, default):
            return f"{key} is {found.get(key)!r}, expected {expected.get(key)!r}"
    return ""
