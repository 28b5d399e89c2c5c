"""``ptqpipe serve``: a checkpoint becomes a service. Here loading, engine and server meet.

One process serves alone. Of several ranks the first has the engine and the server, the others compute with it; they are
started here (``rank_processes.py``) or by torchrun.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from ptqpipe.errors import PtqError, UsageError
from ptqpipe.serving.preflight import (
    check_address,
    check_checkpoint,
    check_place,
    check_speculative,
    check_sums,
    context_of,
    host_names,
    processor_of,
    read_template,
    require_packages,
    try_template,
)
from ptqpipe.serving.rank_processes import RankInfo, WorkerRanks

if TYPE_CHECKING:
    from ptqpipe.serving.rank_zero import RankZero

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of ``ptqpipe serve``; `None` is chosen from the model or the machine.

    name          of the model in the API
    allreduce     "off", a codec ("int8", ...), or "auto": quantized where it is measured to be faster
    overlap       whether a prefill's all-reduces overlap with its computation (``engine/overlap.py``)
    invariant     whether an answer must not depend, to the bit, on what else is computed (``runtime/compiled.py``)
    max_len       longest sequence; cache_bytes: of keys and values
    max_queue     most sequences that wait
    speculative   "mtp": drafts by the model's own layer of that kind, ``speculative_tokens`` of a sequence in a step
    allowed_hosts names by which clients reach the service, beside this machine's own (``server/guards.py``)
    media         folder of the files that messages may name as images
    """

    ckpt: str
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    packed: bool = True
    activations: str = "simulated"
    allreduce: str = "off"
    overlap: bool = True
    invariant: bool = False
    max_len: int | None = None
    max_seqs: int = 32
    max_batch_tokens: int = 1024
    max_queue: int = 256
    cache_bytes: int | None = None
    prefix_caching: bool = True
    speculative: str | None = None
    speculative_tokens: int = 1
    threads: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    api_key: str | None = None
    max_body: int = 4 << 20
    chat_template: Path | None = None
    media: Path | None = None
    drain_s: float = 30.0
    access_log: bool = False

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--max-num-seqs", self.max_seqs, 1),
            ("--max-batch-tokens", self.max_batch_tokens, 16),
            ("--max-queue", self.max_queue, 0),
            ("--workers", 1 if self.threads is None else self.threads, 1),
            ("--max-model-len", 2 if self.max_len is None else self.max_len, 2),
            ("--kv-cache-size", 1 if self.cache_bytes is None else self.cache_bytes, 1),
            ("--max-body", self.max_body, 1),
            ("--speculative-tokens", self.speculative_tokens, 1),
        ):
            if value < least:
                raise UsageError(f"{flag} is {value}, expected {least} or more")
        check_address(self.port, self.drain_s, self.api_key)
        host_names(self.host, self.allowed_hosts)
        if self.invariant and (self.dtype, self.device, self.allreduce) != ("bfloat16", "cpu", "off"):
            raise UsageError(
                "--batch-invariant needs --dtype bfloat16, --device cpu and --allreduce off, not "
                f"{self.dtype}, {self.device} and {self.allreduce}"
            )
        if self.speculative is None and self.speculative_tokens != 1:
            raise UsageError("--speculative-tokens says how much --speculative drafts; add --speculative mtp")
        if self.max_batch_tokens < self.max_seqs:
            raise UsageError(
                f"--max-batch-tokens {self.max_batch_tokens} is less than --max-num-seqs {self.max_seqs}: a sequence "
                "needs one token per step"
            )


def serve(options: ServeOptions, place: RankInfo, *, worker: list[str], log: Log) -> None:
    """Serves until a signal or a failure. Raises UsageError before loading, PtqError when the service failed.

    worker  the command that starts a further rank, which gets ``--rank-of FILE/RANK`` added
    """
    place.follow_parent()
    _check(options, place)
    if place.rank > 0:
        from ptqpipe.serving.rank_zero import follow_first

        follow_first(options, place)
        return
    with _prepared(options, place, worker, log) as (lead, listening, template):
        lead.serve(listening, template)


@contextmanager
def serving(options: ServeOptions, *, log: Log) -> Iterator[str]:
    """A service in threads of this process, of one rank, for as long as the context lasts; gives its URL.

    ``log`` hears of the loading alone, not of what comes after. Raises what `serve` does.
    """
    _check(options, RankInfo())
    from ptqpipe.serving.server.uvicorn_server import READY

    loaded, failed = threading.Event(), []

    def of_loading(line: str) -> None:
        if line.startswith(READY):
            loaded.set()
        if not loaded.is_set():
            log(line)

    with _prepared(options, RankInfo(), [], of_loading) as prepared:
        lead, listening, template = prepared

        def main() -> None:
            try:
                lead.serve(listening, template, signals=False)
            except PtqError as error:
                failed.append(error)

        thread = threading.Thread(target=main, name="ptqpipe-server", daemon=True)
        thread.start()
        try:
            while thread.is_alive() and not lead.ready.wait(0.05):
                pass
            if lead.ready.is_set():
                yield lead.url
        finally:
            lead.service.stop()
            thread.join()
    if failed:
        raise failed[0]


def _check(options: ServeOptions, place: RankInfo) -> None:
    """UsageError for what is missing, before anything is imported that takes long."""
    require_packages()
    check_place(options.ckpt, options.device, place)
    from ptqpipe.runtime.memory import use_one_arena

    use_one_arena()


@contextmanager
def _prepared(
    options: ServeOptions, place: RankInfo, worker: list[str], log: Log
) -> Iterator[tuple["RankZero", socket, str | None]]:
    """The first rank, ready to load, its socket and the chat template; the other ranks run meanwhile."""
    from ptqpipe.runtime.loading import load_tokenizer
    from ptqpipe.serving.rank_zero import RankZero
    from ptqpipe.serving.server.uvicorn_server import bind

    listening = bind(options.host, options.port)
    check_sums(options.allreduce)
    template = read_template(options.chat_template)
    check_checkpoint(options.ckpt, tp=place.size, packed=options.packed)
    if options.speculative is not None:
        check_speculative(options.ckpt, tp=place.size)
    tokenizer, context = load_tokenizer(Path(options.ckpt)), context_of(options.ckpt, options.max_len)
    processor = processor_of(options.ckpt, invariant=options.invariant)
    chats = template or getattr(tokenizer, "chat_template", None) or getattr(processor, "template", None)
    if chats:
        try_template(tokenizer, chats)
    if isinstance(processor, str) and options.media is not None:
        raise UsageError(f"--allowed-local-media-path: {processor}; leave the option out")
    with WorkerRanks.start(place, worker) as ranks:
        yield RankZero(options, ranks, (tokenizer, processor), context, log), listening, template
