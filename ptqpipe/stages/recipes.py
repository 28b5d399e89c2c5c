"""recipes: those that come with ptqpipe, listed by name, or one of them as its file has it."""

import textwrap
from typing import Any

from ptqpipe.errors import UsageError, did_you_mean
from ptqpipe.recipe import load_recipe, named_recipes


def to_json() -> list[dict[str, Any]]:
    """Name, description, formats, and whether statistics are needed, of every recipe that has a name."""
    loaded = {name: load_recipe(path) for name, path in named_recipes().items()}
    return [
        {
            "name": name,
            "description": recipe.description,
            "formats": [scheme.name for scheme in recipe.schemes()],
            "needs_stats": any(rule.calibrated for rule in recipe.rules),
        }
        for name, recipe in loaded.items()
    ]


def render() -> str:
    """The list for a terminal of 80 columns."""
    rows, lines = to_json(), []
    width = max(len(one["name"]) for one in rows)
    for one in rows:
        text = f"{one['description']}{'; needs --stats' if one['needs_stats'] else ''}"
        start = f"{one['name']:<{width}}  "
        lines += textwrap.wrap(text, 80, initial_indent=start, subsequent_indent=" " * len(start))
    return "\n".join(lines)


def text_of(name: str) -> str:
    """The file of a recipe. UsageError with the nearest and the known names."""
    known = named_recipes()
    path = known.get(name.lower().replace("-", "_"))
    if path is None:
        raise UsageError(f"unknown recipe {name!r}; {did_you_mean(name.lower(), known, listed=True)}")
    return path.read_text(encoding="utf-8")
