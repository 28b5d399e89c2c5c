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
from ptqpipe.conversion import cache_specs, container_of
from ptqpipe.conversion.convert_summary import missing_config, warnings_of
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.prepare import prepare as prepare_conversion
from ptqpipe.conversion.transform.plan import foldable_rotations, matrix_bytes
from ptqpipe.errors import PtqError, UsageError, arg
from ptqpipe.models.folding import find_structure
from ptqpipe.models.language_model import takes_images
from ptqpipe.models.reader_facts import check_rotation
from ptqpipe.models.source import Source
from ptqpipe.pipeline import call
from ptqpipe.pipeline.budget.command import Budget, check_budget
from ptqpipe.pipeline.presets import TABLE, WEIGHTS, Way, kind_of
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
    call.check_call(work, recipe, recipe_path)
    texts = call.texts_of(work.data)
    if work.reader is not None and work.budget is None:
        recipe = call.for_reader(work.reader, recipe, recipe_path)
    formats = call.formats_for(work.reader, work.formats) if work.budget is not None else ()
    path = resolve_source(str(model))
    _check_windows(path, work, texts)
    tokenizer = cache(lambda: load_tokenizer(path))
    notes = [line for text in work.eval for line in check_text(text, tokenizer, field=work.text_field)]
    if work.budget is not None:
        check_budget(path, Budget.parse(work.budget), formats, requantize=work.requantize)
        if work.reader is not None:
            if build_recipe(recipe).rotations:
                check_rotation(work.reader, None)
            recipe = replace(recipe, container=call.container_of_all(work.reader, formats))
        _check_cache(path, build_recipe(recipe, path=recipe_path), work)
        way = TABLE[WEIGHTS][work.quality or "best"] if work.data else None
        _check_untie(work, way, arg("budget", work.budget))
        target = out or Path(f"{name_of(path)}-MIXED")
        check_disjoint(path, target)
        nbytes = Budget.parse(work.budget).nbytes or 0
        built_from = (path, target, recipe, recipe_path, work, way, texts)
        return Pipeline(*built_from, True, nbytes, (), mode, machine, notes=notes)
    asked: dict[str, Any] = {"collected": bool(work.data), "reader": work.reader, "requantize": work.requantize}
    with prepare_conversion(path, options=recipe, recipe_path=recipe_path, out=out, **asked) as prepared:
        built = prepared.outputs.recipe
        _check_cache(path, built, work)
        way = TABLE[kind_of(built.schemes())][work.quality or "best"] if work.data else None
        _check_untie(work, way, " with ".join(scheme.name for scheme in built.schemes()))
        way = _foldable(_rotatable(way, prepared.source, built, untie=work.untie), prepared.source)
        if way is not None and way.own_text and call.own_weight(work.data) is None:
            way, work = _with_own_text(way, work, path)
            texts = call.texts_of(work.data)
        warnings = [] if way is None else list(way.without)
        needs = way is not None and bool(call.has_static(built) or way.transform or not way.method)
        nbytes, target = prepared.layout.file_bytes + _own_head_bytes(way, prepared.source), prepared.out
        no_config = missing_config(prepared)
        warnings += [*([no_config] if no_config is not None else []), *warnings_of(prepared)]
    built_from = (path, target, recipe, recipe_path, work, way, texts)
    return Pipeline(*built_from, needs, nbytes, tuple(warnings), mode, machine, notes=notes)


def _check_windows(path: Path, work: PipelineOptions, texts: Sequence[str]) -> None:
    """UsageError for windows that the model cannot take, or of which the texts have too few."""
    if work.data:
        config = read_config(path)
        seqlen = default_length(config) if work.seqlen is None else work.seqlen
        check_windows(config, samples=work.samples, seqlen=seqlen)
        check_seed(work.seed)
        if texts:
            _, samples = call.own_share(work.data, work.samples)
            check_samples(texts, path, samples=samples, seqlen=seqlen, field=work.text_field)


def _check_cache(path: Path, recipe: Recipe, work: PipelineOptions) -> None:
    """UsageError for scales of a KV cache of which calibrating would see no keys and values."""
    if work.data and recipe.kv_cache != "none":
        container = container_of(recipe, recipe.container_name)
        with Source.open(path) as source:
            modules = cache_specs(source, recipe.kv_cache, container, container_name=recipe.container_name)
        check_seen(modules, read_config(path))


def _check_untie(work: PipelineOptions, way: Way | None, what: str) -> None:
    """UsageError for ``untie`` where the table has no rotations."""
    if work.untie and (way is None or not way.rotations):
        quality = "" if work.quality is None else f" with {arg('quality', work.quality)}"
        raise UsageError(
            f"{arg('untie', True)} is for the rotations that {arg('quality', 'best')} learns for a format with "
            f"quantized inputs, and {what}{quality} has none; leave {arg('untie')} out"
        )


def _own_head_bytes(way: Way | None, source: Source) -> int:
    """What a head takes that becomes a tensor of its own; 0 for any other one."""
    if way is None or "rotate_residual" not in way.rotations:
        return 0
    structure = find_structure(source.tensors, source.reader.config)
    return source.reader.entries[structure.embeddings[0]].nbytes if structure.tied else 0


def _rotatable(way: Way | None, source: Source, recipe: Recipe, *, untie: bool) -> Way | None:
    """The way with those of its rotations that can be learned for this model, and why the others cannot be."""
    if way is None or not way.rotations:
        return way
    scheme, reader = recipe.schemes()[0], source.reader
    if recipe.rotations:
        return _without_rotations(way, f"{arg('rotate')} rotates inputs while the model runs")
    if takes_images(read_config(reader.path), reader.path):
        return _without_rotations(way, "they are learned from text alone, and the model takes images")
    if source.container is not None:
        return _without_rotations(way, "the model is quantized already")
    options = TransformOptions(transforms=way.rotations, learn=way.steps, format=scheme.name, untie=untie)
    try:
        structure = find_structure(source.tensors, reader.config)
    except PtqError as error:
        return _without_rotations(way, str(error))
    names, refused = foldable_rotations(structure, options)
    refused = [reason.replace("is refused:", "is left out:", 1) for reason in refused]
    if matrix_bytes(names, structure, options) > MATRICES and "rotate_values" in names:
        names.remove("rotate_values")
        refused.append(f"rotate_values is left out: the matrices would take over {disk_size(MATRICES)} in the record")
    return way._replace(rotations=",".join(names), without=(*way.without, *refused))


def _with_own_text(way: Way, work: PipelineOptions, path: Path) -> tuple[Way, PipelineOptions]:
    """The call with the model's own text beside its data, half of the windows; or the way, and why it is left out."""
    if takes_images(read_config(path), path):
        why = "the model takes images, and writes text alone"
    elif work.text_field is not None:
        why = f"{arg('text_field', work.text_field)} is in no row of it"
    else:
        weights = sum(weighted(name)[1] or 1.0 for name in work.data)
        return way, replace(work, data=(*work.data, f"{call.SELF}={weights!r}"))
    return way._replace(own_text=False, without=(*way.without, f"the model's own text is left out: {why}")), work


def _foldable(way: Way | None, source: Source) -> Way | None:
    """The way, without its transform where this family's layers are not known well enough to fold it."""
    if way is None or not way.transform:
        return way
    try:
        find_structure(source.tensors, source.reader.config)
    except PtqError as error:
        line = f"{way.transform} is left out: {error}"
        return way._replace(transform="", without=(*way.without, line))
    return way


def _without_rotations(way: Way, why: str) -> Way:
    return way._replace(rotations="", without=(*way.without, f"rotations are left out: {why}"))
