"""The quality of quantized models: ptqpipe beside every peer, KL divergence to the float model on held-out text.

    python scripts/bench_quality.py --scratch DIR --results FILE [--models bench-4m ...] [--formats nvfp4 ...]
        [--entries PART ...] [--seeds 0 1 2] [--python TOOL=PYTHON ...] [--redo PART ...]
    python scripts/bench_quality.py --table FILE

Each entry (quality_entries.py) makes a checkpoint in processes of its own, a peer under the interpreter given for it,
with its own code (peers_*.py), from the same source; quality_measure.py then measures them all alike: decoded by
ptqpipe, inputs quantized as the format says, the first 24,576 tokens of the held-out text in windows of 256. What is
calibrated gets the same 128 rows of 256 tokens, chosen by the seed, once a seed. The head stays in the source's
precision everywhere. One JSON line an entry, model, format and seed; lines that the results have already are not made
again, so a run that was stopped continues, and ``--redo`` makes those again whose "tool:entry" contains PART. A peer
that fails says so in its line. Times are of whole processes, imports included, on one thread.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quality_worker
from bench_convert import measured
from compare_peers import reason_of, version_of
from quality_entries import ENTRIES, FORMATS, Entry, Job, calibrate_command, own_steps, peer_command

HERE = Path(__file__).parent
TOKENS = 24_576
LIMIT_SECONDS = 1800
PACKAGES = {
    "llm-compressor": "llmcompressor",
    "modelopt": "nvidia-modelopt",
    "auto-round": "auto-round",
    "fouroversix": "fouroversix",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its texts, as paths below the shared folder ("./": below this repository).

    shared_text  the one text there is serves for calibration, too: the model has memorised it
    convert      what `ptqpipe convert` must be told
    """

    name: str
    folder: str
    held_out: str
    calibration: str
    shared_text: bool = False
    convert: tuple[str, ...] = ()


WIKI = ("assets/data/wikitext2/wiki.test.raw", "assets/data/wikitext2/wiki.train.part.txt")
STORIES = ("assets/data/tinystories_excerpt/tinystories.txt",) * 2
CORPUS = ("assets/models/slm4096/orig/corpus.txt",) * 2
MODELS = (
    Model("bench-4m", "assets/models/bench-4m/hf", *WIKI),
    Model("demo_model", "./ptqpipe/demo_model", *WIKI),
    Model("babyllama-tok361", "assets/models/babyllama-tok361/hf", *STORIES),
    Model("stories260K", "assets/models/stories260K/hf", *STORIES),
    Model("slm4096", "assets/models/slm4096/hf", *CORPUS, shared_text=True, convert=("--container", "ptqpipe")),
)


def place(name: str, shared: Path) -> Path:
    """Where a path of the table above is."""
    return HERE.parent / name[2:] if name.startswith("./") else shared / name


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a line one of a kind."""
    return tuple(line.get(name) for name in ("model", "format", "tool", "entry", "seed"))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a results file; none where there is no file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def named(entry: Entry, parts: list[str]) -> bool:
    """Whether the command line names an entry: by its key, or by a part of it that is no entry's key."""
    keys = {other.key for other in ENTRIES}
    return any(part == entry.key or (part not in keys and part in entry.key) for part in parts)


def wanted(args: argparse.Namespace) -> Iterator[tuple[int | None, str, Entry]]:
    """(seed or None, format, entry) in the order of a run: all formats and entries with one seed, then the next."""
    for number, seed in enumerate(args.seeds):
        for fmt in args.formats:
            for entry in ENTRIES:
                if fmt not in entry.formats or (args.entries and not named(entry, args.entries)):
                    continue
                if entry.needs_text(fmt) or number == 0:
                    yield (seed if entry.needs_text(fmt) else None), fmt, entry


def cost(commands: list[list[str]]) -> dict[str, Any]:
    """Runs processes one after another; what they cost together. SystemExit with the last words of one that fails."""
    runs = [measured(["timeout", str(LIMIT_SECONDS), "nice", *command])[0] for command in commands]
    return {
        "seconds": round(sum(run.seconds for run in runs), 1),
        "cpu_s": round(sum(run.cpu_seconds for run in runs), 1),
        "peak_rss_mib": round(max((run.peak_bytes for run in runs), default=0) / 2**20),
    }


