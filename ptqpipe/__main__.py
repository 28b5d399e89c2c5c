"""Entry point of ``ptqpipe`` and ``python -m ptqpipe``: Ctrl-C has its exit code before heavy imports begin, and no
thread can spoil the end.
"""

import contextlib
import gc
import os
import sys
import threading

_MAY_HANG = {"ptqpipe-engine", "ptqpipe-overlap"}


def run() -> None:
    """Runs the command line; an interrupt while it is still imported ends like any other, without a trace."""
    # Plans of large models are hundreds of thousands of small objects without cycles: looking for cycles among them as
    # often as Python does by default takes a third of a dry run's time.
    gc.set_threshold(50_000, 20, 100)
    try:
        from ptqpipe.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        main()
    except SystemExit as end:
        # Python looks for cycles three times while it ends, among all that torch has made: a quarter of a second. It
        # looks through nothing that is frozen; but Triton's library would print that its objects are still there.
        if "triton" not in sys.modules:
            gc.freeze()
        if any(thread.name in _MAY_HANG for thread in threading.enumerate()):
            _leave(end)
        raise


def _leave(end: SystemExit) -> None:
    """Ends the process with ``end``'s code and without the interpreter's finalization.

    A thread may wait in C++ for a rank that is dead. When it wakes while the interpreter ends, Python unwinds it
    through frames that allow no exception, and the process is aborted, whatever its exit code was to be.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a pipe that nobody reads any more
            stream.flush()
    os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


if __name__ == "__main__":
    run()
