"""The quality of quantized models: ptqpipe beside every peer, KL divergence to the float model on held-out text.

    python scripts/bench_quality.py --scratch DIR --results FILE [--models bench-4m ...] [--formats nvfp4 ...]
        [--entries PART ...] [--seeds 0 1 2] [--python TOOL=PYTHON ...] [--redo PART ...]
        [--model NAME FOLDER HELD_OUT CALIBRATION]
    python scripts/bench_quality.py --table FILE [--models bench-4m ...]

Each entry (quality_entries.py) makes a checkpoint in processes of its own, a peer under the interpreter given for it,
with its own code (peers.py), from the same source; quality_measure.py then measures them all alike: decoded by
ptqpipe, inputs quantized as the format says, the first 24,576 tokens of the held-out text in windows of 256, or of each
``--window``, and a third as many of a text of another kind and of chats, where the model has a template for them
(questions of ARC-easy and PIQA with their right answers). Published models, which fetch_models.py writes, run where
``--models`` names them, on half as many tokens. What is calibrated gets the same 128 rows of 256 tokens, chosen by the
seed, once a seed. The head stays in the source's precision everywhere. One JSON line an entry, model, format and seed;
lines that the results have already are not made again, so a run that was stopped continues, and ``--redo`` makes those
again whose "tool:entry" contains PART. A peer that fails says so in its line. Times are of whole processes, imports
included, on one thread; with ``--warm`` each tool is imported once, its jobs are forks, and times leave the imports
out. With ``--device`` ptqpipe quantizes and all checkpoints are measured there; llm-compressor takes a GPU by itself,
ModelOpt where its interpreter sees one.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_convert import measured
from compare_peers import reason_of, version_of
from quality_entries import ENTRIES, FORMATS, Entry, Job, calibrate_command, own_steps, peer_command

if TYPE_CHECKING:
    from quality_measure import Baseline

HERE = Path(__file__).parent
OWN = "ptqpipe"
TOKENS, TOKENS_OF_LARGE = 24_576, 12_288  # of the held-out text; of models of more than LARGE weights
LARGE = 100_000_000
OTHERS = 3  # one in so many tokens of a text of another kind, and of chats
WINDOW = 256
LIMIT_SECONDS = 7200  # of a job; a model of 150 M in `best` on one thread takes most of an hour
PACKAGES = {
    "llm-compressor": "llmcompressor",
    "modelopt": "nvidia-modelopt",
    "auto-round": "auto-round",
    "fouroversix": "fouroversix",
    "torchao": "torchao",
    "llama.cpp": "llama-cpp-python",
}
SHAKESPEARE = "assets/data/tinyshakespeare/input.txt"
QUESTIONS = "assets/data/llm_foundry"
CHATS = (f"{QUESTIONS}/world_knowledge/arc_easy.jsonl", f"{QUESTIONS}/commonsense_reasoning/piqa.jsonl")
PUBLISHED = "published/"


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its texts, as paths below the shared folder ("./": below this repository; "published/": below the
    folder that fetch_models.py writes).

    shared_text  the one text there is serves for calibration, too: the model has memorised it
    other        a text of another kind to measure on, too; none where it is empty
    convert      what `ptqpipe convert` must be told
    """

    name: str
    folder: str
    held_out: str
    calibration: str
    shared_text: bool = False
    other: str = SHAKESPEARE
    convert: tuple[str, ...] = ()


WIKI = ("assets/data/wikitext2/wiki.test.raw", "assets/data/wikitext2/wiki.train.part.txt")
STORIES = ("assets/data/tinystories_excerpt/tinystories.txt",) * 2
CORPUS = ("assets/models/slm4096/orig/corpus.txt",) * 2
MODELS = (
    Model("bench-4m", "assets/models/bench-4m/hf", *WIKI),
    Model("demo_model", "./ptqpipe/demo_model", *WIKI),
    Model("babyllama-tok361", "assets/models/babyllama-tok361/hf", *STORIES),
    Model("stories260K", "assets/models/stories260K/hf", *STORIES),
    Model(
        "slm4096", "assets/models/slm4096/hf", *CORPUS, shared_text=True, other="", convert=("--container", "ptqpipe")
    ),
    Model("smollm2-135m", "published/smollm2-135m", *WIKI),
    Model("smollm2-135m-dithered", "published/smollm2-135m-dithered", *WIKI),
)


