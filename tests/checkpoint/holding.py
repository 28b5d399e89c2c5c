"""Another process that writes a folder, as a lock tells."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ptqpipe.checkpoint.lock import RankLock


@contextmanager
def another_process_in(folder: Path) -> Iterator[int]:
    """Holds the folder's lock, and makes the folder where it is missing; gives its id."""
    folder.mkdir(parents=True, exist_ok=True)
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        RankLock(folder)
        os.write(say, b"x")
        signal.pause()
        os._exit(0)
    assert os.read(ready, 1) == b"x"
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(say)
