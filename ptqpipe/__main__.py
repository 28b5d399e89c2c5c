"""Entry point of ``ptqpipe`` and ``python -m ptqpipe``: Ctrl-C has its exit code before heavy imports begin, and no
thread can spoil the end.
"""

import atexit
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
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        hangs = any(thread.name in _MAY_HANG for thread in others)
        if hangs or all(thread.daemon for thread in others):
            if not hangs:
                atexit._run_exitfuncs()  # what packages still have to do, such as to remove temporary folders
            _leave(end)
        raise


def _leave(end: SystemExit) -> None:
    """Ends the process with ``end``'s code and without the interpreter's finalization.

    To take apart what torch has made takes an eighth of a second, and changes nothing. And a thread may wait in C++ for
    a rank that is dead. When it wakes while the interpreter ends, Python unwinds it through frames that allow no
    exception, and the process is aborted, whatever its exit code was to be.
    """
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before it began
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk, a pipe that nobody reads any more
            code = code or 120  # Python's own
    os._exit(code)


if __name__ == "__main__":
    run()
