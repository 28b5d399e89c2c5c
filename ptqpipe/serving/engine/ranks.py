"""Runs one engine on several ranks: the leader decides what is computed, the others compute it with it.

A batch goes to all ranks as one tensor of int64; everything that decides (scheduling, sampling, text) happens on the
leader alone. While nothing is to be done the leader sends beats, so that a rank whose leader has gone ends, too. Must
not know how ranks are started.
"""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from ptqpipe.errors import PtqError, arg, is_no_memory, one_line
from ptqpipe.serving.engine.batch import Batch, unpack
from ptqpipe.serving.engine.model_runner import ModelRunner

_BEAT, _CLOSE = 0, -1
RunCollective = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


class Leader:
    """Rank 0's runner: the same as a `ModelRunner`, on all ranks of ``group`` at once.

    watch  what runs each message to the others, which waits until they take it
    lost   makes the message of a failed operation's reason: who knows which rank has ended can say so
    """

    def __init__(
        self,
        runner: ModelRunner,
        group: dist.ProcessGroup | None = None,
        *,
        watch: RunCollective | None = None,
        lost: Callable[[str], str] = "a rank does not answer: {}".format,
    ) -> None:
        self._runner, self._group, self._watch, self._lost = runner, group, watch, lost
        self.blocks, self.block_size = runner.blocks, runner.block_size
        self.max_seqs, self.state_bytes = runner.max_seqs, runner.state_bytes

    def run(self, batch: Batch) -> torch.Tensor:
        """Float32 logits [wanted, vocabulary]. PtqError when a rank does not answer."""
        packed = batch.pack()
        try:
            self._broadcast_word(len(packed))
            self._send(packed)
            return self._runner.run(batch)
        except RuntimeError as error:
            if is_no_memory(error):
                reason = one_line(str(error), limit=300)
                raise PtqError(
                    f"the leading rank is out of memory ({reason}); lower {arg('kv_cache_size')} or "
                    f"{arg('max_num_seqs')}"
                ) from error
            raise PtqError(self._lost(one_line(str(error), limit=300))) from error

    def beat(self) -> None:
        """Lets the others know that the leader lives. PtqError when one does not."""
        try:
            self._broadcast_word(_BEAT)
        except RuntimeError as error:
            raise PtqError(self._lost(one_line(str(error), limit=300))) from error

    def close(self) -> None:
        """Ends the others. Those that have ended already are ignored."""
        with contextlib.suppress(RuntimeError):
            self._broadcast_word(_CLOSE)

    def _broadcast_word(self, word: int) -> None:
        self._send(torch.tensor([word], dtype=torch.int64))

    def _send(self, message: torch.Tensor) -> None:
        def send() -> torch.Tensor:
            dist.broadcast(message, src=0, group=self._group)
            return message

        send() if self._watch is None else self._watch(send)


def follow(runner: ModelRunner, group: dist.ProcessGroup | None = None) -> None:
    """A rank above 0: computes what the leader sends until it closes. PtqError when the leader is gone."""
    word = torch.zeros(1, dtype=torch.int64)
    while True:
        try:
            dist.broadcast(word, src=0, group=group)
            size = int(word)
            if size == _CLOSE:
                return
            if size == _BEAT:
                continue
            packed = torch.empty(size, dtype=torch.int64)
            dist.broadcast(packed, src=0, group=group)
            runner.run(unpack(packed))
        except RuntimeError as error:
            if is_no_memory(error):
                raise
            raise PtqError(f"the leading rank does not answer: {one_line(str(error), limit=300)}") from error


def agree(blocks: int, group: dist.ProcessGroup | None = None) -> int:
    """The smallest of the ranks' numbers of blocks: the leader's tables must be good for all."""
    number = torch.tensor([blocks], dtype=torch.int64)
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    return int(number)
