"""Random attack on every exact scale search of this machine: blocks drawn to break its bounds, against brute force.

The torch path, the compiled kernels on every instruction set and a GPU's, over formats, dtypes, magnitudes and
importances. The blocks are those of tests/numerics/search/hostile.py, and so is the bound-free search that they are
held to. Prints one JSON line a format and search: blocks, seconds (of CPU time in that search), how many blocks have
another scale, and Python that makes the first of them again. Exits 1 if any has. Several runs: attack_search.jsonl.

    python -m tests.fuzz.attack_search [--blocks 1000000] [--seed 0] [--minutes 60] [--only mxfp4]
        [--searches triton ...]
"""

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass

import torch

from ptqpipe.numerics.formats import CODECS, Format, get_format
from tests.numerics.search import hostile

# (format, share of the blocks): by what a block costs to score at every scale
SHARES = {
    "mxfp4": 16, "nvfp4": 16, "e2m1/16/e4m3": 12, "e2m1/8/ue5m3": 8, "e2m1/4/e8m0": 8, "mxfp6_e2m3": 4, "mxfp6_e3m2": 4,
    "mxfp8": 6, "e2m1/8/e4m3/global": 6, "e4m3/16/e4m3/global": 4, "e2m3/12/ue5m3/global": 3, "e3m2/4/e4m3": 4,
    "e2m1/64/e8m0": 3, "e2m1/128/e8m0": 1, "e2m1/256/e8m0": 1, "e4m3/256/e8m0": 0.5, "e2m1/256/e4m3": 0.5,
    "e2m1/64/ue5m3/global": 1, "e5m2/8/e8m0": 1, "e2m1/4/ue4m4/global": 1,
}  # fmt: skip
TILE = Format("tile 16x24", CODECS["e4m3"], (16, 24), CODECS["bf16"], partial_blocks=True)
NUMBERS = [  # scales that are numbers: (format, shape of a weight, share)
    (get_format("e4m3/16/bf16"), (8, 64), 0.05), (get_format("fp8_channel"), (8, 72), 0.05), (TILE, (40, 60), 0.02),
    (get_format("fp8_tensor"), (3, 50), 0.005), (get_format("fp8_block"), (130, 140), 0.0005),
    (get_format("fp8_channel"), (1, 70000), 0.0001), (get_format("int4_g32"), (2, 64), 0.01),
    (get_format("int4_g128"), (2, 256), 0.01), (get_format("int8_channel"), (4, 72), 0.01),
    (get_format("int8_signed_channel"), (4, 40), 0.005),
]  # fmt: skip
BATCH = 1 << 16  # elements of a weight


@dataclass(slots=True)
class Tally:
    """What one search did on one format."""

    blocks: int = 0
    seconds: float = 0.0
    differing: int = 0
    first: str = ""


def attack(case: hostile.Case, tallies: dict[tuple[str, str], Tally], searches: dict[str, hostile.Search]) -> int:
    """Runs the searches on a case, adds to the tallies and returns the number of blocks."""
    expected = case.expected()
    for name, search in searches.items():
        start = time.process_time()
        found = search(case.w, case.fmt, case.global_scale, case.importance)
        seconds = time.process_time() - start
        if found is None:
            continue
        tally = tallies.setdefault((case.fmt.name, name), Tally())
        tally.blocks += expected.numel()
        tally.seconds += seconds
        tally.differing += len(case.differing(found, expected))
        tally.first = tally.first or case.fault(name, found, expected)
    return expected.numel()


def targets(only: str) -> list[tuple[Format, tuple[int, int], float]]:
    """(format, shape of a weight of each kind, share of the blocks)."""
    rows = []
    for name, share in SHARES.items():
        fmt = get_format(name)
        columns = 8 * fmt.block[1]
        rows.append((fmt, (max(1, BATCH // columns // len(hostile.KINDS)), columns), float(share)))
    return [row for row in rows + NUMBERS if only in row[0].name]


def run(
    blocks: int, seed: int, minutes: float, only: str, searches: dict[str, hostile.Search]
) -> dict[tuple[str, str], Tally]:
    """Attacks until the blocks or the minutes are spent, the format that is furthest behind its share first."""
    draw, todo = random.Random(seed), targets(only)
    done, tallies = [0.0] * len(todo), dict[tuple[str, str], Tally]()
    end, total = time.monotonic() + 60 * minutes, 0
    while total < blocks and time.monotonic() < end:
        k = min(range(len(todo)), key=lambda i: done[i] / todo[i][2])
        fmt, shape, _ = todo[k]
        kinds = tuple(hostile.KINDS) if fmt.scale.enumerable else (draw.choice(list(hostile.KINDS)),)
        case = hostile.make(
            fmt, shape, kinds=kinds, size=draw.choice(hostile.SIZES), dtype=draw.choice(hostile.DTYPES),
            importance=draw.choice(("none", draw.choice(hostile.IMPORTANCES))), seed=draw.randrange(1 << 31),
        )  # fmt: skip
        count = attack(case, tallies, searches)
        done[k] += count
        total += count
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of all formats together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="ends earlier after this time")
    parser.add_argument("--only", default="", help="formats whose name contains this")
    parser.add_argument("--searches", nargs="+", help="torch, triton or an instruction set [all that run here]")
    arguments = parser.parse_args()
    known = hostile.searches()
    missing = sorted(set(arguments.searches or ()) - set(known))
    if missing:
        sys.exit(f"no search {missing[0]} on this machine; it has {', '.join(known)}")
    searches = {name: known[name] for name in arguments.searches or known}
    torch.set_num_threads(1)
    tallies = run(arguments.blocks, arguments.seed, arguments.minutes, arguments.only, searches)
    for (fmt, search), tally in tallies.items():
        line = {"format": fmt, "search": search, "blocks": tally.blocks, "seconds": round(tally.seconds, 3)}
        print(json.dumps(line | {"differing": tally.differing, "first": tally.first, "seed": arguments.seed}))
    sys.exit(1 if not tallies or any(tally.differing for tally in tallies.values()) else 0)


if __name__ == "__main__":
    main()
