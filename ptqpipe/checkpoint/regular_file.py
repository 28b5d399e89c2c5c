"""Reads small files of other people's folders whole: never a pipe, a device or more than a limit.

A link may lead to /dev/zero, which never ends, and opening a pipe waits for a writer; sizes that `stat` gives are those
of another moment. So a file is opened without waiting, looked at when it is open, and its bytes are counted as they
come. Knows nothing of what the files hold.
"""

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

#: What any JSON file may have: the records of models with 100,000 experts have half of it.
MAX_JSON_BYTES = 256 * 2**20
#: What a recipe or a chat template may have: both are parsed in pure Python, YAML at some 10 s a megabyte.
MAX_RECIPE_BYTES = 2**20
#: What a text that models are calibrated or measured on may have.
MAX_TEXT_BYTES = 4 * 2**30

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def kind_of(mode: int) -> str:
    """The kind of file of an ``st_mode``: "a pipe", "a device"; "" for a regular file."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def read_regular(path: Path, *, limit: int) -> bytes:
    """All bytes of a regular file, or of one that a link leads to.

    Raises OSError as `open` does, and, with words of its own for ``strerror``, for anything else than a regular file
    and for more than ``limit`` bytes; never waits, and never holds more than twice ``limit`` bytes.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        raw = b"" if status.st_size > limit else _up_to(file.fileno(), limit + 1)
    if status.st_size > limit or len(raw) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return raw


def open_regular(path: Path) -> io.FileIO:
    """A regular file, open for reading, unbuffered. Raises OSError as `read_regular` does; never waits."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if kind := kind_of(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, f"it is {kind}, expected a file", str(path))
        return io.FileIO(fd)
    except BaseException:
        os.close(fd)
        raise


def read_regular_text(path: Path, *, limit: int) -> str:
    """`read_regular` as UTF-8 text, its line ends as ``\\n``. Raises UnicodeDecodeError too."""
    return io.TextIOWrapper(io.BytesIO(read_regular(path, limit=limit)), encoding="utf-8").read()


def read_json(path: Path) -> Any:
    """The content of a JSON file; None where it cannot be read or parsed. For files of other programs."""
    try:
        return json.loads(read_regular(path, limit=MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def _up_to(fd: int, nbytes: int) -> bytes:
    parts = []
    while nbytes > 0 and (part := os.read(fd, min(nbytes, 2**24))):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)
