"""One step of the engine as numbers: everything that a rank needs to compute it.

All sequences' tokens lie in one row, those of one sequence together. Must not know sequences' owners or text.
"""

from collections.abc import Sequence as Row
from dataclasses import dataclass

import torch

from ptqpipe.serving.engine.prompt_images import ImageRows, rows_of
from ptqpipe.serving.engine.scheduler import Chunk


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
    """``tokens`` of ``spans``, one after the other; ``wanted``: places whose logits are computed. Int64 [T], [W].

    images  what of the tokens images decide, if any do
    """

    tokens: torch.Tensor
    wanted: torch.Tensor
    spans: tuple[Span, ...]
    images: ImageRows | None = None

    def positions(self) -> torch.Tensor:
        """Each token's place in its sequence, int64 [T]; [3, T] where a sequence with images counts otherwise."""
        if self.images is not None and self.images.positions is not None:
            return self.images.positions
        if self.tokens.shape[0] == len(self.spans):  # one each
            return torch.tensor([span.total - 1 for span in self.spans])
        return torch.cat([torch.arange(span.total - span.count, span.total) for span in self.spans])

    def pack(self) -> torch.Tensor:
        """The batch as one int64 tensor; `unpack` is the inverse."""
        head = [len(self.spans), len(self.tokens), len(self.wanted)]
        for span in self.spans:
            head += [span.count, span.total, span.row, len(span.blocks), *span.blocks]
        images = [] if self.images is None else [self.images.pack()]
        return torch.cat([torch.tensor(head, dtype=torch.int64), self.tokens, self.wanted, *images])


def unpack(packed: torch.Tensor) -> Batch:
    """The batch that `Batch.pack` packed."""
    numbers = packed.tolist()
    n_spans, n_tokens, n_wanted = numbers[:3]
    offset, spans = 3, []
    for _ in range(n_spans):
        count, total, row, n_blocks = numbers[offset : offset + 4]
        spans.append(Span(count, total, tuple(numbers[offset + 4 : offset + 4 + n_blocks]), row))
        offset += 4 + n_blocks
    end = offset + n_tokens + n_wanted
    images = ImageRows.unpack(packed[end:]) if end < len(packed) else None
    return Batch(packed[offset : offset + n_tokens], packed[offset + n_tokens : end], tuple(spans), images)


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
    images = None
    if any(chunk.seq.seen is not None for chunk in chunks):
        images = rows_of([(chunk.seq.seen, chunk.start, chunk.start + chunk.size) for chunk in chunks])
    return Batch(as_int64[0], as_int64[1], tuple(spans), images)
