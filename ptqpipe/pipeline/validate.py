"""Checks a call of the pipeline before any work: options that contradict each other, files that are not there, data
that the model cannot take."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from ptqpipe.calibration.data import check_samples, check_seed, sample_length
from ptqpipe.calibration.generate import check_windows
from ptqpipe.calibration.kv import check_seen
from ptqpipe.calibration.rows import files_of, weighted
from ptqpipe.conversion.kv_cache import cache_specs
from ptqpipe.conversion.planned_outputs import container_of
from ptqpipe.errors import UsageError, arg, usage
from ptqpipe.models.reader_facts import check_rotation, container_for, formats_of
from ptqpipe.models.source import Source
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.pipeline.budget.plan_units import DEFAULT_FORMATS, KEEP
from ptqpipe.recipe.file import build_recipe
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions
from ptqpipe.recipe.recipe import Recipe
from ptqpipe.runtime.loading import read_layered_config

SELF = "self"
_BY_QUALITY = ("algorithm", "objective", "damping", "refine_passes")


def check_call(work: PipelineOptions, recipe: RecipeOptions, recipe_path: Path | None) -> None:
    """UsageError for options that contradict each other, and for texts that do not exist."""
    if work.quality is not None and not work.data:
        raise UsageError(
            f"{arg('quality', work.quality)} says how much is computed with data; add {arg('data', 'FILE')}, or "
            f"{arg('data', SELF)}"
        )
    if work.untie and not work.data:
        raise UsageError(
            f"{arg('untie', True)} is for the rotations that {arg('quality', 'best')} learns from data; add "
            f"{arg('data', 'FILE')}, or {arg('data', SELF)}"
        )
    windows = {name: getattr(work, name) for name in ("samples", "seqlen", "seed")}
    chosen = next((name for name, value in windows.items() if value != getattr(PipelineOptions(), name)), None)
    if chosen is not None and not work.data:
        raise UsageError(_about_data(arg(chosen, windows[chosen])))
    if work.text_field is not None and not (work.data or work.eval):
        raise UsageError(_about_data(arg("text_field", work.text_field)))
    if work.text_field is not None and own_weight(work.data) is not None and len(work.data) > 1:
        raise UsageError(
            f"{arg('text_field', work.text_field)} is not in the rows that {arg('data', SELF)} generates; leave one of "
            "them out"
        )
    if work.formats is not None and work.budget is None:
        raise UsageError(
            f"{arg('formats')} names what {arg('budget')} chooses from; add {arg('budget')}, or give one "
            f"{arg('format')}"
        )
    decider = arg("recipe") if recipe_path is not None else arg("format") if recipe.format is not None else ""
    if recipe.mtp != "keep":
        decider = arg("mtp", recipe.mtp)
    if work.budget is not None and decider:
        raise UsageError(f"{arg('budget')} chooses the formats, and {decider} does; give one of them")
    decided = next((name for name in _BY_QUALITY if work.data and name in recipe.stated), None)
    if decided is not None:
        raise UsageError(
            f"{arg(decided)} is decided by {arg('quality')} where there is {arg('data')}; leave it out, "
            f"or use {usage('calibrate', 'MODEL', data='FILE', out='FOLDER')}, then "
            f"{usage('convert', 'MODEL', stats='FOLDER')}"
        )
    built = build_recipe(recipe, path=recipe_path)
    if not work.data and (built.kv_cache != "none" or built.bias_correction):
        option = arg("kv_cache" if built.kv_cache != "none" else "bias_correction")
        raise UsageError(f"{option} needs statistics of a text; add {arg('data', 'FILE')}, or {arg('data', SELF)}")
    if work.quality == "fast" and built.rotations:
        raise UsageError(
            f"{arg('quality', 'fast')} weights scales by moments of each input alone, which do not say those of "
            f"rotated ones; use {arg('quality')} good or best, or leave {arg('rotate')} out"
        )
    if work.budget is not None and work.reader is not None and built.rotations:
        check_rotation(work.reader, None)
    files_of(work.eval, option="eval")


def _about_data(option: str) -> str:
    return f"{option} says how {arg('data')} is read; add {arg('data', 'FILE')}, or leave it out"


def check_data(path: Path, work: PipelineOptions, texts: Sequence[str]) -> None:
    """UsageError for windows that the model cannot take, or of which the texts have too few."""
    if work.data:
        config = read_layered_config(path)
        seqlen = sample_length(config, path) if work.seqlen is None else work.seqlen
        check_windows(config, samples=work.samples, seqlen=seqlen)
        check_seed(work.seed)
        if texts:
            _, samples = own_share(work.data, work.samples)
            check_samples(texts, path, samples=samples, seqlen=seqlen, field=work.text_field)


def check_cache(path: Path, recipe: Recipe, work: PipelineOptions) -> None:
    """UsageError for scales of a KV cache of which calibrating would see no keys and values."""
    if work.data and recipe.kv_cache != "none":
        container = container_of(recipe, recipe.container_name)
        with Source.open(path) as source:
            modules = cache_specs(source, recipe.kv_cache, container, container_name=recipe.container_name)
        check_seen(modules, read_layered_config(path))


def check_untie(work: PipelineOptions, what: str, *, rotates: bool) -> None:
    """UsageError for ``untie`` where the table has no rotations."""
    if work.untie and not rotates:
        quality = "" if work.quality is None else f" with {arg('quality', work.quality)}"
        raise UsageError(
            f"{arg('untie', True)} is for the rotations that {arg('quality', 'best')} learns for a format with "
            f"quantized inputs, and {what}{quality} has none; leave {arg('untie')} out"
        )


def texts_of(data: Sequence[str]) -> list[str]:
    """The files and data sets of ``data``, each with a weight where they are mixed with the model's own text: a folder
    stands for the texts in it. UsageError where it has none, and for a file that does not exist."""
    texts = [name for name in data if not _is_own(name)]
    if len(data) - len(texts) > 1:
        raise UsageError(f"{arg('data')} has self twice; give it once, self=2 for twice its share of the windows")
    if not texts or len(texts) == len(data):
        return files_of(texts)
    return files_of([name if weighted(name)[1] is not None else f"{name}=1" for name in texts])


def own_weight(data: Sequence[str]) -> float | None:
    """The weight of the text that the model writes itself; None where ``data`` has none of it."""
    return next((weighted(name)[1] or 1.0 for name in data if _is_own(name)), None)


def own_share(data: Sequence[str], samples: int) -> tuple[int, int]:
    """(how many of the windows the model writes itself, how many files give): both rounded up."""
    own, others = own_weight(data) or 0.0, sum(weighted(name)[1] or 1.0 for name in data if not _is_own(name))
    return ceil(samples * own / (own + others)), ceil(samples * others / (own + others))


def _is_own(name: str) -> bool:
    return weighted(name)[0] == SELF and not Path(SELF).exists()


def formats_for(reader: str | None, formats: tuple[str, ...] | None) -> tuple[str, ...]:
    """What a budget chooses from: those of the call, or the usual ones that the reader runs. UsageError for one that it
    does not run."""
    if reader is None:
        return formats or DEFAULT_FORMATS
    supported = formats_of(reader)
    if formats is None:
        return tuple(name for name in DEFAULT_FORMATS if name in supported or name == KEEP)
    for name in formats:
        if name.lower() != KEEP:
            container_for(reader, [get_scheme(name)])
    return formats


def for_reader(reader: str, recipe: RecipeOptions, recipe_path: Path | None) -> RecipeOptions:
    """The options with the container from which the reader runs what they ask for. UsageError where it does not run
    it."""
    built = build_recipe(recipe, path=recipe_path)
    container = None if built.container is None else built.container_name
    return recipe.but(container=container_for(reader, built.schemes(), container=container))


def container_of_all(reader: str, formats: Sequence[str]) -> str:
    """The container from which a reader runs all of these formats in one checkpoint."""
    return container_for(reader, [get_scheme(name) for name in formats if name.lower() != KEEP])


def has_static(recipe: Recipe) -> bool:
    """Whether a conversion writes numbers that come from statistics: scales of inputs or of the KV cache, biases."""
    static = any(scheme.needs_input_global_scale for scheme in recipe.schemes())
    return static or recipe.kv_cache != "none" or recipe.bias_correction
