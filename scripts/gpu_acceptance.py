"""Everything that has to be seen on a GPU, in minutes, from a bare checkout: nothing is installed or downloaded.

    python scripts/gpu_acceptance.py --out DIR [--minutes 9] [--only search engine ...] [--rehearse]

In an order of value, each part in a process of its own that is ended when its time is up. Time that a part leaves goes
to those after it. The CPU kernels, where they are not built yet, are built meanwhile. DIR gets

    results.jsonl  what each part printed, a line at once, with the part's name; then how the part ended
    summary.md     a table of the parts and a list of what they printed
    log.txt        everything else that they wrote

Before the first part it says what machine this is and which packages are missing; parts that need those are skipped,
with that as the reason. Exits with 1 if a part failed or ran out of time. ``--rehearse`` runs every part on a CPU with
tiny sizes, the kernels under Triton's interpreter: to see that all of it runs, before there is a GPU.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
CORE = ("torch", "triton", "numpy", "regex", "safetensors", "click", "tqdm", "yaml")
MODELS = (*CORE, "transformers", "accelerate", "tokenizers")
LEAST_S = 5.0  # what a part gets at least
SHORT_OF_TIME = 124


@dataclass(frozen=True, slots=True)
class Part:
    """What is run, in Python: a command line of ``scripts``, and another one for a rehearsal.

    share  of the time, beside those of the other parts
    needs  modules without which it cannot run
    """

    name: str
    share: float
    command: str
    rehearsal: str
    needs: tuple[str, ...] = CORE


PARTS = (
    Part(
        "compile", 2, "scripts/compile_triton.py --capability {capability} --jobs {cores}",
        "scripts/compile_triton.py --capability 90 --only amax",
    ),
    Part(
        "search", 2, "scripts/bench_triton.py --only quantize",
        "scripts/bench_triton.py --only quantize --rows 16 --columns 64 --rounds 1 --formats mxfp4",
    ),
    Part(
        "attack", 1, "tests/fuzz/attack_search.py --searches triton --blocks 400000 --minutes 0.5",
        "tests/fuzz/attack_search.py --searches triton --blocks 1 --only e2m1/16/e4m3",
        (*CORE, "pytest"),
    ),
    Part(
        "linear", 4,
        "scripts/bench_triton.py --only linear --formats nvfp4 mxfp4 mxfp8 fp8_channel --shapes 4096x4096 14336x4096 "
        "--batches 1 2048 16 4 64 512 --rounds 10",
        "scripts/bench_triton.py --only linear --formats nvfp4 --shapes 32x64 --batches 1 16 --rounds 1",
    ),
    Part(
        "attention", 1, "scripts/bench_triton.py --only attention --rounds 10",
        "scripts/bench_triton.py --only attention --rounds 1",
        MODELS,
    ),
    Part(
        "columns", 2, "scripts/bench_triton.py --only columns",
        "scripts/bench_triton.py --only columns --shapes 8x32 --formats nvfp4",
    ),
    Part(
        "allreduce", 2, "scripts/check_symmetric.py --calls 10000",
        "scripts/check_symmetric.py --ranks 2 --calls 2",
    ),
    Part("convert", 4, "scripts/gpu_models.py convert", "scripts/gpu_models.py convert --rehearse", MODELS),
    Part("calibrate", 3, "scripts/gpu_models.py calibrate", "scripts/gpu_models.py calibrate --rehearse", MODELS),
    Part("engine", 5, "scripts/gpu_models.py engine", "scripts/gpu_models.py engine --rehearse", MODELS),
    Part(
        "tests", 4,
        "-m pytest -q -m gpu -p no:cacheprovider tests/numerics/kernels tests/serving/collectives tests/serving/engine",
        "-m pytest -q -m gpu -p no:cacheprovider tests/serving/collectives/test_triton.py",
        (*MODELS, "pytest", "hypothesis"),
    ),
)  # fmt: skip


def main() -> int:
    """The exit code."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    scratch = Path(tempfile.mkdtemp(prefix="ptqpipe-gpu-", dir=roomiest()))
    with (
        open(options.out / "results.jsonl", "w", encoding="utf-8") as results,
        open(options.out / "log.txt", "w") as log,
    ):
        lines = Lines(results)
        try:
            here = machine(options.rehearse, scratch)
            lines.add({"part": "machine", **here})
            if not options.rehearse and not here.get("device"):
                sys.exit("gpu_acceptance.py needs a CUDA device that torch can use, or --rehearse")
            builds = build_kernels(log)
            run_parts(chosen, here, lines, log, end=end, scratch=scratch, rehearse=options.rehearse, builds=builds)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            (options.out / "summary.md").write_text(summary(lines.kept), encoding="utf-8")
    print(summary(lines.kept, details=False))
    return 1 if any(line.get("result") in ("failed", "out of time") for line in lines.kept) else 0


def arguments() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9, help="for everything together")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="NAME")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    options = parser.parse_args()
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes} is too few; use more than 0")
    return options


