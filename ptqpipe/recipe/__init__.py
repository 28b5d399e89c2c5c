"""Recipes: a YAML file (or the options of a command) in, validated frozen dataclasses out.

A recipe decides bytes: which weights are quantized to what, by which search, stored in which container. It must not
know machines (workers, devices, memory).

    model.py      Rule and Recipe, patterns of names, and their JSON
    recipes/      the built-in recipes
    file.py       the YAML file, and the options of a call that override it (their table is ``ptqpipe/options.py``)
    write.py      recipes that plan makes
"""

from ptqpipe.options import RecipeOptions
from ptqpipe.recipe.file import build_recipe, load_recipe, named_recipes, parse_recipe
from ptqpipe.recipe.model import BY_RECIPE, IGNORED, Recipe, Rule, failing_facts, matches
from ptqpipe.recipe.write import exact_patterns, recipe_text
