"""recipes: those that come with ptqpipe, listed by name, or one of them as its file has it."""

import textwrap
from typing import Any

from ptqpipe.errors import arg
from ptqpipe.recipe.file import GROUPS, load_recipe, named_recipe, named_recipes


def names() -> list[str]:
    return list(named_recipes())


def to_json() -> list[dict[str, Any]]:
    """Name, group, file, description, formats, and whether statistics are needed, of every recipe that has a name."""
    loaded = [(name, path, load_recipe(path)) for name, path in named_recipes().items()]
    return [
        {
            "name": name,
            "group": path.parent.name,
            "file": str(path),
            "description": recipe.description,
            "formats": [scheme.name for scheme in recipe.schemes()],
            "needs_stats": any(rule.calibrated for rule in recipe.rules),
        }
        for name, path, recipe in loaded
    ]


def render() -> str:
    """The list for a terminal of 80 columns, group by group."""
    rows, lines = to_json(), list[str]()
    width = max(len(one["name"]) for one in rows)
    for group, title in GROUPS.items():
        lines += ["", f"{title}:"] if lines else [f"{title}:"]
        for one in (one for one in rows if one["group"] == group):
            text = one["description"] + (f"; needs {arg('stats')}" if one["needs_stats"] else "")
            start = f"  {one['name']:<{width}}  "
            lines += textwrap.wrap(text, 80, initial_indent=start, subsequent_indent=" " * len(start))
    return "\n".join(lines)


def text_of(name: str) -> str:
    """The file of a recipe. UsageError with near names."""
    return named_recipe(name).read_text(encoding="utf-8")
