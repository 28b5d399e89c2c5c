"""The transport for the smallest messages between CPUs: one-shot as one all-to-all.

What costs time in a small message is threads that wake up. An all-to-all sends and receives everything on the group's
own thread and wakes the caller once; ``point_to_point.py`` wakes it for every message. But gloo's all-to-all asks for a
message only behind its own, so that two ranks send one after the other: on a slow link that costs more than it saves,
which is why ``gate.py`` has to measure it.

Must not know codecs. Calls of one group must come in the same order on all ranks, as those of any collective.
"""

import time

import torch
import torch.distributed as dist

from ptqpipe.collectives.point_to_point import Workspace
from ptqpipe.collectives.stats import Stats
from ptqpipe.collectives.wire import Wire


def one_shot(
    group: dist.ProcessGroup,
    wire: Wire,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: Workspace,
    stats: Stats,
) -> None:
    """``x`` [n], contiguous, to all; every rank adds them up, with the bits of ``Exchange.one_shot``. ``out`` may be
    ``x``; no buffer is in use afterwards."""
    ranks, rank, size = group.size(), group.rank(), wire.nbytes(x.numel(), x.dtype)
    others = (ranks - 1) * size
    copies, received, made = workspace.whole(2 * others + size).split_with_sizes([others, others, size])
    begun = time.perf_counter()
    message = wire.encode(x, made)
    copies.view(ranks - 1, size).copy_(message)
    sizes = [size] * ranks
    sizes[rank] = 0
    encoded = time.perf_counter()
    group.alltoall_base(received, copies, sizes, sizes).wait()
    arrived = time.perf_counter()
    terms: list[torch.Tensor | None] = list(received.split_with_sizes(sizes))
    terms[rank] = message
    wire.reduce(terms, x, made[:0], out)
    stats.encode_s += encoded - begun
    stats.wait_s += arrived - encoded
    stats.reduce_s += time.perf_counter() - arrived
    stats.wire_bytes += others