class Lines:
    """What is known so far, in a file that has each line at once."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.kept = file, list[dict[str, Any]]()

    def add(self, line: dict[str, Any]) -> None:
        """One more."""
        self.kept.append(line)
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def roomiest() -> str:
    """Where models are made: in memory, unless a disk has more room (containers often get 64 MB there)."""
    places = [place for place in ("/dev/shm", tempfile.gettempdir()) if os.access(place, os.W_OK)]
    enough = [place for place in places if shutil.disk_usage(place).free > 70e9]
    return enough[0] if enough else max(places, key=lambda place: shutil.disk_usage(place).free)


def machine(rehearse: bool, scratch: Path) -> dict[str, Any]:
    """What this runs on, and which packages are missing."""
    missing = [name for name in (*MODELS, "pytest", "hypothesis") if util.find_spec(name) is None]
    found: dict[str, Any] = {
        "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)), "missing": missing,
        "scratch": str(scratch.parent), "scratch_free_gb": round(shutil.disk_usage(scratch).free / 1e9, 1),
    }  # fmt: skip
    for name in ("torch", "triton", "transformers"):
        if name not in missing:
            found[name] = metadata.version(name)
    if not rehearse and "torch" not in missing:
        import torch

        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            free, total = torch.cuda.mem_get_info()
            found |= {
                "device": torch.cuda.get_device_name(),
                "capability": 10 * major + minor,
                "cuda": torch.version.cuda,
            }
            found |= {"gpu_free_gib": round(free / 2**30, 1), "gpu_gib": round(total / 2**30, 1)}
    return found


def build_kernels(log: TextIO) -> subprocess.Popen[bytes] | None:
    """The compilation of the CPU kernels, under way; None where they are there."""
    if (ROOT / "ptqpipe" / "kernels" / "_cpu.so").exists() or util.find_spec("setuptools") is None:
        return None
    command = ["nice", sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def run_parts(
    parts: list[Part], here: dict[str, Any], lines: Lines, log: TextIO, *, end: float, scratch: Path, rehearse: bool,
    builds: subprocess.Popen[bytes] | None,
) -> None:  # fmt: skip
    """Every part in its turn, with its share of the time that is left."""
    for at, part in enumerate(parts):
        lack = [name for name in part.needs if name in here["missing"]]
        if lack:
            lines.add({"part": part.name, "result": "skipped", "reason": f"not installed: {', '.join(lack)}"})
            continue
        if builds is not None and part.name in ("convert", "calibrate", "engine"):
            code, builds = wait_for(builds, end), None
            lines.add({"part": "machine", "kernels": "built" if code == 0 else f"not built: exit code {code}"})
        left = end - time.monotonic()
        limit = max(LEAST_S, left * part.share / sum(other.share for other in parts[at:]))
        begun, code = time.monotonic(), SHORT_OF_TIME
        if left > 0:
            command = command_of(part, here, scratch, rehearse=rehearse)
            log.write(f"\n== {part.name}: {' '.join(command)}\n")
            log.flush()
            code = run(command, part.name, lines, log, limit_s=min(limit, max(left, LEAST_S)), rehearse=rehearse)
        seconds = round(time.monotonic() - begun, 1)
        result = {0: "passed", SHORT_OF_TIME: "out of time"}.get(code, "failed")
        lines.add({"part": part.name, "result": result, "seconds": seconds, "limit_s": round(limit, 1), "code": code})


def wait_for(process: subprocess.Popen[bytes], end: float) -> int:
    """The exit code of a process; it is ended when everything has to end."""
    try:
        return process.wait(timeout=max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return SHORT_OF_TIME


def command_of(part: Part, here: dict[str, Any], scratch: Path, *, rehearse: bool) -> list[str]:
    """Its command line."""
    words = (part.rehearsal if rehearse else part.command).split()
    words = [word.format(capability=here.get("capability"), cores=here["cores"]) for word in words]
    return [sys.executable, *words, *(["--scratch", str(scratch)] if "gpu_models.py" in words[0] else [])]


def run(command: list[str], name: str, lines: Lines, log: TextIO, *, limit_s: float, rehearse: bool) -> int:
    """Runs a part and keeps its lines; its exit code, SHORT_OF_TIME where it was ended."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment |= {"TRITON_INTERPRET": "1" if rehearse else "0", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if rehearse else {}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
        start_new_session=True,
    )  # fmt: skip
    ended = threading.Event()

    def stop() -> None:
        ended.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, stop)
    timer.start()
    try:
        assert process.stdout is not None
        for text in process.stdout:
            line = parsed(text)
            lines.add({"part": name, **line}) if line is not None else log.write(text)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            stop()
        log.flush()
    return SHORT_OF_TIME if ended.is_set() else code


def parsed(text: str) -> dict[str, Any] | None:
    """A line of results; None for any other."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def summary(lines: list[dict[str, Any]], *, details: bool = True) -> str:
    """Markdown: the machine, a row for each part that has ended, and under it what each part said."""
    text = [
        "# GPU acceptance",
        "",
        ", ".join(f"{key}: {value}" for key, value in lines[0].items() if key != "part"),
        "",
    ]
    text += ["| part | result | seconds | why |", "|---|---|---|---|"]
    for line in lines:
        if "result" in line:
            why = line.get("reason") or (f"exit code {line['code']}" if line["result"] == "failed" else "")
            text.append(f"| {line['part']} | {line['result']} | {line.get('seconds', '')} | {why} |")
    return "\n".join([*text, "", *(said(lines) if details else ())])


def said(lines: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of every part, as a list."""
    for name in dict.fromkeys(line["part"] for line in lines[1:]):
        yield from (f"## {name}", "")
        for line in lines[1:]:
            if line["part"] == name and "result" not in line:
                yield "- " + ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("part", "ptx"))
        yield ""


if __name__ == "__main__":
    sys.exit(main())
