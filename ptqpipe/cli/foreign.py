"""What other packages say by themselves: warnings of deprecated calls, advice of loggers. It is for programmers.

It stays off a user's terminal, where it would stand between results and tear progress bars. It is printed where the
environment asks for warnings (``PYTHONWARNINGS=default``), and behind the trace of an error that is a bug.
"""

import logging
import sys
import warnings
from collections.abc import MutableMapping
from typing import TextIO

from ptqpipe.cli.lines import say
from ptqpipe.errors import PtqWarning, one_line

# Of packages that have handlers of their own on stderr, or write there from C++: what they log from.
_LEVELS = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_MOST = 50  # lines that are kept

_held: dict[str, None] = {}


def hold_back(environment: MutableMapping[str, str]) -> None:
    """Keeps other packages' warnings back from now on, here and in child processes, unless Python was asked for
    warnings. Doing it twice is doing it once."""
    if sys.warnoptions:
        return
    warnings.showwarning = _show
    for name, level in _LEVELS.items():
        environment.setdefault(name, level)
    if isinstance(getattr(logging.lastResort, "stream", None), _Held):
        return
    handler = logging.StreamHandler(_Held())  # of loggers without one: Python would print from warnings on
    handler.setLevel(logging.WARNING)
    logging.lastResort = handler
    hook = sys.excepthook

    def behind_trace(*error: object) -> None:
        hook(*error)  # type: ignore[arg-type]
        for line in _held:
            say(line)

    sys.excepthook = behind_trace


def _show(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """In the place of `warnings.showwarning`."""
    if issubclass(category, PtqWarning):
        say(f"warning: {message}")
    else:
        _hold(f"{filename}:{lineno}: {category.__name__}: {message}")


def _hold(line: str) -> None:
    if len(_held) < _MOST:
        _held[one_line(line)] = None


class _Held:
    """A stream whose lines are held back."""

    def write(self, text: str) -> None:
        """Holds them back."""
        if text.strip():
            _hold(text.strip())

    def flush(self) -> None:
        """Nothing is in between."""
