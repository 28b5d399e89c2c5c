"""Jobs on worker threads: how they share memory, what the progress bar shows, how the first error ends a run.

Must not know what a job computes, or where its result goes.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

from ptqpipe.quantities import memory_size
from ptqpipe.stages.common.machine import resident_bytes


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
        bar_format=_FORMAT,
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
        desc=f"{label[:30]}: " if label else None,
        bar_format="{desc}" + _FORMAT,
    )
