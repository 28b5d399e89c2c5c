"""Recipes: a YAML file (or the options of a command) in, validated frozen dataclasses out.

A recipe decides bytes: which weights are quantized to what, by which search, stored in which container. It must not
know machines (workers, devices, memory).

    recipe.py     Rule and Recipe, patterns of names, and their JSON
    file.py       the YAML file, the recipes that have a name (``recipes/`` at the top of the repository), and the
                  options of a call that override a file (their table is ``ptqpipe/recipe/options.py``)
"""
