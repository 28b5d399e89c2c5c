"""Checks a run's data against the model, from headers."""

from collections.abc import Sequence
from pathlib import Path

from ptqpipe.calibration.data import check_samples, check_seed
from ptqpipe.calibration.generate import check_windows
from ptqpipe.calibration.kv import check_seen
from ptqpipe.conversion.kv_cache import cache_specs
from ptqpipe.conversion.planned_outputs import container_of
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.embedder import is_embedder
from ptqpipe.models.language_model import layered_model_of
from ptqpipe.models.source import Source
from ptqpipe.pipeline import validate
from ptqpipe.pipeline.presets import QualityPreset
from ptqpipe.recipe.options import PipelineOptions
from ptqpipe.recipe.recipe import Recipe
from ptqpipe.runtime.loading import default_length, read_config


def check_data(path: Path, work: PipelineOptions, texts: Sequence[str]) -> None:
    """UsageError for windows that the model cannot take, or of which the texts have too few."""
    if validate.own_weight(work.data) is not None and is_embedder(path):
        raise UsageError(
            f"{path} is a sentence embedder, which writes no text: {arg('data', validate.SELF)} is for models that "
            f"continue text; give {arg('data', 'FILE')}"
        )
    if work.data:
        config = read_config(path, layered_model_of)
        seqlen = default_length(config, path) if work.seqlen is None else work.seqlen
        check_windows(config, samples=work.samples, seqlen=seqlen)
        check_seed(work.seed)
        if texts:
            _, samples = validate.own_share(work.data, work.samples)
            check_samples(texts, path, samples=samples, seqlen=seqlen, field=work.text_field)


def check_cache(path: Path, recipe: Recipe, work: PipelineOptions) -> None:
    """UsageError for scales of a KV cache of which calibrating would see no keys and values."""
    if work.data and recipe.kv_cache != "none":
        container = container_of(recipe, recipe.container_name)
        with Source.open(path) as source:
            modules = cache_specs(source, recipe.kv_cache, container, container_name=recipe.container_name)
        check_seen(modules, read_config(path, layered_model_of))


def check_untie(work: PipelineOptions, preset: QualityPreset | None, what: str) -> None:
    """UsageError for ``untie`` where the table has no rotations."""
    if work.untie and (preset is None or not preset.rotations):
        quality = "" if work.quality is None else f" with {arg('quality', work.quality)}"
        raise UsageError(
            f"{arg('untie', True)} is for the rotations that {arg('quality', 'best')} learns for a format with "
            f"quantized inputs, and {what}{quality} has none; leave {arg('untie')} out"
        )
