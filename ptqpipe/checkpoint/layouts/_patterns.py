"""Sets of module names as regular expressions, for configs that give different modules different schemes.

Readers match such expressions with ``re.match`` against a module's name. Knows nothing of schemes or config files.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

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
