"""Recipes: a YAML file (or the options of a command) in, validated frozen dataclasses out.

A recipe decides bytes: which weights are quantized to what, by which search, spelled by which container. It must not
know machines (workers, devices, memory).

    model.py    Rule and Recipe, patterns of names, the defaults, and their JSON
    file.py     the YAML file
    options.py  the options that override it
"""

from ptqpipe.recipe.file import load_recipe, parse_recipe
from ptqpipe.recipe.model import DEFAULT_FUSE, DEFAULT_KEEP, Recipe, Rule, matches
from ptqpipe.recipe.options import RecipeOptions, build_recipe

__all__ = [
    "DEFAULT_FUSE",
    "DEFAULT_KEEP",
    "Recipe",
    "RecipeOptions",
    "Rule",
    "build_recipe",
    "load_recipe",
    "matches",
    "parse_recipe",
]
