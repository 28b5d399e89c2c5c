"""``ptqpipe serve``: a checkpoint becomes a service. Here loading, engine and server meet.

One process serves alone. Of several ranks the first has the engine and the server, the others compute with it; they are
started here (``ranks.py``) or by torchrun.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptqpipe.errors import PtqError, UsageError
from ptqpipe.stages.serve.checks import (
    check_address,
    check_checkpoint,
    check_place,
    check_sums,
    context_of,
    host_names,
    read_template,
    require_packages,
)
from ptqpipe.stages.serve.ranks import Place, Ranks
from ptqpipe.stages.serve.watchdog import Watchdog

if TYPE_CHECKING:
    from socket import socket

    from ptqpipe.collectives import QuantAllReduce
    from ptqpipe.engine.engine import Engine
    from ptqpipe.engine.overlap import Overlap
    from ptqpipe.engine.ranks import Leader
    from ptqpipe.engine.runner import Runner
    from ptqpipe.runtime.parallel import RunCollective

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve and how; `None` is chosen from the model or the machine.

    name          of the model in the API
    allreduce     "off", a codec ("int8", ...), or "auto": quantized where it is measured to be faster
    overlap       whether a prefill's all-reduces overlap with its computation (``engine/overlap.py``)
    invariant     whether an answer must not depend, to the bit, on what else is computed (``runtime/invariant.py``)
    max_len       longest sequence; cache_bytes: of keys and values
    max_queue     most sequences that wait
    allowed_hosts names by which clients reach the service, beside this machine's own (``server/guards.py``)
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
    threads: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    api_key: str | None = None
    max_body: int = 4 << 20
    chat_template: Path | None = None
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--max-num-seqs", self.max_seqs, 1),
            ("--max-batch-tokens", self.max_batch_tokens, 16),
            ("--max-queue", self.max_queue, 0),
            ("--threads", 1 if self.threads is None else self.threads, 1),
            ("--max-model-len", 2 if self.max_len is None else self.max_len, 2),
            ("--kv-cache-size", 1 if self.cache_bytes is None else self.cache_bytes, 1),
            ("--max-body", self.max_body, 1),
        ):
            if value < least:
                raise UsageError(f"{flag} is {value}, expected {least} or more")
        check_address(self.port, self.drain_s, self.api_key)
        host_names(self.host, self.allowed_hosts)
        if self.invariant and (self.dtype, self.device, self.allreduce) != ("bfloat16", "cpu", "off"):
            raise UsageError(
                "--batch-invariant goes with --dtype bfloat16, --device cpu and --allreduce off, not with "
                f"{self.dtype}, {self.device} and {self.allreduce}"
            )
        if self.max_batch_tokens < self.max_seqs:
            raise UsageError(
                f"--max-batch-tokens {self.max_batch_tokens} is less than --max-num-seqs {self.max_seqs}: a sequence "
                "needs a token a step"
            )


def serve(options: ServeOptions, place: Place, *, worker: list[str], say: Say) -> None:
    """Serves until a signal or a failure. Raises UsageError before loading, PtqError when the service failed.

    worker  the command that starts a further rank, which gets ``--rank-of HOST:PORT/RANK`` added
    """
    place.follow_parent()
    require_packages()
    check_place(options.ckpt, options.device, place)
    from ptqpipe.runtime.memory import use_one_arena

    use_one_arena()
    if place.rank > 0:
        _follow(options, place)
        return
    from ptqpipe.runtime.loading import load_tokenizer
    from ptqpipe.server.run import bind

    listening = bind(options.host, options.port)
    check_sums(options.allreduce)
    template = read_template(options.chat_template)
    check_checkpoint(options.ckpt, tp=place.size, packed=options.packed)
    tokenizer, context = load_tokenizer(Path(options.ckpt)), context_of(options.ckpt, options.max_len)
    with Ranks.start(place, worker) as ranks:
        Lead(options, ranks, tokenizer, context, say).serve(listening, template)


class Lead:
    """The first rank: it builds the engine in the engine's thread, and serves.

    leader      what sends each batch to the other ranks, once they have joined; None for one rank
    all_reduce  what sums over the ranks, once they have joined; None for one rank
    cause       the error for which there is no engine: its kind is the exit code, and a service keeps the text alone
    """

    def __init__(self, options: ServeOptions, ranks: Ranks, tokenizer: Any, context: int, say: Say) -> None:
        from ptqpipe.engine.service import Service

        self.options, self.ranks, self.tokenizer, self.context, self.say = options, ranks, tokenizer, context, say
        self.leader: Leader | None = None
        self.all_reduce: QuantAllReduce | None = None
        self.cause: PtqError | None = None
        self.threads = options.threads or ranks.place.threads()
        self.service = Service(
            self.build, max_queue=options.max_queue, threads=self.threads, beat=self.beat, close=self.close
        )

    def build(self) -> "Engine":
        """The engine, after the other ranks have joined."""
        try:
            return self._load()
        except PtqError as error:
            self.cause = error
            raise

    def _load(self) -> "Engine":
        from ptqpipe.engine.ranks import Leader

        options, ranks, watchdog = self.options, self.ranks, Watchdog()
        ranks.join()
        self.all_reduce = _all_reduce(options, ranks.place)
        runner = _runner(options, ranks.place, self.context, self.all_reduce, watchdog)
        if ranks.place.size > 1:
            self.leader = Leader(runner, watch=watchdog)
        engine = _engine(options, runner, self.leader or runner, self.tokenizer, self.context)
        self.say(_summary(runner, ranks.place.size, self.threads, self.context))
        watchdog.watch(ranks.failing(self.service.fail), ranks.others)
        return engine

    def beat(self) -> None:
        """Lets the other ranks know that this one lives."""
        if self.leader is not None:
            self.leader.beat()

    def close(self) -> None:
        """Ends the other ranks, unless one of them is broken: then they are killed."""
        if self.leader is not None and not self.ranks.broken:
            self.leader.close()

    def counts(self) -> dict[str, int] | None:
        """What the sums over the ranks have cost so far, as ``/metrics`` shows it."""
        if self.all_reduce is None:
            return None
        stats = self.all_reduce.stats()
        return {
            "quantized": stats.calls,
            "plain": stats.plain_calls,
            "values": stats.value_bytes,
            "wire": stats.wire_bytes,
        }

    def serve(self, listening: "socket", template: str | None) -> None:
        """Until a signal or a failure. ``template``: the chat template in the place of the tokenizer's."""
        from ptqpipe.server.app import ServerOptions, create_app
        from ptqpipe.server.run import run
        from ptqpipe.stages.common.identity import name_of

        options, service = self.options, self.service
        self.ranks.watch(service.fail)
        name = options.name or name_of(Path(options.ckpt))
        hosts = host_names(options.host, options.allowed_hosts)
        server = ServerOptions((name,), self.context, hosts, options.api_key, options.max_body, template)
        app = create_app(service, self.tokenizer, server, all_reduce=self.counts)
        service.start()
        try:
            run(app, service, listening, host=options.host, drain_s=options.drain_s, say=self.say)
        except PtqError as error:
            raise (self.cause if self.cause is not None and str(self.cause) == str(error) else error) from None


