"""Decides a run of several stages from the call and from headers. Reads no weight and writes nothing."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ptqpipe.calibration.data import check_samples, check_seed
from ptqpipe.calibration.generate import check_windows
from ptqpipe.calibration.kv import check_seen
from ptqpipe.calibration.rows import weighted
from ptqpipe.check.evaluate.tokenized_text import check_text
from ptqpipe.checkpoint import Mode, check_disjoint, name_of, resolve_source
from ptqpipe.conversion.convert_summary import missing_config, warnings_of
from ptqpipe.conversion.kv_cache import cache_specs
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.planned_outputs import container_of
from ptqpipe.conversion.prepare import prepare as prepare_conversion
from ptqpipe.conversion.transform.plan import foldable_rotations, matrix_bytes
from ptqpipe.errors import PtqError, UsageError, arg
from ptqpipe.models.folding import find_structure
from ptqpipe.models.language_model import takes_images
from ptqpipe.models.reader_facts import check_rotation
from ptqpipe.models.source import Source
from ptqpipe.pipeline import validate
from ptqpipe.pipeline.budget.command import Budget, check_budget
from ptqpipe.pipeline.presets import TABLE, WEIGHTS, QualityPreset, kind_of
from ptqpipe.pipeline.stages import Pipeline
from ptqpipe.recipe.file import build_recipe
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions, check_options
from ptqpipe.recipe.recipe import Recipe
from ptqpipe.run.machine import Machine
from ptqpipe.run.quantities import disk_size
from ptqpipe.runtime.loading import default_length, load_tokenizer, read_config

MATRICES = 128_000_000  # bytes of a record that the matrices of rotations may take: half of what is read


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
    _check_windows(path, work, texts)
    tokenizer = cache(lambda: load_tokenizer(path))
    notes = [line for text in work.eval for line in check_text(text, tokenizer, field=work.text_field)]
    if work.budget is not None:
        check_budget(path, Budget.parse(work.budget), formats, requantize=work.requantize)
        if work.reader is not None:
            if build_recipe(recipe).rotations:
                check_rotation(work.reader, None)
            recipe = recipe.but(container=validate.container_of_all(work.reader, formats))
        _check_cache(path, build_recipe(recipe, path=recipe_path), work)
        preset = TABLE[WEIGHTS][work.quality or "best"] if work.data else None
        _check_untie(work, preset, arg("budget", work.budget))
        target = out or Path(f"{name_of(path)}-MIXED")
        check_disjoint(path, target)
        nbytes = Budget.parse(work.budget).nbytes or 0
        built_from = (path, target, recipe, recipe_path, work, preset, texts)
        return Pipeline(*built_from, True, nbytes, (), mode, machine, notes=notes)
    options: dict[str, Any] = {"collected": bool(work.data), "reader": work.reader, "requantize": work.requantize}
    with prepare_conversion(path, options=recipe, recipe_path=recipe_path, out=out, **options) as prepared:
        built = prepared.outputs.recipe
        _check_cache(path, built, work)
        preset = TABLE[kind_of(built.schemes())][work.quality or "best"] if work.data else None
        _check_untie(work, preset, " with ".join(scheme.name for scheme in built.schemes()))
        preset = _foldable(_rotatable(preset, prepared.source, built, untie=work.untie), prepared.source)
        if preset is not None and preset.own_text and validate.own_weight(work.data) is None:
            preset, work = _with_own_text(preset, work, path)
            texts = validate.texts_of(work.data)
        warnings = [] if preset is None else list(preset.without)
        needs = preset is not None and bool(validate.has_static(built) or preset.transform or not preset.method)
        nbytes, target = prepared.layout.file_bytes + _own_head_bytes(preset, prepared.source), prepared.out
        no_config = missing_config(prepared)
        warnings += [*([no_config] if no_config is not None else []), *warnings_of(prepared)]
    built_from = (path, target, recipe, recipe_path, work, preset, texts)
    return Pipeline(*built_from, needs, nbytes, tuple(warnings), mode, machine, notes=notes)


def _check_windows(path: Path, work: PipelineOptions, texts: Sequence[str]) -> None:
    """UsageError for windows that the model cannot take, or of which the texts have too few."""
    if work.data:
        config = read_config(path)
        seqlen = default_length(config) if work.seqlen is None else work.seqlen
        check_windows(config, samples=work.samples, seqlen=seqlen)
        check_seed(work.seed)
        if texts:
            _, samples = validate.own_share(work.data, work.samples)
            check_samples(texts, path, samples=samples, seqlen=seqlen, field=work.text_field)


def _check_cache(path: Path, recipe: Recipe, work: PipelineOptions) -> None:
    """UsageError for scales of a KV cache of which calibrating would see no keys and values."""
    if work.data and recipe.kv_cache != "none":
        container = container_of(recipe, recipe.container_name)
        with Source.open(path) as source:
            modules = cache_specs(source, recipe.kv_cache, container, container_name=recipe.container_name)
        check_seen(modules, read_config(path))


def _check_untie(work: PipelineOptions, preset: QualityPreset | None, what: str) -> None:
    """UsageError for ``untie`` where the table has no rotations."""
    if work.untie and (preset is None or not preset.rotations):
        quality = "" if work.quality is None else f" with {arg('quality', work.quality)}"
        raise UsageError(
            f"{arg('untie', True)} is for the rotations that {arg('quality', 'best')} learns for a format with "
            f"quantized inputs, and {what}{quality} has none; leave {arg('untie')} out"
        )


def _own_head_bytes(preset: QualityPreset | None, source: Source) -> int:
    """What a head takes that becomes a tensor of its own; 0 for any other one."""
    if preset is None or "rotate_residual" not in preset.rotations:
        return 0
    structure = find_structure(source.tensors, source.reader.config)
    return source.reader.entries[structure.embeddings[0]].nbytes if structure.tied else 0


def _rotatable(preset: QualityPreset | None, source: Source, recipe: Recipe, *, untie: bool) -> QualityPreset | None:
    """The preset with those of its rotations that can be learned for this model, and why the others cannot be."""
    if preset is None or not preset.rotations:
        return preset
    scheme, reader = recipe.schemes()[0], source.reader
    if recipe.rotations:
        return _without_rotations(preset, f"{arg('rotate')} rotates inputs while the model runs")
    if takes_images(read_config(reader.path), reader.path):
        return _without_rotations(preset, "they are learned from text alone, and the model takes images")
    if source.container is not None:
        return _without_rotations(preset, "the model is quantized already")
    options = TransformOptions(transforms=preset.rotations, learn=preset.steps, format=scheme.name, untie=untie)
    try:
        structure = find_structure(source.tensors, reader.config)
    except PtqError as error:
        return _without_rotations(preset, str(error))
    names, refused = foldable_rotations(structure, options)
    refused = [reason.replace("is refused:", "is left out:", 1) for reason in refused]
    if matrix_bytes(names, structure, options) > MATRICES and "rotate_values" in names:
        names.remove("rotate_values")
        refused.append(f"rotate_values is left out: the matrices would take over {disk_size(MATRICES)} in the record")
    return preset._replace(rotations=",".join(names), without=(*preset.without, *refused))


def _with_own_text(preset: QualityPreset, work: PipelineOptions, path: Path) -> tuple[QualityPreset, PipelineOptions]:
    """The call with the model's own text beside its data, half of the windows; or the preset, and why there is none."""
    if takes_images(read_config(path), path):
        why = "the model takes images, and writes text alone"
    elif work.text_field is not None:
        why = f"{arg('text_field', work.text_field)} is in no row of it"
    else:
        weights = sum(weighted(name)[1] or 1.0 for name in work.data)
        return preset, replace(work, data=(*work.data, f"{validate.SELF}={weights!r}"))
    return preset._replace(own_text=False, without=(*preset.without, f"the model's own text is left out: {why}")), work


def _foldable(preset: QualityPreset | None, source: Source) -> QualityPreset | None:
    """The preset, without its transform where this family's layers are not known well enough to fold it."""
    if preset is None or not preset.transform:
        return preset
    try:
        find_structure(source.tensors, source.reader.config)
    except PtqError as error:
        line = f"{preset.transform} is left out: {error}"
        return preset._replace(transform="", without=(*preset.without, line))
    return preset


def _without_rotations(preset: QualityPreset, why: str) -> QualityPreset:
    return preset._replace(rotations="", without=(*preset.without, f"rotations are left out: {why}"))
