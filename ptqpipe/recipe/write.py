"""Writes recipes from programs: expressions that match a set of modules exactly, and the YAML text."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"\d+")
_Template = tuple[str | None, ...]
"""The pieces of a module's name as expressions; None stands for the number of the layer."""


def exact_patterns(modules: Sequence[str]) -> list[str]:
    """Anchored ``re:`` patterns that match exactly these modules (and every expert beside a listed one)."""
    layers: dict[_Template, dict[str, None]] = defaultdict(dict)
    for module in modules:
        template, layer = _template(module)
        layers[template][layer] = None
    leaves: dict[tuple[_Template, tuple[str, ...]], list[str]] = defaultdict(list)
    for (*head, leaf), numbers in layers.items():
        leaves[(tuple(head), tuple(numbers))].append(str(leaf))
    patterns = []
    for (parents, of_layers), of_parent in leaves.items():
        pieces = [_alternatives(of_layers) if piece is None else piece for piece in parents]
        patterns.append("re:" + r"\.".join([*pieces, _alternatives(of_parent)]) + "$")
    return patterns


def _template(module: str) -> tuple[_Template, str]:
    """A module's name with any expert, and the number of its layer, "" for none: the first number inside the name."""
    names = module.split(".")
    pieces: list[str | None] = []
    layer = ""
    for place, name in enumerate(names):
        inside = _NUMBER.fullmatch(name) is not None and 0 < place < len(names) - 1
        if inside and names[place - 1] == "experts":
            pieces.append(r"\d+")
        elif inside and not layer:
            layer = name
            pieces.append(None)
        else:
            pieces.append(re.escape(name))
    return tuple(pieces), layer


def _alternatives(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"(?:{'|'.join(expressions)})"


def recipe_text(content: Mapping[str, Any]) -> str:
    """A recipe as YAML, in the style of the recipes that have a name. JSON's strings are YAML's double-quoted ones."""
    lines = [f"version: {content['version']}", f"description: {_quoted(content['description'])}"]
    lines += [f"container: {content['container']}"] if "container" in content else []
    lines.append("rules:")
    for rule in content["rules"]:
        more = [f"    {key}: {value}" for key, value in rule.items() if key != "match"]
        lines += [f"  - match: {_quoted(rule['match'])}", *more]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
