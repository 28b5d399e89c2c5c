"""The ranks of a service at work: the first one runs the engine and the server, the others compute with it.

Imports what only the ``serve`` extra brings; `ptqpipe.serving.command` looks first whether that is installed.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import Any

import torch

from ptqpipe.checkpoint import name_of
from ptqpipe.errors import PtqError
from ptqpipe.models.language_model import takes_images
from ptqpipe.run.machine import resident_bytes
from ptqpipe.run.quantities import memory_size
from ptqpipe.runtime.compiled import make_batch_invariant, use_kernels
from ptqpipe.runtime.fill import watched
from ptqpipe.runtime.loading import dtype_of, load_rank, read_config
from ptqpipe.runtime.memory import keep_freed_memory
from ptqpipe.runtime.parallel import RunCollective, TensorParallel
from ptqpipe.serving.collectives import NEVER, QuantAllReduce, Thresholds
from ptqpipe.serving.engine import Engine, EngineOptions, Service, State, invariance
from ptqpipe.serving.engine.model_runner import CacheOptions, ModelRunner, check_model
from ptqpipe.serving.engine.overlap import Overlap, least_tokens
from ptqpipe.serving.engine.ranks import Leader, agree, follow
from ptqpipe.serving.engine.speculative import Drafter
from ptqpipe.serving.facts import LoadingBar, facts_of, heading, instructions
from ptqpipe.serving.options import ServeOptions
from ptqpipe.serving.preflight import context_of
from ptqpipe.serving.rank_processes import RankInfo, WorkerRanks
from ptqpipe.serving.server.app import ServerOptions, create_app
from ptqpipe.serving.server.uvicorn_server import run
from ptqpipe.serving.tower import Tower
from ptqpipe.serving.watchdog import Watchdog


class RankZero:
    """The first rank: it builds the engine in the engine's thread, and serves.

    leader      what sends each batch to the other ranks, once they have joined; None for one rank
    all_reduce  what sums over the ranks, once they have joined; None for one rank
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
        self.all_reduce: QuantAllReduce | None = None
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
        self.all_reduce = _all_reduce(options, ranks.place)
        with LoadingBar(self.log) as bar, watched(lambda done, total: self._loading(bar, done, total)):
            runner = _runner(options, ranks.place, self.context, self.all_reduce, watchdog)
        if ranks.place.size > 1:
            self.leader = Leader(runner, watch=watchdog, lost=ranks.lost)
        engine = _engine(options, runner, self.leader or runner, self.tokenizer, self.context)
        if not isinstance(self.processor, str):
            engine.see = Tower(Path(options.ckpt), runner.dtype, str(runner.model.device), self.log).see
        self.log(_summary(runner, ranks.place.size, self.threads, self.context))
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

    def counts(self) -> dict[str, int] | None:
        """Counters of the all-reduces so far, for ``/metrics``."""
        if self.all_reduce is None:
            return None
        stats = self.all_reduce.stats()
        return {
            "quantized": stats.calls,
            "plain": stats.plain_calls,
            "values": stats.value_bytes,
            "wire": stats.wire_bytes,
        }

    def serve(self, listening: socket, template: str | None, *, signals: bool = True) -> None:
        """Until a signal or a failure.

        template  the chat template in the place of the tokenizer's
        signals   as in `ptqpipe.serving.server.uvicorn_server.run`
        """
        options, service = self.options, self.service
        self.ranks.watch(service.fail)
        name, facts = options.served_model_name or name_of(Path(options.ckpt)), facts_of(options.ckpt)
        self.log(heading(name, facts))
        if takes_images(read_config(Path(options.ckpt)), Path(options.ckpt)):
            loaded = "vision tower and projector are loaded with the first image"
            self.log(f"(a model of images and text: {self.processor if isinstance(self.processor, str) else loaded})")
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
            all_reduce=self.counts,
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


def follow_first(options: ServeOptions, place: RankInfo) -> None:
    """A rank that computes for the first one."""
    place.ignore_signals()
    torch.set_num_threads(options.workers or place.threads())
    place.join()
    follow(_runner(options, place, context_of(options.ckpt, options.max_model_len), _all_reduce(options, place)))


