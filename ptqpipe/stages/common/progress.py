"""Progress of a stage on the terminal: bytes read, rate, time left, memory. Knows jobs by name and size only."""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from tqdm import tqdm

from ptqpipe.stages.common.machine import resident_bytes

_FORMAT = "{percentage:3.0f}% {bar:20} {n_fmt}/{total_fmt} {rate_fmt} ETA {remaining}{postfix}"


class AnyJob(Protocol):
    """What one worker does in one go. ``group`` is its place among the layout's groups."""

    @property
    def id(self) -> str: ...

    @property
    def group(self) -> int: ...

    @property
    def source_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Step:
    """An `AnyJob` that is nothing else: a decoder block, for the bar."""

    id: str
    group: int
    source_bytes: int


class Progress:
    """A tqdm bar over source bytes, advanced by any thread. Draws nothing when not ``shown``."""

    def __init__(self, jobs: Sequence[AnyJob], *, shown: bool) -> None:
        self._lock = threading.Lock()
        self._bar: Any = tqdm(
            total=sum(job.source_bytes for job in jobs),
            unit="B",
            unit_scale=True,
            disable=not shown,
            file=sys.stderr,
            smoothing=0.05,
            bar_format=_FORMAT,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def advance(self, job: AnyJob) -> None:
        """One job is done."""
        with self._lock:
            if not self._bar.disable:
                memory = resident_bytes()
                self._bar.set_postfix_str(
                    f"mem {memory.current >> 20} MiB, peak {memory.peak >> 20} | {job.id}"[:90], refresh=False
                )
            self._bar.update(job.source_bytes)


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
