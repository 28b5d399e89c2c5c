"""The engine in a thread of its own: loads the model there, takes requests from other threads, calls them back.

Everything that touches the engine happens in its thread, so the engine needs no locks. Whoever submits gets pieces in
that thread and hands them on (an HTTP server: into its event loop). When the engine fails all requests are notified,
and nothing new is taken. Must not know HTTP.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from queue import Empty, SimpleQueue

import torch

from ptqpipe.errors import PtqError, one_line
from ptqpipe.serving.engine.engine import Engine, Request, TokenOutput
from ptqpipe.serving.engine.sequence import Finish

Listener = Callable[[TokenOutput], None]
MOST_IMAGE_BYTES = 1 << 30  # of what processors made of the images of all requests under way
BEAT_S = 2.0  # an idle engine lets its other ranks know that it lives


class State(StrEnum):
    """State of a service."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    STOPPED = "stopped"
    DEAD = "dead"  # failed


class Unavailable(PtqError):
    """The service takes no request now: it loads, ends, or has failed."""


class Overloaded(PtqError):
    """The queue is full; try again in ``retry_s`` seconds."""

    def __init__(self, message: str, *, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is; ``blocks`` of its cache, ``free`` of them used by no sequence."""

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    free: int = 0
    preemptions: int = 0

    @property
    def cache_use(self) -> float:
        """The part of the cache that sequences use, 0 to 1."""
        return (self.blocks - self.free) / self.blocks if self.blocks else 0.0


@dataclass(slots=True)
class _Pending:
    listener: Listener
    sequences: int
    image_bytes: int = 0


class Service:
    """Runs the engine that ``build`` makes.

    build      called in the engine's thread
    max_queue  most sequences that wait, beside those that run
    threads    of torch's operations, in the engine's thread
    beat       called when nothing is to be done, every `BEAT_S`
    close      called in the engine's thread when it ends
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        max_queue: int,
        threads: int | None = None,
        beat: Callable[[], None] = lambda: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.state, self.error = State.LOADING, ""
        self.engine: Engine | None = None
        self._build, self._beat, self._close = build, beat, close
        self._max_queue, self._threads = max_queue, threads
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # what other threads ask for
        self._pending: dict[str, _Pending] = {}
        self._lock = threading.Lock()  # of the state and of what is pending
        self._thread = threading.Thread(target=self._main, name="ptqpipe-engine", daemon=True)
        self.ended = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        """Queues a request; ``listener`` gets its pieces in the engine's thread until each sequence has its last one.

        Raises Unavailable, Overloaded, or UsageError for a request that cannot be computed.
        """
        with self._lock:
            if self.state is not State.READY or self.engine is None:
                raise Unavailable(self.error or f"the service is {self.state}")
            self.engine.check(request)
            if self.sequences() + request.n > self.most:
                raise Overloaded(
                    f"{self.sequences()} sequences are under way or waiting, expected at most {self.most}; try again "
                    "later",
                    retry_s=1 + self.sequences() // 32,
                )
            size = 0 if request.images is None else request.images.nbytes
            held = sum(entry.image_bytes for entry in self._pending.values())
            if size and held and held + size > MOST_IMAGE_BYTES:
                raise Overloaded(f"the images of requests under way take {held} bytes; try again later", retry_s=1)
            self._pending[request.id] = _Pending(listener, request.n, size)
            self._calls.put(lambda: self._add(request))  # before a drain's last word, which waits for the lock

    @property
    def most(self) -> int:
        """The most sequences that it takes at once; 0 while it loads."""
        return 0 if self.engine is None else self._max_queue + self.engine.options.max_seqs

    def cancel(self, request: str) -> None:
        """Ends a request; its listener hears of it. Unknown and finished ones are left alone."""
        self._calls.put(lambda: self._cancel(request))

    def drain(self) -> None:
        """Takes nothing new from now on, and stops when everything under way has finished."""
        with self._lock:
            if self.state in (State.LOADING, State.READY):
                self.state = State.DRAINING
        self._calls.put(None)

    def stop(self) -> None:
        """Cancels every request, notifying its listener that the answer is incomplete, then stops."""
        self.drain()
        error = "the server ended before the answer did"
        for request in list(self._pending):
            self._calls.put(lambda request=request: self._cancel(request, error=error))  # type: ignore[misc]

    def fail(self, error: str) -> None:
        """Ends the service with an error from outside: a rank that died. The engine's thread may be stuck for good."""
        with self._lock:
            if self.state in (State.DEAD, State.STOPPED):
                return
            self.state, self.error = State.DEAD, one_line(error)
            pending, self._pending = dict(self._pending), {}
        for name, entry in pending.items():
            for index in range(entry.sequences):
                entry.listener(TokenOutput(name, index, finish=Finish.CANCELLED, error=self.error))
        self.ended.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; whether it came."""
        return self.ended.wait(timeout_s)

    def sequences(self) -> int:
        """Number of running and waiting sequences."""
        return sum(entry.sequences for entry in list(self._pending.values()))

    def load(self) -> Load:
        """How busy the engine is, as of now."""
        if self.engine is None:
            return Load()
        scheduler, blocks = self.engine.scheduler, self.engine.blocks
        running = len(scheduler.running)
        waiting = max(0, self.sequences() - running)
        return Load(running, waiting, blocks.count, blocks.free, scheduler.preemptions)

    def _main(self) -> None:
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)  # OpenMP keeps the number by thread
            self.engine = self._build()
            with self._lock:
                if self.state is State.LOADING:
                    self.state = State.READY
            self._loop(self.engine)
        except PtqError as error:
            if self.engine is not None or self.state is not State.DRAINING:  # else the loading was given up
                self.fail(str(error))
        except BaseException as error:  # also a panic of a library in Rust, such as the tokenizer's
            self.fail(f"the engine failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._close()
            with self._lock:
                if self.state is not State.DEAD:
                    self.state = State.STOPPED
            self.ended.set()

    def _loop(self, engine: Engine) -> None:
        while self.state is State.READY or engine.busy or not self._calls.empty():
            if self.state is State.DEAD:
                return
            self._answer_calls(wait=not engine.busy)
            for piece in engine.step():
                self._tell(piece)

    def _answer_calls(self, *, wait: bool) -> None:
        """Does what other threads asked for; waits for the first one, beating, if there is nothing else to do."""
        timeout = BEAT_S if wait and self.state is State.READY else 0.0
        while True:
            try:
                call = self._calls.get(timeout=timeout) if timeout else self._calls.get_nowait()
            except Empty:
                if timeout:
                    self._beat()
                return
            if call is not None:
                call()
            timeout = 0.0

    def _add(self, request: Request) -> None:
        assert self.engine is not None
        if request.id in self._pending:
            self.engine.add(request)

    def _cancel(self, request: str, *, error: str | None = None) -> None:
        assert self.engine is not None
        for piece in self.engine.cancel(request):
            self._tell(replace(piece, error=error))

    def _tell(self, piece: TokenOutput) -> None:
        with self._lock:
            entry = self._pending.get(piece.request)
            if entry is None:
                return
            if piece.finish is not None:
                entry.sequences -= 1
                if entry.sequences == 0:
                    del self._pending[piece.request]
        entry.listener(piece)
