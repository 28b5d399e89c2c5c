"""A child process, everything it starts, and the shared memory they use: watched, ended, and cleared away.

Linux only, from /proc: this process becomes the reaper of its descendants, so a worker whose parent was killed is
handed to it instead of being lost, and nothing that it did not start is ever touched. Shared-memory segments count as
the family's when one of its processes had them mapped and they were not there before it started; they are removed only
when no process maps them any more.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

SHM = Path("/dev/shm")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LISTEN = "0A"  # of a socket's state in /proc/net/tcp
END_S = 5.0  # between asking the last workers to end and killing them


@dataclass(slots=True)
class Family:
    """A child and its descendants.

    before    the segments that were there first
    segments  those that the family has mapped since
    known     every process that was seen to belong to it
    """

    child: subprocess.Popen[bytes]
    before: frozenset[str]
    segments: set[str] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    stopped_at: float | None = None

    @classmethod
    def start(cls, command: list[str], environment: dict[str, str], *, log: int | None = None) -> Self:
        """Starts the child in a session of its own: a Ctrl-C at the terminal reaches it through us alone.

        log  the file descriptor of what it prints; None is this process's own

        The child gets SIGTERM when the thread that called this ends, whatever ends it. No other thread may run, since
        code of ours runs between fork and exec.
        """
        become_reaper()
        before = frozenset(path.name for path in SHM.iterdir()) if SHM.is_dir() else frozenset()
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_ends_with(os.getpid()),
        )
        return cls(child, before)

    @property
    def code(self) -> int | None:
        """The child's exit code, negative for a signal; None while it runs."""
        return self.child.returncode

    def running(self) -> bool:
        """Whether the child runs."""
        return self.child.poll() is None

    def wait(self, seconds: float) -> None:
        """Until the child ends, at most so long."""
        try:
            self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def members(self) -> list[int]:
        """The processes that stem from the child: it, its descendants, and those of them that came to us as orphans."""
        parents = parent_of_each()
        ours = {pid for pid, parent in parents.items() if parent == os.getpid()}
        roots = {pid for pid in ours if pid in self.known or _session(pid) == self.child.pid}
        found, new = set(roots), roots
        while new:
            new = {pid for pid, parent in parents.items() if parent in new} - found
            found |= new
        self.known |= found
        return sorted(found)

    def listens(self, port: int) -> bool:
        """Whether one of its processes has a TCP socket that listens on the port."""
        inodes = listening_sockets(port)
        return any(inodes & open_sockets(pid) for pid in self.members())

    def look(self) -> None:
        """Notes the segments that the family has mapped now."""
        for pid in self.members():
            self.segments |= mapped_segments(pid) - self.before

    def stop(self) -> None:
        """Asks the child to end. The first time counts."""
        self.stopped_at = self.stopped_at or time.monotonic()
        self.child.send_signal(signal.SIGTERM)

    def seconds_since_stop(self) -> float:
        """Seconds since the first `stop`, 0 before."""
        return time.monotonic() - self.stopped_at if self.stopped_at is not None else 0.0

    def kill(self) -> None:
        """Ends every member at once."""
        for pid in self.members():
            _signal(pid, signal.SIGKILL)

    def clear(self) -> list[str]:
        """After the child has ended: ends the workers it left, removes their segments; a line for each."""
        lines = []
        left = self.members()
        for pid in left:
            self.segments |= mapped_segments(pid) - self.before
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.kill()
        while self.members():
            time.sleep(0.05)
        self._reap()
        if left:
            lines.append(f"ended {len(left)} process(es) that vLLM had left")
        removed = [name for name in sorted(self.segments) if remove_segment(name)]
        if removed:
            lines.append(f"removed {len(removed)} shared-memory segment(s) that vLLM had left: {', '.join(removed)}")
        return lines

    def _reap(self) -> None:
        """Collects the exit codes of orphans that ended as ours."""
        for pid in self.known - {self.child.pid}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def become_reaper() -> None:
    """Makes this process the parent of descendants whose own parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _ends_with(parent: int) -> Callable[[], None]:
    """What a child does before it becomes another program, so that it is asked to end when ``parent`` has gone."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def listening_sockets(port: int) -> set[str]:
    """Inodes of the TCP sockets of this network namespace that listen on a port."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text(encoding="utf-8").splitlines()[1:]
        except OSError:  # no IPv6
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def open_sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    found = set()
    for path in _entries(Path(f"/proc/{pid}/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(path))
    return {link[len("socket:[") : -1] for link in found if link.startswith("socket:[")}


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # ended meanwhile, or another user's
        return []


def parent_of_each() -> dict[int, int]:
    """Parent by process, for every process of this machine that is not a zombie."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # ended meanwhile
                continue
            if fields[0] != "Z":
                found[int(folder.name)] = int(fields[1])
    return found


def mapped_segments(pid: int) -> set[str]:
    """The names below /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # ended meanwhile, or another user's
        return set()
    paths = (line.split(maxsplit=5)[5] for line in lines if f" {SHM}/" in line)
    return {path.removeprefix(f"{SHM}/").removesuffix(" (deleted)") for path in paths}


def remove_segment(name: str) -> bool:
    """Removes a segment that is there and that no process maps. Whether it did."""
    if not (SHM / name).exists() or any(name in mapped_segments(pid) for pid in parent_of_each()):
        return False
    try:
        (SHM / name).unlink()
    except OSError:
        return False
    return True


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
