"""How far the loading of a model is: a bar on a terminal, else lines, few of them."""

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from ptqpipe.quantities import disk_size

LINE_S = 2.0  # between two lines
_FORMAT = "loading {percentage:3.0f}% {bar:20} {n_fmt}/{total_fmt}B {rate_fmt} ETA {remaining}"


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
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Shows it."""
        if self._terminal:
            if self._bar is None:
                self._bar = tqdm(
                    total=total, unit_scale=True, unit="B", file=sys.stderr, bar_format=_FORMAT, leave=False
                )
            self._bar.update(done - self._bar.n)
        elif self._clock() >= self._next:
            self._next = self._clock() + LINE_S
            self._log(f"loading ... {100 * done / max(total, 1):.0f} % of {disk_size(total)}")

    def __enter__(self) -> "LoadingBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
