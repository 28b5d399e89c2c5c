"""What goes on beside Python's imports, since torch takes most of a second in which the disk has nothing to do.

The beginning of a model's weights is read, no more than a part of the memory that is free, so that nothing that others
have cached gives way. Whoever reads the weights takes from the system's cache what is there
(``checkpoint/direct.py``). Knows files by their names; imports nothing heavy.
"""

import gc
import os
import re
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MOST_BYTES = 768 << 20  # about what a fast disk reads in that time
_FREE_SHARE = 4  # one part in so many of the memory that is free
_PIECE = 1 << 20  # asked for in one call: the system reads no more at once
_UNDER_WAY = 32 << 20  # asked for and not read yet: more would hold up what the command itself reads next


@contextmanager
def importing(model: str | None) -> Iterator[None]:
    """For what a command imports: no cycles are looked for among it, then or later, where torch is not there yet; and
    meanwhile the weights of ``model`` are read to the system's cache, if it is a folder of safetensors files, there are
    two processors, and the system has such a cache."""
    looks = gc.isenabled() and "torch" not in sys.modules
    if looks:
        gc.disable()
    try:
        with _reading_ahead(model):
            yield
    finally:
        if looks:
            gc.freeze()
            gc.enable()


@contextmanager
def _reading_ahead(model: str | None) -> Iterator[None]:
    possible = hasattr(os, "posix_fadvise") and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1
    files: list[Path] = []
    if possible and model is not None and os.path.isdir(model):
        files = sorted(Path(model).glob("*.safetensors"), key=_in_order)
    if not files:
        yield
        return
    left = threading.Event()
    thread = threading.Thread(target=_read, args=(files, _bytes_to_read(), left), name="ptqpipe-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def _in_order(path: Path) -> list[tuple[int, str]]:
    """As a conversion takes them: ``layer-2`` before ``layer-10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", path.name)]


def _bytes_to_read() -> int:
    return min(_MOST_BYTES, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _FREE_SHARE)


def _read(files: list[Path], nbytes: int, left: threading.Event) -> None:
    """The first ``nbytes`` of the files, until ``left`` is set. Whoever needs a file that cannot be read says so."""
    with suppress(OSError):
        for path in files:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a pipe, too, without waiting
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    return
                size = min(status.st_size, nbytes)
                _read_file(fd, size, left)
                nbytes -= size
            finally:
                os.close(fd)
            if left.is_set() or not nbytes:
                return


def _read_file(fd: int, nbytes: int, left: threading.Event) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # nothing but what is asked for
    for start in range(0, nbytes, _PIECE):
        if left.is_set():
            return
        os.posix_fadvise(fd, start, min(_PIECE, nbytes - start), os.POSIX_FADV_WILLNEED)
        if start % _UNDER_WAY == 0 and start >= _UNDER_WAY:
            os.pread(fd, 1, start - _UNDER_WAY)  # waits until it has been read
