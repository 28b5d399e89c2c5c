"""Measures what deciding a conversion takes where no weight is read: a dry run over the headers of DeepSeek-V3.

Usage: python -m labs.headers [--layout deepseek-v3] [--formats nvfp4 ...] [--repeat 3] [--results FILE]

The checkpoint has the names, shapes, dtypes and files of the published one (671 billion weights, 688 GB), its weights
are holes in the files (make_published_layout.py). Each run is a whole process with its imports, whose bytecode is there
as in an installation: a first run writes it to a temporary folder and does not count. ``bare_s`` is a process that asks
for help. One JSON line a format, medians of the seconds (``cpu_s``: of CPU time, which other processes of the machine
disturb less) and the largest peak:

    goal_s, goal_mib  5 s and 500 MiB
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from bench_convert import measured
from make_published_layout import LAYOUTS, make

GOAL_SECONDS, GOAL_MIB = 5.0, 500


def main() -> int:
    """Parses the options and measures; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="deepseek-v3")
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "fp8_block"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args()
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        made = make(model, options.layout, sparse=True)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(folder, "bytecode"))
        python = [sys.executable, "-P", "-m", "ptqpipe", "convert"]
        bare = [measured([*python, "--help"])[0].seconds for _ in range(options.repeat)]
        for fmt in options.formats:
            command = [*python, str(model), "--format", fmt, "--dry-run", "-o", str(Path(folder, "out"))]
            measured(command)
            runs = [measured(command)[0] for _ in range(options.repeat)]
            seconds, peak = statistics.median(run.seconds for run in runs), max(run.peak_bytes for run in runs) / 2**20
            missed |= seconds > GOAL_SECONDS or peak > GOAL_MIB
            line = json.dumps({
                "layout": options.layout, "format": fmt, **made, "dry_run_s": round(seconds, 2),
                "cpu_s": round(statistics.median(run.cpu_seconds for run in runs), 2),
                "bare_s": round(statistics.median(bare), 2), "peak_rss_mib": round(peak, 1), "goal_s": GOAL_SECONDS,
                "goal_mib": GOAL_MIB, "all_s": [round(run.seconds, 2) for run in runs],
                "load_average": round(os.getloadavg()[0], 1), "processors": os.cpu_count(),
            })  # fmt: skip
            print(line, flush=True)
            if options.results:
                with open(options.results, "a", encoding="utf-8") as file:
                    file.write(line + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
