"""Prefill at two ranks over a link of a given speed: the sums plain and quantized, end to end; and what int8 does to
the perplexity. Linux, root, ip and tc.

Usage: sudo python scripts/bench_prefill_link.py CKPT [--links 1] [--prompt 2048] [--repeat 5] [--text FILE]
       [--codec int8] [--results FILE]

Each rank runs in a network namespace of its own (bench_allreduce.py makes and removes them) on one core: the engine's
runner, one step of ``--prompt`` random tokens, plain and quantized in turns. Plain is the faster one of gloo's sum and
our schedule without a codec. One JSON line a link: medians in seconds, their ratio, the bytes of the sums, and how long
the sums alone take of the time. With ``--text`` also the perplexity of its first tokens in windows, with either sum.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_allreduce
import torch
import torch.distributed as dist

import ptqpipe.runtime
from ptqpipe.collectives import QuantAllReduce
from ptqpipe.engine.batch import Batch, Span
from ptqpipe.engine.runner import CacheOptions, Runner

BLOCK = 16  # tokens a page
LIMIT_S = 1800


class Sums:
    """The all-reduce that the model's layers call: one of several, with the time spent in it."""

    def __init__(self, ways: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> None:
        self.ways, self.now = ways, next(iter(ways))
        self.seconds, self.nbytes = 0.0, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        begun = time.perf_counter()
        y = self.ways[self.now](x)
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


def prefill(runner: Runner, sums: Sums, tokens: torch.Tensor, repeat: int) -> dict[str, Any]:
    """Medians of the ways, in turns."""
    batch = one_sequence(tokens, torch.tensor([len(tokens) - 1]))
    took: dict[str, list[tuple[float, float]]] = {way: [] for way in sums.ways}
    for turn in range(repeat + 1):
        for way in sums.ways:
            sums.now, sums.seconds, sums.nbytes = way, 0.0, 0
            dist.barrier()
            begun = time.perf_counter()
            runner.run(batch)
            if turn:
                took[way].append((time.perf_counter() - begun, sums.seconds))
    middle = {way: [statistics.median(part) for part in zip(*runs, strict=True)] for way, runs in took.items()}
    plain = min((way for way in sums.ways if way != "quantized"), key=lambda way: middle[way][0])
    ratio = statistics.median(a[0] / b[0] for a, b in zip(took[plain], took["quantized"], strict=True))
    return {
        "tokens": len(tokens),
        "message_mib": sums.nbytes / 2**20,
        "seconds": {way: round(both[0], 4) for way, both in middle.items()},
        "in_sums": {way: round(both[1], 4) for way, both in middle.items()},
        "plain": plain,
        "ratio": round(ratio, 3),
    }


def perplexity(runner: Runner, sums: Sums, ids: torch.Tensor, window: int) -> dict[str, float]:
    """Of the windows of a text, by each way."""
    found = {}
    for way in sums.ways:
        sums.now = way
        total = 0.0
        rows = ids[: len(ids) // window * window].view(-1, window)
        for row in rows:
            logits = runner.run(one_sequence(row, torch.arange(window)))
            total += float(torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum"))
        found[way] = math.exp(total / (len(rows) * (window - 1)))
    return found


def worker(options: argparse.Namespace) -> None:
    """One rank."""
    rank, ranks, link = int(options.worker[0]), int(options.worker[1]), options.worker[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    quantized = QuantAllReduce(codec=options.codec, min_bytes=0)
    sums = Sums({"gloo": own, "two_shot": quantized.plain_two_shot, "quantized": lambda x: quantized(x, x)})
    model = ptqpipe.runtime.load(options.model, tp=ranks, rank=rank, all_reduce=sums).eval()
    longest = max(options.prompt, options.window)
    runner = Runner(model, CacheOptions(max_bytes=2 << 30, max_len=longest, max_seqs=1, block_size=BLOCK))
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(3, vocabulary, (options.prompt,), generator=torch.Generator().manual_seed(0))
    line: dict[str, Any] = {"model": options.model.name, "link": link, "ranks": ranks, "codec": options.codec}
    line |= prefill(runner, sums, tokens, options.repeat)
    if options.text:
        from transformers import AutoTokenizer

        text = options.text.read_text(encoding="utf-8")[: 8 * options.tokens]
        ids = torch.tensor(AutoTokenizer.from_pretrained(options.model)(text)["input_ids"][: options.tokens])
        found = perplexity(runner, sums, ids, options.window)
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
    if os.geteuid():
        sys.exit("namespaces and tc need root")
    for link in options.links:
        for line in bench_allreduce.launch(options.ranks, link, script=__file__, limit_s=LIMIT_S):
            print(json.dumps(line))
            if options.results:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
