"""Packed linear layers beside torch's bfloat16 linear, on the CPU: tokens per second as a ratio, in one run.

Usage: python scripts/bench_linear.py [--formats nvfp4 ...] [--shapes 4096x4096 ...] [--rows 1 4 ...] [--threads 1 2]
    [--repeat 7] [--results FILE]

Every measurement works through enough copies of the weight that none is in a cache when its turn comes (COPIES_BYTES),
as in a model whose layers follow each other; the two sides alternate; medians of ``--repeat``. One JSON line a format,
shape, number of rows and of threads: microseconds a call, the ratio (bfloat16 time / packed time: above 1 is faster),
GB/s of packed bytes; ``one_order``: the time with sums in one order for any number of rows (``serve
--batch-invariant``) over the time without, where a kernel knows both.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ptqpipe.api.matrices import quantize
from ptqpipe.numerics.kernels import cpu
from ptqpipe.runtime.packed import PackedWeight, packed_linear

COPIES_BYTES = 320 << 20  # of bfloat16 weights that a measurement goes through
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8_channel", "fp8_block")
SHAPES = ("4096x4096", "14336x4096", "4096x14336")
ROWS = (1, 4, 16, 32, 64, 128, 512, 2048)


def seconds_of(layers: Sequence[Callable[[], torch.Tensor]]) -> float:
    """Seconds of one call of each layer, one after the other, divided by their number."""
    begun = time.perf_counter()
    for layer in layers:
        layer()
    return (time.perf_counter() - begun) / len(layers)


def measure(fmt: str, shape: tuple[int, int], rows: int, *, repeat: int) -> dict[str, object]:
    """One line."""
    n, k = shape
    copies = max(2, COPIES_BYTES // (2 * n * k)) if rows <= 64 else 2
    w = (torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    first = PackedWeight.from_qtensor(quantize(w, fmt)).arranged()
    packed = [first] + [PackedWeight.from_qtensor(quantize(w, fmt)).arranged() for _ in range(copies - 1)]
    floats = [w.clone() for _ in range(copies)]
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = [lambda p=p: packed_linear(x, p) for p in packed]
    theirs = [lambda f=f: torch.nn.functional.linear(x, f) for f in floats]
    kept = [PackedWeight.from_qtensor(quantize(w, fmt)).arranged() for _ in range(copies)]
    for each in kept:
        if each.operand is not None:
            each.operand.keep_order()
    in_order = [lambda p=p: packed_linear(x, p) for p in kept]
    sides = (ours, theirs, in_order)
    for side in sides:
        seconds_of(side)
    runs = [tuple(seconds_of(side) for side in sides) for _ in range(repeat)]
    packed_s, bf16_s, order_s = (statistics.median(run[side] for run in runs) for side in range(3))
    return {
        "format": fmt,
        "shape": f"{n}x{k}",
        "rows": rows,
        "threads": torch.get_num_threads(),
        "isa": cpu.isa(),
        "packed_us": round(packed_s * 1e6, 1),
        "bf16_us": round(bf16_s * 1e6, 1),
        "ratio": round(bf16_s / packed_s, 3),
        "one_order": round(order_s / packed_s, 3) if first.operand is not None else None,
        "packed_gb_per_s": round(first.nbytes / packed_s / 1e9, 2),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Runs the measurements that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    for threads in args.threads:
        torch.set_num_threads(threads)
        for shape in args.shapes:
            n, k = (int(part) for part in shape.split("x"))
            for fmt in args.formats:
                for rows in args.rows:
                    line = json.dumps(measure(fmt, (n, k), rows, repeat=args.repeat))
                    print(line, flush=True)
                    if args.results:
                        with args.results.open("a", encoding="utf-8") as file:
                            file.write(line + "\n")


if __name__ == "__main__":
    main()
