"""glibc's malloc, told to keep what a step of the engine frees: the next step then finds its memory where it was.

By itself malloc gives large blocks back to the system at once and gets fresh pages for the next ones, which the system
must clear: a sixth of a prefill's time on small models. What is kept is what the largest step needs. Of no effect where
the C library is another one.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
_KEPT = 1 << 30  # bytes


def use_one_arena() -> None:
    """All threads share a heap, which may grow to any size; call it before the first of them starts.

    Heaps of threads are cut into 64 MiB, between which a step's memory comes and goes.
    """
    _set(_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Blocks below 1 GiB come from the heap from now on, and it does not shrink by less.

    To be called when a model is loaded: what loading frees goes back to the system.
    """
    _set(_MMAP_THRESHOLD, _KEPT)
    _set(_TRIM_THRESHOLD, _KEPT)


def _set(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
