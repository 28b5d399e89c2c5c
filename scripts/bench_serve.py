"""Serving, measured: ours (packed and bfloat16), transformers' generate and serve, and vLLM, on one model and prompts.

Usage: python scripts/bench_serve.py MODEL [--packed OUT] [--vllm-python PYTHON] [--systems a,b] [--batches 1,4,16]
       [--prompt N] [--new N] [--threads N] [--repeats N]

MODEL is a bfloat16 checkpoint that exceeds the CPU's cache (scripts/make_synthetic_model.py), OUT the same converted
(without it: converted to NVFP4 here). Servers are asked over HTTP by streams that begin at once, with random tokens as
prompts, new ones each time, so that no prefix cache helps; ``generate`` runs in a process of its own. A JSON line for
each system and batch, medians of the repeats:

    prefill_tokens_s   prompt tokens / time until the last sequence has its first token
    decode_tokens_s    tokens that come after that / time until the last one
    ttft_ms, itl_ms    time to first token and between tokens: p50, p99
    pss_mb             memory of all its processes, shared pages divided

and a line of ratios to vLLM's bfloat16 where both ran. Ratios within one run are what counts.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_S = 300
SYSTEMS = ("ptqpipe", "ptqpipe-bf16", "generate", "transformers-serve", "vllm")


@dataclass(frozen=True, slots=True)
class Load:
    """``batch`` prompts of ``prompt`` tokens, ``new`` tokens each."""

    batch: int
    prompt: int
    new: int


@dataclass(slots=True)
class Timing:
    """When each stream began and got its tokens, seconds."""

    began: float
    tokens: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """One repeat."""

    prefill_tokens_s: float
    decode_tokens_s: float
    ttft_ms: tuple[float, float]
    itl_ms: tuple[float, float]


def prompts_of(load: Load, vocabulary: int, repeat: int) -> list[list[int]]:
    """Random tokens, others for every load and repeat."""
    rng = random.Random(f"{load.batch} {load.prompt} {repeat}")
    return [[rng.randrange(16, vocabulary - 16) for _ in range(load.prompt)] for _ in range(load.batch)]


def quantile(values: list[float], q: float) -> float:
    """The nearest rank."""
    return sorted(values)[min(len(values) - 1, round(q * (len(values) - 1)))]


def result_of(timings: list[Timing], load: Load) -> Result:
    """What the streams' times say."""
    began, ready = min(t.began for t in timings), max(t.tokens[0] for t in timings)
    last = max(t.tokens[-1] for t in timings)
    # A server may put several tokens in one event: events count as many tokens as each stream had.
    after = sum(sum(at > ready for at in t.tokens) * load.new / len(t.tokens) for t in timings)
    first = [1e3 * (t.tokens[0] - t.began) for t in timings]
    gaps = [1e3 * (b - a) for t in timings for a, b in zip(t.tokens, t.tokens[1:], strict=False)] or [0.0]
    return Result(
        load.batch * load.prompt / (ready - began),
        after / (last - ready) if last > ready else 0.0,
        (quantile(first, 0.5), quantile(first, 0.99)),
        (quantile(gaps, 0.5), quantile(gaps, 0.99)),
    )


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> Timing:
    """One completion."""
    timing = Timing(time.perf_counter())
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {") and '"error"' not in line[:20]:
                timing.tokens.append(time.perf_counter())
    return timing


async def ask(url: str, model: str, prompts: list[Any], new: int) -> list[Timing]:
    """All prompts at once."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=256)) as client:
        bodies = [
            {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True, "ignore_eos": True}
            for prompt in prompts
        ]
        return await asyncio.gather(*(stream(client, body) for body in bodies))


@contextmanager
def server(command: list[str], *, threads: int, port: int) -> Iterator[int]:
    """A server's process id, from when it answers until the end of the context."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            until = time.monotonic() + START_S
            while not healthy(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{command[:4]} did not start:\n{log.read()[-3000:].decode(errors='replace')}")
                time.sleep(0.2)
            yield process.pid
        finally:
            with suppress(ProcessLookupError):  # it did not start
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def healthy(port: int) -> bool:
    """Whether a server answers."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def pss_mb(root: int) -> float:
    """Proportional set size of a process and all below it."""
    total, found = 0, [root]
    while found:
        pid = found.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[1])  # type: ignore[index]
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in children.read_text().split()]
        except OSError:
            continue
    return total / 1024


def command_of(system: str, arguments: argparse.Namespace, packed: Path, longest: int) -> list[str]:
    """How a system is started."""
    port, seqs = str(arguments.port), str(max(arguments.batches))
    own = [sys.executable, "-m", "ptqpipe", "serve"]
    limits = ["--max-model-len", str(longest), "--max-num-seqs", seqs, "--served-model-name", "m", "--port", port]
    match system:
        case "ptqpipe":
            return [*own, str(packed), *limits, "--workers", str(arguments.threads), *arguments.ptqpipe_flags]
        case "ptqpipe-bf16":
            return [*own, str(arguments.model), *limits, "--workers", str(arguments.threads)]
        case "vllm":
            flags = ["--", "--dtype", "bfloat16"]
            return [
                *own,
                str(arguments.model),
                *limits,
                "--engine",
                "vllm",
                "--vllm-python",
                arguments.vllm_python,
                *flags,
            ]
        case "transformers-serve":
            binary = str(Path(sys.executable).with_name("transformers"))
            return [binary, "serve", str(arguments.model), "--port", port, "--device", "cpu", "--dtype", "bfloat16"]
    raise SystemExit(f"{system} is unknown; use {', '.join(SYSTEMS)}")


def measure_server(system: str, arguments: argparse.Namespace, packed: Path, loads: list[Load]) -> None:
    """Starts it, warms it up, prints its lines."""
    vocabulary = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    text = system == "transformers-serve"  # takes no tokens
    name = str(arguments.model) if text else "m"
    tokenizer = None
    if text:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    longest = max(load.prompt + load.new for load in loads) + 16
    command = command_of(system, arguments, packed, longest)
    with server(command, threads=arguments.threads, port=arguments.port) as pid:
        url = f"http://127.0.0.1:{arguments.port}"
        for load in loads:
            results = []
            for repeat in range(-1, arguments.repeats):  # the first one warms up
                prompts: list[Any] = prompts_of(load, vocabulary, repeat)
                prompts = [tokenizer.decode(prompt) for prompt in prompts] if tokenizer else prompts
                results.append(result_of(asyncio.run(ask(url, name, prompts, load.new)), load))
            report(system, load, results[1:], pss_mb(pid), arguments)


class Clock:
    """A streamer that notes when tokens come."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def put(self, value: Any) -> None:
        """A token (the prompt, first)."""
        self._times.append(time.perf_counter())

    def end(self) -> None:
        """No more."""


def generate(model: Path, load: Load, threads: int, repeats: int) -> None:
    """The child of ``generate``: prints one line of its results."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    results = []
    for repeat in range(-1, repeats):
        ids = torch.tensor(prompts_of(load, found.config.vocab_size, repeat))
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        times: list[float] = []
        began = time.perf_counter()
        if load.batch == 1:
            found.generate(ids, min_new_tokens=load.new, max_new_tokens=load.new, streamer=Clock(times), **options)
            times = times[1:]  # the first one is the prompt
        else:  # no streamer for batches: two calls
            found.generate(ids, min_new_tokens=1, max_new_tokens=1, **options)
            first = time.perf_counter() - began
            again = time.perf_counter()
            found.generate(ids, min_new_tokens=load.new, max_new_tokens=load.new, **options)
            step = (time.perf_counter() - again - first) / (load.new - 1)
            times = [began + first + step * at for at in range(load.new)]
        results.append(result_of([Timing(began, times)] * load.batch, load))
    lines = [[r.prefill_tokens_s, r.decode_tokens_s, r.ttft_ms, r.itl_ms] for r in results[1:]]
    print(json.dumps({"results": lines, "pss_mb": pss_mb(os.getpid())}))


def measure_generate(arguments: argparse.Namespace, loads: list[Load]) -> None:
    """A process for each load."""
    for load in loads:
        command = [
            sys.executable,
            __file__,
            str(arguments.model),
            "--child",
            json.dumps([load.batch, load.prompt, load.new]),
        ]
        command += ["--threads", str(arguments.threads), "--repeats", str(arguments.repeats)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        results = [Result(a, b, tuple(c), tuple(d)) for a, b, c, d in found["results"]]
        report("generate", load, results, found["pss_mb"], arguments)


MEASURED: dict[tuple[str, int], dict[str, Any]] = {}


def report(system: str, load: Load, results: list[Result], memory: float, arguments: argparse.Namespace) -> None:
    """One line."""
    line: dict[str, Any] = {"system": system, "batch": load.batch, "prompt": load.prompt, "new": load.new}
    line["threads"] = arguments.threads
    for name in ("prefill_tokens_s", "decode_tokens_s"):
        line[name] = round(statistics.median(getattr(result, name) for result in results), 1)
    for name in ("ttft_ms", "itl_ms"):
        for at, quantity in enumerate(("p50", "p99")):
            line[f"{name}_{quantity}"] = round(statistics.median(getattr(result, name)[at] for result in results), 2)
    line["pss_mb"] = round(memory)
    MEASURED[system, load.batch] = line
    print(json.dumps(line), flush=True)


def ratios(loads: list[Load]) -> None:
    """Ours to the others' bfloat16."""
    for load in loads:
        for ours in ("ptqpipe", "ptqpipe-bf16"):
            for theirs in ("vllm", "generate", "transformers-serve"):
                a, b = MEASURED.get((ours, load.batch)), MEASURED.get((theirs, load.batch))
                if a and b:
                    names = ("prefill_tokens_s", "decode_tokens_s", "pss_mb")
                    found = {name: round(a[name] / b[name], 3) for name in names if b[name]}
                    print(json.dumps({"ratio": f"{ours} / {theirs}", "batch": load.batch, **found}), flush=True)


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description="Serving, measured; JSON lines.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--vllm-python")
    parser.add_argument("--systems", default="ptqpipe,ptqpipe-bf16,generate")
    parser.add_argument("--batches", type=lambda text: [int(x) for x in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument(
        "--ptqpipe-flags", type=str.split, default=[], help="further flags of ptqpipe serve, in one word"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        generate(arguments.model, Load(*json.loads(arguments.child)), arguments.threads, arguments.repeats)
        return
    systems = arguments.systems.split(",")
    if "vllm" in systems and not arguments.vllm_python:
        raise SystemExit("--systems vllm needs --vllm-python, the interpreter of its environment")
    loads = [Load(batch, arguments.prompt, arguments.new) for batch in arguments.batches]
    with tempfile.TemporaryDirectory() as folder:
        packed = arguments.packed
        if packed is None and "ptqpipe" in systems:
            packed = Path(folder) / "packed"
            command = [sys.executable, "-m", "ptqpipe", "convert", str(arguments.model), "-o", str(packed)]
            subprocess.run([*command, "--format", arguments.format, "-q"], check=True, stdout=subprocess.DEVNULL)
        for system in systems:
            if system == "generate":
                measure_generate(arguments, loads)
            else:
                measure_server(system, arguments, packed, loads)
    ratios(loads)


if __name__ == "__main__":
    main()
