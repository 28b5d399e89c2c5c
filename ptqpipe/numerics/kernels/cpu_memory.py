"""Memory for what every step reads whole: in huge pages where the system has them.

A product with one row of x waits for its weights. With pages of 4 KiB the processor also waits for the address of each,
and its own fetching ahead stops where a page ends; pages of 2 MiB leave little of that. The system is asked for them
(``madvise``) and may refuse; nothing else depends on it. Knows bytes; must not know what they stand for.
"""

import mmap
import threading
from contextlib import suppress

import torch

_HUGE = 2 << 20  # bytes of a huge page on x86-64, and on aarch64 with pages of 4 KiB
_ROOM = 64 << 20  # that small tensors share: a page that is never written takes no memory
_LINE = 64
_lock = threading.Lock()
_rest: tuple[mmap.mmap | None, int, int] = (None, 0, 0)  # the room in use, and the first and last byte of what is left


def empty(nbytes: int) -> torch.Tensor:
    """uint8 ``[nbytes]`` that begins a cache line, with any contents; given back when nothing refers to its room."""
    global _rest
    if nbytes < _LINE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    wanted = -(-nbytes // _LINE) * _LINE
    with _lock:
        room, first, last = _rest if wanted < _ROOM else (None, 0, 0)
        if room is None or first + wanted > last:
            size = max(wanted, _ROOM)
            room, first = _pages(size)
            last = first + size
        if wanted < _ROOM:
            _rest = (room, first + wanted, last)
    # A tensor of its own, not a part of another, which could not be written if that had been made in inference mode.
    return torch.frombuffer(room, dtype=torch.uint8, count=nbytes, offset=first)


def _pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory, and where in it ``nbytes`` begin with a huge page. MemoryError without memory."""
    try:
        room = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {nbytes} bytes for weights: {error}") from None
    with suppress(OSError):  # a system without them
        room.madvise(mmap.MADV_HUGEPAGE)
    return room, -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % _HUGE
