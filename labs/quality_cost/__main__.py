"""What calibration and GPTQ cost: ptqpipe beside llm-compressor, whole processes, one after the other, several times.

    python -m labs.quality_cost --scratch DIR --results FILE --python llm-compressor=PYTHON [auto-round=PYTHON]
        [--model bench-4m | --trained NAME FOLDER TEXT | --shape 94m [--layers N]] [--samples 32] [--seqlen 128]
        [--format nvfp4] [--device cuda] [--times 3]

One JSON line: for each of "calibrate", "convert", both together ("gptq"), "gptq in order" (`tune --method gptq` and
`convert`) and the peer's GPTQ (its whole process, which loads, calibrates, quantizes and saves) the medians of seconds,
processor seconds and peak memory, and the ratios to the peer within each turn. Both get the same rows of tokens.

With ``--trained`` (a model and text for it) and ``--shape`` (a synthetic model of make_synthetic_model.py, random
tokens) `convert --quality good` and `best` are measured in place of the single steps, one thread each, on ``--samples``
rows of ``--seqlen`` tokens; with auto-round's interpreter its tuning in 200 steps, too. The file has an eighth more
rows, as a text usually has: ptqpipe holds them out, the peers take all. On random weights GPTQ in order gains little,
so a few rows of some weights are quantized in two ways for nothing; ``improved`` says how many decoder layers it
improved, of ``layers``. With ``--layers`` a synthetic model has fewer decoder layers than its shape, and ``seconds``
and the like are of that. ``weights`` counts the source's.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench_quality import HERE, MODELS, OWN, Runs, place
from quality_entries import ENTRIES, Job, calibrate_command, own_steps, peer_command
from safetensors import safe_open

from ptqpipe.numerics.kernels.cpu import isa
from ptqpipe.numerics.kernels.cpu_library import processor

PEER, TUNED = "llm-compressor", "auto-round"
METHODS = {PEER: "gptq", TUNED: "tuned"}
COSTS = ("seconds", "cpu_s", "peak_rss_mib")


def jobs_of(args: argparse.Namespace) -> dict[str, Job]:
    """What is run, by the name of its entry's tool and name."""
    from quality_measure import read_texts

    model = next(m for m in MODELS if m.name == args.model)
    source = place(model.folder, args.shared)
    texts = read_texts(
        source,
        place(model.held_out, args.shared),
        place(model.calibration, args.shared),
        tokens=args.tokens,
        shared=model.shared_text,
    )
    rows = texts.rows(0)
    file = args.scratch / "rows.jsonl"
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows.tolist()))
    wanted = ((OWN, "gptq"), (OWN, "gptq in order"), (PEER, "gptq"))
    entries = {(e.tool, e.name): e for e in ENTRIES if args.format in e.formats}
    count, length = rows.shape
    out = args.scratch / "out"
    return {
        f"{tool} {name}": Job(entries[tool, name], args.format, source, out, file, 0, count, length, model.convert)
        for tool, name in wanted
    }


def turn(jobs: dict[str, Job], runs: Runs, scratch: Path) -> dict[str, dict[str, Any]]:
    """Every job once."""
    for left in (*scratch.glob("out*"), *scratch.glob("stats*")):
        shutil.rmtree(left)
    own, ordered, peer = jobs.values()
    stats = scratch / "stats"
    found = {"calibrate": runs.cost(OWN, [calibrate_command(own.source, stats, own)])}
    found["convert"] = runs.cost(OWN, own_steps(own, stats))
    found["gptq"] = {name: found["calibrate"][name] + found["convert"][name] for name in COSTS[:2]}
    found["gptq"]["peak_rss_mib"] = max(found[step]["peak_rss_mib"] for step in ("calibrate", "convert"))
    shutil.rmtree(own.out)
    found[PEER] = runs.cost(PEER, [peer_command(peer)])
    shutil.rmtree(own.out)
    found["gptq in order"] = runs.cost(OWN, own_steps(ordered, stats))
    return found


def source_of(args: argparse.Namespace) -> Path:
    """The folder of the model that is quantized."""
    if args.trained:
        return Path(args.trained[1])
    if args.shape:
        return Path(args.scratch / f"{args.shape}-{args.layers or 'all'}")
    return place(next(m for m in MODELS if m.name == args.model).folder, args.shared)


def make_synthetic(args: argparse.Namespace, source: Path) -> None:
    """The synthetic model, unless it is there."""
    if not (source / "config.json").exists():
        fewer = ["--layers", str(args.layers)] if args.layers else []
        command = [sys.executable, HERE / "make_synthetic_model.py", source, "--shape", args.shape, *fewer]
        subprocess.run(command, check=True)
        tokenizer = place(next(m for m in MODELS if m.name == args.model).folder, args.shared)
        for part in tokenizer.glob("tokenizer*"):  # the peer asks for one, though the rows are tokens
            shutil.copy(part, source)


def rows_of(source: Path, text: Path | None, *, samples: int, length: int) -> list[list[int]]:
    """Rows of ``length`` tokens for a whole command: of a text, spread over it, or random ones."""
    count = samples * 9 // 8  # with those that are held out
    if text is None:
        words = json.loads((source / "config.json").read_text())["vocab_size"]
        seeded = random.Random(0)
        return [[seeded.randrange(words) for _ in range(length)] for _ in range(count)]
    from ptqpipe.check.evaluate.tokenized_text import read_text
    from ptqpipe.runtime.loading import load_tokenizer

    tokens = read_text(text, lambda: load_tokenizer(source)).tokens.tolist()
    step = len(tokens) // count
    if step < length:
        raise SystemExit(f"{text} has {len(tokens)} tokens, expected {count * length} or more")
    return [tokens[at * step :][:length] for at in range(count)]


