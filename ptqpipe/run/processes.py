"""Processes: how Python is started in a child, how ranks meet, all descendants with their shared memory, common ends.

A child never imports from the working folder, which may be a downloaded model: ``python -m`` and ``python -c`` put it
first on sys.path, and a json.py beside the weights would be run. `own_command` and `safe_environment` keep it out by
Python's own switch for that, -P and PYTHONSAFEPATH; not by -I, which would also drop PYTHONPATH and the user's
site-packages, where people keep packages that they use.

`ProcessTree` is Linux only: this process becomes the reaper of its descendants, so that a worker whose parent was
killed is handed to it instead of being lost, and nothing that it did not start is ever touched. A shared-memory segment
counts as the tree's when one of its processes had it mapped and it was not there before the tree started; it is
removed only when no process maps it any more. Must not know what the processes are for. psutil is imported when it is
needed.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ptqpipe.errors import PtqError

if TYPE_CHECKING:
    import psutil

SHM = Path("/dev/shm")
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # the interface's name
END_S = 5.0  # between asking the last workers to end and killing them
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PARENT_POLL_S = 0.5
# The package comes from its own file: where this process has it from a source tree, -P would hide it from the child.
_START = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("ptqpipe", sys.argv.pop(1))
sys.modules["ptqpipe"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["ptqpipe"])
sys.argv[0] = "ptqpipe"
from ptqpipe.__main__ import run
"""


def own_command(start: str = "run()") -> list[str]:
    """The command that runs ``ptqpipe`` in a process of its own; the arguments of ``ptqpipe`` go behind it.

    start  code that calls ``run``, where something else has to come first
    """
    return [sys.executable, "-P", "-c", _START + start, str(Path(__file__).parents[1] / "__init__.py")]


