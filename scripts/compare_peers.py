"""ptqpipe beside llm-compressor's model_free_ptq and NVIDIA ModelOpt on the same models, in one run, on the CPU.

Usage: python scripts/compare_peers.py MODEL [MODEL ...] --llmcompressor PYTHON --modelopt PYTHON [--repeat 3]

MODEL is a checkpoint folder, or ``synthetic:SHAPE`` (made by make_synthetic_model.py in the scratch folder, removed).
Each tool runs in a process of its own under the interpreter given; the order alternates; the source's cached pages are
dropped before each. Time is from the start of the interpreter to its exit, so it holds the imports (an empty run of the
same imports is measured too, as ``import_s``); the bytecode of all tools is there, as pip leaves it. Peak memory is
sampled over the process and its children. The error of every output is measured by this script alone, by the same
decode (ptqpipe.load_tensors), against the source. One JSON line a model and task; a peer that fails says so in its
line.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_convert import Run, compile_package, drop_cache, folder_bytes, make_source, measured

LLMC = "import torch\nfrom llmcompressor import model_free_ptq\n"
MODELOPT = (
    "import copy, torch\nimport modelopt.torch.quantization as mtq\n"
    "from modelopt.torch.export import export_hf_checkpoint\nfrom transformers import AutoModelForCausalLM\n"
)
LLMC_RUN = (
    "model_free_ptq({source!r}, {out!r}, scheme={config!r}, ignore=['lm_head', 're:.*embed_tokens$'], "
    "max_workers={workers}, device='cpu')\n"
)
MODELOPT_RUN = (
    "torch.set_num_threads({workers})\n"
    "model = AutoModelForCausalLM.from_pretrained({source!r}, dtype=torch.bfloat16)\n"
    "config = {config}\n"
    "with torch.no_grad():\n"
    "    mtq.quantize(model, config)\n"
    "    export_hf_checkpoint(model, export_dir={out!r})\n"
)
# ModelOpt's sweep over all E4M3 scales at the abs-max global scale, its published W4A4 recipe without the activations.
SWEEP = (
    "copy.deepcopy(mtq.NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG)\n"
    "config['quant_cfg'] = [c for c in config['quant_cfg'] if c['quantizer_name'] != '*input_quantizer']"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tool's way to do a task. ``config`` is what its call needs: a scheme, an expression, or our options."""

    tool: str
    task: str
    what: str
    config: str


ENTRIES = (
    Entry("ptqpipe", "nvfp4", "exact scales, searched global scale", "--format nvfp4"),
    Entry("ptqpipe", "nvfp4", "exact scales, abs-max global scale", "--format nvfp4 --global-scale absmax"),
    Entry("ptqpipe", "nvfp4", "abs-max", "--format nvfp4 --global-scale absmax --scale-search absmax"),
    Entry("llmcompressor", "nvfp4", "model_free_ptq NVFP4A16", "NVFP4A16"),
    Entry("modelopt", "nvfp4", "W4A16_NVFP4", "mtq.W4A16_NVFP4_CFG"),
    Entry("modelopt", "nvfp4", "MSE sweep over E4M3 scales", SWEEP),
    Entry("ptqpipe", "fp8", "per channel, exact", "--format fp8"),
    Entry("ptqpipe", "fp8", "per channel, abs-max", "--format fp8 --scale-search absmax"),
    Entry("llmcompressor", "fp8", "model_free_ptq FP8_DYNAMIC", "FP8_DYNAMIC"),
    Entry("modelopt", "fp8", "FP8_PER_CHANNEL_PER_TOKEN", "mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG"),
)


def command_of(entry: Entry, source: Path, out: Path, interpreters: dict[str, str], workers: int) -> list[str]:
    """The process that does it."""
    python = interpreters[entry.tool]
    if entry.tool == "ptqpipe":
        options = [*entry.config.split(), "--workers", str(workers), "-q"]
        return [python, "-P", "-m", "ptqpipe", "convert", str(source), "-o", str(out), *options]
    head, body = (LLMC, LLMC_RUN) if entry.tool == "llmcompressor" else (MODELOPT, MODELOPT_RUN)
    return [
        python,
        "-P",
        "-c",
        head + body.format(source=str(source), out=str(out), config=entry.config, workers=workers),
    ]


def import_command(tool: str, interpreters: dict[str, str]) -> list[str]:
    """The same process without the work."""
    code = {"ptqpipe": "import ptqpipe.conversion.command", "llmcompressor": LLMC, "modelopt": MODELOPT}[tool]
    return [interpreters[tool], "-P", "-c", code]


