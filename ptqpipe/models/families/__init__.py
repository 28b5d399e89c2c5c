"""Families of models: one table of the facts that tensor names and shapes do not show, used by every command.

A row says how a config.json names the family, which of its modules are not quantized like the rest and why, what its
readers fuse into one matrix, how its experts lie in stacks, and where factors may move. The default keep rules of a
recipe, the checks of a finished checkpoint, plans and transforms read the same rows, so that what is written and what
is verified cannot drift apart.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ptqpipe.errors import CheckpointError
from ptqpipe.models.families.contradictions import (
    another_layout,
    another_width,
    check_experts,
    check_tower,
    check_unmerged,
    is_plain_decoder,
    too_few_layers,
    too_many_layers,
    unmerged,
)
from ptqpipe.models.families.defaults import COMMON, DEFAULT_FUSE, OUTSIDE, UNLIKE_EXPERTS
from ptqpipe.models.families.family import Family, Keep, Mtp, Norms, ReaderIssue
from ptqpipe.models.families.table import FAMILIES, MERGED_BY_READERS

# What a recipe keeps whatever the model is.
DEFAULT_KEEP: tuple[Keep, ...] = tuple(issue.keep for issue in COMMON if issue.by_default and not issue.counted_by)

# Where a config.json keeps the language model's part, if not at its top.
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")
_MTP_PART = re.compile(r"((?:.*\.)?layers\.(\d+)\.)(eh_proj|enorm|hnorm)\.weight$")
_BY_TYPE = {name: family for family in FAMILIES for name in family.types}


def family_of(config: Mapping[str, Any]) -> Family:
    """The row of the model of a config.json; an empty one for a family that the table does not have."""
    for part in (config, *_text_parts(config)):
        family = _BY_TYPE.get(str(part.get("model_type")))
        if family is not None:
            return family
    return Family()


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the table has a row for the model of a config.json, or for its language model."""
    return any(str(part.get("model_type")) in _BY_TYPE for part in (config, *_text_parts(config)))


def norms_of(config: Mapping[str, Any]) -> Norms | None:
    """The norms of the model of a config.json, or of its language model; None where they are unknown."""
    rows = (_BY_TYPE.get(str(part.get("model_type"))) for part in (config, *_text_parts(config)))
    return next((row.norms for row in rows if row is not None and row.norms is not None), None)


def fixed_of(config: Mapping[str, Any]) -> str:
    """Why no factor may move in the model of a config.json, as far as its row says so."""
    return family_of(config).fixed


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what it says of its language model at the top."""
    merged = dict(config)
    for part in _text_parts(config):
        merged |= part
    return merged


def mtp_layer(config: Mapping[str, Any]) -> str:
    """What the names of the multi-token prediction layer begin with; "" where the table knows none."""
    row, layers = family_of(config).mtp, layer_count(config)
    return "" if row is None or layers is None else f"{row.block.format(layer=layers)}."


def in_mtp_layers(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Says of the name of a tensor whether it belongs to a multi-token prediction layer, the first or a further one."""
    patterns = [re.compile(issue.keep.pattern.removeprefix("re:")) for issue in issues_of(config) if issue.mtp]
    return lambda name: any(pattern.match(name) for pattern in patterns)


def uncounted_layers(config: Mapping[str, Any], names: Iterable[str]) -> frozenset[str]:
    """What the names of multi-token prediction layers begin with that the files hold behind the last decoder layer, and
    that the config.json does not count."""
    first, counted = layer_count(config), _extra_layers(config, "num_nextn_predict_layers")
    matched = (match for match in map(_MTP_PART.match, names) if match)
    return frozenset(x[1] for x in matched if first is not None and int(x[2]) >= first and int(x[2]) not in counted)


def outside_language_model(config: Mapping[str, Any], names: Iterable[str]) -> frozenset[str]:
    """The tensors that only images or sound pass: of towers and projectors."""
    reasons = ("tower", "projector")
    patterns = [re.compile(issue.keep.pattern.removeprefix("re:")) for issue in issues_of(config)
                if any(word in issue.keep.reason for word in reasons)]  # fmt: skip
    return frozenset(name for name in names if any(pattern.match(name) for pattern in patterns))


