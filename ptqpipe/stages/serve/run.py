"""``ptqpipe serve``: a checkpoint becomes a service. Here loading, engine and server meet.

One process serves alone. Of several ranks the first has the engine and the server, the others compute with it; they are
started here (``ranks.py``) or by torchrun.
"""

from collections.abc import Callable, Sequence
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
    read_tokenizer,
    require_packages,
)
from ptqpipe.stages.serve.hardware import cache_bytes, default_threads, device_of
from ptqpipe.stages.serve.ranks import Place, Ranks
from ptqpipe.stages.serve.watchdog import Watchdog

if TYPE_CHECKING:
    from ptqpipe.collectives import QuantAllReduce
    from ptqpipe.engine.engine import Engine
    from ptqpipe.engine.overlap import Overlap
    from ptqpipe.engine.runner import Runner
    from ptqpipe.runtime.parallel import RunCollective

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve and how; `None` is chosen from the model or the machine.

    name          of the model in the API
    allreduce     "off", a codec ("int8", ...), or "auto": quantized where it is measured to be faster
    overlap       whether a prefill's sums go beside its computing (``engine/overlap.py``)
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
    from ptqpipe.runtime.allocator import use_one_arena

    use_one_arena()
    if place.rank > 0:
        _follow(options, place)
        return
    from ptqpipe.server.run import Listen, bind

    listen = Listen(options.host, options.port, options.drain_s)
    listening = bind(listen)
    check_sums(options.allreduce)
    template = read_template(options.chat_template)
    check_checkpoint(options.ckpt, tp=place.size, packed=options.packed)
    tokenizer, context = read_tokenizer(options.ckpt), context_of(options.ckpt, options.max_len)
    with Ranks.start(place, worker) as ranks:
        _lead(options, ranks, (tokenizer, template, context), (listening, listen), say)


def _lead(
    options: ServeOptions,
    ranks: Ranks,
    model: tuple[Any, str | None, int],
    listens: tuple[Any, Any],
    say: Say,
) -> None:
    """The first rank. ``model``: its tokenizer, the chat template given for it, the longest sequence."""
    from ptqpipe.collectives import QuantAllReduce
    from ptqpipe.engine.ranks import Leader
    from ptqpipe.engine.service import Service
    from ptqpipe.server.app import ServerOptions, create_app
    from ptqpipe.server.metrics import AllReduceCounts
    from ptqpipe.server.run import run
    from ptqpipe.stages.common.identity import name_of

    tokenizer, template, context = model
    leaders: list[Leader] = []
    sums: list[QuantAllReduce] = []
    causes: list[PtqError] = []
    threads = options.threads or default_threads(ranks.place.local)
    watchdog = Watchdog()

    def build() -> "Engine":
        try:
            return load()
        except PtqError as error:
            causes.append(error)
            raise

    def load() -> "Engine":
        ranks.join()
        sums.extend(_all_reduce(options, ranks.place))
        runner = _runner(options, ranks.place, context, sums, watchdog)
        if ranks.place.size > 1:
            leaders.append(Leader(runner, watch=watchdog))
        engine = _engine(options, runner, leaders[0] if leaders else runner, tokenizer, context)
        say(_summary(runner, ranks.place.size, threads, context))
        watchdog.watch(ranks.failing(service.fail), ranks.others)
        return engine

    def close() -> None:
        if leaders and not ranks.broken:
            leaders[0].close()

    def beat() -> None:
        if leaders:
            leaders[0].beat()

    service = Service(build, max_queue=options.max_queue, threads=threads, beat=beat, close=close)
    ranks.watch(service.fail)
    name = options.name or name_of(Path(options.ckpt))
    hosts = host_names(options.host, options.allowed_hosts)
    server = ServerOptions((name,), context, hosts, options.api_key, options.max_body, template)

    def counts() -> AllReduceCounts | None:
        found = sums[0].stats() if sums else None
        if found is None:
            return None
        return AllReduceCounts(found.calls, found.plain_calls, found.value_bytes, found.wire_bytes)

    app = create_app(service, tokenizer, server, all_reduce=counts)
    service.start()
    try:
        run(app, service, *listens, say=say)
    except PtqError as error:  # the engine's thread leaves its message alone; its kind is the exit code
        raise (causes[0] if causes and str(causes[0]) == str(error) else error) from None


