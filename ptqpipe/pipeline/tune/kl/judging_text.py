"""The text that judges descent on the whole model: held-out samples of each source, and the package's sample text."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from ptqpipe.calibration.data import HELD_SHARE, Samples
from ptqpipe.check.evaluate.tokenized_text import SAMPLE, read_text
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.errors import UsageError, arg, argv
from ptqpipe.runtime.loading import load_tokenizer

DATA, OTHER = "held-out samples", "sample text"


def held_out_sources(samples: Samples, judged: Sequence[int], sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """What held-out samples are called -> which of the windows of the ``judged`` batches they are: of several sources
    each by itself, so that none gets worse for the sake of the others. ``sizes``: windows of each batch."""
    ends = list(accumulate(sizes))
    windows = torch.cat([torch.arange(ends[batch] - sizes[batch], ends[batch]) for batch in judged])
    origin = samples.origin[windows] if len(samples.files) > 1 else torch.zeros(len(windows), dtype=torch.int64)
    files = origin.unique().tolist()
    if len(files) == 1:
        return {DATA: torch.arange(len(windows))}
    return {f"{DATA} of {' '.join(argv(data=file + 1))}": (origin == file).nonzero().squeeze(1) for file in files}


def sample_windows(prepared: Conversion, samples: Samples) -> torch.Tensor:
    """Windows [n, seqlen] of the sample text, spread over it, as many as judge the data. UsageError where the text is
    shorter than one."""
    model, seqlen = prepared.source.reader.path, samples.windows.shape[1]
    text = read_text(SAMPLE, lambda: load_tokenizer(model))
    windows = text.windows(seqlen)
    if not len(windows):
        raise UsageError(
            f"{arg('method', 'kl')} also tests on the sample text of the package, which has {len(text.tokens)} "
            f"tokens, less than {arg('seqlen', seqlen)}; lower {arg('seqlen')}"
        )
    most = max(1, round((len(samples.windows) + len(samples.held_out)) / HELD_SHARE))
    return windows[:: -(-len(windows) // most)]
