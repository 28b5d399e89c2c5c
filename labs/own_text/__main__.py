"""What it is worth to vary the text that a model writes for its own calibration: KL divergence of `--quality best`.

    python -m labs.own_text --scratch DIR [--models bench-4m] [--formats nvfp4] [--seeds 0] [--ways PART ...]
        [--results FILE]

`generate` writes 128 windows (and 16 to hold out) as each way of WAYS says, `convert --quality best` learns from them,
and the result is measured as in bench_quality.py, on both texts. "prompts" are the first PROMPT tokens of as many
windows of the training text, so that they are no way without data. One JSON line for each model, format, seed and way.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_convert import measured
from bench_quality import HERE, MODELS, OWN, TOKENS, Model, begin, measure, place, write_rows

PROMPT = 16
WAYS = {
    "as it is": [],
    "temperature 0.8": ["--temperature", "0.8"],
    "temperature 1.2": ["--temperature", "1.2"],
    "temperatures 0.7, 1, 1.3": ["--temperature", "0.7", "--temperature", "1", "--temperature", "1.3"],
    "lengths 64, 256": ["--length", "64", "--length", "256"],
    "prompts": ["--prompts"],
}


def lines_of(model: Model, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of a model, one after the other."""
    source, folder = place(model.folder, args.shared), args.scratch / model.name
    folder.mkdir(parents=True, exist_ok=True)
    texts = (place(model.held_out, args.shared), place(model.calibration, args.shared), TOKENS, model.shared_text)
    begin(source, *texts, place(model.other, args.shared) if model.other else None)
    rows, prompts, own, out = (folder / name for name in ("rows.jsonl", "prompts.jsonl", "own.jsonl", "out"))
    program = [sys.executable, "-P", "-m", OWN]
    for seed in args.seeds:
        count, length = write_rows(seed, rows)
        beginnings = [json.loads(line)["input_ids"][:PROMPT] for line in rows.read_text().splitlines()]
        prompts.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in beginnings))
        windows = ["--samples", str(count), "--seqlen", str(length), "--seed", str(seed), "--workers", "1", "-q"]
        for way in (way for way in WAYS if not args.ways or any(part in way for part in args.ways)):
            words = [*WAYS[way], str(prompts)] if way == "prompts" else WAYS[way]
            measured([*program, "generate", str(source), *words, *windows, "--overwrite", "-o", str(own)])
            for fmt in args.formats:
                for left in folder.glob("*out*"):
                    shutil.rmtree(left)
                asked = ["--data", str(own), "--format", fmt, "--quality", "best", *model.convert]
                measured([*program, "convert", str(source), *asked, *windows, "-o", str(out)])
                found = measure(out, fmt)
                line = {"model": model.name, "format": fmt, "seed": seed, "way": way}
                yield line | {name: found[name] for name in ("kl", "other_kl") if name in found}


def main() -> None:
    """Measures, prints and appends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bench-4m"], choices=[m.name for m in MODELS])
    parser.add_argument("--formats", nargs="+", default=["nvfp4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--ways", nargs="+", default=[], metavar="PART", help="parts of the names of ways [all]")
    parser.add_argument("--shared", type=Path, default=HERE.parent.parent / "shared", help="folder of the assets")
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"))
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.jsonl"))
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    args.scratch = args.scratch.resolve()
    for model in (m for m in MODELS if m.name in args.models):
        for line in lines_of(model, args):
            print(json.dumps(line), flush=True)
            with args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
