"""Families of models: one table of what names and shapes do not show, for every command.

A row says how a config.json names the family, which of its modules are not quantized like the rest and why, what its
readers make one matrix of, how its experts lie in stacks, and where factors may move. The default keep rules of a
recipe, the checks of a finished checkpoint, plans and transforms read the same rows, so that what is written and what
is verified cannot drift apart. It must not know formats or files.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ptqpipe.families.contradictions import check_config
from ptqpipe.families.table import COMMON, DEFAULT_FUSE, FAMILIES
from ptqpipe.families.types import Fact, Family, Keep, Mtp, Norms

__all__ = [
    "COMMON",
    "DEFAULT_FUSE",
    "DEFAULT_KEEP",
    "FAMILIES",
    "Fact",
    "Family",
    "Keep",
    "Mtp",
    "Norms",
    "absent_layers",
    "check_config",
    "facts_of",
    "family_of",
    "fuse_of",
    "layer_count",
]

# What a recipe keeps whatever the model is.
DEFAULT_KEEP: tuple[Keep, ...] = tuple(fact.keep for fact in COMMON if not fact.counted_by)

# Where a config.json keeps the language model's part, if not at its top.
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")
_BY_TYPE = {name: family for family in FAMILIES for name in family.types}


def family_of(config: Mapping[str, Any]) -> Family:
    """The row of the model of a config.json; an empty one for a family that the table does not have."""
    for part in (config, *_text_parts(config)):
        found = _BY_TYPE.get(str(part.get("model_type")))
        if found is not None:
            return found
    return Family()


def facts_of(config: Mapping[str, Any]) -> Iterator[Fact]:
    """The facts that hold for the model of a config.json, those of its family first, with layers by their numbers."""
    for fact in (*family_of(config).facts, *COMMON):
        if not fact.counted_by:
            yield fact
            continue
        numbers = _extra_layers(config, fact.counted_by)
        if numbers:
            pattern = fact.keep.pattern.replace("{layers}", "|".join(map(str, numbers)))
            yield replace(fact, keep=fact.keep._replace(pattern=pattern))


def absent_layers(config: Mapping[str, Any], names: Iterable[str]) -> str:
    """What is to be said of multi-token prediction layers that the config counts and the files do not hold; or nothing.

    transformers drops these tensors and leaves the count: what it has saved is whole without them.
    """
    key = "num_nextn_predict_layers"
    wanted = [f"layers.{number}." for number in _extra_layers(config, key)]
    if not wanted or any("mtp" in name or any(part in name for part in wanted) for name in names):
        return ""
    return (
        f"config.json says {key} {len(wanted)}, but the files have no {wanted[0][:-1]}; set it to 0, or take the files "
        "that hold it: readers that predict several tokens stop, the others do not look for it"
    )


def fuse_of(config: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Leaf names below one parent that readers of this model make one matrix of."""
    own = family_of(config).fuse
    taken = {leaf for group in own for leaf in group}
    return (*own, *(group for group in DEFAULT_FUSE if taken.isdisjoint(group))) if own else DEFAULT_FUSE


def layer_count(config: Mapping[str, Any]) -> int | None:
    """How many decoder layers a config.json says, those of multi-token prediction aside; None where it does not."""
    counts = (part.get("num_hidden_layers") for part in (config, *_text_parts(config)))
    return next((count for count in counts if type(count) is int), None)


def _text_parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of a config.json that describe its language model, the outer ones first."""
    for name in _TEXT:
        part = config.get(name)
        if isinstance(part, Mapping):
            yield part
            yield from _text_parts(part)


def _extra_layers(config: Mapping[str, Any], key: str) -> range:
    """Numbers of the ``key`` layers behind the last of num_hidden_layers; none where the config does not say both."""
    for part in (config, *_text_parts(config)):
        count, first = part.get(key), part.get("num_hidden_layers")
        if type(count) is int and type(first) is int and 0 < count <= 1000:
            return range(first, first + count)
    return range(0)
