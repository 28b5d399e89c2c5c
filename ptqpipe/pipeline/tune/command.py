"""tune: learned codes for the weights of a model, one decoder layer at a time, into a folder (`learned_codes.py`).

The plan is convert's: tune changes the weights that a conversion with the same recipe quantizes. "layerwise" takes the
scales and codes that it would write with statistics, the other methods the nearest codes as a start. Moments are
collected for the current layer and then discarded, so they are never on disk. A folder of statistics gives the static
scales of inputs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ptqpipe.checkpoint import Finished, Mode, check_place
from ptqpipe.conversion.prepare import prepare
from ptqpipe.models.language_model import layered_model_of
from ptqpipe.pipeline.tune import backwards, codes_folder, tune_samples
from ptqpipe.pipeline.tune.layer_loop import tune_layers
from ptqpipe.pipeline.tune.options import TuneOptions, check
from ptqpipe.pipeline.tune.tune_summary import described
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import Machine, compute_threads, peak_bytes, threads
from ptqpipe.runtime.loading import config_of
from ptqpipe.runtime.memory import keep_freed_memory


def tune(
    model: str | Path,
    data: Sequence[str],
    out: Path,
    *,
    recipe: RecipeOptions | None = None,
    recipe_path: Path | None = None,
    stats: Path | None = None,
    options: TuneOptions | None = None,
    mode: Mode = "new",
    machine: Machine | None = None,
    log: Callable[[str], None] | None = None,
) -> Finished:
    """Writes a folder of learned codes.

    log  called with what is about to be done, before the model runs

    Raises UsageError for data or settings that do not fit the model, CheckpointError for a model that cannot be run,
    NumericsError for weights or activations that are not finite, OutputError for the folder.
    """
    begun = time.monotonic()
    options, machine = options or TuneOptions(), machine or Machine(compute_threads())
    check(options)
    descent = options.descent
    prepared = prepare(model, options=recipe, recipe_path=recipe_path, out=out, stats=stats, collected=True)
    with prepared:
        check_place(out)
        config, units = config_of(prepared.source, layered_model_of), prepared.outputs.plan.units
        samples = tune_samples.load(data, prepared.source.reader.path, options, config)
        if samples.images or not backwards.are_used(prepared, options):
            options = replace(options, metric="output")  # the reverse pass takes rows of one length
        if descent is not None:
            options = descent.with_rate(prepared, options)
            descent.check(prepared, samples, options, machine)
        folder = codes_folder.open_folder(out, prepared, samples, options, mode=mode)
        largest = max((m.shape[0] * m.shape[1] for unit in units for m in unit.members), default=0)
        notes: list[str] = []
        with folder, threads(machine.workers, largest=largest):
            if log is not None:
                log(described(prepared, samples, options, config))
            if codes_folder.ENDED not in folder.done:
                keep_freed_memory()  # of moments, hidden states: clearing fresh pages is a tenth of the time
                notes = tune_layers(prepared, samples, folder, options, machine)
            if descent is not None:
                descent.improve(prepared, samples, folder, options, machine)
            content = codes_folder.content(prepared, samples, options, folder)
            folder.finish(content)
    return Finished(out, content, time.monotonic() - begun, peak_bytes(), tuple(notes))
