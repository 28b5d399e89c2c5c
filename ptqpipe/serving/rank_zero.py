"""The first rank of a service: it runs the engine and the server.

Imports what only the ``serve`` extra brings; `ptqpipe.serving.command` looks first whether that is installed.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Any

from ptqpipe.checkpoint import name_of
from ptqpipe.errors import PtqError
from ptqpipe.run.machine import resident_bytes
from ptqpipe.runtime.fill import watched
from ptqpipe.serving.engine import Engine, Service, State
from ptqpipe.serving.engine.ranks import Leader
from ptqpipe.serving.facts import LoadingBar, about_images, facts_of, heading, instructions
from ptqpipe.serving.options import ServeOptions
from ptqpipe.serving.rank_engine import build_engine, build_runner, summary
from ptqpipe.serving.rank_processes import WorkerRanks
from ptqpipe.serving.rank_sums import RankSums
from ptqpipe.serving.server.app import ServerOptions, create_app
from ptqpipe.serving.server.uvicorn_server import run
from ptqpipe.serving.tower import Tower
from ptqpipe.serving.watchdog import Watchdog


class RankZero:
    """The first rank: it builds the engine in the engine's thread, and serves.

    leader      what sends each batch to the other ranks, once they have joined; None for one rank
    sums        how the ranks sum, once they have joined
    ready       set when requests are taken, at ``url``
    cause       the error for which there is no engine: its kind is the exit code, and a service keeps the text alone
    """

    def __init__(
        self,
        options: ServeOptions,
        ranks: WorkerRanks,
        words: tuple[Any, Any],
        context: int,
        log: Callable[[str], None],
    ) -> None:
        """
        words  the tokenizer; the processor for images, or a text that says why there is none
        """
        self.options, self.ranks, self.context, self.log = options, ranks, context, log
        self.tokenizer, self.processor = words
        self.leader: Leader | None = None
        self.sums: RankSums | None = None
        self.cause: PtqError | None = None
        self.ready, self.url = threading.Event(), ""
        self.threads = options.workers or ranks.place.threads()
        self.service = Service(
            self.build, max_queue=options.max_queue, threads=self.threads, beat=self.beat, close=self.close
        )

    def build(self) -> Engine:
        """The engine, after the other ranks have joined."""
        try:
            return self._load()
        except PtqError as error:
            self.cause = error
            raise

    def _load(self) -> Engine:
        options, ranks, watchdog = self.options, self.ranks, Watchdog()
        ranks.join()
        self.sums = RankSums.of(options, ranks.place)
        with LoadingBar(self.log) as bar, watched(lambda done, total: self._loading(bar, done, total)):
            runner = build_runner(options, ranks.place, self.context, self.sums, watchdog)
        if ranks.place.size > 1:
            self.leader = Leader(runner, watch=watchdog, lost=ranks.lost)
        engine = build_engine(options, runner, self.leader or runner, self.tokenizer)
        if not isinstance(self.processor, str):
            engine.see = Tower(Path(options.ckpt), runner.dtype, str(runner.model.device), self.log).see
        self.log(summary(runner, ranks.place.size, self.threads, self.context))
        watchdog.watch(ranks.failing(self.service.fail), ranks.others)
        return engine

    def _loading(self, bar: LoadingBar, done: int, total: int) -> None:
        """Shows how far the loading is; PtqError, which ends it, when nobody waits for it any more."""
        bar(done, total)
        if self.service.state is not State.LOADING:
            raise PtqError("the loading was given up")

    def beat(self) -> None:
        """Lets the other ranks know that this one lives."""
        if self.leader is not None:
            self.leader.beat()

    def close(self) -> None:
        """Ends the other ranks, unless one of them is broken: then they are killed."""
        if self.leader is not None and not self.ranks.broken:
            self.leader.close()

    def serve(self, listening: socket, template: str | None, *, signals: bool = True) -> None:
        """Until a signal or a failure.

        template  the chat template in the place of the tokenizer's
        signals   as in `ptqpipe.serving.server.uvicorn_server.run`
        """
        options, service = self.options, self.service
        self.ranks.watch(service.fail)
        name, facts = options.served_model_name or name_of(Path(options.ckpt)), facts_of(options.ckpt)
        self.log(heading(name, facts))
        if line := about_images(options.ckpt, self.processor):
            self.log(line)
        hosts = options.host_names()
        server = ServerOptions(
            (name,), self.context, hosts, options.api_key, options.max_body, template, options.allowed_local_media_path
        )
        facts = {**facts, "images": not isinstance(self.processor, str)}
        app = create_app(
            service,
            self.tokenizer,
            server,
            processor=self.processor,
            all_reduce=lambda: None if self.sums is None else self.sums.counts(),
            details=lambda: {**facts, "resident_bytes": resident_bytes()[0]},
        )
        service.start()
        try:
            run(
                app,
                service,
                listening,
                host=options.host,
                drain_s=options.drain,
                log=self.log,
                ready=lambda url: self._welcome(url, template),
                access_log=options.access_log,
                signals=signals,
            )
        except PtqError as error:
            raise (self.cause if self.cause is not None and str(self.cause) == str(error) else error) from None
        finally:
            self.ranks.broken |= service.engine is None  # they load, too, and hear of the end by nothing else

    def _welcome(self, url: str, template: str | None) -> None:
        self.url = url
        self.ready.set()
        chats = (template or getattr(self.tokenizer, "chat_template", None)) is not None
        for line in instructions(url, chats=chats, key=self.options.api_key is not None):
            self.log(line)
