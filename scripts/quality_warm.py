"""A process that has imported a tool once, and does its jobs in forks of itself, one after another.

Run by `bench_quality.py --warm` under the tool's interpreter; must not import ptqpipe unless that is the tool. Each
line of the input is the JSON list of a job's arguments; each line of the output is what the job was: {"status",
"seconds", "cpu_s", "peak_rss_mib", "said"}. A fork has everything of the tool imported, and no state of the jobs before
it; its times leave the imports out.

    python scripts/quality_warm.py llm-compressor LIMIT_SECONDS
"""

import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

PRELOAD = {
    "llm-compressor": (
        "datasets",
        "llmcompressor",
        "llmcompressor.modifiers.gptq",
        "llmcompressor.modifiers.quantization",
    ),
    "modelopt": ("modelopt.torch.quantization", "modelopt.torch.export"),
    "auto-round": ("auto_round",),
    "fouroversix": ("fouroversix",),
    "torchao": ("torchao.prototype.mx_formats", "torchao.quantization"),
    "ptqpipe": ("ptqpipe.api.models", "ptqpipe.cli", "ptqpipe.calibration.command", "ptqpipe.pipeline.tune.command"),
}
LLAMA = "transformers.models.llama.modeling_llama"


def work(tool: str, arguments: Sequence[str]) -> int:
    """A job, in a fork: exit status."""
    script = Path(__file__).with_name("peers.py")
    sys.argv = [str(script), *arguments]
    try:
        if tool == "ptqpipe":
            from ptqpipe.cli import main

            main(list(arguments))
        else:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def forked(tool: str, arguments: Sequence[str], limit_seconds: int) -> dict[str, object]:
    """Does a job; what it was."""
    with tempfile.TemporaryFile() as said:
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            signal.alarm(limit_seconds)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            status = work(tool, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status, usage = os.wait4(child, 0)
        seconds = time.monotonic() - begun
        said.seek(0)
        words = said.read().decode(errors="replace")[-4000:]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            words += f"\nTimeoutError: not done after {limit_seconds} seconds"
    return {
        "status": os.waitstatus_to_exitcode(status),
        "seconds": round(seconds, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_mib": usage.ru_maxrss >> 10,
        "said": words,
    }


def main() -> None:
    """Imports, then answers until the input ends."""
    tool, limit_seconds = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    import torch

    torch.set_num_threads(1)
    for name in (*PRELOAD[tool], LLAMA):
        import_module(name)
    for line in sys.stdin:
        print(json.dumps(forked(tool, json.loads(line), limit_seconds)), file=answers, flush=True)


if __name__ == "__main__":
    main()
