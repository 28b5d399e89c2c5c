"""One run of vLLM in its own environment, for vllm_loads.py and vllm_tensor_parallel.py. Needs vLLM alone.

``python vllm_child.py REQUEST ANSWER`` (JSON files) loads a model, asks for the log-probabilities of prompts and greedy
continuations, and where it is told to, times prefill and decode. `run` starts it from another interpreter and keeps
what it logged.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}
Outcome = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Request:
    """What to run. ``prompts`` are token ids; each gets ``new_tokens`` greedy ones.

    speed   [batch, prompt tokens, new tokens, repeats], or empty
    """

    model: str
    prompts: list[list[int]]
    new_tokens: int
    tensor_parallel: int = 1
    eager: bool = True
    max_model_len: int = 256
    speed: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it: ``outcome`` is None where vLLM refused, and ``problem`` says why.

    speed    prefill_tokens_s, decode_tokens_s (medians)
    numbers  of the quantized all-reduce, one dict a worker
    log      the lines of the plugin
    """

    outcome: Outcome | None
    problem: str = ""
    speed: dict[str, float] = field(default_factory=dict)
    numbers: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


def run(python: str, request: Request, *, environment: dict[str, str], limit_s: int) -> Answer:
    """Runs a request with another interpreter, and clears away what vLLM leaves."""
    from ptqpipe.run.processes import ProcessTree

    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if request.tensor_parallel == 1 else {}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log"), "w+", errors="replace") as log:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(asdict(request)))
        tree = ProcessTree.start(
            [python, __file__, str(asked), str(answered)],
            {**os.environ, **ENVIRONMENT, **one_process, **environment},
            log=log.fileno(),
        )
        deadline = time.monotonic() + limit_s
        while tree.running() and time.monotonic() < deadline:
            tree.look()
            tree.wait(0.5)
        late = tree.running()
        tree.kill()
        tree.wait(10)
        tree.clear()
        log.seek(0)
        text = log.read()
        said = [line[line.index("ptqpipe:") :] for line in text.splitlines() if "ptqpipe:" in line]
        if late:
            return Answer(None, f"no answer in {limit_s} s", log=said)
        if tree.code == 0 and answered.exists():
            return Answer(**json.loads(answered.read_text()), log=said)
        lines = [line.strip() for line in text.splitlines() if "Error" in line or "not supported" in line]
        return Answer(None, (lines[-1] if lines else f"exit code {tree.code}")[:300], log=said)


def main() -> None:
    """The child."""
    from vllm import LLM, SamplingParams

    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    model = LLM(
        request.model,
        dtype="bfloat16",
        enforce_eager=request.eager,
        max_model_len=request.max_model_len,
        max_num_seqs=max([8, *request.speed[:1]]),
        seed=0,
        skip_tokenizer_init=True,
        tensor_parallel_size=request.tensor_parallel,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.25,
        worker_extension_cls=os.environ.get("PTQPIPE_WORKER_EXTENSION", ""),
    )

    def generate(prompts: list[list[int]], tokens: int, logprobs: int | None) -> list[Any]:
        wanted = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            prompt_logprobs=logprobs,
            logprobs=logprobs,
            ignore_eos=True,
            detokenize=False,
        )
        return list(model.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False))

    outcome = [
        {
            "tokens": list(o.outputs[0].token_ids),
            "prompt": [p[i].logprob for p, i in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)],
            "new": [p[i].logprob for p, i in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)],
        }
        for o in generate(request.prompts, request.new_tokens, 0)
    ]
    speed = measure(generate, request.speed) if request.speed else {}
    numbers = model.collective_rpc("ptqpipe_allreduce") if os.environ.get("PTQPIPE_WORKER_EXTENSION") else []
    Path(sys.argv[2]).write_text(json.dumps({"outcome": outcome, "speed": speed, "numbers": numbers}))


def measure(generate: Any, speed: list[int]) -> dict[str, float]:
    """Medians: prefill from runs of one new token; decode from what further tokens took beyond that.

    ``_cpu_s`` counts processor seconds of this process instead, which other processes disturb less; one rank only.
    """
    batch, prompt, new, repeats = speed
    prompts = [[5 + (7 * i + 13 * row) % 200 for i in range(prompt)] for row in range(batch)]

    def seconds(tokens: int) -> tuple[float, float]:
        begin, busy = time.perf_counter(), time.process_time()
        generate(prompts, tokens, None)
        return time.perf_counter() - begin, time.process_time() - busy

    seconds(2)
    first = [seconds(1) for _ in range(repeats)]
    whole = [seconds(1 + new) for _ in range(repeats)]
    found = {}
    for clock, unit in enumerate(("s", "cpu_s")):
        begin, end = (statistics.median(run[clock] for run in runs) for runs in (first, whole))
        found[f"prefill_tokens_{unit}"] = round(batch * prompt / begin, 1)
        found[f"decode_tokens_{unit}"] = round(batch * new / max(end - begin, 1e-9), 1)
    return found


if __name__ == "__main__":
    main()
