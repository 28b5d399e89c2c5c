"""Notices ranks that live but do not compute: a process that was stopped, a machine that does not answer.

A rank waits for the others in every sum, once or twice a layer, and they compute the same layers at the same time; so a
long wait is a rank that hangs, while a long step may be nothing but a long prompt. The timeout counts polls rather than
wall-clock time: when the whole service is stopped and goes on (Ctrl-Z and fg), none of it has passed.
"""

import threading
import time
from collections.abc import Callable

import torch

from ptqpipe.run.processes import is_stopped

WAIT_S = 60.0  # of one sum
STOPPED_S = 10.0
LOOK_S = 0.1


class Watchdog:
    """Runs collective operations and reports when one takes longer than ``wait_s``."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self.wait_s = wait_s
        self._looks_left = round(wait_s / LOOK_S)
        self._begun = 0  # how many operations have begun, and ended
        self._ended = 0
        self._seen = 0

    def __call__(self, collective: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._begun += 1
        try:
            return collective()
        finally:
            self._ended += 1

    def look(self) -> bool:
        """Whether an operation has been under way for too long. To be called every `LOOK_S`."""
        begun = self._begun
        if begun == self._ended or begun != self._seen:
            self._seen, self._looks_left = begun, round(self.wait_s / LOOK_S)
            return False
        self._looks_left -= 1
        return self._looks_left <= 0

    def watch(self, failed: Callable[[str], None], who: Callable[[], str]) -> None:
        """Calls ``failed`` once, in a thread, when an operation takes too long.

        who  names the ranks that are waited for
        """

        def main() -> None:
            while not self.look():
                time.sleep(LOOK_S)
            failed(f"{who()} has not answered for {self.wait_s:g} s; the service cannot go on without it")

        threading.Thread(target=main, name="ptqpipe-watchdog", daemon=True).start()


class Stopped:
    """Tells which processes have been stopped (SIGSTOP) for `STOPPED_S`."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}

    def look(self, pid: int) -> bool:
        """Whether a process has been stopped for `STOPPED_S`. To be called every `LOOK_S`."""
        self._looks[pid] = self._looks.get(pid, 0) + 1 if is_stopped(pid) else 0
        return self._looks[pid] * LOOK_S >= STOPPED_S