def issues_of(config: Mapping[str, Any]) -> Iterator[ReaderIssue]:
    """The issues that hold for the model of a config.json, those of its family first, with layers by their numbers."""
    for issue in (*family_of(config).issues, *COMMON):
        if not issue.counted_by:
            yield issue
            continue
        numbers = _extra_layers(config, issue.counted_by)
        if numbers:
            pattern = issue.keep.pattern.replace("{layers}", "|".join(map(str, numbers)))
            yield replace(issue, keep=issue.keep._replace(pattern=pattern))


def fails_either_way(config: Mapping[str, Any], issue: ReaderIssue) -> bool:
    """Whether the readers that fail where these modules are quantized also fail where they are kept."""
    return any(
        other.keep == issue.keep
        and bool(other.unless_quantized) != bool(issue.unless_quantized)
        and set(issue.readers) <= set(other.readers)
        for other in issues_of(config)
        if other.symptom
    )


def check_config(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """CheckpointError, in one line, where a config.json contradicts the tensors beside it: too few or too many experts,
    a tower without a config, an adapter beside the weights that it is of, a multi-token prediction layer of which a
    part is missing.

    config  of the model, as it stands in its files
    names   of all tensors
    """
    unique = dict.fromkeys(names)
    check_experts(config, unique)
    check_tower(config, unique)
    if not any(issue.keep == MERGED_BY_READERS.keep for issue in family_of(config).issues):
        check_unmerged(unique)
    row, layers = family_of(config).mtp, layer_count(config)
    if row is None or layers is None:
        return
    parts = [f"{part}.weight".format(layer=layers) for part in (row.join, row.tokens, row.states, row.last)]
    missing = [part for part in parts if part not in unique]
    if missing and len(missing) < len(parts):
        raise CheckpointError(
            f"the files hold a multi-token prediction layer without {missing[0]!r}; download the model again, or "
            "remove the rest of the layer"
        )


def doubts(config: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """What a config.json says and the tensors beside it do not hold, one line each, where the model may be meant so.

    shapes  name -> (dtype, shape) of all tensors
    """
    lines = (absent_layers(config, shapes), _uncounted(config, shapes))
    return [line for line in lines if line]


def misfits(config: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Where the tensors are not those of the model that a config.json names, one line each, as far as structure says
    it: names of another layout, layers too few or too many, another width. Readers stop there.

    shapes  name -> (dtype, shape) of all tensors
    """
    layout = another_layout(config, shapes)
    if layout:
        return [layout]
    further = {int(prefix.rpartition("layers.")[2][:-1]) for prefix in uncounted_layers(config, shapes)}
    drafts = in_mtp_layers(config)
    lines = (
        too_few_layers(config, shapes),
        too_many_layers(config, [name for name in shapes if not drafts(name)], further),
        another_width(config, shapes),
        unmerged(shapes),
    )
    return [line for line in lines if line]


def _uncounted(config: Mapping[str, Any], names: Iterable[str]) -> str:
    layers = sorted(uncounted_layers(config, names))
    if not layers:
        return ""
    return (
        f"{layers[0][:-1]} is a multi-token prediction layer that config.json does not count: it stays as it is; for "
        f"readers that predict several tokens set num_nextn_predict_layers to {len(layers)}"
    )


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


def output_rows(config: Mapping[str, Any]) -> Callable[[str, int], tuple[int, ...]]:
    """Says of a module and its rows which rows make up each of the outputs that readers build of it, one below the
    other: all of them where it has one output, or where the config.json does not say how many each has."""
    text, outputs_by_pattern = language_config(config), list[tuple[re.Pattern[str], tuple[int, ...]]]()
    for outputs in family_of(config).outputs:
        counts = [[int(text[key]) for key in keys if type(text.get(key)) is int] for keys in outputs.rows]
        if list(map(len, counts)) == list(map(len, outputs.rows)):
            outputs_by_pattern.append((re.compile(outputs.pattern), tuple(math.prod(count) for count in counts)))

    def of(module: str, rows: int) -> tuple[int, ...]:
        fitting = (sizes for pattern, sizes in outputs_by_pattern if sum(sizes) == rows and pattern.match(module))
        return next(fitting, (rows,))

    return of


def head_counts(config: Mapping[str, Any]) -> frozenset[int]:
    """The head counts of attention in a config.json, in any of its parts: a matrix with that many rows has one output
    for each head."""
    counts = {value for key, value in config.items() if "heads" in key and type(value) is int}
    inner = (head_counts(value) for value in config.values() if isinstance(value, Mapping))
    return frozenset(counts).union(*inner)


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Number of decoder layers in a config.json, without MTP layers; None where it has none."""
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
