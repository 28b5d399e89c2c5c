"""Entry point of ``ptqpipe`` and ``python -m ptqpipe``: Ctrl-C has its exit code before heavy imports begin, nothing is
imported from the working folder, and no thread can spoil the end.
"""

import atexit
import gc
import os
import sys

_MAY_HANG = {"ptqpipe-engine", "ptqpipe-overlap"}


def run() -> None:
    """Runs the command line; an interrupt while it is still imported ends like any other, without a trace."""
    # Plans of large models are hundreds of thousands of small objects without cycles: looking for cycles among them as
    # often as Python does by default takes a third of a dry run's time.
    gc.set_threshold(50_000, 20, 100)
    try:
        _import_nothing_from_the_working_folder()
        from ptqpipe.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        main()
    except SystemExit as end:
        import threading

        # Whoever else runs by now has nothing to finish: the command has. To wait for it could take for ever.
        if not any(thread.name in _MAY_HANG for thread in threading.enumerate()):
            atexit._run_exitfuncs()  # what packages still have to do, such as to remove temporary folders
        _leave(end)


def _import_nothing_from_the_working_folder() -> None:
    """Drops the relative entries of PYTHONPATH, and keeps the folder out of every Python that is started from here.

    It may be a downloaded model, with a json.py beside the weights. What Python imports before this can only be kept
    from it by the caller: ``ptqpipe`` is safe, ``python -m ptqpipe`` from within such a folder is not without -P.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    dropped = {os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)} - set(entries)
    sys.path[:] = [entry for entry in sys.path if entry not in dropped]
    from ptqpipe.run.processes import safe_environment

    inherited = dict(os.environ)
    os.environ.clear()
    os.environ.update(safe_environment(inherited))


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
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # the working folder, by -m
    run()
