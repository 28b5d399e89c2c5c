"""Prefill at two ranks over a link of a given speed: the sums plain and quantized, waited for or overlapped, end to
end; and what int8 does to the perplexity. Linux, root, ip and tc.

Usage: sudo python -m labs.prefill_link CKPT [--links 1] [--prompt 2048] [--repeat 5] [--text FILE]
       [--codec int8] [--least N] [--results FILE]

Each rank runs in a network namespace of its own (bench_allreduce.py makes and removes them) on one core: the engine's
runner, one step of ``--prompt`` random tokens, by all ways in turns. Ways are gloo's sum, our schedule without a codec
(two_shot) and the quantized sum; "overlapped": in two halves by turns, their sums beside computing (engine/overlap.py).
One JSON line a link:

    seconds, in_sums, waited  medians a way: of the step, inside of sums, and of those what the step waited for
    plain, plain_overlapped, best_quantized  the fastest way of its kind
    speedup    medians within turns. ``quantized``: plain over quantized, neither overlapped; ``best_over_plain`` and
               ``best_over_plain_overlapped``: these over the best quantized, the first is what others do
    overlap_speedup  the same of each way over itself overlapped
    identical  whether each overlapped way gave the bits of the same sums not overlapped

--least: another number of tokens from which on steps are cut in halves than the engine's. With ``--text`` also the
perplexity of its first tokens in windows, by each way.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_allreduce
import torch
import torch.distributed as dist

from ptqpipe.runtime.compiled import use_kernels
from ptqpipe.runtime.loading import load_rank, read_config
from ptqpipe.runtime.memory import keep_freed_memory, use_one_arena
from ptqpipe.runtime.parallel import TensorParallel
from ptqpipe.serving.collectives import QuantAllReduce
from ptqpipe.serving.engine import EngineOptions
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.model_runner import ModelRunner
from ptqpipe.serving.engine.overlap import Overlap, least_tokens

BLOCK = 16  # tokens a page
LIMIT_S = 1800


OVERLAPPED = " overlapped"


class Sums:
    """The all-reduce that the model's layers call: one of several, with the time spent in it.

    ways  those with the same sums overlapped behind them
    """

    def __init__(self, sums: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> None:
        self._sums = sums
        self.ways = [*sums, *(name + OVERLAPPED for name in sums)]
        self.seconds, self.nbytes = 0.0, 0
        self.choose(self.ways[0])

    def choose(self, way: str) -> None:
        """The way of the calls from now on; forgets what was counted."""
        self._now = self._sums[way.removesuffix(OVERLAPPED)]
        self.seconds, self.nbytes = 0.0, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        begun = time.perf_counter()
        y = self._now(x)
        self.seconds += time.perf_counter() - begun
        self.nbytes += x.nbytes
        return y


def one_sequence(tokens: torch.Tensor, wanted: torch.Tensor) -> Batch:
    """A step of a whole prompt."""
    n = len(tokens)
    return Batch(tokens, wanted, (Span(n, n, tuple(range(-(-n // BLOCK)))),))


def own(x: torch.Tensor) -> torch.Tensor:
    """gloo's sum."""
    dist.all_reduce(x)
    return x


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one step: all of it, inside of sums, and of those what it waited for."""

    step: float
    in_sums: float
    waited: float


@dataclass(frozen=True, slots=True)
class Rank:
    """What steps run on."""

    runner: ModelRunner
    sums: Sums
    overlap: Overlap

    def step(self, batch: Batch, way: str) -> tuple[torch.Tensor, Took]:
        """The logits of a batch by a way."""
        self.sums.choose(way)
        overlapped = way.endswith(OVERLAPPED)
        self.runner.overlap = self.overlap if overlapped else None
        waited, begun = self.overlap.waited_s, time.perf_counter()
        logits = self.runner.run(batch)
        seconds, in_sums = time.perf_counter() - begun, self.sums.seconds
        return logits, Took(seconds, in_sums, self.overlap.waited_s - waited if overlapped else in_sums)


def prefill(rank: Rank, tokens: torch.Tensor, repeat: int) -> dict[str, Any]:
    """Medians of the ways, in turns."""
    batch, ways = one_sequence(tokens, torch.tensor([len(tokens) - 1])), rank.sums.ways
    took: dict[str, list[Took]] = {way: [] for way in ways}
    logits: dict[str, torch.Tensor] = {}
    for turn in range(repeat + 1):
        for way in ways:
            dist.barrier()
            logits[way], one = rank.step(batch, way)
            if turn:
                took[way].append(one)
    median = {
        name: {way: statistics.median(getattr(one, name) for one in took[way]) for way in ways}
        for name in ("step", "in_sums", "waited")
    }

    def best(*, quantized: bool, overlapped: bool | None) -> str:
        """The fastest way of a kind; None: overlapped or not."""
        kind = [way for way in ways if way.startswith("quantized") == quantized]
        kind = [way for way in kind if overlapped in (None, way.endswith(OVERLAPPED))]
        return min(kind, key=lambda way: median["step"][way])

    def speedup(slow: str, fast: str) -> float:
        return round(statistics.median(a.step / b.step for a, b in zip(took[slow], took[fast], strict=True)), 3)

    plain, plain_overlapped = (best(quantized=False, overlapped=overlapped) for overlapped in (False, True))
    quantized = best(quantized=True, overlapped=None)
    return {
        "tokens": len(tokens),
        "message_mib": rank.sums.nbytes / 2**20,
        "seconds": {way: round(x, 4) for way, x in median["step"].items()},
        "in_sums": {way: round(x, 4) for way, x in median["in_sums"].items()},
        "waited": {way: round(x, 4) for way, x in median["waited"].items()},
        "plain": plain,
        "plain_overlapped": plain_overlapped,
        "best_quantized": quantized,
        "speedup": {
            "quantized": speedup(plain, "quantized"),
            "plain_overlapped": speedup(plain, plain_overlapped),
            "best_over_plain": speedup(plain, quantized),
            "best_over_plain_overlapped": speedup(plain_overlapped, quantized),
        },
        "overlap_speedup": {way: speedup(way, way + OVERLAPPED) for way in ways if way + OVERLAPPED in took},
        "identical": {
            way: torch.equal(logits[way], logits[way + OVERLAPPED]) for way in ways if way + OVERLAPPED in logits
        },
    }


def perplexity(rank: Rank, ids: torch.Tensor, window: int) -> dict[str, float]:
    """Of the windows of a text, by each way."""
    found = {}
    for way in rank.sums.ways:
        total = 0.0
        rows = ids[: len(ids) // window * window].view(-1, window)
        for row in rows:
            logits, _ = rank.step(one_sequence(row, torch.arange(window)), way)
            total += float(torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum"))
        found[way] = math.exp(total / (len(rows) * (window - 1)))
    return found


def worker(options: argparse.Namespace) -> None:
    """One rank."""
    rank, ranks, link = int(options.worker[0]), int(options.worker[1]), options.worker[2]
    torch.set_num_threads(1)
    use_one_arena()
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    quantized = QuantAllReduce(codec=options.codec, min_bytes=0, one_shot=ranks == 2)  # as the service has it
    sums = Sums({"gloo": own, "two_shot": quantized.plain_two_shot, "quantized": lambda x: quantized(x, x)})
    config = read_config(options.model).get_text_config()
    overlap = Overlap(least_tokens=options.least or least_tokens(config.hidden_size * torch.bfloat16.itemsize))
    ours = TensorParallel(ranks, rank, all_reduce=sums, run=overlap)
    model = load_rank(options.model, ours)
    use_kernels(model)  # this and the next line as the service does
    keep_freed_memory()
    longest = max(options.prompt, options.window)
    runner = ModelRunner(model, EngineOptions(max_bytes=2 << 30, max_len=longest, max_seqs=1, block_size=BLOCK))
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(3, vocabulary, (options.prompt,), generator=torch.Generator().manual_seed(0))
    line: dict[str, Any] = {"model": options.model.name, "link": link, "ranks": ranks, "codec": options.codec}
    each = Rank(runner, sums, overlap)
    line |= prefill(each, tokens, options.repeat)
    if options.text:
        from transformers import AutoTokenizer

        text = options.text.read_text(encoding="utf-8")[: 8 * options.tokens]
        ids = torch.tensor(AutoTokenizer.from_pretrained(options.model)(text)["input_ids"][: options.tokens])
        found = perplexity(each, ids, options.window)
        line["perplexity"] = {way: round(value, 4) for way, value in found.items()}
        line["perplexity_change"] = round(found["quantized"] / found["gloo"] - 1, 6)
    if rank == 0:
        print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="CKPT")
    parser.add_argument("--links", nargs="+", default=["1"], help="Gbit/s, or loopback")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--least", type=int)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=16384, help="of the text")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """The links one after the other."""
    options = parse()
    if options.worker:
        worker(options)
        return
    if not (options.model / "config.json").is_file():
        sys.exit(f"{options.model} has no config.json; give a checkpoint folder, such as ptqpipe convert writes")
    if os.geteuid():
        sys.exit("namespaces and tc need root")
    for link in options.links:
        for line in bench_allreduce.launch(options.ranks, link, program=("-m", "labs.prefill_link"), limit_s=LIMIT_S):
            print(json.dumps(line))
            if options.results:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
