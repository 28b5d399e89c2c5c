"""The engine in a process of its own, without a server, for bench_serve.py: what llama_child.py is for llama.cpp.

    python engine_child.py CHECKPOINT THREADS TOKENS SEQUENCES [--cpu-clock] [--profile]

Answers lines of JSON on standard input, {"prompts": [[token, ...], ...], "new": N}, with a line each: {"began":
seconds, "tokens": [seconds of each token, for each sequence]}. The first line of all has the bytes of weights that a
decode step reads, and what this machine's memory and products reach at most with so many threads. ``--cpu-clock``
counts seconds of the process's CPU time: for one thread, beside other work. ``--profile`` writes what torch's operators
took to standard error.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ptqpipe.numerics.kernels import cpu
from ptqpipe.runtime.compiled import use_kernels
from ptqpipe.runtime.linear import PackedLinear
from ptqpipe.runtime.loading import load
from ptqpipe.runtime.memory import keep_freed_memory
from ptqpipe.serving.engine import Engine, EngineOptions
from ptqpipe.serving.engine.engine import Request
from ptqpipe.serving.engine.model_runner import ModelRunner
from ptqpipe.serving.engine.sequence import SamplingParams

READ_BYTES = 1 << 30
CLOCK = time.process_time if "--cpu-clock" in sys.argv else time.perf_counter
PRODUCT = (128, 2048, 5632)  # rows, columns and rows of a weight


class NoText:
    """In the place of a tokenizer: tokens are all that is asked for."""

    eos_token_id = None

    def decode(self, tokens: list[int], **options: Any) -> str:
        """No text."""
        return ""


def fastest(work: Any, times: int = 5) -> float:
    """Seconds of the fastest run."""
    found = []
    for _ in range(times):
        began = CLOCK()
        work()
        found.append(CLOCK() - began)
    return min(found)


def limits() -> dict[str, float]:
    """GB/s that the threads read, and billions of float32 multiplications with additions a second."""
    numbers = torch.zeros(READ_BYTES // 8, dtype=torch.int64)
    x, weight = torch.randn(PRODUCT[0], PRODUCT[1]), torch.randn(PRODUCT[2], PRODUCT[1])
    products = PRODUCT[0] * PRODUCT[1] * PRODUCT[2]
    return {
        "read_gb_s": round(READ_BYTES / fastest(numbers.amax) / 1e9, 1),
        "float32_gmac_s": round(products / fastest(lambda: torch.nn.functional.linear(x, weight)) / 1e9, 1),
    }


def bytes_read(model: Any) -> int:
    """Bytes of weights that a decode step reads: all but the embedding's table."""
    packed = sum(layer.packed.nbytes for layer in model.modules() if isinstance(layer, PackedLinear))
    others = [module for module in model.modules() if module is not model.get_input_embeddings()]
    return packed + sum(int(p.nbytes) for module in others for p in module.parameters(recurse=False))


class Child:
    """A model with an engine for ``sequences`` of ``tokens``."""

    def __init__(self, checkpoint: str, tokens: int, sequences: int) -> None:
        model = load(checkpoint, dtype="auto", packed=True, activations="none")
        self.bytes = bytes_read(model)  # before the head's are in panels
        use_kernels(model)
        keep_freed_memory()
        limits = EngineOptions(1 << 32, tokens, sequences)
        runner = ModelRunner(model, limits)
        self.engine = Engine(runner, NoText(), options=limits, vocabulary=runner.config.vocab_size, end_tokens=())

    def answer(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Times of one load."""
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        times: list[list[float]] = [[] for _ in prompts]
        first: list[int] = [-1] * len(prompts)
        began = CLOCK()
        for at, prompt in enumerate(prompts):
            self.engine.add(Request(str(at), tuple(prompt), params))
        while self.engine.busy:
            for piece in self.engine.step():
                at = int(piece.request)
                first[at] = piece.tokens[0] if first[at] < 0 else first[at]
                times[at].append(CLOCK())
        return {"began": began, "tokens": times, "first": first}


def main() -> None:
    """Answers until the input ends."""
    checkpoint, threads, tokens, sequences = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(threads)
    reached = limits()
    child = Child(str(checkpoint), tokens, sequences)
    print(json.dumps({"bytes": child.bytes, "isa": cpu.isa(), **reached}), flush=True)
    for line in sys.stdin:
        if "--profile" in sys.argv:
            with torch.profiler.profile() as found:
                answer = child.answer(**json.loads(line))
            print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), file=sys.stderr)
        else:
            answer = child.answer(**json.loads(line))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
