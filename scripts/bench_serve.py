"""Serving, measured: ours (packed and bfloat16), transformers' generate and serve, vLLM, llama.cpp; on one model.

Usage: python scripts/bench_serve.py MODEL [--packed OUT] [--packed-fp8-head OUT] [--vllm-python PYTHON] [--systems a,b]
       [--batches 1,4,16] [--prompt N] [--new N] [--threads N] [--repeats N] [--llama-python PYTHON] [--gguf FILE]
       [--isa avx2|avx512]

MODEL is a bfloat16 checkpoint that exceeds the CPU's cache (scripts/make_synthetic_model.py), OUT the same converted
(without it: converted to NVFP4 here). Servers are asked over HTTP by streams that begin at once, with random tokens as
prompts, new ones each time, so that no prefix cache helps; ``generate`` runs in a process of its own. A JSON line for
each system and batch, medians of the repeats:

    prefill_tokens_s   prompt tokens / time until the last sequence has its first token
    decode_tokens_s    tokens that come after that / time until the last one
    ttft_ms, itl_ms    time to first token and between tokens: p50, p99
    pss_mb             memory of all its processes, shared pages divided

and a line of ratios to vLLM's bfloat16 where both ran. Ratios within one run are what counts.

``engine``, ``engine-fp8-head``, ``engine-bf16`` and ``llama`` have no server: a process each (engine_child.py,
llama_child.py) that stays, and they take turns, repeat by repeat. llama.cpp has the same random weights in Q4_0, its
head in Q6_K, from a Python of its own with llama-cpp-python and gguf; engine's head is bfloat16, engine-fp8-head's FP8.
``--isa`` is what ptqpipe and torch use; give the --llama-python whose llama.cpp was built for the same. Their lines
have the limits of this machine, too: ``read_limit`` is the decode speed if the bytes of weights were read once a step
as fast as that was measured, ``of_limit`` the part of it that was reached.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from bench_children import TORCH_AVX2, Child, Load, Result, Timing, prompts_of, pss_mb, result_of

START_S = 300
SYSTEMS = ("ptqpipe", "ptqpipe-bf16", "generate", "transformers-serve", "vllm")
IN_PROCESS = ("engine", "engine-fp8-head", "engine-bf16", "llama")
FP8_HEAD = """version: 1
rules:
  - match: "lm_head"
    format: fp8
  - match: "*"
    format: {}
"""


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


def command_of(system: str, arguments: argparse.Namespace, packed: Path, longest: int) -> list[str]:
    """How a system is started."""
    port, seqs = str(arguments.port), str(max(arguments.batches))
    own = [sys.executable, "-P", "-m", "ptqpipe", "serve"]
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


def measure_in_process(arguments: argparse.Namespace, models: dict[str, Path], loads: list[Load]) -> None:
    """Loads all of ``models`` (by system), and asks them in turns; prints their lines."""
    vocabulary = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    longest, most = max(load.prompt + load.new for load in loads) + 16, max(load.batch for load in loads)
    children = [
        Child(
            system,
            model,
            (arguments.threads, longest, most),
            llama_python=arguments.llama_python,
            cpu_clock=arguments.cpu_clock,
        )
        for system, model in models.items()
    ]
    reached = max((child.facts.get("read_gb_s", 0.0) for child in children), default=0.0)
    for load in loads:
        results: dict[str, list[Result]] = {system: [] for system in models}
        for repeat in range(-1, arguments.repeats):  # the first one warms up
            small = load if repeat >= 0 else Load(load.batch, 32, 4)
            for child in children:
                began, streams = child.ask(prompts_of(small, vocabulary, repeat), small.new)
                results[child.system].append(result_of([Timing(began, stream) for stream in streams], small))
        for child in children:
            known = {"clock": "cpu" if arguments.cpu_clock else "wall"}
            known |= {name: value for name, value in child.facts.items() if name != "bytes"}
            if reached:
                limit = load.batch * reached * 1e9 / child.facts["bytes"]
                decode = statistics.median(result.decode_tokens_s for result in results[child.system][1:])
                known |= {"read_limit": round(limit, 1), "of_limit": round(decode / limit, 3)}
            memory = pss_mb(child.process.pid)
            report(
                child.system, load, results[child.system][1:], memory, arguments, bytes=child.facts["bytes"], **known
            )
    for child in children:
        child.end()


MEASURED: dict[tuple[str, int], dict[str, Any]] = {}


def report(
    system: str, load: Load, results: list[Result], memory: float, arguments: argparse.Namespace, **known: Any
) -> None:
    """One line."""
    line: dict[str, Any] = {"system": system, "batch": load.batch, "prompt": load.prompt, "new": load.new}
    line["threads"] = arguments.threads
    for name in ("prefill_tokens_s", "decode_tokens_s"):
        line[name] = round(statistics.median(getattr(result, name) for result in results), 1)
    for name in ("ttft_ms", "itl_ms"):
        for at, quantity in enumerate(("p50", "p99")):
            line[f"{name}_{quantity}"] = round(statistics.median(getattr(result, name)[at] for result in results), 2)
    line |= {"pss_mb": round(memory), **({"isa": arguments.isa} if arguments.isa else {}), **known}
    MEASURED[system, load.batch] = line
    print(json.dumps(line), flush=True)


def ratios(loads: list[Load]) -> None:
    """Ours to the others' bfloat16."""
    for load in loads:
        for ours in ("ptqpipe", "ptqpipe-bf16", *IN_PROCESS[:-1]):
            for theirs in ("llama",) if ours in IN_PROCESS else ("vllm", "generate", "transformers-serve"):
                a, b = MEASURED.get((ours, load.batch)), MEASURED.get((theirs, load.batch))
                if a and b:
                    names = ("prefill_tokens_s", "decode_tokens_s", "pss_mb")
                    found = {name: round(a[name] / b[name], 3) for name in names if b[name]}
                    print(json.dumps({"ratio": f"{ours} / {theirs}", "batch": load.batch, **found}), flush=True)


