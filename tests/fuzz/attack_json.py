"""Mutates every JSON file that a command reads and reads it as the commands do: no traceback, no hang, no stray file.

    python -m tests.fuzz.attack_json                              # 100,000 mutants
    python -m tests.fuzz.attack_json --mutants 1000000 --seed 7 --only stats.json
    python -m tests.fuzz.attack_json --cli 50                     # also so many through each command

Needs a checkout and `pip install -e ".[dev]"`: the files and readers are those of the tests (tests/json_files.py).
Prints a JSON line for each file and for each mutant that was not read or refused in one line, with its bytes escaped;
exits with 1 if there is one.
"""

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from tests.json_files import Target, attack, mutated, targets

COMMANDS = {
    "config.json of compressed_tensors": [["inspect", "."], ["verify", "."], ["diff", ".", "../ptqpipe"]],
    "ptqpipe.json": [["inspect", "."], ["verify", "."], ["report", ".", "-o", "/dev/null"]],
    "recipe": [["convert", "../float", "--dry-run", "-o", "new", "--recipe", "recipe.yaml"]],
    "stats.json": [["convert", "../float", "--dry-run", "-o", "new", "--stats", "."]],
    "rounding.json": [["convert", "../float", "--dry-run", "-o", "new", "--codes", "."]],
    "eval.json": [["report", "../compressed_tensors", "--eval", "m.eval.json", "-o", "/dev/null"]],
}


def main() -> int:
    """0 if every mutant was read or refused in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the files whose name holds this")
    parser.add_argument("--cli", type=int, default=0, metavar="N", help="mutants through each command")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        known = {name: t for name, t in targets(Path(folder)).items() if (args.only or "") in name}
        whole = sum(target.share for target in known.values())
        for name, target in known.items():

            def found(what: str, mutant: bytes, name: str = name) -> None:
                nonlocal bad
                bad += 1
                print(json.dumps({"file": name, "wrong": what, "mutant": ascii(mutant[:2000])}), flush=True)

            begun, count = time.monotonic(), round(args.mutants * target.share / whole)
            outcomes = attack(target, count, seed=args.seed, root=Path(folder), found=found)
            line = {"file": name, "mutants": count, **outcomes, "seconds": round(time.monotonic() - begun, 1)}
            print(json.dumps(line), flush=True)
            for command in COMMANDS.get(name, []) if args.cli else []:
                for code, mutant in through(command, target, args.cli, seed=args.seed):
                    found(f"ptqpipe {' '.join(command)}: {code}", mutant)
    return int(bad > 0)


def through(command: list[str], target: Target, count: int, *, seed: int) -> Iterator[tuple[str, bytes]]:
    """Runs a command on mutants, in this process; what ended otherwise than a command may, with its mutant."""
    from ptqpipe.cli import main as run

    rng = random.Random(f"{seed} {command}")
    for _ in range(count):
        mutant = mutated(target.sound, rng)
        target.file.write_bytes(mutant)
        said = io.StringIO()
        try:
            with contextlib.chdir(target.file.parent), redirect_stderr(said), redirect_stdout(io.StringIO()):
                run(command)
        except SystemExit as end:
            lines = said.getvalue().splitlines()
            if end.code not in (0, 1, 2, None) or any(line.startswith("Traceback") for line in lines):
                yield f"exit {end.code}: {lines[-1:]}", mutant
        except BaseException as error:
            yield f"{type(error).__name__}: {error}"[:300], mutant
    target.file.write_bytes(target.sound)


if __name__ == "__main__":
    sys.exit(main())
