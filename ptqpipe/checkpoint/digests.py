"""Checks the sha256 of files that an index lists before their first tensor is read, so that damage is an error.

Codes and moments are all legal numbers: nothing else could tell a flipped bit. It must not know what the files hold.
"""

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint.header import shown
from ptqpipe.errors import CheckpointError


def file_sha256(path: Path, *, remedy: str = "check the file") -> str:
    """sha256 of a whole file in hex. CheckpointError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read: {error.strerror}; {remedy}") from None


class FileDigests:
    """May be asked by threads; each file is read once for it, and then likely from memory."""

    def __init__(self, known: Mapping[Any, Any], *, remedy: str) -> None:
        """``known``: sha256 in hex by the file's name; a file of none is not checked."""
        self._known, self._remedy = dict(known), remedy
        self._lock = threading.Lock()

    def check(self, file: Path) -> None:
        """Raises CheckpointError for a file that is not the one that the index tells of, or cannot be read."""
        with self._lock:
            if file.name not in self._known:
                return
            if file_sha256(file, remedy=self._remedy) != self._known[file.name]:
                raise CheckpointError(
                    f"{shown(str(file))} is damaged: its sha256 is not the one that was recorded; {self._remedy}"
                )
            del self._known[file.name]
