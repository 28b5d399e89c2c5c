"""What two-sided GPTQ in order gains: KL divergence by tokens that are run backwards, and by rows quantized together.

    python -m labs.two_sided_gain --scratch DIR [--models bench-4m] [--model NAME FOLDER HELD_OUT CALIBRATION]
        [--tokens 28672 16384 8192] [--rows 16] [--seeds 0 1 2] [--format nvfp4]
        [--results FILE]

`tune --method gptq` and `convert`, as the entry "two-sided gptq in order" of bench_quality.py, on the same 128 rows of
256 tokens, of which codes are learned from 112: 28,672 tokens. Measured as there, on both texts. One JSON line for each
model, seed, number of tokens and of rows (16, as ptqpipe has it, where a line has none).
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from bench_convert import measured
from bench_quality import HERE, MODELS, TOKENS, Model, begin, measure, place, write_rows
from quality_entries import ENTRIES, Job, own_steps

WITH = """import sys
from ptqpipe.quantization import kronecker
from ptqpipe.calibration import backward as reverse
from ptqpipe.cli import main
reverse.TOKENS, two_sided.GROUP, reverse.SHARE = int(sys.argv.pop(1)), int(sys.argv.pop(1)), 1 << 30
main()
"""


def run(job: Job, tokens: int, rows: int) -> None:
    """Makes the checkpoint."""
    for words in own_steps(job, job.out):  # each is "-P -m ptqpipe" and what follows
        measured([sys.executable, "-P", "-c", WITH, str(tokens), str(rows), *words[3:]])


def lines_of(model: Model, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of a model, one after the other."""
    source, folder = place(model.folder, args.shared), args.scratch / model.name
    folder.mkdir(parents=True, exist_ok=True)
    texts = (place(model.held_out, args.shared), place(model.calibration, args.shared), TOKENS, model.shared_text)
    begin(source, *texts, place(model.other, args.shared) if model.other else None)
    entry = next(one for one in ENTRIES if one.name == "two-sided gptq in order")
    for seed in args.seeds:
        file = folder / f"rows-{seed}.jsonl"
        rows, length = write_rows(seed, file)
        for tokens, together in product(args.tokens, args.rows):
            job = Job(entry, args.format, source, folder / "out", file, seed, rows, length, model.convert)
            for left in folder.glob("out*"):
                shutil.rmtree(left)
            run(job, tokens, together)
            found = measure(job.out, args.format)
            line = {"model": model.name, "format": args.format, "seed": seed, "tokens": tokens, "rows": together}
            yield line | {name: found[name] for name in ("kl", "other_kl") if name in found}


def main() -> None:
    """Measures, prints and appends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[], choices=[m.name for m in MODELS])
    parser.add_argument("--model", nargs=4, action="append", default=[], metavar=("NAME", "FOLDER", "HELD_OUT", "TEXT"))
    parser.add_argument("--tokens", nargs="+", type=int, default=[28_672, 16_384, 8_192])
    parser.add_argument("--rows", nargs="+", type=int, default=[16])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--shared", type=Path, default=HERE.parent.parent / "shared", help="folder of the assets")
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"))
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.jsonl"))
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    args.scratch = args.scratch.resolve()
    for model in [*(m for m in MODELS if m.name in args.models), *(Model(*words) for words in args.model)]:
        for line in lines_of(model, args):
            print(json.dumps(line), flush=True)
            with args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