def _follow(options: ServeOptions, place: Place) -> None:
    """A rank that computes for the first one."""
    import torch

    from ptqpipe.engine.ranks import follow

    place.ignore_signals()
    torch.set_num_threads(options.threads or place.threads())
    place.join()
    follow(_runner(options, place, context_of(options.ckpt, options.max_len), _all_reduce(options, place)))


def _all_reduce(options: ServeOptions, place: Place) -> "QuantAllReduce | None":
    """What sums over the ranks, None for one. Sums of a decode step stay plain: they are small, and latency is all.

    "off" is one that never quantizes, so that its sums are counted, too. "auto" measures, together with all ranks.
    """
    if place.size == 1:
        return None
    from ptqpipe.collectives import NEVER, QuantAllReduce, Thresholds
    from ptqpipe.runtime.loading import dtype_of, read_config

    group = place.group_of_sums(place.device(options.device))
    if options.allreduce == "off":
        plain = QuantAllReduce(group, min_bytes=NEVER)
        if options.invariant and place.size > 2:  # in the order of ranks; of two numbers there is but one sum
            plain.thresholds = Thresholds(NEVER, ((NEVER, "two_shot"),))
        return plain
    one_shot = place.size == 2 and options.device == "cpu"  # as many bytes, one message and one rounding less
    config = read_config(Path(options.ckpt)).get_text_config()
    decode_bytes = options.max_seqs * config.hidden_size * dtype_of(options.dtype, config).itemsize
    if options.allreduce == "auto":
        measured = QuantAllReduce(group, min_bytes="auto", one_shot=one_shot)
        least = max(measured.thresholds.quantized, decode_bytes + 1)
        measured.thresholds = replace(measured.thresholds, quantized=least)
        return measured
    return QuantAllReduce(group, options.allreduce, min_bytes=decode_bytes + 1, one_shot=one_shot)


