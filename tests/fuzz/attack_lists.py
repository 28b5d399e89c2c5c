"""Tiny checkpoints of every layout with every vendor's form of list, consistent and not: does `verify` see which are?

    python -m tests.fuzz.attack_lists                 # all
    python -m tests.fuzz.attack_lists --only modelopt # those with this in their name

Prints a JSON line for each wrong verdict, then the counts; exits with 1 where there was one: a fault of a consistent
checkpoint, or none that names the module of an inconsistent one. Needs a checkout and `pip install -e ".[dev]"`: the
checkpoints are those of the tests (tests/check/verify/vendors.py). Needs no network and no GPU.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from ptqpipe.check.verify.command import verify
from tests.check.verify.vendors import all_cases


def main() -> int:
    """Runs the cases; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    only = parser.parse_args().only
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (make, wrong)) in enumerate(all_cases().items()):
            if only not in name:
                continue
            faults = verify(make(Path(folder) / str(number)), workers=1).faults
            named = any(module in f"{fault.where} {fault.message}" for module in wrong for fault in faults)
            kind = "inconsistent" if wrong else "consistent"
            counts[kind] += 1
            if bool(faults) == bool(wrong) and (named or not wrong):
                continue
            counts[f"{kind}, wrong verdict"] += 1
            print(json.dumps({"case": name, "expected": wrong, "found": [f"{f.where}: {f.message}" for f in faults]}))
    print(json.dumps(counts))
    return 1 if any("wrong" in kind for kind in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