def error_of(out: Path, source: Path) -> dict[str, Any]:
    """Relative MSE over all quantized weights, by our decode, in float64; how many weights that are."""
    import ptqpipe
    from ptqpipe.numerics.qtensor import QTensor

    squared = energy = 0.0
    weights: list[str] = []
    with ptqpipe.load_tensors(source) as plain, ptqpipe.load_tensors(out) as stored:
        for name in stored:
            q = stored[name]
            if not isinstance(q, QTensor):
                continue
            w = plain[name]
            if isinstance(w, QTensor):
                raise SystemExit(f"{source} is quantized; compare on a float model")
            step = max((1 << 22) // w.shape[1] // 128, 1) * 128
            for start in range(0, w.shape[0], step):
                rows = w[start : start + step].double()
                piece = q if q.fmt.block[0] == 0 else q.narrow(0, start, rows.shape[0])
                decoded = piece.dequantize().double()
                decoded = decoded[start : start + step] if q.fmt.block[0] == 0 else decoded
                squared += float((decoded - rows).square().sum())
                energy += float(rows.square().sum())
            weights.append(name)
    return {"relative_mse": squared / energy if energy else None, "weights": len(weights), "energy": energy}


def compare(source: Path, label: str, task: str, options: argparse.Namespace) -> dict[str, Any]:
    """All tools on one model and task, alternating."""
    interpreters = {"ptqpipe": sys.executable, "llmcompressor": options.llmcompressor, "modelopt": options.modelopt}
    entries = [e for e in ENTRIES if e.task == task and interpreters[e.tool]]
    runs: dict[Entry, list[Run]] = {entry: [] for entry in entries}
    failures: dict[Entry, str] = {}
    errors: dict[Entry, dict[str, Any]] = {}
    imports: dict[str, list[float]] = {}
    load = os.getloadavg()[0]
    for _ in range(options.repeat):
        for tool in dict.fromkeys(entry.tool for entry in entries):
            imports.setdefault(tool, []).append(measured(import_command(tool, interpreters))[0].seconds)
        for entry in entries:
            if entry in failures:
                continue
            out = options.scratch / "peer-output"
            shutil.rmtree(out, ignore_errors=True)
            drop_cache(source)
            try:
                run, _ = measured(command_of(entry, source, out, interpreters, options.workers))
            except SystemExit as error:
                failures[entry] = reason_of(str(error))
                continue
            runs[entry].append(run)
            if entry not in errors:
                errors[entry] = {**error_of(out, source), "output_bytes": folder_bytes(out)}
            shutil.rmtree(out, ignore_errors=True)
    lines = [
        {"tool": e.tool, "what": e.what, "failed": failures[e]}
        if e in failures
        else {
            "tool": e.tool,
            "what": e.what,
            "seconds": round(statistics.median(run.seconds for run in runs[e]), 2),
            "import_s": round(statistics.median(imports[e.tool]), 2),
            "cpu_s": round(statistics.median(run.cpu_seconds for run in runs[e]), 2),
            "peak_rss_mib": round(max(run.peak_bytes for run in runs[e]) / 2**20, 1),
            **errors[e],
        }
        for e in entries
    ]
    return {
        "model": label,
        "task": task,
        "source_bytes": folder_bytes(source),
        "workers": options.workers,
        "repeat": options.repeat,
        "load_average_before": round(load, 1),
        "tools": lines,
    }


def reason_of(text: str) -> str:
    """The line of a process's last words that says why it failed."""
    lines = text.strip().splitlines() or ["?"]
    return next((line for line in reversed(lines) if re.match(r"\w*(Error|Exception)\b", line)), lines[-1])[:300]


def version_of(python: str, package: str) -> str | None:
    """The installed version of a package under an interpreter."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def main() -> None:
    """Parses the options, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--llmcompressor", metavar="PYTHON", help="interpreter of an environment with llmcompressor")
    parser.add_argument("--modelopt", metavar="PYTHON", help="interpreter of one with nvidia-modelopt and transformers")
    parser.add_argument("--tasks", nargs="+", default=["nvfp4", "fp8"], choices=["nvfp4", "fp8"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"))
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    compile_package()
    os.environ["HF_HUB_OFFLINE"] = "1"
    peers = (
        ("llmcompressor", options.llmcompressor, "llmcompressor"),
        ("modelopt", options.modelopt, "nvidia-modelopt"),
    )
    versions = {tool: version_of(python, package) for tool, python, package in peers if python}
    for model in options.models:
        shape = model.removeprefix("synthetic:") if model.startswith("synthetic:") else None
        source = options.scratch / shape if shape else Path(model)
        existed = source.exists()
        if shape:
            make_source(shape, source, None)
        label = model if shape else source.parent.name if source.name == "hf" else source.name
        for task in options.tasks:
            line = json.dumps({**compare(source, label, task, options), "versions": versions})
            print(line, flush=True)
            if options.results:
                with open(options.results, "a", encoding="utf-8") as file:
                    file.write(line + "\n")
        if shape and not existed:
            shutil.rmtree(source)


if __name__ == "__main__":
    main()
