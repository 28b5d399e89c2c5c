"""Writes one output file at once or not at all; its place is checked before anything is computed.

Whether one that exists may be replaced is the caller's to say. Folders of weights
have `partial.py`.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ptqpipe.checkpoint.header import shown
from ptqpipe.errors import OutputError, OutputExists, WrongOutput, arg, write_failure

LOOK_BYTES = 4096  # of an existing file that `own` is shown


def check_file(
    path: Path, *, nbytes: int = 1 << 16, own: Callable[[bytes], bool] | None = None, what: str = ""
) -> None:
    """Makes sure that ``path`` can be written, by making a file without a name where it will lie.

    nbytes  about how many bytes will be written: a full disk is found now, and not after hours
    own     says from the first `LOOK_BYTES` of a file that exists whether it may be replaced; None: any may
    what    what ``own`` looks for, with its article: "a report of ptqpipe"

    Raises OutputExists for a folder, a device, or a file that is not to be replaced; WrongOutput for a place where no
    file can lie, OutputError for one where none can be written. Missing folders are made by `write_file`.
    """
    name = shown(str(path), limit=400)
    with _errors(path):
        place = path.expanduser() if str(path).startswith("~") else path
        if place.is_dir():
            raise OutputExists(f"{name} is a folder, expected the name of a file; give another {arg('out')}")
        if os.path.lexists(place) and place.exists() and not place.is_file():
            raise OutputExists(f"{name} is no ordinary file; give another {arg('out')}")
        if place.exists() and own is not None:
            with open(place, "rb") as file:
                head = file.read(LOOK_BYTES)
            if not own(head):
                raise OutputExists(f"{name} exists and is not {what}; remove it, or give another {arg('out')}")
        folder = next(parent for parent in (place.absolute().parent, *place.absolute().parents) if parent.exists())
        if not folder.is_dir():
            raise WrongOutput(
                f"{shown(str(folder))} is a file, {name} cannot be created in it; give another {arg('out')}"
            )
        with contextlib.suppress(FileNotFoundError):
            os.lstat(folder / place.name)  # says whether the file system takes such a name
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                _reserve(probe.fileno(), nbytes)
        except FileNotFoundError:  # of a file system that is made by the kernel
            where = f"{shown(str(folder))} is not writable"
            raise WrongOutput(f"{where}, {name} cannot be created in it; give another {arg('out')}") from None


def write_file(path: Path, content: str) -> None:
    """Replaces ``path`` at once, its folder made where it is missing; what cannot be written leaves nothing behind.

    UTF-8; names of files that are not Unicode are written escaped. What a killed process leaves is a hidden file, which
    the next one to write ``path`` takes over. Raises OutputError.
    """
    with _errors(path):
        place = path.expanduser() if str(path).startswith("~") else path
        place.parent.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(os.fsencode(place.name)).hexdigest()[:16]  # as short as any file system wants it
        growing = place.with_name(f".ptqpipe-{name}.partial")
        fd = _open_alone(growing)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content.encode("utf-8", errors="backslashreplace"))
                file.flush()
                os.fsync(fd)
                os.replace(growing, place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(growing)
            raise


def _open_alone(path: Path) -> int:
    """An empty file for this process alone: it waits for another one that is writing it. Raises OSError."""
    while True:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.lexists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                os.ftruncate(fd, 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # by now it is what the other one has written


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """An OSError as one line that names ``path`` and the remedy, whatever file it was about."""
    try:
        yield
    except RuntimeError as error:  # an unknown user's home
        raise OutputError(
            f"{shown(str(path), limit=400)} cannot be written: {error}; give another {arg('out')}"
        ) from None
    except OSError as error:
        reason = write_failure(error, resumes=False)
        raise OutputError(f"{shown(str(path), limit=400)} cannot be written: {reason}") from None


def _reserve(fd: int, nbytes: int) -> None:
    """Reserves ``nbytes``; raises OSError where the disk has no room for them."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, max(1, nbytes))
    else:  # macOS
        os.write(fd, bytes(min(max(1, nbytes), 1 << 20)))