def place(name: str, shared: Path, published: Path | None = None) -> Path:
    """Where a path of the table above is. Published models are in the folder PTQPIPE_MODELS, or beside ``shared``."""
    if name.startswith(PUBLISHED):
        published = published or Path(os.environ.get("PTQPIPE_MODELS", shared.resolve().parent / "real"))
        return published / name.removeprefix(PUBLISHED)
    return HERE.parent / name[2:] if name.startswith("./") else shared / name


def labelled(model: Model, window: int) -> str:
    """What result lines call a model that is measured in windows of ``window`` tokens."""
    return model.name if window == WINDOW else f"{model.name}, windows of {window}"


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


class Runs:
    """Runs processes, or with ``warm`` forks of one process a tool that has imported it."""

    def __init__(self, pythons: dict[str, str], *, warm: bool) -> None:
        self.pythons = {**pythons, OWN: sys.executable}
        self._warm = warm
        self._servers: dict[str, subprocess.Popen[str]] = {}

    def cost(self, tool: str, commands: list[list[str]]) -> dict[str, Any]:
        """Runs commands (without the interpreter) one after another; what they cost together. SystemExit with the last
        words of one that fails."""
        if self._warm and tool != "llama.cpp":  # which imports next to nothing
            parts = [self._forked(tool, command) for command in commands]
        else:
            parts = [self._process(tool, command) for command in commands]
        total = {name: round(sum(part[name] for part in parts), 1) for name in ("seconds", "cpu_s")}
        peak = round(max((part["peak_rss_mib"] for part in parts), default=0))
        return {**total, "peak_rss_mib": peak, **({"warm": True} if self._warm else {})}

    def _process(self, tool: str, command: list[str]) -> dict[str, Any]:
        run = measured(["timeout", str(LIMIT_SECONDS), self.pythons[tool], *command])[0]
        return {"seconds": run.seconds, "cpu_s": run.cpu_seconds, "peak_rss_mib": run.peak_bytes / 2**20}

    def _forked(self, tool: str, command: list[str]) -> dict[str, Any]:
        server = self._servers.get(tool)
        if server is None:
            start = [self.pythons[tool], str(HERE / "quality_warm.py"), tool, str(LIMIT_SECONDS)]
            pipe = subprocess.PIPE
            server = self._servers[tool] = subprocess.Popen(start, stdin=pipe, stdout=pipe, text=True)
        assert server.stdin is not None
        assert server.stdout is not None
        arguments = command[3:] if tool == OWN else command[1:]  # after "-P -m ptqpipe", after the script
        with suppress(BrokenPipeError):
            print(json.dumps(arguments), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        if not answer:  # it has no packages, or not all of them
            del self._servers[tool]
            python, code = self.pythons[tool], server.wait()
            raise SystemExit(f"the process of {tool}, {python}, ended with {code}; its words are above")
        done: dict[str, Any] = json.loads(answer)
        if done["status"]:
            raise SystemExit(done["said"])
        return done

    def close(self) -> None:
        """Ends the processes."""
        for server in self._servers.values():
            server.communicate()


# What runs in the process that holds the float model; here alone are torch and ptqpipe imported.
_current: list["Baseline"] = []


def begin(
    source: Path,
    held_out: Path,
    calibration: Path,
    tokens: int | None,
    shared: bool,
    other: Path | None,
    device: str = "cpu",
    threads: int = 1,
    windows: Sequence[int] = (WINDOW,),
    chats: Sequence[Path] = (),
    folder: Path | None = None,
) -> list[dict[str, Any]]:
    """Loads a float model in the place of the one before; what it measures in windows of each size: its perplexity, and
    that on the text of another kind and on chats. ``tokens`` None: as many as its size allows. ``folder`` is for its
    logits."""
    import torch
    from quality_measure import Baseline, chat_tokens, read_texts

    torch.set_num_threads(threads)
    _current.clear()
    tokens = tokens or (TOKENS_OF_LARGE if weights_of(source) > LARGE else TOKENS)
    texts = read_texts(source, held_out, calibration, tokens=tokens, shared=shared)
    few = max(tokens // OTHERS, *windows)
    others = {}
    if other is not None:
        others["other_"] = read_texts(source, other, other, tokens=few, shared=True).held_out
    if chats and (written := chat_tokens(source, chats, few)) is not None:
        others["chat_"] = written
    for window in windows:
        _current.append(Baseline.of(source, texts, device, others=others, window=window, folder=folder))
    return [one.perplexities | {"tokens": len(one.held_out[""].tokens)} for one in _current]


def weights_of(model: Path) -> int:
    """How many weights a checkpoint has, from the headers of its files."""
    count = 0
    for file in model.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        count += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return count


def write_rows(seed: int, file: Path) -> tuple[int, int]:
    """Writes the calibration rows of a seed as {"input_ids": [...]} lines; how many there are, and tokens in each."""
    rows = _current[0].texts.rows(seed)
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows.tolist()))
    return rows.shape[0], rows.shape[1]


