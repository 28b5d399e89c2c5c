"""The machine and the work on it: workers, device, memory, ranks; jobs on threads, and their progress bar.

None of it changes a byte of any output. Must not know what a job computes, or where its result goes.
"""

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from ptqpipe.errors import UsageError
from ptqpipe.quantities import memory_size, option_size

# What a process holds before any weight, and what one worker holds beside a cached unit (chunks, samples, temporaries).
BASE_BYTES = 420 << 20
WORKER_BYTES = 128 << 20
MAX_DEFAULT_WORKERS = 16  # of those that wait for disks; what only computes has as many threads as there are cores
READ_AHEAD = 1  # threads beside the workers, which wait for the disk while those compute


def resident_bytes() -> tuple[int, int]:
    """(resident bytes of this process now, at most so far), from the kernel's accounting."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            current = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # not Linux: the peak is all there is
        current = peak
    return current, max(peak, current)


def peak_bytes() -> int:
    """The most bytes that this process has had resident so far."""
    return resident_bytes()[1]


def default_workers() -> int:
    """One per processor that this process may use, at most 16."""
    return min(len(processors()), MAX_DEFAULT_WORKERS)


def processors() -> list[int]:
    """The numbers of the processors that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def compute_threads() -> int:
    """One per physical core that this process may use: for stages that compute and wait for no disk."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = set()
    for cpu in processors():
        try:
            cores.add(Path(topology.format(cpu)).read_text(encoding="ascii").strip())
        except OSError:  # the kernel does not say: every processor counts
            cores.add(str(cpu))
    return len(cores)


def require_device_kernels() -> None:
    """UsageError that names what to install where the GPU kernels cannot run."""
    from ptqpipe.kernels import triton

    triton.require()


@dataclass(frozen=True, slots=True)
class Share:
    """What the workers of a stage get of the memory.

    workers      how many compute at once: as many as were asked for, as there are jobs, or as memory has room for
    threads      workers plus read-ahead threads
    cache_bytes  how much of a unit each thread may keep in memory
    pool_bytes   what is left of the memory for what single jobs need in addition
    device       where the workers compute
    """

    workers: int
    threads: int
    cache_bytes: int
    pool_bytes: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Machine:
    """How much of the machine a stage may use. ``memory_bytes`` limits resident memory of the process."""

    workers: int = field(default_factory=default_workers)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory_bytes: int = 2 << 30
    progress: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers} is too few; use 1 or more")
        least = BASE_BYTES + WORKER_BYTES
        if self.memory_bytes < least:
            raise UsageError(
                f"--max-memory {option_size(self.memory_bytes)} is too small; one worker needs {option_size(least)}"
            )

    def divide_memory(self, largest_unit_bytes: int, jobs: int, *, reserved_bytes: int = 0) -> "Share":
        """The workers that fit, then what each may cache from what is left.

        READ_AHEAD threads more than workers, where they leave the largest unit its cache: while some wait for the disk,
        as many as there are workers compute.

        reserved_bytes  kept free for the job that needs the most
        """
        free = max(0, self.memory_bytes - BASE_BYTES - reserved_bytes)
        workers = threads = max(1, min(self.workers, jobs, free // WORKER_BYTES))
        ahead = min(threads + READ_AHEAD, max(threads, jobs))
        if free // ahead - WORKER_BYTES >= largest_unit_bytes:
            threads = ahead
        cache = max(0, free // threads - WORKER_BYTES)
        used = BASE_BYTES + threads * (WORKER_BYTES + min(cache, largest_unit_bytes))
        return Share(workers, threads, cache, max(0, self.memory_bytes - used), self.device)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets torch's own threads to ``count`` in the context, at most the processors that this process may use."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, len(processors())))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Torch's own threads only get in each other's way on runs of rows; the workers are the threads. Also for one
    worker: their number changes the last bits of products."""
    with threads(1):
        yield


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a torchrun; rank 0 of 1 without one."""

    rank: int = 0
    world: int = 1

    def barrier(self) -> None:
        """Waits for every rank."""
        if self.world > 1:
            torch.distributed.barrier()

    def barrier_unless_first(self) -> None:
        """The others wait here until rank 0 reaches :meth:`barrier_if_first`."""
        if self.rank != 0:
            self.barrier()

    def barrier_if_first(self) -> None:
        """Lets the others pass :meth:`barrier_unless_first`."""
        if self.rank == 0:
            self.barrier()


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker does in one go.

    id            names it in the journal and on the progress bar
    group         its place among the groups of the output's layout
    source_bytes  how much of the source it reads
    """

    id: str
    group: int
    source_bytes: int


_FORMAT = "{percentage:3.0f}% {bar:20} {n_fmt}/{total_fmt}{unit} {rate_fmt} ETA {remaining}{postfix}"

J = TypeVar("J", bound=Job)


class MemoryPool:
    """Memory that jobs share: each waits until what it needs is free. A job that needs more than all has it alone."""

    def __init__(self, nbytes: int) -> None:
        self._free = self._total = max(0, nbytes)
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Reserves ``nbytes`` of it for as long as the context lasts."""
        share = min(nbytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= share)
            self._free -= share
        try:
            yield
        finally:
            with self._changed:
                self._free += share
                self._changed.notify_all()


def run_jobs(jobs: Sequence[J], do: Callable[[J], None], *, threads: int) -> None:
    """All jobs on ``threads`` threads, in order; the first error ends the run after the jobs in flight."""
    stop = threading.Event()

    def unless_stopped(job: J) -> None:
        if stop.is_set():
            return
        try:
            do(job)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="ptqpipe") as pool:
        try:
            for future in as_completed([pool.submit(unless_stopped, job) for job in jobs]):
                future.result()
        except BaseException:  # Ctrl-C reaches the main thread alone
            stop.set()
            raise


_stage: list[str] = []  # of the run of several stages under way, at most one


@contextmanager
def bars_of(stage: str) -> Iterator[None]:
    """Bars begin with ``stage`` meanwhile: "[2/5] tune"."""
    _stage.append(f"{stage}  ")
    try:
        yield
    finally:
        _stage.pop()


@contextmanager
def progress_bar(jobs: Sequence[Job], *, shown: bool) -> Iterator[Callable[[Job], None]]:
    """A tqdm bar over source bytes: rate, time left, memory. Yields what any thread calls when a job is done.

    The time left follows from the jobs that are done: the first ones of a run are its measurement of this machine.
    Draws nothing when not ``shown``.
    """
    lock = threading.Lock()
    bar: Any = tqdm(
        total=sum(job.source_bytes for job in jobs),
        unit="B",
        unit_scale=True,
        disable=not shown,
        file=sys.stderr,
        smoothing=0.05,
        desc="".join(_stage) or None,
        bar_format="{desc}" + _FORMAT,
    )

    def advance(job: Job) -> None:
        with lock:
            if shown:
                current, peak = resident_bytes()
                bar.set_postfix_str(
                    f"mem {memory_size(current)}, peak {memory_size(peak)} | {job.id}"[:90], refresh=False
                )
            bar.update(job.source_bytes)

    try:
        yield advance
    finally:
        bar.close()


def token_bar(tokens: int, *, shown: bool, label: str = "") -> Any:
    """tqdm's bar over tokens, a context. ``label``: what stands before it."""
    return tqdm(
        total=tokens,
        unit="tok",
        unit_scale=True,
        disable=not shown,
        file=sys.stderr,
        desc="".join(_stage) + (f"{label[:30]}: " if label else "") or None,
        bar_format="{desc}" + _FORMAT,
    )
