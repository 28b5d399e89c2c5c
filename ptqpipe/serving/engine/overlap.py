"""Overlaps all-reduces with computation: of two halves of a prefill, one computes while the sums of the other are sent.

A step of enough tokens is cut in two at a token. Both halves run through the model in one thread, as greenlets: when a
layer of one needs a sum over the ranks, the sum is given to a second thread and control goes to the other half; when
that one needs a sum, control comes back and waits for the first. So every rank computes and sums

    A0 B0 A1 B1 ...        the sum of A_i beside the computing of B_i, that of B_i beside the computing of A_i+1

in this order whatever the times are, and layer by layer the first half has put its keys and values into the pages
before the second one looks for them. One thread computes, so that OpenMP keeps one team of threads. Whether and where
a step is cut depends on the batch alone, the same on all ranks. Must not know models or how ranks sum.
"""

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from ptqpipe.serving.engine.batch import Batch, Span

Collective = Callable[[], torch.Tensor]
Forward = Callable[[Batch], torch.Tensor]

LEAST_TOKENS = 256  # of prompts in a step that is cut: below, the kernels gain too little from many rows
LEAST_BYTES = 1 << 20  # that a layer's sum of such a step has: below, starting twice costs more than waiting
_TILE = 64  # a cut inside a prompt leaves the first half a multiple of it: the kernels' tiles of rows


def least_tokens(row_bytes: int) -> int:
    """The fewest tokens of prompts that are worth two halves, where a layer's sum has ``row_bytes`` a token.

    Measured by ``python -m labs.prefill_link --least 1`` at two ranks of a core each, on loopback and 1 Gbit/s.
    """
    return max(LEAST_TOKENS, -(-LEAST_BYTES // row_bytes))


class Overlap:
    """Runs steps in halves. What it is called with are the collectives of the model's forward (``runtime.load``).

    least_tokens  the fewest tokens of prompts in a step that is cut
    waited_s      for collectives of halves, since the start
    """

    def __init__(self, *, least_tokens: int = LEAST_TOKENS) -> None:
        self.least_tokens = least_tokens
        self.waited_s = 0.0
        self._courier: _Courier | None = None

    def __call__(self, collective: Collective) -> torch.Tensor:
        """What a collective operation gives: of a half, later, when the other one has had its turn; else at once."""
        half = getcurrent()
        if not isinstance(half, _Half):
            return collective()
        assert half.parent is not None
        total: torch.Tensor = half.parent.switch(collective)
        return total

    def run(self, batch: Batch, forward: Forward) -> torch.Tensor:
        """The logits of a batch, [wanted, vocabulary]. ``forward`` computes those of a batch or of a half."""
        parts = halves(batch, self.least_tokens)
        if parts is None:
            return forward(batch)
        first, second = self._by_turns([_Half(forward, part) for part in parts])
        if not len(first) or not len(second):
            return first if len(first) else second
        logits = first.new_empty(len(batch.wanted), first.shape[-1])
        ahead = batch.wanted < len(parts[0].tokens)
        logits[ahead], logits[~ahead] = first, second
        return logits

    def _by_turns(self, both: "list[_Half]") -> list[torch.Tensor]:
        if self._courier is None:
            self._courier = _Courier()
        try:
            turns = deque(both)
            while turns:
                half = turns.popleft()
                self.waited_s += half.advance(self._courier)
                if not half.dead:
                    turns.append(half)
            return [half.result for half in both]
        finally:
            for half in both:
                half.close()


class _Half(greenlet):  # type: ignore[misc]  # has no types
    """The forward of a half, which stops at each of its collectives."""

    def __init__(self, forward: Forward, batch: Batch) -> None:
        super().__init__(lambda: forward(batch))
        self.gr_context = copy_context()  # its own, so that it may set what its own layers see
        self.result = torch.empty(0)
        self._pending: Future[torch.Tensor] | None = None

    def advance(self, courier: "_Courier") -> float:
        """Computes up to the next collective and gives that to the courier, or to the end. Seconds it waited before."""
        begun, collective = time.perf_counter(), None
        if self._pending is None:
            waited, collective = 0.0, self.switch()
        else:
            error = self._pending.exception()
            waited = time.perf_counter() - begun
            collective = self.switch(self._pending.result()) if error is None else self.throw(error)
        if self.dead:
            self._pending, self.result = None, collective
        else:
            self._pending = courier.submit(collective)
        return waited

    def close(self) -> None:
        """Cancels it. Returns when no thread writes to its tensors any more."""
        if self._pending is not None and not self._pending.cancel():
            wait([self._pending])
        if not self.dead:
            self.throw()


class _Courier:
    """A thread that runs collectives one after the other. It ends when this object goes."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Collective, Future[torch.Tensor]] | None] = SimpleQueue()
        ready, threads = threading.Event(), torch.get_num_threads()
        # Not waited for when the process ends: a rank that has died may have left it in a collective.
        threading.Thread(target=_carry, args=(self._queue, ready), name="ptqpipe-overlap", daemon=True).start()
        ready.wait()
        torch.set_num_threads(threads)
        weakref.finalize(self, self._queue.put, None)

    def submit(self, collective: Collective) -> "Future[torch.Tensor]":
        """Runs it after all that came before."""
        future: Future[torch.Tensor] = Future()
        self._queue.put((collective, future))
        return future


def _carry(queue: Any, ready: threading.Event) -> None:
    """The courier's thread. Its own operations get one thread: a second team would take the computing one's cores."""
    torch.get_num_threads()  # torch sets a thread's number when it is first asked for
    torch.set_num_threads(1)  # the number for new threads too, until the courier sets that again
    ready.set()
    with torch.inference_mode():
        while (item := queue.get()) is not None:
            collective, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(collective())
            except BaseException as error:
                future.set_exception(error)
            del item, collective, future


def halves(batch: Batch, least_tokens: int) -> tuple[Batch, Batch] | None:
    """A batch cut in two of about as many tokens; None for one with images, or with fewer than ``least_tokens`` tokens
    of prompts.

    A span may be cut, but no end of it is left with one token: where there is no kernel for both, that would be
    computed like a decode step's, with other roundings.
    """
    if batch.images is not None or sum(x.count for x in batch.spans if x.count > 1) < max(least_tokens, 4):
        return None
    middle = _place(batch)
    first: list[Span] = []
    second: list[Span] = []
    starts = itertools.accumulate((span.count for span in batch.spans), initial=0)
    for span, start in zip(batch.spans, starts, strict=False):
        here = min(max(middle - start, 0), span.count)
        if here == span.count:
            first.append(span)
        elif here == 0:
            second.append(span)
        else:
            total = span.total - span.count + here
            first.append(Span(here, total, span.blocks, span.row))
            second.append(Span(span.count - here, span.total, span.blocks, span.row))
    if not first or not second:
        return None
    ahead = batch.wanted < middle
    return (
        Batch(batch.tokens[:middle], batch.wanted[ahead], tuple(first)),
        Batch(batch.tokens[middle:], batch.wanted[~ahead] - middle, tuple(second)),
    )


def _place(batch: Batch) -> int:
    """Where to split the batch: near the middle."""
    count = len(batch.tokens)
    middle = count // 2 // _TILE * _TILE or count // 2
    start = 0
    for span in batch.spans:
        if start < middle < start + span.count:
            if middle - start == 1:
                return start
            if start + span.count - middle == 1:
                return middle + 1
        start += span.count
    return middle
