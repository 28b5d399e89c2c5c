"""One step of the engine as numbers: everything that a rank needs to compute it.

All sequences' tokens lie in one row, those of one sequence together. Must not know sequences' owners or text.
"""

from collections.abc import Sequence as Row
from dataclasses import dataclass

import torch

from ptqpipe.engine.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a batch: ``count`` tokens, which see ``total`` ones with themselves, in ``blocks``.

    row  where the sequence's states are, in a model that has some (``states.py``)
    """

    count: int
    total: int
    blocks: tuple[int, ...]
    row: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """``tokens`` of ``spans``, one after the other; ``wanted``: places whose logits are computed. Int64 [T], [W]."""

    tokens: torch.Tensor
    wanted: torch.Tensor
    spans: tuple[Span, ...]

    def positions(self) -> torch.Tensor:
        """Each token's place in its sequence, int64 [T]."""
        return torch.cat([torch.arange(span.total - span.count, span.total) for span in self.spans])

    def pack(self) -> torch.Tensor:
        """The batch as one int64 tensor; `unpack` is the inverse."""
        head = [len(self.spans), len(self.tokens), len(self.wanted)]
        for span in self.spans:
            head += [span.count, span.total, span.row, len(span.blocks), *span.blocks]
        return torch.cat([torch.tensor(head, dtype=torch.int64), self.tokens, self.wanted])


def unpack(packed: torch.Tensor) -> Batch:
    """The batch that `Batch.pack` packed."""
    numbers = packed.tolist()
    n_spans, n_tokens, n_wanted = numbers[:3]
    at, spans = 3, []
    for _ in range(n_spans):
        count, total, row, n_blocks = numbers[at : at + 4]
        spans.append(Span(count, total, tuple(numbers[at + 4 : at + 4 + n_blocks]), row))
        at += 4 + n_blocks
    tokens = packed[at : at + n_tokens]
    return Batch(tokens, packed[at + n_tokens : at + n_tokens + n_wanted], tuple(spans))


def make_batch(chunks: Row[Chunk], block_size: int) -> Batch:
    """The batch of a step. Logits: of each chunk's last token and its drafts if it samples, of all of it if the
    prompt's are asked."""
    tokens: list[int] = []
    wanted: list[int] = []
    spans: list[Span] = []
    for chunk in chunks:
        seq, total = chunk.seq, chunk.start + chunk.size
        if seq.needs_prompt_logits:
            wanted += range(len(tokens), len(tokens) + chunk.count)
        elif chunk.samples:
            wanted += range(len(tokens) + chunk.count - 1, len(tokens) + chunk.size)
        tokens += [*seq.tokens[chunk.start : chunk.start + chunk.count], *chunk.drafts]
        spans.append(Span(chunk.size, total, tuple(seq.blocks[: -(-total // block_size)]), seq.row))
    as_int64 = [torch.tensor(numbers, dtype=torch.int64) for numbers in (tokens, wanted)]
    return Batch(as_int64[0], as_int64[1], tuple(spans))