def whole_commands(args: argparse.Namespace, rows: list[list[int]], peers: Iterable[str]) -> dict[str, list[str]]:
    """`convert --quality` and the peers' processes, without interpreters."""
    source, out, file = source_of(args), args.scratch / "out", args.scratch / "rows.jsonl"
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    data = ["--data", str(file), "--samples", str(args.samples), "--seqlen", str(args.seqlen), "--workers", "1", "-q"]
    data += ["--device", args.device]
    own = ["-P", "-m", "ptqpipe", "convert", str(source), "-o", str(out), "--format", args.format, *data, "--quality"]
    found = {"good": [*own, "good"], "best": [*own, "best", "--work-dir", str(args.scratch / "stages")]}
    for tool in peers:
        entry = next(e for e in ENTRIES if (e.tool, e.name) == (tool, METHODS[tool]))
        found[tool] = peer_command(Job(entry, args.format, source, out, file, 0, len(rows), args.seqlen, ()))
    return found


def improved(scratch: Path) -> dict[str, int]:
    """How many decoder layers GPTQ in order improved in the last `--quality best`, of how many."""
    blocks = json.loads((scratch / "stages" / "codes" / "rounding.json").read_text())["blocks"].values()
    return {"improved": sum(block["kept"] for block in blocks), "layers": len(blocks)}


def whole_turn(commands: dict[str, list[str]], runs: Runs, scratch: Path) -> dict[str, dict[str, Any]]:
    """Every command once."""
    found = {}
    for name, command in commands.items():
        for left in (*scratch.glob("out*"), *(scratch.glob("stages") if name == "best" else ())):
            shutil.rmtree(left)
        found[name] = runs.cost(name if name in METHODS else OWN, [command])
    return found


def summary(turns: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the turns; ratios are of one turn each."""

    def median(of: Any) -> float:
        return round(float(statistics.median(of(one) for one in turns)), 2)

    lines: dict[str, Any] = {
        step: {name: median(lambda one, step=step, name=name: one[step][name]) for name in COSTS} for step in turns[0]
    }
    for peer in (peer for peer in METHODS if peer in turns[0]):
        for step in (step for step in ("gptq", "gptq in order", "good", "best") if step in turns[0]):
            lines[f"{step} / {peer}"] = {
                name: median(lambda one, step=step, name=name, peer=peer: one[step][name] / one[peer][name])
                for name in COSTS
            }
    return lines


def gpu_name() -> str:
    """Asked in a process of its own: this one must not hold a GPU."""
    ask = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.run([sys.executable, "-P", "-c", ask], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Measures, and appends the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bench-4m", choices=[m.name for m in MODELS])
    parser.add_argument(
        "--trained", nargs=3, metavar=("NAME", "FOLDER", "TEXT"), help="a model of your own, and text for it"
    )
    parser.add_argument("--shape", help="of a synthetic model, in place of a trained one")
    parser.add_argument("--layers", type=int, help="of the synthetic model [the shape's]")
    parser.add_argument("--samples", type=int, default=32, help="of a whole command [32]")
    parser.add_argument("--seqlen", type=int, default=128, help="tokens of each of them [128]")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--device", default="cpu", help="of a whole command; the peer takes a GPU where there is one")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24_576)
    parser.add_argument("--python", required=True, nargs="+", metavar="TOOL=PYTHON", help="interpreters of the peers")
    parser.add_argument("--shared", type=Path, default=HERE.parent.parent / "shared", help="folder of the assets")
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"))
    parser.add_argument("--results", type=Path, default=HERE.parent / "benchmarks" / "quality_cost.jsonl")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    args.scratch = args.scratch.resolve()
    args.scratch.mkdir(parents=True, exist_ok=True)
    # Without byte code every process would compile torch and transformers again, for longer than it works.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    pythons = dict(pair.split("=", 1) for pair in args.python)
    runs = Runs(pythons, warm=False)
    name = args.trained[0] if args.trained else args.shape or args.model
    line: dict[str, Any] = {"model": name, "format": args.format, "times": args.times}
    line |= {"trained": False} if args.shape else {}
    line |= {} if args.device == "cpu" else {"device": gpu_name()}
    if args.shape:
        make_synthetic(args, source_of(args))
    # In a process of its own: a child counts as its peak memory what its parent held when it was made.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as worker:
        if args.shape or args.trained:
            text = Path(args.trained[2]) if args.trained else None
            rows = worker.submit(rows_of, source_of(args), text, samples=args.samples, length=args.seqlen).result()
            commands = whole_commands(args, rows, pythons)
        else:
            jobs = worker.submit(jobs_of, args).result()
    if args.shape or args.trained:
        turns = [whole_turn(commands, runs, args.scratch) for _ in range(args.times)]
        line |= {"samples": args.samples, "seqlen": args.seqlen} | improved(args.scratch)
    else:
        turns = [turn(jobs, runs, args.scratch) for _ in range(args.times)]
    line["weights"] = sum(
        math.prod(part.get_slice(name).get_shape())
        for file in source_of(args).glob("*.safetensors")
        for part in [safe_open(file, "pt")]
        for name in part.keys()  # noqa: SIM118 - no mapping
    )
    line |= {"cpu": processor()[0], "isa": isa()} | summary(turns)
    print(json.dumps(line))
    with open(args.results, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
