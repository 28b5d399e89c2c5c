"""Decides a run of several stages from the call and from headers. Reads no weight and writes nothing."""

from functools import cache
from pathlib import Path
from typing import Any

from ptqpipe.check.evaluate.tokenized_text import check_text
from ptqpipe.checkpoint import Mode, check_disjoint, name_of, resolve_source
from ptqpipe.conversion.convert_summary import missing_config, warnings_of
from ptqpipe.conversion.prepare import prepare as prepare_conversion
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.embedder import is_embedder
from ptqpipe.pipeline import validate
from ptqpipe.pipeline.budget.command import Budget, check_budget
from ptqpipe.pipeline.fit_preset import foldable, own_head_bytes, rotatable, with_own_text
from ptqpipe.pipeline.presets import TABLE, WEIGHTS, kind_of
from ptqpipe.pipeline.run_plan import Pipeline
from ptqpipe.recipe.file import build_recipe
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions, check_options
from ptqpipe.run.machine import Machine
from ptqpipe.runtime.loading import load_tokenizer


def prepare(
    model: str | Path,
    recipe: RecipeOptions | None,
    recipe_path: Path | None,
    out: Path | None,
    work: PipelineOptions,
    mode: Mode,
    machine: Machine,
) -> Pipeline:
    """Decides a run from the call and from headers. Raises what `pipeline` raises before any work; writes nothing."""
    recipe = recipe or RecipeOptions()
    check_options(work)
    validate.check_call(work, recipe, recipe_path)
    texts = validate.texts_of(work.data)
    if work.reader is not None and work.budget is None:
        recipe = validate.for_reader(work.reader, recipe, recipe_path)
    formats = validate.formats_for(work.reader, work.formats) if work.budget is not None else ()
    path = resolve_source(str(model))
    if validate.own_weight(work.data) is not None and is_embedder(path):
        raise UsageError(
            f"{path} is a sentence embedder, which writes no text: {arg('data', validate.SELF)} is for models that "
            f"continue text; give {arg('data', 'FILE')}"
        )
    validate.check_data(path, work, texts)
    tokenizer = cache(lambda: load_tokenizer(path))
    notes = [line for text in work.eval for line in check_text(text, tokenizer, field=work.text_field)]
    if work.budget is not None:
        check_budget(path, Budget.parse(work.budget), formats, requantize=work.requantize)
        if work.reader is not None:
            recipe = recipe.but(container=validate.container_of_all(work.reader, formats))
        validate.check_cache(path, build_recipe(recipe, path=recipe_path), work)
        preset = TABLE[WEIGHTS][work.quality or "best"] if work.data else None
        validate.check_untie(work, arg("budget", work.budget), rotates=bool(preset and preset.rotations))
        target = out or Path(f"{name_of(path)}-MIXED")
        check_disjoint(path, target)
        nbytes = Budget.parse(work.budget).nbytes or 0
        built_from = (path, target, recipe, recipe_path, work, preset, texts)
        return Pipeline(*built_from, True, nbytes, (), mode, machine, notes=notes)
    options: dict[str, Any] = {"collected": bool(work.data), "reader": work.reader, "requantize": work.requantize}
    with prepare_conversion(path, options=recipe, recipe_path=recipe_path, out=out, **options) as prepared:
        built = prepared.outputs.recipe
        validate.check_cache(path, built, work)
        preset = TABLE[kind_of(built.schemes())][work.quality or "best"] if work.data else None
        names = " with ".join(scheme.name for scheme in built.schemes())
        validate.check_untie(work, names, rotates=bool(preset and preset.rotations))
        preset = foldable(rotatable(preset, prepared.source, built, untie=work.untie), prepared.source)
        if preset is not None and preset.own_text and validate.own_weight(work.data) is None:
            preset, work = with_own_text(preset, work, path)
            texts = validate.texts_of(work.data)
        warnings = [] if preset is None else list(preset.without)
        needs = preset is not None and bool(validate.has_static(built) or preset.transform or not preset.method)
        nbytes, target = prepared.layout.file_bytes + own_head_bytes(preset, prepared.source), prepared.out
        no_config = missing_config(prepared)
        warnings += [*([no_config] if no_config is not None else []), *warnings_of(prepared)]
    built_from = (path, target, recipe, recipe_path, work, preset, texts)
    return Pipeline(*built_from, needs, nbytes, tuple(warnings), mode, machine, notes=notes)