def measure(out: Path, fmt: str, floats: bool = False, number: int = 0) -> dict[str, Any]:
    """What a checkpoint measures, or with ``floats`` the float model behind its inputs, in windows of the size that has
    that number in `begin`; ``other_kl`` on the text of another kind, ``chat_kl`` on chats."""
    return _current[number].measure(out, fmt, floats=floats)


def calibrated(job: Job, stats: Path, runs: Runs) -> dict[str, Any]:
    """The statistics of the source, made once for all entries of a seed; what that cost."""
    record = stats.with_suffix(".cost.json")
    if not record.exists():
        shutil.rmtree(stats, ignore_errors=True)
        record.write_text(json.dumps(runs.cost(OWN, [calibrate_command(job.source, stats, job)])))
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def produce(job: Job, runs: Runs, stats: Path) -> dict[str, Any]:
    """Makes an entry's checkpoint; its cost, that of calibration (``calibration``) counted in."""
    if job.entry.tool != OWN:
        return runs.cost(job.entry.tool, [peer_command(job)])
    rest = own_steps(job, stats)
    of_its_own = job.entry.quality is not None or job.entry.learn or bool(job.entry.moments)
    if not job.entry.calibrated or of_its_own or (job.entry.tune is not None and job.entry.transform is None):
        return runs.cost(OWN, rest)
    first = calibrated(job, stats, runs)
    second = runs.cost(OWN, rest)
    both = {name: round(first[name] + second[name], 1) for name in ("seconds", "cpu_s")}
    return {**second, **both, "peak_rss_mib": max(first["peak_rss_mib"], second["peak_rss_mib"]), "calibration": first}


