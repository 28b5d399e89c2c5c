"""Decides a conversion that is a run of its own, as `convert` makes it without data, budget and evaluation."""

from typing import Any

from ptqpipe.conversion.call_recipe import best_with
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.prepare import prepare
from ptqpipe.pipeline.options import ConvertCommand
from ptqpipe.pipeline.validate import for_reader


def prepare_alone(options: ConvertCommand) -> Conversion:
    """Reads headers only. Raises what ``conversion/prepare.py`` raises."""
    recipe = options.recipe_options
    if options.reader is not None:
        recipe = for_reader(options.reader, recipe, options.recipe)
    named: dict[str, Any] = {"recipe_path": options.recipe, "stats": options.stats, "codes": options.codes}
    return prepare(
        options.model,
        options=best_with(recipe, **named),
        out=options.out,
        reader=options.reader,
        requantize=options.requantize,
        dry=options.dry_run,
        **named,
    )
