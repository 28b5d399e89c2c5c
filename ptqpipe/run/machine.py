"""The machine and the work on it: workers, device, memory, ranks; jobs on threads, and their progress bar.

None of it changes a byte of any output. Must not know what a job computes, or where its result goes.
"""

import contextlib
import gc
import io
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any, TextIO, TypeVar

import torch
from tqdm import tqdm

from ptqpipe.errors import UsageError, arg, printable
from ptqpipe.run.options import MachineOptions
from ptqpipe.run.quantities import disk_size, memory_size, option_size, option_size_above, three_digits

# What a process holds before any weight, and what one worker holds beside a cached unit (chunks, samples, temporaries).
BASE_BYTES = 420 << 20
WORKER_BYTES = 128 << 20
MAX_DEFAULT_WORKERS = 16  # of those that wait for disks; what only computes has as many threads as there are cores
LARGE_MATRIX = 1 << 20  # numbers, below which threads wait for each other longer than they work
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


def reset_peak() -> None:
    """Lets `peak_bytes` count from now on, where the kernel can."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:  # not Linux, or not allowed: the peak of the whole process is all there is
        return


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
    from ptqpipe.numerics.kernels import triton

    triton.require()


@dataclass(frozen=True, slots=True)
class WorkerBudget:
    """The number of workers of a stage and the memory of each.

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
    """Limits for a stage: threads, memory, progress bars. ``memory_bytes`` limits resident memory of the process."""

    workers: int = field(default_factory=default_workers)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory_bytes: int = 2 << 30
    progress: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"{arg('workers', self.workers)} is too few; use 1 or more")
        least = BASE_BYTES + WORKER_BYTES
        if self.memory_bytes < least:
            raise UsageError(
                f"{arg('max_memory', option_size(self.memory_bytes))} is too small; one worker needs "
                f"{option_size(least)}"
            )

    def require(self, nbytes: int, what: str, *, otherwise: str = "") -> None:
        """UsageError where ``what`` needs more memory than there is. ``otherwise``: another remedy."""
        if nbytes > self.memory_bytes:
            raise UsageError(
                f"{arg('max_memory', option_size(self.memory_bytes))} is too small for {what}; give "
                f"{arg('max_memory', option_size_above(nbytes))}{otherwise and ', or '}{otherwise}"
            )

    def divide_memory(self, largest_unit_bytes: int, jobs: int, *, reserved_bytes: int = 0) -> "WorkerBudget":
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
        pool = self.memory_bytes - used
        if self.device.type == "cuda":  # what jobs need in addition they need there, too
            # torch loads what factors matrices when it is first used, and fails where two threads do that at once.
            torch.linalg.inv(torch.ones(1, 1, device=self.device))
            pool = min(pool, torch.cuda.mem_get_info(self.device)[0] - threads * WORKER_BYTES)
        return WorkerBudget(workers, threads, cache, max(0, pool), self.device)


@contextlib.contextmanager
def threads(count: int, *, largest: int | None = None) -> Iterator[None]:
    """Sets torch's own threads to ``count`` in the context, at most the processors that this process may use; to one
    where a model's ``largest`` matrix is below LARGE_MATRIX."""
    before = torch.get_num_threads()
    small = largest is not None and largest < LARGE_MATRIX
    torch.set_num_threads(1 if small else min(count, len(processors())))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pauses the garbage collector: planning a large model allocates hundreds of thousands of small objects without
    cycles, and collections take a tenth of the time of planning."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
    """A unit of work for one worker.

    id            names it in the journal and on the progress bar
    group         its place among the groups of the output's layout
    source_bytes  how much of the source it reads
    """

    id: str
    group: int
    source_bytes: int


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


_STAGE: ContextVar[str] = ContextVar("stage", default="")
_BAR, _LEAST_BAR = 10, 3  # columns of the bar itself: as a rule, and the fewest for which a long title is not shortened
_ETA, _MEMORY = len("00:00"), len("mem 1.04 GiB, ")
_BESIDE = len("100%  /s ETA 00:00, peak 1001 MiB")  # what every line has beside title, bar, amount and speed
_LEAST_TITLE = 12  # a stage with its number: "[12/14] eval"
_NOTE = len(" | layer 10 of 80")  # what is under way goes before the memory in use


@contextmanager
def progress_prefix(title: str) -> Iterator[None]:
    """Puts ``title`` before every bar that is drawn in the context: "[2/5] tune"."""
    token = _STAGE.set(title)
    try:
        yield
    finally:
        _STAGE.reset(token)


