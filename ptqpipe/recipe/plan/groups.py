"""Weights that are quantized or kept together: those that runtimes fuse into one matrix, and those of one stack of
experts.

``rules`` holds the rule of every candidate that is to be quantized, ``reasons`` why the others are kept; a candidate
whose group cannot follow moves from the one to the other.

``check/verify/shared_scales.py`` finds the fused groups of a stored checkpoint again on its own: on purpose, so that a
mistake here does not pass its own check.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ptqpipe.errors import RecipeError
from ptqpipe.models.families import output_rows
from ptqpipe.models.slices import Member, Shapes
from ptqpipe.recipe.recipe import Rule


def fused_groups(candidates: Mapping[str, Member], fuse: Sequence[Sequence[str]]) -> list[list[str]]:
    """Every candidate in exactly one group; groups and members in the order of the source, then of the fuse table."""
    table = {leaf: (index, place) for index, leaves in enumerate(fuse) for place, leaf in enumerate(leaves)}
    groups: dict[tuple[str, int, int], list[tuple[int, str]]] = {}
    singles: list[tuple[int, list[str]]] = []
    order = {key: place for place, key in enumerate(candidates)}
    for key, member in candidates.items():
        parent, _, leaf = member.module.rpartition(".")
        if leaf in table and member.stack is None:
            index, place = table[leaf]
            columns = member.shape[1]  # runtimes stack rows, so only equal columns fuse
            groups.setdefault((parent, index, columns), []).append((place, key))
        else:
            singles.append((order[key], [key]))
    fused = [(min(order[key] for _, key in group), [key for _, key in sorted(group)]) for group in groups.values()]
    return [keys for _, keys in sorted(fused + singles, key=lambda item: item[0])]


def siblings_outside(
    candidates: Mapping[str, Member], group: Sequence[str], tensors: Shapes, fuse: Sequence[Sequence[str]]
) -> list[str]:
    """Matrices that runtimes fuse with a group though they are no candidates (of a dtype that is not quantized)."""
    first = candidates[group[0]]
    parent, dot, leaf = first.module.rpartition(".")
    leaves = next((leaves for leaves in fuse if leaf in leaves), ())
    siblings = [f"{parent}{dot}{other}.weight" for other in leaves]
    return [
        name
        for name in siblings
        if name in tensors and name not in candidates and tensors[name][1][1:] == (first.shape[1],)
    ]


def keep_short_blocks(
    groups: Iterable[list[str]],
    candidates: Mapping[str, Member],
    config: Mapping[str, Any],
    *,
    rules: dict[str, Rule],
    reasons: dict[str, str],
) -> None:
    """Runtimes put fused weights, and the outputs of one weight, below each other: only the last of them may end with a
    short block of rows.

    vLLM and SGLang refuse others (validate_fp8_block_shape of their fp8_utils.py), or would look up a block's scale in
    another row than it was stored in.
    """
    rows_of = output_rows(config)
    for group in groups:
        for key in group:
            rule, member = rules.get(key), candidates[key]
            block = 1 if rule is None or rule.scheme is None else rule.scheme.fmt.step(0)
            if block == 1:
                continue
            outputs = rows_of(member.module, member.shape[0])
            short = [rows for rows in (outputs[:-1] if key == group[-1] else outputs) if rows % block]
            if short:
                del rules[key]
                below = f", of {len(outputs)} outputs that readers build one below the other," if outputs[1:] else ""
                reasons[key] = f"{short[0]} rows{below} do not divide into blocks of {block}"


def keep_whole_groups(
    groups: Iterable[list[str]], outside: Mapping[str, list[str]], *, rules: dict[str, Rule], reasons: dict[str, str]
) -> None:
    """Fused weights have one fate: one that is kept keeps its siblings; two schemes in one group contradict."""
    for group in groups:
        kept = [key for key in group if key not in rules] + outside[group[0]]
        if kept:
            for key in group:
                if rules.pop(key, None) is not None:
                    reasons[key] = f"fused with {kept[0]}, which is kept ({reasons[kept[0]]})"
        elif any(rules[key] is not rules[group[0]] and rules[key] != rules[group[0]] for key in group[1:]):
            first, other = rules[group[0]], next(rules[key] for key in group if rules[key] != rules[group[0]])
            raise RecipeError(
                f"{group[0]} and its fused siblings get two rules ({first.match!r} and {other.match!r}); "
                "runtimes keep one matrix of them, so write one rule for all"
            )


def reject_split_stacks(candidates: Mapping[str, Member], *, rules: dict[str, Rule], reasons: dict[str, str]) -> None:
    """A 3-D source tensor is quantized as a whole or kept as a whole."""
    by_tensor: dict[str, list[str]] = {}
    for key, member in candidates.items():
        by_tensor.setdefault(member.source.tensor, []).append(key)
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
