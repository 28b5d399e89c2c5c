"""A model's log-probabilities on one text, computed once: the reference that the same model, quantized, is scored
against.

Memory holds all of them; `cache.py` keeps those of long texts on disk, in the same encoding.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ptqpipe.errors import UsageError
from ptqpipe.evaluation.log_probabilities import MOST, decode, encode
from ptqpipe.evaluation.scores import Window, batches, model_logits, vocabulary_of, windows
from ptqpipe.quantities import memory_size

MAX_BYTES = 8 << 30


class KeptLogits:
    """The reference of `score`: the log-probabilities of a model on ``tokens`` int64 [T], encoded in memory."""

    def __init__(self, model: Any, tokens: torch.Tensor, window: int) -> None:
        """UsageError where they would take more than 8 GiB."""
        self.vocabulary = vocabulary_of(model) or 0
        needed = MOST * self.vocabulary * len(tokens)
        if needed > MAX_BYTES:
            most = MAX_BYTES // (MOST * self.vocabulary)
            raise UsageError(
                f"log-probabilities of {len(tokens)} tokens take {memory_size(needed)}; use --max-tokens {most} or less"
            )
        found = windows(len(tokens), window)
        self._kept = {
            batch[0].start: encode(model_logits(model, batch, tokens))
            for batch in batches(found, vocabulary=self.vocabulary)
        }

    def __call__(self, batch: Sequence[Window], tokens: torch.Tensor, /) -> torch.Tensor:
        found = decode(self._kept[batch[0].start], sum(window.scored for window in batch), self.vocabulary)
        assert found is not None
        return found
