"""What a run of several stages takes of the disk, from the shapes of the model: upper bounds, nothing is measured.

Must not know how a stage works; what each of them leaves on disk for the next is written down here and held by a test
that watches the folder.
"""

from typing import NamedTuple

from ptqpipe.options import PipelineOptions
from ptqpipe.quantities import disk_size
from ptqpipe.source import Source
from ptqpipe.stages.pipeline.table import Way

_STATISTICS = 4 * 4  # bytes for a channel: maximum, mean and second moment, and that of the held-out samples
_BLOCKS = 4 * 32  # the moments of 16 columns, twice
_FACTORS = 2 * 11  # 8 bytes in base64, in the journal and in the file
_ENTRY = 4096  # JSON about one matrix, of all stages
_TOKEN = 12  # bytes in a row of text that the model wrote
_SAMPLES = 128


class Disk(NamedTuple):
    """Bytes beside the output while it is made, at most.

    codes   as `tune` finds them, until they are written into the output
    small   statistics, factors and what is said of them
    hidden  hidden states of the samples, where memory has no room for them; 0 for a run without data
    """

    codes: int
    small: int
    hidden: int

    def __str__(self) -> str:
        """In words."""
        parts = [(self.codes, "codes"), (self.small, "statistics")]
        words = ", ".join(f"{disk_size(nbytes)} of {what}" for nbytes, what in parts if nbytes)
        spilled = f"; {disk_size(self.hidden)} of hidden states where --max-memory has no room for them"
        return f"{words or 'nothing'}{spilled if self.hidden else ''}"


def disk_of(
    source: Source, weights_bytes: int, work: PipelineOptions, way: Way | None, *, needs_statistics: bool, seqlen: int
) -> Disk:
    """What a run needs beside its output.

    weights_bytes  of the output, 0 where a budget decides it: then that of the source bounds it
    seqlen         tokens of a sample
    """
    if way is None:
        return Disk(0, 0, 0)
    matrices = [shape for _, shape in source.tensors.values() if len(shape) > 1]
    channels = sum(max(shape[-2:]) * (shape[0] if len(shape) > 2 else 1) for shape in matrices)
    count = sum(shape[0] if len(shape) > 2 else 1 for shape in matrices)
    tokens = (work.samples or _SAMPLES) * 9 // 8 * seqlen  # with those that are held out
    each = _STATISTICS * needs_statistics
    if way.transform:
        each += _STATISTICS + _BLOCKS + _FACTORS
    text = _TOKEN * tokens if "self" in work.data else 0
    hidden = 4 * tokens * _width(source) * (3 if way.method == "gptq" else 1)
    codes = (weights_bytes or source.reader.nbytes) if way.method else 0
    return Disk(codes, channels * each + count * _ENTRY + text, hidden)


def _width(source: Source) -> int:
    """Channels of the hidden states; 0 where the config does not say."""
    config = source.reader.config
    text = config.get("text_config")
    found = [part.get(key) for part in (text if isinstance(text, dict) else {}, config) for key in ("hidden_size", "n_embd")]
    return next((value for value in found if isinstance(value, int)), 0)
