"""What the commands of README.md, docs/README.md and docs/calibration.md cost and lose: runs each as it is printed, and
writes the numbers beside it.

    python scripts/measure_commands.py [--shared DIR] [--scratch DIR] [--only PART ...]
    python scripts/measure_commands.py --show    # no runs: writes the tables from the results that there are

A command is run in a new process with its defaults (samples, their length, threads), MODEL being the published
SmolLM2-135M-Instruct (fetch_models.py) for the first two pages and bench-4m for the last, and text.jsonl text of
WikiText-2. KL is that of bench_quality.py, on its held-out text. A result is one line of benchmarks/commands.jsonl; a
later line of the same command and model replaces an earlier one.
"""

import argparse
import json
import multiprocessing
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench_convert import measured
from bench_quality import MODELS, begin, measure, place, read_lines

ROOT = Path(__file__).resolve().parent.parent
README, CALIBRATION, START = ROOT / "README.md", ROOT / "docs" / "calibration.md", ROOT / "docs" / "README.md"
FORMATS, QUALITIES = ("nvfp4", "nvfp4_w4a4", "mxfp4a16", "mxfp4", "fp8"), ("fast", "good", "best")
ROW = 16_000  # characters of a row of text.jsonl
PUBLISHED, SMALL = "smollm2-135m", "bench-4m"
# Rows of README: what the reader has, a command, and perhaps another one, KL, CPU time, memory. Rows of calibration.md:
# a format.
README_ROW = re.compile(r"^(\| [^|]* \| `(ptqpipe convert [^`]*)`[^|]*)\|[^|]*\|[^|]*\|[^|]*\|$", re.MULTILINE)
FORMAT_ROW = re.compile(r"^\| (\w+) \|(?: \d+\.\d+, [\d.]+, \d+ \|){3}$", re.MULTILINE)


def quality_command(fmt: str, quality: str) -> str:
    """The command of a cell of calibration.md's table."""
    return f"ptqpipe convert MODEL --data text.jsonl --format {fmt} --quality {quality}"


def commands(model: str) -> list[str]:
    """The commands that are measured on a model, each once, in the order of the pages."""
    if model == PUBLISHED:
        return list(dict.fromkeys(match[2] for match in README_ROW.finditer(README.read_text(encoding="utf-8"))))
    return [quality_command(fmt, quality) for fmt in FORMATS for quality in QUALITIES]


def documents(text: str) -> Iterator[str]:
    """The text in rows of about `ROW` characters, whole lines each."""
    lines, size = [], 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= ROW:
            yield "".join(lines)
            lines, size = [], 0
    yield from ["".join(lines)] if lines else []


def instruction_set() -> str:
    """What the CPU kernels use. Run in the worker: this process must not import torch, whose memory would count as
    that of the commands it starts."""
    from ptqpipe.numerics.kernels.cpu import isa

    return isa()


def run(command: str, model: str, scratch: Path, source: Path, worker: ProcessPoolExecutor) -> dict[str, Any]:
    """The line of a command on a model. ``worker`` holds the float model, as in bench_quality.py."""
    out = scratch / "out"
    for left in (*scratch.glob("out*"), *scratch.glob(".out*")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    words = [{"MODEL": str(source), "text.jsonl": str(scratch / "text.jsonl")}.get(w, w) for w in shlex.split(command)]
    cost, _ = measured([sys.executable, "-m", *words, "-o", str(out), "-q"])
    lost = worker.submit(measure, out, "").result()
    return {
        "command": command,
        "model": model,
        **{name: lost[name] for name in ("kl", "standard_error", "perplexity", "top1_agreement", "tokens")},
        "seconds": round(cost.seconds, 1),
        "cpu_s": round(cost.cpu_seconds, 1),
        "peak_rss_mib": round(cost.peak_bytes / 2**20),
        "isa": worker.submit(instruction_set).result(),
        "processors": len(os.sched_getaffinity(0)),
        "date": datetime.now(UTC).date().isoformat(),
    }


def with_numbers(page: str, lines: list[dict[str, Any]]) -> str:
    """A page with the numbers of the lines in its tables."""
    by = {(line["model"], line["command"]): line for line in lines}

    def readme_row(match: re.Match[str]) -> str:
        line = by.get((PUBLISHED, match[2]))
        if line is None:
            return match[0]
        return f"{match[1]}| {1000 * line['kl']:.3g} | {line['cpu_s']:,.0f} | {line['peak_rss_mib']:,} |"

    def format_row(match: re.Match[str]) -> str:
        cells = [by.get((SMALL, quality_command(match[1], quality))) for quality in QUALITIES]
        if match[1] not in FORMATS or None in cells:
            return match[0]
        shown = [f"{1000 * one['kl']:.2f}, {one['cpu_s']:.1f}, {one['peak_rss_mib']}" for one in cells if one]
        return f"| {match[1]} | {' | '.join(shown)} |"

    return FORMAT_ROW.sub(format_row, README_ROW.sub(readme_row, page))


def main() -> None:
    """Runs what is asked for, and writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--models", nargs="+", default=[PUBLISHED, SMALL], choices=[PUBLISHED, SMALL])
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="commands, or parts of them [all]")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of the assets")
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "commands.jsonl")
    args = parser.parse_args()
    if not args.show:
        os.environ["HF_HUB_OFFLINE"] = "1"
        scratch = args.scratch.resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        for model in (m for name in args.models for m in MODELS if m.name == name):
            source, held_out, text = (
                place(name, args.shared) for name in (model.folder, model.held_out, model.calibration)
            )
            rows = [json.dumps({"text": row}) + "\n" for row in documents(text.read_text(encoding="utf-8"))]
            (scratch / "text.jsonl").write_text("".join(rows), encoding="utf-8")
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as worker:
                worker.submit(begin, source, held_out, text, None, False, None).result()
                every = commands(model.name)
                for command in every:
                    if args.only and not any(p == command or (p not in every and p in command) for p in args.only):
                        continue
                    line = run(command, model.name, scratch, source, worker)
                    print(json.dumps(line), flush=True)
                    with open(args.results, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
    for page in (README, CALIBRATION, START):
        page.write_text(with_numbers(page.read_text(encoding="utf-8"), read_lines(args.results)), encoding="utf-8")


if __name__ == "__main__":
    main()