def _all_reduce(options: ServeOptions, place: RankInfo) -> QuantAllReduce | None:
    """The all-reduce of this service; None for one rank. Decode steps are never quantized: they are latency-bound.

    "off" is one that never quantizes, so that its sums are counted, too. "auto" measures, together with all ranks.
    """
    if place.size == 1:
        return None
    group = place.group_of_sums(place.device(options.device))
    if options.allreduce == "off":
        plain = QuantAllReduce(group, min_bytes=NEVER)
        if options.batch_invariant and place.size > 2:  # in the order of ranks; of two numbers there is but one sum
            plain.thresholds = Thresholds(NEVER, ((NEVER, "two_shot"),))
        return plain
    one_shot = place.size == 2 and options.device == "cpu"  # as many bytes, one message and one rounding less
    config = read_config(Path(options.ckpt)).get_text_config()
    decode_bytes = options.max_num_seqs * config.hidden_size * dtype_of(options.dtype, config).itemsize
    if options.allreduce == "auto":
        measured = QuantAllReduce(group, min_bytes="auto", one_shot=one_shot)
        least = max(measured.thresholds.quantized, decode_bytes + 1)
        measured.thresholds = replace(measured.thresholds, quantized=least)
        return measured
    return QuantAllReduce(group, options.allreduce, min_bytes=decode_bytes + 1, one_shot=one_shot)


def _overlap(options: ServeOptions, place: RankInfo) -> Overlap | None:
    """Overlaps the all-reduces of long steps with their computation; None on GPUs."""
    if place.size == 1 or not options.overlap or options.device != "cpu":
        return None
    config = read_config(Path(options.ckpt)).get_text_config()
    row_bytes = config.hidden_size * dtype_of(options.dtype, config).itemsize
    return Overlap(least_tokens=least_tokens(row_bytes))


def _run_collective(overlap: Overlap | None, watchdog: Watchdog | None) -> RunCollective | None:
    """What runs a collective operation: each of the two that there is, the watchdog where it really happens."""
    if overlap is None or watchdog is None:
        return overlap or watchdog
    return lambda collective: overlap(lambda: watchdog(collective))


def _runner(
    options: ServeOptions,
    place: RankInfo,
    context: int,
    sums: QuantAllReduce | None,
    watchdog: Watchdog | None = None,
) -> ModelRunner:
    """This rank's part of the model, with a cache as large as all ranks can have."""
    overlap = _overlap(options, place)
    device = place.device(options.device)
    if device != "cpu":
        torch.cuda.set_device(device)  # of this thread, which computes: Triton's kernels start where it says
    group, all_reduce = (None, None) if sums is None else (sums.group, lambda x: sums(x, x))
    model = load_rank(
        Path(options.ckpt),
        TensorParallel(place.size, place.rank, group, all_reduce, _run_collective(overlap, watchdog)),
        dtype=options.dtype,
        packed=not options.decoded,
        activations="none" if options.activations == "none" else "simulated",
        device=device,
        mtp=options.speculative is not None,
    )
    check_model(model)
    make_batch_invariant(model) if options.batch_invariant else use_kernels(model)
    keep_freed_memory()
    cache = options.kv_cache_size or place.cache_bytes(device)
    together = agree if place.size > 1 else None
    runner = ModelRunner(model, CacheOptions(cache, context, options.max_num_seqs), agree=together, overlap=overlap)
    if options.batch_invariant:
        invariance.check(runner)
    return runner


def _engine(options: ServeOptions, runner: ModelRunner, computes: Any, tokenizer: Any, context: int) -> Engine:
    speculates = options.speculative is not None
    drafter = Drafter(runner, most=options.speculative_tokens, max_len=context) if speculates else None
    limits = EngineOptions(context, options.max_num_seqs, options.max_batch_tokens, options.prefix_caching)
    return Engine(
        computes,
        tokenizer,
        options=limits,
        vocabulary=runner.config.vocab_size,
        end_tokens=end_tokens(runner.model, tokenizer),
        drafter=drafter,
    )


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """End-of-sequence tokens: the generation config's, else the config's, and the tokenizer's."""
    tokens: set[int] = set()
    text = model.config.get_text_config()
    for value in (model.generation_config.eos_token_id, getattr(text, "eos_token_id", None)):
        if value is not None:
            tokens |= set(value) if isinstance(value, (list, tuple)) else {int(value)}
            break
    return tokens | ({int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set())


def _summary(runner: ModelRunner, ranks: int, threads: int, context: int) -> str:
    """One line about what computes."""
    tokens = runner.blocks * runner.block_size
    cache = runner.blocks * runner.bytes_per_block
    kind = "FP8" if runner.scales else str(runner.dtype).removeprefix("torch.")
    states = runner.max_seqs * runner.state_bytes
    pages = f"{tokens} tokens in {kind}, {memory_size(cache)} per rank"
    beside = f"; states of {runner.max_seqs} sequences: {memory_size(states)} per rank, so prefixes are not shared"
    return (
        f"ranks: {ranks}, threads of each: {threads}; context: {context} tokens; "
        f"KV cache: {pages if cache else 'none'}{beside if states else ''}"
    )
