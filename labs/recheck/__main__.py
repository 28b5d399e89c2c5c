"""Measures what convert's second look costs: the sample of every weight's blocks that is found again by brute force.

Usage: python -m labs.recheck [MODEL ...] [--formats nvfp4 ...] [--repeat 3] [--scratch DIR] [--results FILE]

MODEL is a folder, or a shape of make_synthetic_model.py [1gb]. Each format is converted in processes of their own, with
the second look and without it (a switch that only this script has), alternating. One JSON line for each: medians, all
runs, ratios with / without of wall and CPU seconds from the start of the interpreter to its exit, and `share`: the CPU
seconds that the threads of a run spent in the second look, divided by all of its process. Of a busy machine `share` is
the number to read: the ratios also have the noise of two runs. Sources and outputs lie in the page cache.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench_convert import Run, folder_bytes, make_source, measured

FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8_tensor", "fp8_block")


def child(model: Path, fmt: str, out: Path, workers: int, *, look: bool) -> None:
    """Converts, and prints the CPU seconds of the second look and its blocks; without it none."""
    import ptqpipe
    from ptqpipe.numerics.qtensor import QTensor
    from ptqpipe.quantization.recheck import Recheck
    from ptqpipe.quantization.unit import Promise

    spent: list[float] = []
    take, check = Recheck.take, Recheck.check

    def timed_take(self: Recheck, member: int, row: int, q: QTensor) -> None:
        begun, sink, passed = time.thread_time(), self._sink, 0.0
        sink(member, row, q)
        passed = time.thread_time() - begun
        self._sink = lambda *_: None
        if look:
            take(self, member, row, q)
        self._sink = sink
        spent.append(time.thread_time() - begun - passed)

    def timed_check(self: Recheck, promises: tuple[Promise, ...]) -> list[int]:
        begun = time.thread_time()
        found = check(self, promises) if look else [0] * len(promises)
        spent.append(time.thread_time() - begun)
        return found

    Recheck.take, Recheck.check = timed_take, timed_check  # type: ignore[method-assign, assignment]
    record = ptqpipe.convert(model, format=fmt, out=out, workers=workers, overwrite=True).record
    blocks = sum(entry["rechecked"] for entry in record["weights"].values())
    print(json.dumps({"seconds": sum(spent), "blocks": blocks, "weights": len(record["weights"])}))


def measure(model: Path, fmt: str, scratch: Path, *, repeat: int, workers: int) -> dict[str, Any]:
    """Everything about one format of one model."""
    from ptqpipe.numerics.kernels import cpu as kernels

    runs: dict[str, list[Run]] = {"with": [], "without": []}
    shares, told = [], {}
    load = os.getloadavg()[0]
    for turn in range(repeat):
        for look in ("with", "without") if turn % 2 == 0 else ("without", "with"):
            out = scratch / "converted"
            command = [sys.executable, "-m", "labs.recheck", "--child", str(model), fmt, str(out), str(workers), look]
            run, printed = measured(command)
            shutil.rmtree(out)
            runs[look].append(run)
            if look == "with":
                told = json.loads(printed)
                shares.append(told["seconds"] / run.cpu_seconds)
    wall, cpu = (
        {look: statistics.median(getattr(run, name) for run in runs[look]) for look in runs}
        for name in ("seconds", "cpu_seconds")
    )
    return {
        "model": model.parent.name if model.name == "hf" else model.name,
        "format": fmt,
        "isa": kernels.isa(),
        "source_bytes": folder_bytes(model),
        "weights": told["weights"],
        "blocks": told["blocks"],
        "workers": workers,
        "share": round(statistics.median(shares), 4),
        "share_goal": 0.02,
        "cpu_ratio": round(cpu["with"] / cpu["without"], 4),
        "wall_ratio": round(wall["with"] / wall["without"], 4),
        "all_shares": [round(share, 4) for share in shares],
        **{f"all_cpu_s_{look}": [round(run.cpu_seconds, 2) for run in found] for look, found in runs.items()},
        **{f"all_wall_s_{look}": [round(run.seconds, 2) for run in found] for look, found in runs.items()},
        "load_average_before": round(load, 1),
        "processors": os.cpu_count(),
    }


def main() -> None:
    """Parses the options, measures, prints."""
    if sys.argv[1:2] == ["--child"]:
        model, fmt, out, workers, look = sys.argv[2:]
        child(Path(model), fmt, Path(out), int(workers), look=look == "with")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[Path("1gb")], metavar="MODEL")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"), help="folder for sources and outputs")
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    for named in options.models:
        model = named
        if not model.is_dir():
            model = options.scratch / named
            make_source(str(named), model, None)
        for fmt in options.formats:
            line = json.dumps(measure(model, fmt, options.scratch, repeat=options.repeat, workers=options.workers))
            print(line, flush=True)
            if options.results:
                with open(options.results, "a", encoding="utf-8") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