def calibrated(job: Job, stats: Path) -> dict[str, Any]:
    """The statistics of the source, made once for all entries of a seed; what that cost."""
    record = stats.with_suffix(".cost.json")
    if not record.exists():
        shutil.rmtree(stats, ignore_errors=True)
        record.write_text(json.dumps(cost([calibrate_command(sys.executable, job.source, stats, job)])))
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def produce(job: Job, pythons: dict[str, str], stats: Path) -> dict[str, Any]:
    """Makes an entry's checkpoint; its cost, that of calibration (``calibration``) counted in."""
    if job.entry.tool != "ptqpipe":
        return cost([peer_command(job, pythons[job.entry.tool])])
    if not job.entry.calibrated or job.entry.tune is not None:
        return cost(own_steps(job, sys.executable, stats))
    first = calibrated(job, stats)
    rest = cost(own_steps(job, sys.executable, stats))
    both = {name: round(first[name] + rest[name], 1) for name in ("seconds", "cpu_s")}
    return {**both, "peak_rss_mib": max(first["peak_rss_mib"], rest["peak_rss_mib"]), "calibration": first}


def run_model(
    model: Model, args: argparse.Namespace, done: set[tuple[Any, ...]], worker: ProcessPoolExecutor
) -> Iterator[dict[str, Any]]:
    """The lines of a model that are not done. ``worker`` holds the float model: a process counts as its peak memory
    what its parent held, so this one must stay small.
    """
    todo = [
        (seed, fmt, entry)
        for seed, fmt, entry in wanted(args)
        if (model.name, fmt, entry.tool, entry.name, seed) not in done
        and (entry.tool == "ptqpipe" or entry.tool in args.pythons)
    ]
    if not todo:
        return
    source = place(model.folder, args.shared)
    folder = args.scratch / model.name
    folder.mkdir(parents=True, exist_ok=True)
    texts = (place(model.held_out, args.shared), place(model.calibration, args.shared), args.tokens, model.shared_text)
    yield {"model": model.name, "tool": "float", **worker.submit(quality_worker.begin, source, *texts).result()}
    for seed, fmt, entry in todo:
        number = 0 if seed is None else seed
        file = folder / f"rows-{number}.jsonl"
        rows, row_tokens = worker.submit(quality_worker.write_rows, number, file).result()
        job = Job(entry, fmt, source, folder / "out", file, number, rows, row_tokens, model.convert)
        line = {"model": model.name, "format": fmt, "tool": entry.tool, "entry": entry.name, "seed": seed}
        line |= {"calibrated": entry.calibrated, "version": args.versions[entry.tool]}
        for left in folder.glob("out*"):
            shutil.rmtree(left)
        try:
            line |= produce(job, args.pythons, folder / f"stats-{number}")
            line |= worker.submit(quality_worker.measure, job.out, fmt).result()
        except Exception as error:  # whatever a peer's output does to the reader belongs in its line
            line["failed"] = reason_of(str(error))
        except SystemExit as error:
            line["failed"] = reason_of(str(error))
        yield line


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of a results file, and stop")
    parser.add_argument("--models", nargs="+", default=[m.name for m in MODELS], choices=[m.name for m in MODELS])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--entries", nargs="+", default=[], metavar="PART", help='parts of "tool:entry" to run')
    parser.add_argument("--redo", nargs="+", default=[], metavar="PART", help='parts of "tool:entry" to run again')
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--python", nargs="+", default=[], metavar="TOOL=PYTHON", help=", ".join(PACKAGES))
    parser.add_argument("--shared", type=Path, default=HERE.parent.parent / "shared", help="folder of the assets")
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"))
    parser.add_argument("--results", type=Path, default=HERE.parent / "benchmarks" / "quality.jsonl")
    args = parser.parse_args()
    args.pythons = dict(item.split("=", 1) for item in args.python)
    unknown = sorted(set(args.pythons) - set(PACKAGES))
    if unknown:
        parser.error(f"--python {unknown[0]}=...: unknown tool; expected {', '.join(PACKAGES)}")
    return args


def main() -> None:
    """Runs what is missing, or prints the tables."""
    args = parsed()
    if args.table:
        from quality_table import render

        print(render(read_lines(args.table)))
        return
    from ptqpipe._version import __version__

    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    args.scratch = args.scratch.resolve()
    args.versions = {tool: version_of(python, PACKAGES[tool]) for tool, python in args.pythons.items()}
    args.versions["ptqpipe"] = __version__
    redo = [f"{entry.tool}:{entry.name}" for entry in ENTRIES if named(entry, args.redo)]
    lines = read_lines(args.results)
    done = {key_of(line) for line in lines if f"{line['tool']}:{line.get('entry')}" not in redo}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as worker:
        for model in MODELS:
            if model.name not in args.models:
                continue
            for line in run_model(model, args, done, worker):
                print(json.dumps({name: value for name, value in line.items() if name != "kl_windows"}), flush=True)
                with open(args.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