def _overlap(options: ServeOptions, place: Place) -> "Overlap | None":
    """What overlaps the all-reduces of long steps with their computation; on GPUs nothing does yet."""
    if place.size == 1 or not options.overlap or options.device != "cpu":
        return None
    from ptqpipe.engine.overlap import Overlap, least_tokens
    from ptqpipe.runtime.loading import dtype_of, read_config

    config = read_config(Path(options.ckpt)).get_text_config()
    row_bytes = config.hidden_size * dtype_of(options.dtype, config).itemsize
    return Overlap(least_tokens=least_tokens(row_bytes))


def _run_collective(overlap: "Overlap | None", watchdog: Watchdog | None) -> "RunCollective | None":
    """What runs a collective operation: each of the two that there is, the watchdog where it really happens."""
    if overlap is None or watchdog is None:
        return overlap or watchdog
    return lambda collective: overlap(lambda: watchdog(collective))


def _runner(
    options: ServeOptions,
    place: Place,
    context: int,
    sums: "QuantAllReduce | None",
    watchdog: Watchdog | None = None,
) -> "Runner":
    """This rank's part of the model, with a cache as large as all ranks can have."""
    import torch

    from ptqpipe.engine import invariance
    from ptqpipe.engine.ranks import agree
    from ptqpipe.engine.runner import CacheOptions, Runner, check_model
    from ptqpipe.runtime import load
    from ptqpipe.runtime.compiled import use_kernels
    from ptqpipe.runtime.invariant import make_batch_invariant
    from ptqpipe.runtime.memory import keep_freed_memory

    overlap = _overlap(options, place)
    device = place.device(options.device)
    if device != "cpu":
        torch.cuda.set_device(device)  # of this thread, which computes: Triton's kernels start where it says
    model = load(
        options.ckpt,
        tp=place.size,
        rank=place.rank,
        group=None if sums is None else sums.group,
        all_reduce=None if sums is None else lambda x: sums(x, x),
        run_collective=_run_collective(overlap, watchdog),
        dtype=options.dtype,
        packed=options.packed,
        activations="none" if options.activations == "none" else "simulated",
        device=device,
    )
    check_model(model)
    make_batch_invariant(model) if options.invariant else use_kernels(model)
    keep_freed_memory()
    cache = options.cache_bytes or place.cache_bytes(device)
    together = agree if place.size > 1 else None
    runner = Runner(model, CacheOptions(cache, context, options.max_seqs), agree=together, overlap=overlap)
    if options.invariant:
        invariance.check(runner)
    return runner


def _engine(options: ServeOptions, runner: "Runner", computes: Any, tokenizer: Any, context: int) -> "Engine":
    from ptqpipe.engine.engine import Engine, EngineOptions

    limits = EngineOptions(context, options.max_seqs, options.max_batch_tokens, options.prefix_caching)
    return Engine(
        computes,
        tokenizer,
        options=limits,
        vocabulary=runner.config.vocab_size,
        end_tokens=end_tokens(runner.model, tokenizer),
    )


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """What ends a sequence: the generation config's tokens, else the config's, and the tokenizer's."""
    found: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.get_text_config().eos_token_id):
        if value is not None:
            found |= set(value) if isinstance(value, (list, tuple)) else {int(value)}
            break
    return found | ({int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set())


def _summary(runner: "Runner", ranks: int, threads: int, context: int) -> str:
    """One line about what is served."""
    tokens = runner.blocks * runner.block_size
    cache = runner.blocks * runner.bytes_per_block
    kind = "FP8" if runner.scales else str(runner.dtype).removeprefix("torch.")
    return (
        f"{type(runner.model).__name__}, {ranks} rank(s) of {threads} thread(s); context {context} tokens; kv cache "
        f"{tokens} tokens in {kind}, {cache / 2**20:.0f} MiB a rank"
    )
