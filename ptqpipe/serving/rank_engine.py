"""What each rank of a service computes with: its part of the model in a runner, and on the first one the engine."""

from pathlib import Path
from typing import Any

import torch

from ptqpipe.run.quantities import memory_size
from ptqpipe.runtime.compiled import make_batch_invariant, use_kernels
from ptqpipe.runtime.loading import load_rank
from ptqpipe.runtime.memory import keep_freed_memory
from ptqpipe.serving.engine import Engine, EngineOptions, invariance
from ptqpipe.serving.engine.model_runner import ModelRunner, check_model
from ptqpipe.serving.engine.ranks import agree, follow
from ptqpipe.serving.engine.speculative import Drafter
from ptqpipe.serving.options import ServeOptions
from ptqpipe.serving.preflight import context_of
from ptqpipe.serving.rank_processes import RankInfo
from ptqpipe.serving.rank_sums import RankSums
from ptqpipe.serving.watchdog import Watchdog


def follow_first(options: ServeOptions, place: RankInfo) -> None:
    """A rank that computes for the first one."""
    place.ignore_signals()
    torch.set_num_threads(options.workers or place.threads())
    place.join()
    context = context_of(options.ckpt, options.max_model_len)
    follow(build_runner(options, place, context, RankSums.of(options, place)))


def build_runner(
    options: ServeOptions, place: RankInfo, context: int, sums: RankSums, watchdog: Watchdog | None = None
) -> ModelRunner:
    """This rank's part of the model, with a cache as large as all ranks can have."""
    device = place.device(options.device)
    if device != "cpu":
        torch.cuda.set_device(device)  # of this thread, which computes: Triton's kernels start where it says
    model = load_rank(
        Path(options.ckpt),
        sums.parallel(place, watchdog),
        dtype=options.dtype,
        packed=not options.decoded,
        activations="none" if options.activations == "none" else "simulated",
        device=device,
        mtp=options.speculative is not None,
    )
    check_model(model)
    make_batch_invariant(model) if options.batch_invariant else use_kernels(model)
    keep_freed_memory()
    limits = EngineOptions(
        options.kv_cache_size or place.cache_bytes(device),
        context,
        options.max_num_seqs,
        max_batch_tokens=options.max_batch_tokens,
        prefix_caching=options.prefix_caching,
    )
    runner = ModelRunner(model, limits, agree=agree if place.size > 1 else None, overlap=sums.overlap)
    if options.batch_invariant:
        invariance.check(runner)
    return runner


def build_engine(options: ServeOptions, runner: ModelRunner, computes: Any, tokenizer: Any) -> Engine:
    """computes  the runner, or what runs the batches on all ranks"""
    drafter = None
    if options.speculative is not None:
        drafter = Drafter(runner, most=options.speculative_tokens, max_len=runner.options.max_len)
    return Engine(
        computes,
        tokenizer,
        options=runner.options,
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


def summary(runner: ModelRunner, ranks: int, threads: int, context: int) -> str:
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