def _follow(options: ServeOptions, place: Place) -> None:
    """A rank that computes for the first one."""
    import torch

    from ptqpipe.engine.ranks import follow

    place.ignore_signals()
    torch.set_num_threads(options.threads or default_threads(place.local))
    place.join()
    follow(_runner(options, place, context_of(options.ckpt, options.max_len), _all_reduce(options, place)))


def _all_reduce(options: ServeOptions, place: Place) -> "list[QuantAllReduce]":
    """What sums over the ranks, none for one. Sums of a decode step stay plain: they are small, and latency is all.

    "off" is one that never quantizes, so that its sums are counted, too. "auto" measures, together with all ranks.
    """
    if place.size == 1:
        return []
    from ptqpipe.collectives import NEVER, QuantAllReduce, Thresholds
    from ptqpipe.runtime.loading import dtype_of, read_config

    group = place.group_of_sums(device_of(options.device, local_rank=place.local_rank, local_ranks=place.local))
    if options.allreduce == "off":
        plain = QuantAllReduce(group, min_bytes=NEVER)
        if options.invariant and place.size > 2:  # in the order of ranks; of two numbers there is but one sum
            plain.thresholds = Thresholds(NEVER, ((NEVER, "two_shot"),))
        return [plain]
    one_shot = place.size == 2 and options.device == "cpu"  # as many bytes, one message and one rounding less
    config = read_config(Path(options.ckpt)).get_text_config()
    decode_bytes = options.max_seqs * config.hidden_size * dtype_of(options.dtype, config).itemsize
    if options.allreduce == "auto":
        made = QuantAllReduce(group, min_bytes="auto", one_shot=one_shot)
        made.thresholds = replace(made.thresholds, quantized=max(made.thresholds.quantized, decode_bytes + 1))
        return [made]
    return [QuantAllReduce(group, options.allreduce, min_bytes=decode_bytes + 1, one_shot=one_shot)]


def _overlap(options: ServeOptions, place: Place) -> "Overlap | None":
    """What puts the sums of long steps beside their computing; on GPUs nothing does yet."""
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
    sums: "Sequence[QuantAllReduce]",
    watchdog: Watchdog | None = None,
) -> "Runner":
    """This rank's part of the model, with a cache as large as all ranks can have."""
    import torch

    from ptqpipe.engine import invariance
    from ptqpipe.engine.ranks import agree
    from ptqpipe.engine.runner import CacheOptions, Runner, check_model
    from ptqpipe.runtime import load
    from ptqpipe.runtime.allocator import keep_freed_memory
    from ptqpipe.runtime.compiled import use_kernels
    from ptqpipe.runtime.invariant import make_batch_invariant

    overlap = _overlap(options, place)
    device = device_of(options.device, local_rank=place.local_rank, local_ranks=place.local)
    if device != "cpu":
        torch.cuda.set_device(device)  # of this thread, which computes: Triton's kernels start where it says
    model = load(
        options.ckpt,
        tp=place.size,
        rank=place.rank,
        group=sums[0].group if sums else None,
        all_reduce=(lambda x: sums[0](x, x)) if sums else None,
        run_collective=_run_collective(overlap, watchdog),
        dtype=options.dtype,
        packed=options.packed,
        activations="none" if options.activations == "none" else "simulated",
        device=device,
    )
    check_model(model)
    make_batch_invariant(model) if options.invariant else use_kernels(model)
    keep_freed_memory()
    cache = options.cache_bytes or cache_bytes(device, local_ranks=place.local)
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