def run_model(
    model: Model, args: argparse.Namespace, done: set[tuple[Any, ...]], worker: ProcessPoolExecutor, runs: Runs
) -> Iterator[dict[str, Any]]:
    """The lines of a model that are not done. ``worker`` holds the float model: a process counts as its peak memory
    what its parent held, so this one must stay small.
    """
    todo = [
        (seed, fmt, entry, numbers)
        for seed, fmt, entry in wanted(args)
        if (entry.tool == OWN or entry.tool in args.pythons)
        and (
            numbers := [
                number
                for number, window in enumerate(args.window)
                if (labelled(model, window), fmt, entry.tool, entry.name, seed) not in done
            ]
        )
    ]
    if not todo:
        return
    source = place(model.folder, args.shared, args.published)
    if not source.is_dir():
        why = f"no folder {source}" + "; fetch_models.py writes it" * model.folder.startswith(PUBLISHED)
        print(json.dumps({"model": model.name, "skipped": why}), flush=True)
        return
    folder = args.scratch / model.name
    folder.mkdir(parents=True, exist_ok=True)
    texts = (place(model.held_out, args.shared), place(model.calibration, args.shared), args.tokens, model.shared_text)
    other = place(model.other, args.shared) if model.other else None
    chats = [file for name in CHATS if (file := place(name, args.shared)).exists()]
    how: tuple[Any, ...] = (other, args.device, args.threads, args.window, chats, folder)
    for window, begun in zip(args.window, worker.submit(begin, source, *texts, *how).result(), strict=True):
        yield {"model": labelled(model, window), "tool": "float", **begun}
    for seed, fmt, entry, numbers in todo:
        number = 0 if seed is None else seed
        file = folder / f"rows-{number}.jsonl"
        rows, row_tokens = worker.submit(write_rows, number, file).result()
        out, machine = folder / "out", (args.device, args.threads)
        job = Job(entry, fmt, source, out, file, number, rows, row_tokens, model.convert, *machine)
        line = {"format": fmt, "tool": entry.tool, "entry": entry.name, "seed": seed}
        line |= {"calibrated": entry.calibrated, "version": args.versions[entry.tool]}
        line |= {"device": args.device} if args.device != "cpu" else {}
        for left in (*folder.glob("out*"), *folder.glob(".out*")):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        failed = {}
        try:
            line |= produce(job, runs, folder / f"stats-{number}")
        except (Exception, SystemExit) as error:
            failed = {"failed": reason_of(str(error))}
        for size in numbers:
            measured = failed
            if not failed:
                try:
                    measured = worker.submit(measure, job.out, fmt, entry.floats, size).result()
                except (Exception, SystemExit) as error:  # whatever a peer's output does to the reader
                    measured = {"failed": reason_of(str(error))}
            yield {"model": labelled(model, args.window[size]), **line, **measured}


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of a results file, and stop")
    parser.add_argument("--models", nargs="+", default=[], choices=[m.name for m in MODELS], help="[the small ones]")
    parser.add_argument(
        "--model",
        nargs=4,
        action="append",
        default=[],
        metavar=("NAME", "FOLDER", "HELD_OUT", "CALIBRATION"),
        help="another model than these, alone, with the files of its texts; may be repeated",
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--entries", nargs="+", default=[], metavar="PART", help='parts of "tool:entry" to run')
    parser.add_argument("--redo", nargs="+", default=[], metavar="PART", help='parts of "tool:entry" to run again')
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, help="of the held-out text [24576; 12288 of models above 100 M weights]")
    parser.add_argument("--window", nargs="+", type=int, default=[WINDOW], help="tokens of a window [256]")
    parser.add_argument("--python", nargs="+", default=[], metavar="TOOL=PYTHON", help=", ".join(PACKAGES))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N [cpu]")
    parser.add_argument("--threads", type=int, default=1, help="of each process [1]")
    parser.add_argument("--warm", action="store_true", help="import each tool once; times are then without imports")
    parser.add_argument("--shared", type=Path, default=HERE.parent.parent / "shared", help="folder of the assets")
    parser.add_argument("--published", type=Path, metavar="DIR", help="published models [PTQPIPE_MODELS, ../real]")
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"))
    parser.add_argument("--results", type=Path, default=HERE.parent / "benchmarks" / "quality.jsonl")
    args = parser.parse_args()
    args.chosen = [Model(*words) for words in args.model]
    small = [m for m in MODELS if not (m.folder.startswith(PUBLISHED) or args.models or args.model)]
    args.chosen += [m for m in MODELS if m.name in args.models or m in small]
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

        print(render(read_lines(args.table), args.models))
        return
    from quality_table import key_of

    from ptqpipe._version import __version__

    threads = str(args.threads)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    args.scratch = args.scratch.resolve()
    args.versions = {tool: version_of(python, PACKAGES[tool]) for tool, python in args.pythons.items()}
    args.versions[OWN] = __version__
    redo = [f"{entry.tool}:{entry.name}" for entry in ENTRIES if named(entry, args.redo)]
    lines = read_lines(args.results)
    done = {key_of(line) for line in lines if f"{line['tool']}:{line.get('entry')}" not in redo}
    runs = Runs(args.pythons, warm=args.warm)
    with closing(runs), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as worker:
        for model in args.chosen:
            for line in run_model(model, args, done, worker, runs):
                print(json.dumps({name: value for name, value in line.items() if name != "kl_windows"}), flush=True)
                with open(args.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
