"""CPU time of the engine's decode steps on one thread, with the model's own forward and without it, in turns.

Usage: [PTQPIPE_ISA=avx2] python -m labs.step CHECKPOINT [--batches 1,4,16] [--prompt N] [--new N]

One process and one model: each even step leaves the model's forward out (``engine/decode_step.py``), each odd
one does not. A JSON line for each batch: medians in ms of CPU time of a whole step, of its compiled calls, and of the
rest, which is Python and torch's operators. CPU time holds beside other work on the machine, but for what that does to
the caches. Set OMP_NUM_THREADS=1.
"""

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

import torch
from engine_child import Child

from ptqpipe.numerics.kernels import cpu, cpu_library
from ptqpipe.serving.engine.engine import Request
from ptqpipe.serving.engine.sequence import SamplingParams


class Spent:
    """CPU seconds within compiled calls."""

    def __init__(self) -> None:
        self.seconds, self._call = 0.0, cpu_library.call

    def call(self, function: str, *arguments: object) -> int:
        """In the place of `cpu_library.call`."""
        began = time.process_time()
        status = self._call(function, *arguments)
        self.seconds += time.process_time() - began
        return status


def steps(
    child: Child, spent: Spent, prompts: list[tuple[int, ...]], new: int
) -> dict[bool, list[tuple[float, float]]]:
    """(seconds of a decode step, those in compiled calls) of steps without the model's forward, and with it."""
    engine: Any = child.engine
    whole = engine.runner.decode_step
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    for at, prompt in enumerate(prompts):
        engine.add(Request(str(at), prompt, params))
    engine.step()
    for number in range(new - 1):
        without = number % 2 == 0
        engine.runner.decode_step, spent.seconds, began = whole if without else None, 0.0, time.process_time()
        engine.step()
        found[without].append((time.process_time() - began, spent.seconds))
    engine.runner.decode_step = whole
    return {without: some[1:] for without, some in found.items()}  # the first of each warms up


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description="CPU time of decode steps; JSON lines.")
    parser.add_argument("checkpoint")
    parser.add_argument("--batches", type=lambda text: [int(x) for x in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spent = Spent()
    cpu_library.call = spent.call
    child = Child(arguments.checkpoint, arguments.prompt + arguments.new + 1, max(arguments.batches))
    runner: Any = child.engine.runner
    if runner.decode_step is None:
        sys.exit(
            f"{arguments.checkpoint}: its steps are the model's own; give a Llama-shaped model and a CPU with panels"
        )
    rng = random.Random(1)
    for batch in arguments.batches:
        prompts = [tuple(rng.randrange(16, 1 << 14) for _ in range(arguments.prompt)) for _ in range(batch)]
        line: dict[str, Any] = {"system": "step", "batch": batch, "isa": cpu.isa(), "threads": 1, "clock": "cpu"}
        for without, times in steps(child, spent, prompts, arguments.new).items():
            of = "without_forward" if without else "with_forward"
            numbers = {"step": [a for a, _ in times], "calls": [b for _, b in times], "rest": [a - b for a, b in times]}
            line[of] = {name: round(1e3 * statistics.median(some), 2) for name, some in numbers.items()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
