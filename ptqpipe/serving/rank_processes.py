"""The processes of a tensor-parallel service: started and watched here, or joined where torchrun started them.

Ranks that are started here meet by a file that no other user can open, and reach each other by gloo on this machine's
loopback; on GPUs they sum by NCCL. When one ends, the service learns of it at once, for others may wait for it in a
sum; when the first one ends, however it does, the others end. One that is stopped, or does not answer in a sum, counts
as ended (``watchdog.py``).
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from ptqpipe.errors import UsageError, arg, argv, first_line
from ptqpipe.run.processes import LOOPBACK, end_with_parent, join_group, join_remedy, safe_environment
from ptqpipe.runtime.memory import available_bytes
from ptqpipe.serving.watchdog import LOOK_S, STOPPED_S, Stopped

TIMEOUT = timedelta(minutes=10)  # of one collective; ranks load at different speeds
_GRACE_S = 5.0
_LOST_S = 2.0  # from a connection that closes to the end of its process
_CACHE_PART = 4  # of the memory that is free after loading, one part is the cache's


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank of a service.

    local       ranks on this machine
    local_rank  which of them this is
    store       the file by which the first rank and those that it started meet; None: by torchrun's environment
    parent      the process of the first rank, for ranks that it started
    """

    rank: int = 0
    size: int = 1
    local: int = 1
    local_rank: int = 0
    torchrun: bool = False
    store: str | None = None
    parent: int | None = None

    def device(self, device: str) -> str:
        """The device of this rank: "cuda" is one GPU each, by local rank. UsageError for one GPU and several ranks.

        The CUDA branches were tested with a faked driver, never on hardware.
        """
        if device == "cuda":
            return f"cuda:{self.local_rank}"
        if device.startswith("cuda") and self.local > 1:
            raise UsageError(f"{arg('device', device)} is one GPU for {self.local} ranks; use cuda, which is one each")
        return device

    def cache_bytes(self, device: str) -> int:
        """Default size of this rank's cache of keys and values: a quarter of the free memory of its device.

        The host's is divided among the ranks of this machine, a GPU's belongs to one rank.
        """
        if device == "cpu":
            return available_bytes() // _CACHE_PART // self.local
        import torch

        free: int = torch.cuda.mem_get_info(device)[0]
        return free // _CACHE_PART

    def threads(self) -> int:
        """The physical cores less one, for the server, divided among the ranks of this machine; at least 1."""
        from ptqpipe.run.machine import compute_threads

        return max(1, (compute_threads() - 1) // self.local)

    def follow_parent(self) -> None:
        """Makes a rank that was started by the first one end with it: nobody else would ever tell it."""
        if self.parent is not None:
            end_with_parent(self.parent)

    def join(self) -> None:
        """Enters the process group. UsageError where the others are not reached."""
        import torch.distributed as dist
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        if self.size == 1:
            return
        try:
            if self.torchrun:
                join_group(self.rank, self.size, timeout=TIMEOUT)
                return
            assert self.store is not None
            # Not the user's choice for ranks on several machines: these are on one.
            os.environ.update(dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), LOOPBACK))
            store = FileStore(self.store, self.size)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
        except (RuntimeError, ValueError, OSError) as error:
            here = "see above what other ranks say; they need the loopback interface and a folder for temporary files"
            remedy = join_remedy(error) if self.torchrun else here
            raise UsageError(
                f"rank {self.rank} of {self.size} does not reach the others: {first_line(error)}; {remedy}"
            ) from None

    def group_of_sums(self, device: str) -> Any:
        """The process group in which tensors on ``device`` are summed and gathered; None is the one that was joined.

        GPUs get one of NCCL's, made by all ranks together. What the ranks tell each other stays with gloo, on the host.
        """
        import torch
        import torch.distributed as dist

        if self.size == 1 or device == "cpu":
            return None
        torch.cuda.set_device(device)  # of this thread: NCCL's rank is on the current one
        return dist.new_group(backend="nccl", timeout=TIMEOUT)

    def ignore_signals(self) -> None:
        """A rank above 0 ends when the first one tells it to, after that has drained."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


@dataclass(slots=True)
class WorkerRanks:
    """The first rank's control of the others; a context that ends them.

    folder  has the file by which they meet; "" for ranks that it did not start
    """

    place: RankInfo
    processes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    folder: str = ""
    broken: bool = False
    _closing: bool = False

    @classmethod
    def start(cls, place: RankInfo, worker: list[str]) -> Self:
        """Starts ranks 1 and up, unless there are none or torchrun did."""
        ranks = cls(place)
        if place.size == 1 or place.torchrun:
            return ranks
        ranks.folder = tempfile.mkdtemp(prefix="ptqpipe-ranks-")  # 0700
        ranks.place = replace(place, store=os.path.join(ranks.folder, "store"))
        for rank in range(1, place.size):
            command = [*worker, *argv(rank_of=f"{ranks.place.store}/{rank}", parent=os.getpid())]
            ranks.processes[rank] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=safe_environment(os.environ)
            )
        return ranks

    def join(self) -> None:
        """Enters the process group as the first rank."""
        self.place.join()

    def watch(self, failed: Callable[[str], None]) -> None:
        """Calls ``failed`` with what happened when a rank that was started here ends by itself, or is stopped."""
        if self.processes:
            threading.Thread(target=self._watch, args=(failed,), name="ptqpipe-ranks", daemon=True).start()

    def _watch(self, failed: Callable[[str], None]) -> None:
        stopped = Stopped()
        while not self._closing:
            fault = self._fault(stopped)
            if fault and not self._closing:
                self.broken = True
                failed(fault)
                return
            time.sleep(LOOK_S)

    def _fault(self, stopped: Stopped | None = None) -> str:
        """Which rank has ended, or been stopped, and how; "" where none has. Of several, one that was killed.

        The others end a moment later, because it does not answer them.
        """
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        for rank in sorted(codes, key=lambda rank: codes[rank] or 0):
            process, code, how = self.processes[rank], codes[rank], ""
            if code is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            elif stopped is not None and stopped.look(process.pid):
                how = f"has been stopped for {STOPPED_S:g} s"
            if how:
                return f"rank {rank} (process {process.pid}) {how}; the service cannot go on without it"
        return ""

    def lost(self, reason: str) -> str:
        """What a failed operation of the ranks comes from: the one that has ended, else ``reason``.

        A rank's connections close a moment before the system tells that it has ended.
        """
        deadline = time.monotonic() + _LOST_S
        while not (fault := self._fault()) and self.processes and time.monotonic() < deadline:
            time.sleep(LOOK_S / 10)
        self.broken |= bool(fault)
        return fault or f"a rank does not answer: {reason}"

    def failing(self, failed: Callable[[str], None]) -> Callable[[str], None]:
        """``failed`` for whoever else finds that a rank does not work: the ranks are then killed, not waited for."""

        def fail(what: str) -> None:
            self.broken = True
            failed(what)

        return fail

    def others(self) -> str:
        """The ranks that the first one may wait for, as text."""
        if not self.processes:
            return "another rank" if self.place.size > 2 else "rank 1"
        names = [f"rank {rank} (process {process.pid})" for rank, process in self.processes.items()]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the others: they end by themselves when the leader has closed, else they are killed."""
        self._closing = True
        deadline = time.monotonic() + (0.0 if self.broken or error is not None else _GRACE_S)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def parse_place(rank_of: str, size: int, *, parent: int | None = None) -> RankInfo:
    """The place that ``rank_of``, a text FILE/RANK, names."""
    store, _, rank = rank_of.rpartition("/")
    if not re.fullmatch(r"[1-9]\d{0,5}", rank, re.ASCII) or int(rank) >= size or not os.path.isabs(store):
        raise UsageError(f"{arg('rank_of', rank_of)} is not FILE/RANK with an absolute path and a rank below {size}")
    return RankInfo(int(rank), size, size, int(rank), store=store, parent=parent)