class _Bar(tqdm):  # type: ignore[type-arg]  # tqdm has no type arguments at run time
    """tqdm's bar with amounts as all output has them: bytes as 4.50 GB, counts as 24.6k, parts of a layer as 2.4.

    width  columns of the bar itself, where the time left is below an hour and the speed no longer than usual
    """

    def __init__(self, width: int, **options: Any) -> None:
        """``options``: tqdm's, which draws at once."""
        self.width = width
        super().__init__(**options)

    @property
    def format_dict(self) -> dict[str, Any]:
        """tqdm's, with amount, speed, and a format whose bar gives way to what is longer than usual."""
        fields = dict(super().format_dict)
        passed, rate = self.n - self.initial, fields["rate"]
        if rate is None and passed and fields["elapsed"]:
            rate = passed / fields["elapsed"]
        speed = "?" if rate is None else (disk_size if self.unit == "B" else _rate)(rate)
        left = "?" if not rate else tqdm.format_interval(((self.total or 0) - self.n) / rate)
        width = self.width - max(0, len(left) - _ETA) - max(0, len(speed) - _speed_columns(self.unit))
        bar = f"{{bar:{width}}} " if width > 1 else ""
        line = f"{{desc}}{{percentage:3.0f}}% {bar}{{amount}} {{speed}}/s ETA {{remaining}}{{postfix}}"
        return fields | {"amount": _amount(self.n, self.total or 0, self.unit), "speed": speed, "bar_format": line}


def _amount(done: float, total: float, unit: str) -> str:
    size = disk_size if unit == "B" else _count
    return f"{size(done)}/{size(total)}" + ("" if unit == "B" else f" {unit}")


def _speed_columns(unit: str) -> int:
    return len("99.9 MB" if unit == "B" else "99,999")


