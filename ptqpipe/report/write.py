"""Writes a report: the whole file or none, and never over a file that is no report.

A file is a report when it says so in its first bytes, as both renderers write it; anything else stays untouched.
"""

import contextlib
import os
import tempfile
from pathlib import Path

from ptqpipe.errors import OutputError

HTML_MARK = '<meta name="generator" content="ptqpipe report">'
MARKDOWN_MARK = "<!-- ptqpipe report -->"
_LOOK_BYTES = 4096


def check_target(path: Path) -> None:
    """OutputError unless ``path`` is free or an earlier report, in a folder that exists."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder, expected a file name; give -o {path / 'report.html'}")
    if not path.parent.is_dir():
        raise OutputError(f"the folder {path.parent} does not exist; make it, or give another -o")
    if path.exists() or path.is_symlink():
        try:
            with open(path, "rb") as file:
                head = file.read(_LOOK_BYTES)
        except OSError as error:
            raise OutputError(f"{path} exists and cannot be read: {error.strerror}; give another -o") from None
        if not any(mark.encode() in head for mark in (HTML_MARK, MARKDOWN_MARK)):
            raise OutputError(f"{path} exists and is no report of ptqpipe; remove it, or give another -o")


def write_report(path: Path, content: str) -> None:
    """Replaces ``path`` at once; what cannot be written leaves nothing behind. OutputError as ``check_target``."""
    check_target(path)
    raw = content.encode("utf-8", errors="backslashreplace")
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}; give another -o, or make room") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
