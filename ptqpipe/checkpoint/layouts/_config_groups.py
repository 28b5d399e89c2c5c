"""compressed-tensors' config groups: which group applies to a module, and whether the groups match what is stored.

Knows the keys of a group and how readers match targets; must not know formats, nor how a scheme is stored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ptqpipe.checkpoint.json_values import short_json
from ptqpipe.checkpoint.layouts._config import quantization_config, strings
from ptqpipe.checkpoint.layouts._lists import Lists, by_expressions, listed, matched
from ptqpipe.errors import CheckpointError, one_line

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
    """A group's settings as a flat mapping, without its targets."""
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