def converted(model: Path, out: Path, *options: str) -> Path:
    """Converts the model; returns ``out``."""
    command = [sys.executable, "-P", "-m", "ptqpipe", "convert", str(model), "-o", str(out), *options, "-q"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description="Serving, measured; JSON lines.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--packed-fp8-head", type=Path, help="the same with the head in FP8, if it was made before")
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
    parser.add_argument("--llama-python", help="interpreter of an environment with llama-cpp-python and gguf")
    parser.add_argument("--gguf", type=Path, help="the model in Q4_0, if it was made before [made here]")
    parser.add_argument(
        "--cpu-clock", action="store_true", help="CPU seconds, for engine and llama on one thread beside other work"
    )
    parser.add_argument("--isa", choices=("avx2", "avx512"), help="instruction set of ptqpipe and torch [the best]")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        generate(arguments.model, Load(*json.loads(arguments.child)), arguments.threads, arguments.repeats)
        return
    if arguments.isa:  # of every process that is started
        os.environ |= {"PTQPIPE_ISA": arguments.isa, **(TORCH_AVX2 if arguments.isa == "avx2" else {})}
    systems = arguments.systems.split(",")
    if "vllm" in systems and not arguments.vllm_python:
        raise SystemExit("--systems vllm needs --vllm-python, the interpreter of its environment")
    if "llama" in systems and not arguments.llama_python:
        raise SystemExit("--systems llama needs --llama-python, the interpreter of its environment")
    if arguments.cpu_clock and (arguments.threads > 1 or set(systems) - set(IN_PROCESS)):
        raise SystemExit(f"--cpu-clock is for one thread and {', '.join(IN_PROCESS)}; leave the others to another run")
    loads = [Load(batch, arguments.prompt, arguments.new) for batch in arguments.batches]
    with tempfile.TemporaryDirectory() as folder:
        packed, fp8_head = arguments.packed, arguments.packed_fp8_head
        if packed is None and {"ptqpipe", "engine"} & set(systems):
            packed = converted(arguments.model, Path(folder) / "packed", "--format", arguments.format)
        if fp8_head is None and "engine-fp8-head" in systems:
            recipe = Path(folder) / "recipe.yaml"
            recipe.write_text(FP8_HEAD.format(arguments.format), encoding="utf-8")
            fp8_head = converted(arguments.model, Path(folder) / "packed-fp8-head", "--recipe", str(recipe))
        gguf = arguments.gguf
        if gguf is None and "llama" in systems:
            gguf = Path(folder) / "q4_0.gguf"
            script = str(Path(__file__).with_name("llama_child.py"))
            command = [arguments.llama_python, script, "make", str(arguments.model), str(gguf)]
            subprocess.run(command, check=True, capture_output=True)
        places = {"engine": packed, "engine-fp8-head": fp8_head, "engine-bf16": arguments.model, "llama": gguf}
        if alone := {system: places[system] for system in systems if system in places}:
            measure_in_process(arguments, alone, loads)
        for system in systems:
            if system in IN_PROCESS:
                continue
            if system == "generate":
                measure_generate(arguments, loads)
            else:
                measure_server(system, arguments, packed, loads)
    ratios(loads)


if __name__ == "__main__":
    main()
