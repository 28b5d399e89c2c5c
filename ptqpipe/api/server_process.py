"""`serve`: a checkpoint served by a process of its own, which ends with the block that started it."""

import os
import re
import signal
import subprocess
import threading
from collections import deque
from pathlib import Path
from typing import Any, Self

from ptqpipe.api.calls import command, folder_of, options_from
from ptqpipe.errors import PtqError, UsageError, argv
from ptqpipe.run.processes import own_command, safe_environment
from ptqpipe.serving.options import ServeCommand

# False is an option of its own, since they are True if nothing is said.
_NEGATED = ("overlap", "prefix_caching")
_KILL_S = 10.0  # beyond the seconds that requests have to finish
_LINES = 200  # of the service's log that are kept
# The child ends when its standard input does: when this process closes it, or has gone, whatever ended it.
_CHILD = """
import os, signal, threading
def ended():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ended, daemon=True).start()
import contextlib, ptqpipe.cli.help
ptqpipe.cli.help.shell_messages = contextlib.nullcontext  # its errors are raised in Python
run()
"""


class ServiceProcess:
    """A running service: ``url`` is where it answers, ``log`` its last lines. A context manager; or call ``stop``."""

    def __init__(self, ckpt: Path, arguments: list[str], environment: dict[str, str], *, drain_s: float) -> None:
        """Starts the process and waits until it answers. UsageError or PtqError with its words where it does not."""
        self.ckpt, self.url, self.log = ckpt, "", deque[str](maxlen=_LINES)
        self._drain_s, self._ready = drain_s, threading.Event()
        self._process = subprocess.Popen(
            [*own_command(_CHILD), "serve", str(ckpt), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=safe_environment(environment),
            start_new_session=True,  # an interrupted cell of a notebook does not end the service
        )
        self._reader = threading.Thread(target=self._read, name="ptqpipe-service-log", daemon=True)
        self._reader.start()
        try:
            self._ready.wait()
        except BaseException:
            self.stop()
            raise
        if not self.url:
            self._fail()

    def _read(self) -> None:
        """Keeps what the service prints, and finds its address there."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line.rstrip())
            match = re.search(r"\bready\b.*?(https?://[^\s/]+)", line)
            if match is not None and not self.url:
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def _fail(self) -> None:
        """The error of a service that ended before it answered."""
        code = self._process.wait()
        self.stop()
        lines = [line for line in self.log if line.startswith("Error")] or list(self.log)
        words = re.sub(r"^Error[^:]*: ", "", lines[-1]) if lines else f"the service ended with code {code}"
        raise (UsageError if code == UsageError.exit_code else PtqError)(words)

    def stop(self) -> None:
        """Ends the service: requests under way have the seconds of ``drain`` to finish. Twice is once."""
        process = self._process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self._drain_s + _KILL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._reader.join(_KILL_S)
        for stream in (process.stdin, process.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"at {self.url}" if self._process.poll() is None else "ended"
        return f"<serve {self.ckpt}: {state}>"

    def _repr_html_(self) -> str:
        from html import escape

        if self._process.poll() is not None:
            return escape(repr(self))
        return f'ptqpipe serves {escape(str(self.ckpt))} at <a href="{escape(self.url)}">{escape(self.url)}</a>'


@command(ServeCommand)
def serve(ckpt: str | Path, *, port: int = 0, **options: Any) -> ServiceProcess:
    """Serves a checkpoint with OpenAI's API in a process of its own; ``url`` is its address.

    port     0 takes any free one
    options  those of ``ptqpipe serve`` for this package's engine, by their names with underscores; None is the default
             of the command

    Returns when it answers. It ends with the ``with`` block, with ``stop()``, or with this process. Raises UsageError
    for what cannot be served.

    >>> with ptqpipe.serve("OUT", workers=1) as service:
    ...     models = urllib.request.urlopen(f"{service.url}/v1/models").read()
    >>> json.loads(models)["data"][0]["id"]
    'OUT'
    """
    environment = dict(os.environ)
    stated = {name: value for name, value in options.items() if value is not None}
    chosen = options_from(ServeCommand, stated, ckpt=str(ckpt), port=port)  # a wrong value is said here
    if chosen.api_key is not None:  # a command line is for all to see
        environment["PTQPIPE_API_KEY"] = str(stated.pop("api_key"))
    words = {name: value for name, value in stated.items() if value is not False or name in _NEGATED}
    return ServiceProcess(folder_of(ckpt), argv(port=port, **words), environment, drain_s=chosen.drain)
