"""The all-reduce transport for process groups whose collectives are faster than their messages (NCCL): two-shot, in
chunks.

The schedule of ``point_to_point.py`` with an all-to-all and an all-gather a chunk, on a stream of its own, so that the
codec of one chunk runs beside the transfer of another. All messages of a chunk have the room of the longest, since
these collectives want equal ones; what a shorter stripe leaves over is sent and not looked at. Same bits as point to
point.

Runs on gloo as well, which is how it is tested; with NCCL it has not been measured. Must not know codecs.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ptqpipe.serving.collectives.wire import Layout, Stats, Wire

LAG = 1  # chunks on the wire while one is computed


@dataclass(slots=True)
class ChunkMessages:
    """The messages of one chunk: rows are ranks, of equal length."""

    parts: torch.Tensor
    received: torch.Tensor
    sums: torch.Tensor
    work: dist.Work | None = None


@dataclass(slots=True)
class CollectiveExchange:
    """One call on one rank; the fields are those of ``point_to_point.Exchange``. ``out`` may be ``x``."""

    group: dist.ProcessGroup
    wire: Wire
    layout: Layout
    x: torch.Tensor
    out: torch.Tensor
    stream: torch.cuda.Stream | None
    stats: Stats
    own_exact: bool = True
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.group.rank()

    def two_shot(self) -> None:
        """Runs it, or on CUDA queues it: the caller's stream waits for the end."""
        if self.stream is None:
            self._run()
            return
        caller = torch.cuda.current_stream(self.x.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            self._run()
        for tensor in (self.x, self.out):
            tensor.record_stream(self.stream)
        caller.wait_stream(self.stream)

    def _run(self) -> None:
        chunks: dict[int, ChunkMessages] = {}
        for step in range(self.layout.chunks + 2 * LAG):
            if step < self.layout.chunks:
                chunks[step] = self._send_parts(step)
            if 0 <= step - LAG < self.layout.chunks:
                self._reduce(step - LAG, chunks[step - LAG])
            if 0 <= step - 2 * LAG < self.layout.chunks:
                self._decode(step - 2 * LAG, chunks.pop(step - 2 * LAG))

    def _nbytes(self, rank: int, chunk: int) -> int:
        return self.wire.nbytes(len(self.layout.span(rank, chunk)), self.x.dtype)

    def _send_parts(self, chunk: int) -> ChunkMessages:
        # The first stripe is the longest. Rooms start at multiples of 64 bytes, as kernels like them.
        row = -(-self._nbytes(0, chunk) // 64) * 64
        parts, received, sums = (
            torch.zeros(self.layout.ranks, row, dtype=torch.uint8, device=self.x.device) for _ in range(3)
        )
        messages = ChunkMessages(parts, received, sums)
        for rank in range(self.layout.ranks):
            span = self.layout.span(rank, chunk)
            if len(span) and (rank != self.rank or not self.own_exact):
                room = messages.parts[rank, : self._nbytes(rank, chunk)]
                message = self.wire.encode(self.x[span.start : span.stop], room)
                if message.data_ptr() != room.data_ptr():
                    room.copy_(message)
        messages.work = dist.all_to_all_single(
            messages.received.view(-1), messages.parts.view(-1), group=self.group, async_op=True
        )
        self.stats.wire_bytes += row * (self.layout.ranks - 1)
        return messages

    def _reduce(self, chunk: int, messages: ChunkMessages) -> None:
        assert messages.work is not None
        messages.work.wait()
        span, size = self.layout.span(self.rank, chunk), self._nbytes(self.rank, chunk)
        mine = torch.zeros(messages.sums.shape[1], dtype=torch.uint8, device=self.x.device)
        if len(span):
            exact = self.rank if self.own_exact else -1
            terms = [None if rank == exact else row[:size] for rank, row in enumerate(messages.received)]
            own, out = self.x[span.start : span.stop], self.out[span.start : span.stop]
            message = self.wire.reduce(terms, own, mine[:size], out)
            if message.data_ptr() != mine.data_ptr():
                mine[:size].copy_(message)
        messages.work = dist.all_gather_into_tensor(messages.sums.view(-1), mine, group=self.group, async_op=True)
        self.stats.wire_bytes += len(mine) * (self.layout.ranks - 1)

    def _decode(self, chunk: int, messages: ChunkMessages) -> None:
        assert messages.work is not None
        messages.work.wait()
        for rank in range(self.layout.ranks):
            span = self.layout.span(rank, chunk)
            if rank != self.rank and len(span):
                out = self.out[span.start : span.stop]
                message = messages.sums[rank, : self._nbytes(rank, chunk)]
                landing = self.wire.landing(out, message)
                if landing.data_ptr() != message.data_ptr():
                    landing.copy_(message)
                self.wire.decode(message, out)
