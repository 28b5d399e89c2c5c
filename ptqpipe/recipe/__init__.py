"""Recipes: a YAML file (or the options of a command) in, validated frozen dataclasses out.

A recipe decides bytes: which weights are quantized to what, by which search, stored in which container. It must not
know machines (workers, devices, memory).

    model.py      Rule and Recipe, patterns of names, and their JSON
    file.py       the YAML file, the recipes that have a name (``recipes/`` at the top of the repository), and the
                  options of a call that override a file (their table is ``ptqpipe/recipe/options.py``)
    write.py      recipes that plan makes
"""

from ptqpipe.recipe.file import GROUPS, build_recipe, load_recipe, named_recipe, named_recipes, parse_recipe
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.recipe.recipe import BY_RECIPE, IGNORED, Recipe, Rule, failing_facts, matches
from ptqpipe.recipe.write import exact_patterns, recipe_text
