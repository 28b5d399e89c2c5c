"""Which tokens are computed in the next step.

Running sequences come first, in the order of their arrival: one token each when they generate, a piece of their prompt
when they do not yet. What is left of the step's budget admits waiting ones. When the cache is full the latest arrival
gives its pages back and starts again later from its tokens. So the first arrival always advances. Must not know
models or text.
"""

import heapq
from collections import deque
from dataclasses import dataclass, replace

from ptqpipe.serving.engine.block_manager import BlockManager
from ptqpipe.serving.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """``count`` tokens of a sequence to compute, from ``start`` on, and ``drafts`` of those that may follow them."""

    seq: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of tokens that a step computes for it."""
        return self.count + len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether the chunk ends where the sequence does, so that its logits give the next token."""
        return self.start + self.count == len(self.seq.tokens)


PROMPT_LOGITS = 256
"""Most tokens in a step of a sequence whose prompt's logits are asked: a row of them may be half a megabyte."""


class Scheduler:
    """Waiting and running sequences.

    max_seqs    most sequences in a step
    max_tokens  most tokens in a step
    """

    def __init__(self, blocks: BlockManager, *, max_seqs: int, max_tokens: int) -> None:
        self.blocks, self.max_seqs, self.max_tokens = blocks, max_seqs, max_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._rows = list(range(max_seqs))  # that no running sequence has
        self.preemptions = 0

    def add(self, seq: Sequence, *, first: bool = False) -> None:
        """Queues a sequence, in front of all others if ``first``."""
        if first:
            self.waiting.appendleft(seq)
        else:
            self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Forgets a sequence wherever it is; its blocks are free."""
        if seq in self.running:
            self.running.remove(seq)
            self._release(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def step(self) -> list[Chunk]:
        """The next step; empty when there is nothing to do. The sequences have the blocks that it needs."""
        chunks: list[Chunk] = []
        budget, index = self.max_tokens, 0
        while index < len(self.running):
            seq = self.running[index]
            behind = len(self.running) - index - 1  # each of them gets a token at least
            count = _whole(seq, min(_most(seq), max(1, budget - behind)))
            if not self._make_room(seq, count):
                break  # it was the last one and has left
            chunk = self._with_drafts(Chunk(seq, seq.computed, count), budget - behind - count)
            chunks.append(chunk)
            budget -= chunk.size
            index += 1
        self._admit(chunks, budget)
        chunks.sort(key=lambda chunk: chunk.size > 1)  # single tokens in front: their attention is one call
        return chunks

    def _with_drafts(self, chunk: Chunk, room: int) -> Chunk:
        """The chunk with its sequence's drafts behind the last token, if nothing else is to be computed, as far as
        ``room`` tokens and free blocks allow."""
        drafts = chunk.seq.drafts[: max(0, room)] if chunk.samples and chunk.count == 1 else ()
        if not drafts or not self.blocks.grow(chunk.seq, len(chunk.seq.tokens) + len(drafts)):
            return chunk
        return replace(chunk, drafts=drafts)

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Blocks for ``count`` more tokens of a running sequence, from later arrivals if need be; False: it left."""
        while not self.blocks.grow(seq, seq.computed + count):
            last = self.running.pop()
            self._release(last)
            last.preemptions += 1
            self.preemptions += 1
            self.waiting.appendleft(last)
            if last is seq:
                return False
        return True

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        heapq.heappush(self._rows, seq.row)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Lets waiting sequences in, in order, while the step and the cache have room for all of their tokens."""
        while self.waiting and budget > 0 and len(self.running) < self.max_seqs:
            seq = self.waiting[0]
            if seq.unseen:
                return
            self.blocks.share(seq)
            # Room for the token that follows, too: a sequence that is let in should not be the next to be put out.
            if not self.blocks.grow(seq, len(seq.tokens) + 1):
                self.blocks.release(seq)
                return
            if seq.generated == 0:
                seq.cached = seq.computed
            self.waiting.popleft()
            self.running.append(seq)
            seq.row = heapq.heappop(self._rows)
            count = _whole(seq, min(_most(seq), budget))
            chunks.append(Chunk(seq, seq.computed, count))
            budget -= count


def _whole(seq: Sequence, count: int) -> int:
    """``count`` tokens, and the rest of an image whose tokens see each other: those are computed in one step, if need
    be beyond its most tokens."""
    return count if seq.seen is None else seq.seen.whole(seq.computed + count) - seq.computed


def _most(seq: Sequence) -> int:
    return min(seq.remaining, PROMPT_LOGITS) if seq.needs_prompt_logits else seq.remaining