def safe_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """``inherited`` for a child that, like all that it starts in turn, imports nothing from the working folder.

    Of PYTHONPATH only absolute entries are kept: "." and an empty entry (``PYTHONPATH=:/lib`` has one) are the working
    folder, wherever that is.
    """
    result = {**inherited, "PYTHONSAFEPATH": "1"}
    kept = [entry for entry in result.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    return {**result, "PYTHONPATH": os.pathsep.join(kept)} if kept else result


def join_group(rank: int, size: int, *, timeout: timedelta | None = None) -> None:
    """Enters gloo's default group of the processes that a launcher such as torchrun started; twice is once.

    Where all of them are on one machine, gloo listens on loopback alone. The store by which they meet is torchrun's,
    which listens on every address; another launcher has none, so rank 0 opens it here, at MASTER_ADDR alone. Raises
    RuntimeError, ValueError or OSError where the others are not reached.
    """
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if dist.is_initialized():
        return
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size) or _is_loopback(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if not host or not port.isdigit():
            raise ValueError(f"MASTER_ADDR is {host!r} and MASTER_PORT {port!r}, expected rank 0's address and port")
        descriptor = _listening(host, int(port)) if rank == 0 else None
        store = TCPStore(host, int(port), size, rank == 0, wait_for_workers=False, master_listen_fd=descriptor)
        options |= {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group("gloo", **options)


def join_remedy(error: Exception) -> str:
    """The remedy for a failure of `join_group`, as far as its error tells."""
    text = str(error).lower()
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        return "start all ranks with torchrun"
    if "in use" in text or "eaddrinuse" in text:
        return "choose another master port for torchrun"
    return "see above what other ranks say; all must run, and reach each other's ports"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listening(host: str, port: int) -> int | None:
    """The descriptor of a socket that listens at one address. None, which is every address, for one that is not this
    machine's (as behind a translation of addresses), and for a name that is loopback here and another one elsewhere."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if _is_loopback(str(address[0])) and not _is_loopback(host):
        return None
    try:
        return socket.create_server(address, family=family).detach()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


@dataclass(slots=True)
class ProcessTree:
    """A child and its descendants.

    before     names of the segments that were there first
    segments   names of those that the tree has mapped since
    processes  every process that was seen to belong to it
    """

    child: subprocess.Popen[bytes]
    before: frozenset[str]
    segments: set[str] = field(default_factory=set)
    processes: "set[psutil.Process]" = field(default_factory=set)
    stopped_at: float | None = None

    @classmethod
    def start(cls, command: list[str], environment: dict[str, str], *, log: int | None = None) -> Self:
        """Starts the child in a session of its own: a Ctrl-C at the terminal reaches it through this process alone.

        log  the file descriptor of what it prints; None is this process's own

        The child gets SIGTERM when the thread that called this ends, whatever ends it. No other thread may run, since
        Python code runs between fork and exec.
        """
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        parent = os.getpid()

        def end_with_this_process() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        before = frozenset(path.name for path in SHM.iterdir()) if SHM.is_dir() else frozenset()
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_this_process,
        )
        return cls(child, before)

    @property
    def code(self) -> int | None:
        """The child's exit code, negative for a signal; None while it runs."""
        return self.child.returncode

    def running(self) -> bool:
        return self.child.poll() is None

    def wait(self, seconds: float) -> None:
        """Until the child ends, at most ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(seconds)

    def members(self) -> "list[psutil.Process]":
        """The living processes that stem from the child: it, its descendants, and orphans that this process reaps."""
        import psutil

        processes: set[psutil.Process] = set()
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process in self.processes or os.getsid(process.pid) == self.child.pid:
                    processes |= {process, *process.children(recursive=True)}
        self.processes |= processes
        return sorted((process for process in processes if _is_alive(process)), key=lambda process: process.pid)

    def listens(self, port: int) -> bool:
        """Whether one of its processes has a TCP socket that listens on the port."""
        import psutil

        for process in self.members():
            with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return True
        return False

    def look(self) -> None:
        """Notes the segments that the tree has mapped now."""
        for process in self.members():
            self.segments |= _mapped_segments(process.pid) - self.before

    def stop(self) -> None:
        """Asks the child to end. The first time counts."""
        self.stopped_at = self.stopped_at or time.monotonic()
        self.child.send_signal(signal.SIGTERM)

    def seconds_since_stop(self) -> float:
        """Seconds since the first `stop`, 0 before."""
        return time.monotonic() - self.stopped_at if self.stopped_at is not None else 0.0

    def kill(self) -> None:
        """Ends every member at once."""
        self._signal(signal.SIGKILL)

    def clear(self) -> list[str]:
        """After the child has ended: ends the workers it left, removes their segments; a line for each."""
        self.look()
        left = self._signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.kill()
        while self.members():
            time.sleep(0.05)
        for process in self.processes:
            if process.pid != self.child.pid:  # an orphan of which this process has to collect the exit code
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
        lines = [f"ended {left} process(es) that vLLM had left"] if left else []
        removed = [name for name in sorted(self.segments) if _remove_segment(name)]
        if removed:
            lines.append(f"removed {len(removed)} shared-memory segment(s) that vLLM had left: {', '.join(removed)}")
        return lines

    def _signal(self, number: signal.Signals) -> int:
        """Sends a signal to every member; how many there are."""
        import psutil

        members = self.members()
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return len(members)


def _is_alive(process: "psutil.Process") -> bool:
    """Whether a process is there and no zombie."""
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _mapped_segments(pid: int) -> set[str]:
    """The names below /dev/shm that a process has mapped.

    From /proc/PID/maps: psutil reads /proc/PID/smaps, for which the kernel stops the process and walks all its pages.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # ended meanwhile, or another user's
        return set()
    paths = (line.split(maxsplit=5)[5] for line in lines if f" {SHM}/" in line)
    return {path.removeprefix(f"{SHM}/").removesuffix(" (deleted)") for path in paths}


def _remove_segment(name: str) -> bool:
    """Removes a segment that is there and that no process maps. Whether it did."""
    import psutil

    if not (SHM / name).exists() or any(name in _mapped_segments(pid) for pid in psutil.pids()):
        return False
    try:
        (SHM / name).unlink()
    except OSError:
        return False
    return True


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped (SIGSTOP). False where it has ended."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def end_with_parent(parent: int) -> None:
    """Ends this process when ``parent``, which started it, has gone; at once where it has gone already.

    Linux has a signal for that, which comes when the *thread* that started this process ends, so that must be one that
    stays. A thread that looks twice a second does the same elsewhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # before the signal was asked for
        os._exit(PtqError.exit_code)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(PtqError.exit_code)

    threading.Thread(target=look, name="ptqpipe-parent", daemon=True).start()