def _count(value: float) -> str:
    if value >= 1e5:
        return str(tqdm.format_sizeof(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"


def _rate(value: float) -> str:
    return str(tqdm.format_sizeof(value)) if value >= 1e5 else three_digits(value)


def _columns() -> int:
    """How wide the terminal is that bars are drawn on; where there is none, wide enough for all of a bar."""
    try:
        return int(os.environ["COLUMNS"]) if "COLUMNS" in os.environ else os.get_terminal_size(2).columns
    except (OSError, ValueError):
        return 1000


@contextmanager
def counting_bar(
    total: int, unit: str, *, shown: bool, title: str = "", done: int = 0, leave: bool = True
) -> Iterator[Callable[[float, str], None]]:
    """A bar with the amount, the rate, the time left and memory: the same in every command.

    Yields what any thread calls with how much more is done, and with what is under way ("" for nothing to say).

    unit   what is counted, in the plural; "B" for bytes
    title  what stands before the bar, after the title of `progress_prefix`
    done   where it starts: what an earlier run has done. The time left follows from this run alone
    leave  whether it stays when it is done

    Draws nothing when not ``shown``.
    """
    lock = threading.Lock()
    label = " ".join(word for word in (_STAGE.get(), title[:30]) if word)
    room = _columns() - _BESIDE - len(_amount(total, total, unit)) - _speed_columns(unit) - 1
    most = max(_LEAST_TITLE, room - _LEAST_BAR - 1 - len(": "))
    label = shorten(label, most, placeholder="", break_on_hyphens=False).rstrip(",") or label[:most]
    room -= len(label) + len(": ") if label else 0
    narrow = room < _BAR + 1 + _MEMORY + _NOTE  # no place for the memory in use
    width = max(0, min(_BAR, room - 1))
    room -= width + 1 + (0 if narrow else _MEMORY) + len(" | ")  # for notes
    stream = getattr(sys.stderr, "below", sys.stderr)
    bar: Any = _Bar(
        width,
        total=total,
        initial=done,
        unit=unit,
        disable=not shown,
        file=stream,
        smoothing=0.05,
        desc=f"{label}: " if label else None,
        leave=leave,
    )

    def advance(amount: float, note: str) -> None:
        with lock:
            if shown:
                current, peak = resident_bytes()
                memory = f"{'' if narrow else f'mem {memory_size(current)}, '}peak {memory_size(peak)}"
                words = (memory, _fitting(note, room)) if unit == "B" or narrow else (_fitting(note, room), memory)
                bar.set_postfix_str(" | ".join(part for part in words if part), refresh=False)
            bar.update(amount)

    try:
        with lines_above(stream) if shown else contextlib.nullcontext():
            yield advance
    finally:
        bar.close()


class _LinesAbove(io.TextIOBase):
    """A stream that writes lines of text above the bars that are drawn on the stream ``below``."""

    def __init__(self, below: TextIO) -> None:
        self.below = below
        self._begun = ""  # of a line that has no end yet

    def write(self, text: str) -> int:
        """Whole lines at once: between bars that are taken away and drawn again."""
        with tqdm.get_lock():  # type: ignore[no-untyped-call]
            lines, end, rest = f"{self._begun}{text}".rpartition("\n")
            self._begun = rest
            if end or "\r" in rest:  # a line that others draw over and over, as it is
                self._put(lines + end + (rest if "\r" in rest else ""))
                self._begun = "" if "\r" in rest else rest
        return len(text)

    def _put(self, text: str) -> None:
        with tqdm.external_write_mode(file=self.below, nolock=True):
            self.below.write(text)

    def flush(self) -> None:
        """Flushes complete lines; an unfinished line stays buffered."""
        self.below.flush()

    def finish(self) -> None:
        if self._begun:
            self._put(f"{self._begun}\n")
            self._begun = ""

    def isatty(self) -> bool:
        return self.below.isatty()

    def fileno(self) -> int:
        return self.below.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of the base class it may be set
        return self.below.encoding


@contextmanager
def lines_above(stream: TextIO) -> Iterator[None]:
    """What anybody prints on stderr, which is ``stream``, stands above the bars meanwhile and leaves them whole."""
    if sys.stderr is not stream:  # a bar around this one sees to that
        yield
        return
    above = _LinesAbove(stream)
    sys.stderr = above
    try:
        yield
    finally:
        sys.stderr = stream
        above.finish()


def _fitting(note: str, room: int) -> str:
    """A note in so many columns, "" where they are too few. Of a tensor's name the end says which one it is."""
    note = printable(note)
    if len(note) <= room:
        return note
    if " " not in note:
        return f"..{note[2 - room :]}" if room > 12 else ""
    return shorten(note, room, placeholder="", break_long_words=False).rstrip(",") if room > 0 else ""


@contextmanager
def progress_bar(
    jobs: Sequence[Job], *, shown: bool, title: str = "", done: Sequence[Job] = ()
) -> Iterator[Callable[[Job], None]]:
    """`counting_bar` over the bytes of the source that jobs read. Yields what is called when a job is done.

    done  jobs of an earlier run: the bar starts behind them
    """
    before = sum(job.source_bytes for job in done)
    total = before + sum(job.source_bytes for job in jobs)
    with counting_bar(total, "B", shown=shown, title=title, done=before) as advance:
        yield lambda job: advance(job.source_bytes, job.id)


def machine_for(options: MachineOptions, *, device: str = "cpu", progress: bool = False, waits: bool = True) -> Machine:
    """The machine of a command's options. Under torchrun the ranks of a machine share its workers, and "cuda" is the
    rank's own GPU.

    waits  whether the workers wait for disks: where they only compute, there is one for each physical core

    UsageError for a device that is not here, too few workers, or too little memory.
    """
    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise UsageError(f"{arg('device')} {device!r} is unknown; use cpu, cuda or cuda:N")
    if device.startswith("cuda"):
        count, stated = torch.cuda.device_count(), device
        device = device if ":" in device else f"cuda:{environment_number('LOCAL_RANK', 0, least=0)}"
        if int(device.partition(":")[2]) >= count:
            seen = f"it sees {count}, use {arg('device', 'cpu')} or a number below that" if count else ""
            remedy = seen or f"none is visible, use {arg('device', 'cpu')}"
            raise UsageError(f"{arg('device', stated)} needs a GPU that torch can use; {remedy}")
        require_device_kernels()
    workers = options.workers
    if workers is None:
        local = environment_number("LOCAL_WORLD_SIZE", 1, least=1)
        workers = max(1, (default_workers() if waits else compute_threads()) // local)
    return Machine(workers, torch.device(device), options.max_memory, progress)


def environment_number(name: str, default: int | None, *, least: int) -> int:
    """A number that torchrun sets. UsageError where it is none."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d{1,9}", text.strip()) or int(text) < least:
        got = "not set" if text is None else repr(text)
        raise UsageError(
            f"{name} in the environment is {got}, expected a number of {least} or more; start with torchrun, or "
            "unset it"
        )
    return int(text)
