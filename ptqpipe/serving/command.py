"""``ptqpipe serve``: a checkpoint becomes a service. Here loading, engine and server meet.

One process serves alone. Of several ranks the first has the engine and the server, the others compute with it; they are
started here (``rank_processes.py``) or by torchrun.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from ptqpipe.errors import PtqError, UsageError, arg
from ptqpipe.serving.options import ServeOptions
from ptqpipe.serving.preflight import (
    check_checkpoint,
    check_place,
    check_speculative,
    check_sums,
    context_of,
    processor_of,
    read_template,
    require_packages,
    try_template,
)
from ptqpipe.serving.rank_processes import RankInfo, WorkerRanks

if TYPE_CHECKING:
    from ptqpipe.serving.rank_zero import RankZero

Log = Callable[[str], None]


def serve(options: ServeOptions, place: RankInfo, *, worker: list[str], log: Log) -> None:
    """Serves until a signal or a failure. Raises UsageError before loading, PtqError when the service failed.

    worker  the command that starts a further rank, which gets its ``rank_of`` added
    """
    place.follow_parent()
    _check(options, place)
    if place.rank > 0:
        from ptqpipe.serving.rank_engine import follow_first

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
    check_checkpoint(options.ckpt, tp=place.size, packed=not options.decoded)
    if options.speculative is not None:
        check_speculative(options.ckpt, tp=place.size)
    tokenizer, context = load_tokenizer(Path(options.ckpt)), context_of(options.ckpt, options.max_model_len)
    processor = processor_of(options.ckpt, batch_invariant=options.batch_invariant)
    chats = template or getattr(tokenizer, "chat_template", None) or getattr(processor, "template", None)
    if chats:
        try_template(tokenizer, chats)
    if isinstance(processor, str) and options.allowed_local_media_path is not None:
        raise UsageError(f"{arg('allowed_local_media_path')}: {processor}; leave the option out")
    with WorkerRanks.start(place, worker) as ranks:
        yield RankZero(options, ranks, (tokenizer, processor), context, log), listening, template
