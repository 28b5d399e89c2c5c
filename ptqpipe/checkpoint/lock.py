"""Who writes a folder: advisory locks on files in it, freed by the system when their process ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from ptqpipe.checkpoint.header import shown
from ptqpipe.errors import OutputError, PtqWarning, arg

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
_HELD: Final = frozenset({errno.EAGAIN, errno.EACCES})
_TRIES: Final = 5  # at 10 ms: somebody may only be asking whether it is held
_own: Final[set[tuple[int, int]]] = set()  # device and inode of the lock files that this process holds


class RankLock:
    """A lock on ``lock-<rank>`` in a folder."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        """Raises OutputError, naming the holder, if another process has it; FileNotFoundError if the holder finished,
        and took the folder away, between our open and our lock."""
        self._path: Final = folder / f"lock-{rank}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take(folder)
            if not self.in_place():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode("ascii", "replace"), 0)
        except BaseException:
            os.close(self._fd)
            raise
        _own.add(self._identity())

    def _take(self, folder: Path) -> None:
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    warnings.warn(
                        f"{folder} is on a file system without locks; start no second run", PtqWarning, stacklevel=4
                    )
                    return
                if error.errno not in _HELD:
                    raise
                if not left:
                    _refuse(folder, _name(self._fd))
            time.sleep(0.01)

    @property
    def name(self) -> str:
        return self._path.name

    def in_place(self) -> bool:
        """Whether the folder with this lock is still where it was."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        """Frees the lock; the file stays."""
        _own.discard(self._identity())
        os.close(self._fd)

    def _identity(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino


def lock_folder(folder: Path) -> RankLock:
    """Rank 0's lock of a folder, which is made where it is missing. OutputError, and OSError."""
    for _ in range(_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # its holder has finished
            return _lock_all(folder)
    raise OutputError(f"{shown(str(folder))} is made and removed by other processes all the time; wait for them")


def _lock_all(folder: Path) -> RankLock:
    """Rank 0's lock, after making sure that no rank of a former run is still writing."""
    lock = RankLock(folder)
    try:
        for path in folder.glob("lock-*"):
            if path.name != lock.name and path.name[5:].isdigit():
                RankLock(folder, int(path.name[5:])).release()
    except BaseException:
        lock.release()
        raise
    return lock


def holder_of(folder: Path) -> str:
    """Which other process writes a folder, in words; empty for none, and where nobody can tell."""
    for path in sorted(folder.glob("lock-*")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) not in _own:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return _name(fd)
        finally:
            os.close(fd)
    return ""


def refuse_held(folder: Path) -> None:
    """Raises OutputError, naming it, if another process writes a folder."""
    holder = holder_of(folder)
    if holder:
        _refuse(folder, holder)


def _refuse(folder: Path, holder: str) -> NoReturn:
    raise OutputError(
        f"{shown(str(folder))} is being written by {holder}; wait for it, or choose another {arg('out')}"
    ) from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[RankLock]:
    """Holds the lock of a folder, which is made where it is missing; its lock, and a folder with nothing else in it,
    are removed at the end. Raises what `lock_folder` does."""
    lock = lock_folder(folder)
    try:
        yield lock
    finally:
        if lock.in_place():
            with contextlib.suppress(OSError):
                (folder / lock.name).unlink()
                folder.rmdir()
        lock.release()


def _name(fd: int) -> str:
    return os.pread(fd, 200, 0).decode("ascii", "replace").strip() or "another process"
