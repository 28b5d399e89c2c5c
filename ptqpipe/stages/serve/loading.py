"""How far the loading of a model is: a bar on a terminal, else lines, few of them."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from ptqpipe.machine import counting_bar
from ptqpipe.quantities import disk_size

LINE_S = 2.0  # between two lines


class LoadingBar:
    """Called with (bytes of weights read, bytes in all), from any thread. A context, which clears the terminal.

    log    takes the lines where there is no terminal
    clock  gives seconds
    """

    def __init__(
        self, log: Callable[[str], None], *, terminal: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._clock = log, clock
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._next = clock() + LINE_S
        self._bar, self._done = ExitStack(), 0
        self._advance: Callable[[float, str], None] | None = None

    def __call__(self, done: int, total: int) -> None:
        """Shows it."""
        if self._terminal:
            if self._advance is None:
                bar = counting_bar(total, "B", shown=True, title="loading", leave=False)
                self._advance = self._bar.enter_context(bar)
            self._advance(done - self._done, "")
            self._done = done
        elif self._clock() >= self._next:
            self._next = self._clock() + LINE_S
            self._log(f"loading ... {100 * done / max(total, 1):.0f} % of {disk_size(total)}")

    def __enter__(self) -> "LoadingBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
