"""Direct I/O: reads and writes that bypass the system's page cache, for bytes that are used once.

A page cache that a checkpoint streams through costs a copy of every byte and evicts what others had there; where free
memory has to be fetched first (virtual machines), it costs several times the copy. Direct I/O moves pages between the
disk and memory that its owner uses again and again. The system wants file offsets, lengths and addresses on page edges
for it: reads widen to whole pages, writes put their ragged ends through the cache. File systems that cannot (tmpfs) are
read and written the common way.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

#: Multiples of every sector size in use; also the page of the caches that a file's pieces may share.
ALIGN: Final = 4096
#: Smaller pieces are not worth a trip to the disk of their own.
LEAST_BYTES: Final = 128 * 2**10
_READ_BYTES: Final = 32 * 2**20
#: Linux moves at most 2 GiB - 4 KiB in one call; smaller pieces cost nothing and let other threads in.
_MOST_BYTES: Final = 64 * 2**20
_BOUNCE_BYTES: Final = 4 * 2**20
_libc: Final = ctypes.CDLL(None)
_NOT_POSSIBLE: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def margin() -> int:
    """Extra bytes that the memory for :meth:`DirectFile.read` must have."""
    return 3 * ALIGN


def open_direct(path: Path, flags: int) -> int | None:
    """A descriptor past the cache; None where the file system or the system has none."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return None
    try:
        return os.open(path, flags | direct | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_POSSIBLE:
            return None
        raise


class DirectFile:
    """One file for reading: cached pages come from the page cache, the rest straight from the disk."""

    def __init__(self, path: Path, cached_fd: int) -> None:
        """``cached_fd`` is an open descriptor of the same file, and closed with it."""
        self._path, self._cached = path, cached_fd
        self._fd: int | None = None
        self._tried, self._possible = False, True
        self._lock = threading.Lock()

    def _direct(self) -> int | None:
        """The descriptor past the cache, opened when it is first asked for; None for none. Raises OSError."""
        with self._lock:
            if not self._tried:
                self._tried, self._fd = True, open_direct(self._path, os.O_RDONLY)
                if self._fd is not None and not os.path.sameopenfile(self._fd, self._cached):
                    self._close_direct()  # another file has taken the name: whoever reads sees that at the end
            return self._fd

    def read_cached(self, view: memoryview, offset: int) -> bool:
        """Fills ``view`` from byte ``offset`` on by the page cache; False where the file is shorter. Raises OSError."""
        done = 0
        while done < len(view):
            count = os.preadv(self._cached, [view[done : done + _MOST_BYTES]], offset + done)
            if not count:
                return False
            done += count
        return True

    def read(self, memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor | None:
        """Bytes [offset, offset + nbytes) somewhere in ``memory`` (uint8, ``nbytes + margin()`` of them).

        None where the file is shorter. The address of what is returned is congruent to ``offset`` modulo ALIGN. Raises
        OSError.
        """
        inside = offset % ALIGN
        first = -memory.data_ptr() % ALIGN
        pages = bytes_of(memory[first:])
        need, start, done = inside + nbytes, offset - inside, 0
        while done < need:
            piece = pages[done : min(done + _READ_BYTES, -(-need // ALIGN) * ALIGN)]
            count = self._read_some(piece, start + done, wanted=need - done)
            if not count:
                return None
            done += count
        return memory[first + inside : first + need]

    def close(self) -> None:
        """Closes the file; call once."""
        self._close_direct()
        os.close(self._cached)

    def _close_direct(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _read_some(self, piece: memoryview, offset: int, *, wanted: int) -> int:
        """Fills a part of a page-aligned piece: whole pages, or as much as was asked for. 0 at the end of the file."""
        fd = self._direct() if self._possible else None
        if fd is not None and not _in_cache(self._cached, offset, len(piece)):
            try:
                return _whole_pages(os.preadv(fd, [piece], offset), min(wanted, len(piece)))
            except OSError as error:
                if error.errno not in _NOT_POSSIBLE:
                    raise
                self._possible = False
        return _whole_pages(os.preadv(self._cached, [piece], offset), min(wanted, len(piece)))


def _whole_pages(count: int, wanted: int) -> int:
    """The bytes of a read that count: of a short one whole pages, since the next must begin on a page edge."""
    return count if count >= wanted else count // ALIGN * ALIGN


def _in_cache(fd: int, offset: int, nbytes: int) -> bool:
    """Whether most pages of a range lie in the page cache. Looks without reading, unlike RWF_NOWAIT, which reads ahead.

    True where the system does not tell (files of other users among them): then the cache is as good as the disk.
    """
    try:
        mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
    except (OSError, ValueError):  # past the end of the file
        return False
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
    view = np.frombuffer(mapped, dtype=np.uint8)
    status = _libc.mincore(
        ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)
    )
    del view
    mapped.close()
    return status != 0 or int((pages & 1).sum()) * 2 > len(pages)


class OutputFile:
    """One file that many threads write in pieces; the whole pages of large pieces go past the cache."""

    def __init__(self, path: Path) -> None:
        """Opens or creates it. Raises OSError."""
        self.fd: Final = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._direct = open_direct(path, os.O_WRONLY)
        except OSError:
            os.close(self.fd)
            raise

    def write(self, view: memoryview, offset: int) -> None:
        """All bytes of ``view`` at ``offset``. No two pieces may overlap. Raises OSError."""
        head = -offset % ALIGN
        pages = (len(view) - head) // ALIGN * ALIGN
        if self._direct is None or pages < LEAST_BYTES:
            _pwrite_all(self.fd, view, offset)
            return
        _pwrite_all(self.fd, view[:head], offset)
        self._write_pages(view[head : head + pages], offset + head)
        _pwrite_all(self.fd, view[head + pages :], offset + head + pages)

    def read(self, view: memoryview, offset: int) -> int:
        """Fills ``view`` from byte ``offset`` on; how many bytes there were. Raises OSError."""
        done = 0
        while done < len(view) and (count := os.preadv(self.fd, [view[done:]], offset + done)):
            done += count
        return done

    def close(self) -> None:
        """Closes it; call once."""
        os.close(self.fd)
        if self._direct is not None:
            os.close(self._direct)

    def _write_pages(self, view: memoryview, offset: int) -> None:
        bounce = _bounce_buffer()
        for start in range(0, len(view), _BOUNCE_BYTES):
            piece = view[start : start + _BOUNCE_BYTES]
            aligned = bounce[: len(piece)]
            aligned[:] = piece
            try:
                count = 0
                while count < len(piece) and count % ALIGN == 0 and self._direct is not None:
                    count += os.pwrite(self._direct, aligned[count:], offset + start + count)
            except OSError as error:
                if error.errno not in _NOT_POSSIBLE:
                    raise
            _pwrite_all(self.fd, piece[count:], offset + start + count)


_of_thread = threading.local()


def _bounce_buffer() -> memoryview:
    buffer: memoryview | None = getattr(_of_thread, "bounce", None)
    if buffer is None:
        buffer = _of_thread.bounce = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
    return buffer


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory as bytes."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a contiguous CPU tensor is needed, got one on {tensor.device}, strides {tensor.stride()}")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # Any: arrays are buffers, their stubs do not say it
    return memoryview(array)


def _pwrite_all(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
