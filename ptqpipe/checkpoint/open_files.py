"""Open files of a checkpoint of any number of shards: only some of them at a time."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

_SHARE: Final = (
    16  # of the files that a process may have: two descriptors each, and a run reads and writes several sets
)
_LEAST: Final = 4


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


class OpenFiles(Generic[T]):
    """Files by path, opened when they are used; of those that no thread is at, the one that was used longest ago is
    closed when there are too many. Threads may use it."""

    def __init__(self, open_file: Callable[[Path], T]) -> None:
        self._open: Final = open_file
        self._most = max(_LEAST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE)
        self._files: dict[Path, T] = {}  # the one that was used last is the last
        self._users: dict[Path, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def use(self, path: Path) -> Iterator[T]:
        """The open file, which stays open meanwhile. Raises what opening raises."""
        with self._lock:
            file = self._files.pop(path, None)
            if file is None:
                self._close_idle(self._most - 1)
                file = self._open(path)
            self._files[path] = file
            self._users[path] = self._users.get(path, 0) + 1
        try:
            yield file
        finally:
            with self._lock:
                self._users[path] -= 1
                if not self._users[path]:
                    del self._users[path]

    def close(self) -> None:
        """Closes all that no thread is at. Using one again opens it again."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, left: int) -> None:
        for path in [path for path in self._files if path not in self._users]:
            if len(self._files) <= left:
                return
            self._files.pop(path).close()
