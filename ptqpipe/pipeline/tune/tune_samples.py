"""The samples of tune: which are learned from, which judge, and which are run backwards."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptqpipe.calibration.backward import thinned
from ptqpipe.calibration.data import Samples, samples_of_model
from ptqpipe.calibration.runner import BATCH_TOKENS, in_batches
from ptqpipe.errors import UsageError, arg
from ptqpipe.pipeline.tune.options import TuneOptions


def load(data: Sequence[str], model: Path, options: TuneOptions, config: Any) -> Samples:
    """The rows of the data. UsageError for data that do not fit the model or the method."""
    samples = samples_of_model(
        data,
        model,
        config,
        samples=options.samples,
        seqlen=options.seqlen,
        seed=options.seed,
        field=options.text_field,
        holdout=None,
    )
    if samples.images and options.metric == "kl":
        raise UsageError(
            f"{arg('metric', 'kl')} takes no rows with images; use {arg('metric', 'output')}, or data without images"
        )
    return samples.judged() if options.follows and samples.windows.numel() > BATCH_TOKENS else samples


def divided(batches: int, held_out: float) -> tuple[list[int], list[int]]:
    """(numbers of the batches that are learned from, of those that judge): the last ones, as many as the share says; of
    a single batch both."""
    every = list(range(batches))
    judged = every[-max(1, round(batches * held_out)) :] if batches > 1 else every
    return every[: -len(judged)] or every, judged


def learned_from(samples: Samples, options: TuneOptions) -> Samples:
    """The samples that are run backwards; none that are held out, or of GPTQ in order none of the batches that only
    judge, as `divided` says by their share."""
    held_out = options.settings.held_out
    if not options.follows:
        return thinned(replace(samples, held_out=samples.held_out[:0]))
    batches = [*in_batches(samples.windows), *in_batches(samples.held_out)]
    return thinned(samples.first(sum(len(batches[i]) for i in divided(len(batches), held_out)[0])))
