"""Breaks the scale searches one bound, comparison or rounding at a time, and shows that the tests notice every time.

``tests/numerics/search/mutants.toml`` lists the mutants: one change of a source each. A mutant is applied to a copy of
the package in a temporary folder; of the compiled kernels the copy gets the search alone, for one instruction set,
which compiles in seconds. Then the tests that have to notice run until one fails. Before that the same tests must pass
on the unchanged sources. One JSON line a mutant goes to --out:

    killed      a test failed: killed_by
    equivalent  no test failed, and none can: the table says why
    survived    no test failed: a test is missing
    skipped     this machine does not run the instruction set

The exit code is 1 if a mutant survives, if one that is called equivalent is killed, or if the tests fail without any
change; 2 if a mutant of the table no longer applies to the sources. Needs a C++ compiler, the compiled kernels
(pip install -e .) and what the tests need.

    python scripts/mutate_search.py [--list] [--only NAME] [--jobs 2] [--out benchmarks/mutants.jsonl]
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "numerics" / "search" / "mutants.toml"
CSRC = Path("ptqpipe/numerics/kernels/csrc")
LIBRARY = Path("ptqpipe/numerics/kernels/_cpu.so")
FLAGS = ("-g0", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-w")
NO_SEARCH = {"columns.h", "passes.h", "linear.h", "collective.h", "norm.h"}  # what body.h includes besides
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "pytest", "hypothesis", "numpy"])  # half of what a short run of tests costs
CPU_SECONDS = 600  # of a run of tests: a mutant that loops for ever is killed, too, however busy the machine is

# What ctypes calls, for the one instruction set that is built.
EXPORTS = """
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int32_t ptq_has(const char *name) { return !strcmp(name, PTQ_NAME); }
EXPORT int32_t ptq_abi(void) { return PTQ_ABI; }
EXPORT int32_t ptq_amax_of(const char *, const ptq_amax *j, float *out, int64_t *bad) { return amax(j, out, bad); }
EXPORT int32_t ptq_encode_rows(const char *, const ptq_encode *j) { return encode(j); }
"""
BLOCKS = "EXPORT int32_t ptq_quantize_blocks(const char *, const ptq_blocks *j) { return quantize_blocks(j); }\n"
LONG = "EXPORT int32_t ptq_quantize_long(const char *, const ptq_long *j) { return quantize_long(j); }\n"


def known_isas() -> tuple[str, ...]:
    """The instruction sets of this machine, best first; none without the compiled kernels."""
    from ptqpipe.numerics.kernels import cpu  # here alone: a child has to import the package of its own tree

    return cpu.isas()


class TableError(Exception):
    """A mutant that does not apply to the sources."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a source.

    file        the source, from the root of the repository
    find        text that lies in it once; replaced by ``put``
    breaks      what is wrong then
    isa         the instruction set to build, "" for the best one of this machine
    tests       test files and functions, of which one has to fail
    equivalent  why no test can notice, "" where one must
    """

    name: str
    file: str
    find: str
    put: str
    breaks: str
    tests: tuple[str, ...]
    isa: str = ""
    equivalent: str = ""

    @property
    def compiled(self) -> bool:
        """Whether the kernels have to be built for it."""
        return self.file.startswith(str(CSRC))

    def line(self) -> int:
        """The line of the source that is changed. TableError unless ``find`` lies in the file once."""
        text = (ROOT / self.file).read_text()
        if text.count(self.find) != 1:
            raise TableError(f"mutant {self.name!r}: {self.find!r} lies {text.count(self.find)} times in {self.file}")
        return text[: text.index(self.find)].count("\n") + 1


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant."""

    name: str
    file: str
    line: int
    breaks: str
    status: str
    killed_by: str
    isa: str
    seconds: float
    equivalent: str


def table() -> list[Mutant]:
    """The mutants of ``mutants.toml``. TableError for one that does not apply or a name that is there twice."""
    read = tomllib.loads(TABLE.read_text())
    mutants = [Mutant(**{"tests": tuple(read["tests"][entry["file"]])} | entry) for entry in read["mutant"]]
    for name, count in Counter(mutant.name for mutant in mutants).items():
        if count > 1:
            raise TableError(f"{count} mutants are called {name!r}")
    for mutant in mutants:
        mutant.line()
        if mutant.find == mutant.put:
            raise TableError(f"mutant {mutant.name!r} changes nothing")
    return mutants


def controls(mutants: list[Mutant]) -> Iterator[Mutant]:
    """For every set of tests, and every instruction set, a mutant that changes nothing."""
    seen: set[tuple[tuple[str, ...], str, bool]] = set()
    for mutant in mutants:
        kind = (mutant.tests, mutant.isa, mutant.compiled)
        if kind not in seen:
            seen.add(kind)
            yield replace(mutant, name="nothing changed", put=mutant.find, breaks="", equivalent="nothing is changed")


def build(tree: Path, mutant: Mutant, isa: str) -> str:
    """Compiles the search of one instruction set in ``tree``; the compiler's message where it fails.

    The translation unit is isa_*.cpp with less of body.h, and the functions that the tests call.
    """
    csrc = tree / CSRC
    parts = [
        line
        for line in (csrc / "body.h").read_text().partition("#ifdef PTQ_WIRE_ALONE")[0].splitlines()
        if not any(name in line for name in NO_SEARCH)
    ]
    blocks = not Path(mutant.file).name.startswith(("long", "integers"))
    exports = EXPORTS + LONG + (BLOCKS if blocks else "")
    unit = (csrc / f"isa_{isa}.cpp").read_text().replace('#include "body.h"', "\n".join(parts) + exports)
    source = tree / "search.cpp"
    source.write_text(unit)
    # Optimizing is most of the work, but leaves out at once what nothing calls: the templates of short blocks.
    level = "-O0" if blocks else "-O1"
    command = [os.environ.get("CXX", "g++"), level, *FLAGS, f"-I{csrc}", str(source), "-o", str(tree / LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


class Watch:
    """A pytest plugin: runs the fastest tests first and writes down what happens, a line each, as it happens."""

    def __init__(self, diary: Path, seconds: dict[str, float]) -> None:
        self.diary = diary.open("w", buffering=1)
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sorts by what the tests took on the unchanged sources."""
        items.sort(key=lambda item: self.seconds.get(item.nodeid, 0.0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test that never ends is named, too."""
        print(json.dumps([nodeid, "begun", 0.0]), file=self.diary)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The outcome of a test, and of what it needs."""
        if report.when == "call" or report.failed:
            print(json.dumps([report.nodeid, report.outcome, round(report.duration, 3)]), file=self.diary)


def child(tree: str, tests: tuple[str, ...], seconds: dict[str, float]) -> None:
    """Runs the tests in ``tree``; a process of its own, in which nothing of the package is imported yet."""
    assert not any(name.startswith("ptqpipe") for name in sys.modules)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    folder = Path(tree)
    out = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1), os.dup2(out, 2)
    os.chdir(folder)
    sys.path[:] = [tree, *(path for path in sys.path if path and not Path(path, "ptqpipe").is_dir())]
    os.environ |= {"PYTHONPATH": tree, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if any("triton" in test for test in tests):
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "--hypothesis-seed=0"]
    os._exit(int(pytest.main([*options, *tests], plugins=[Watch(folder / "diary", seconds)])))


def run_tests(tree: Path, tests: tuple[str, ...], seconds: dict[str, float]) -> str:
    """The first test that does not pass in ``tree``, or "". ``seconds`` is read, and grows by what passed."""
    process = FORKS.Process(target=child, args=(str(tree), tests, seconds))
    process.start()
    process.join()
    diary = tree / "diary"
    lines = [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []
    if not lines:
        raise TableError(f"no test ran: {(tree / 'output').read_text()[-2000:]}")
    nodeid, outcome, _ = lines[-1]
    if outcome == "failed" or process.exitcode != 0:
        return str(nodeid)  # the one that failed, or that ended the process
    passed = {nodeid: took for nodeid, outcome, took in lines if outcome == "passed"}
    if not passed:
        raise TableError(f"every test was skipped: {(tree / 'output').read_text()[-2000:]}")
    seconds.update(passed)
    return ""


def judge(mutant: Mutant, seconds: dict[str, float]) -> Result:
    """Applies a mutant to a copy of the package and runs its tests, in the order of ``seconds``."""
    began, line = time.monotonic(), mutant.line()
    isas = known_isas()
    isa = (mutant.isa or isas[0]) if mutant.compiled else ""

    def result(status: str, killed_by: str) -> Result:
        took = round(time.monotonic() - began, 1)
        return Result(mutant.name, mutant.file, line, mutant.breaks, status, killed_by, isa, took, mutant.equivalent)

    if isa and isa not in isas:
        return result("skipped", "")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("ptqpipe", "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        source = tree / mutant.file
        source.write_text(source.read_text().replace(mutant.find, mutant.put))
        if mutant.compiled and (message := build(tree, mutant, isa)):
            raise TableError(f"mutant {mutant.name!r} does not compile:\n{message[:2000]}")
        killed_by = run_tests(tree, mutant.tests, seconds)
    return result("killed" if killed_by else "equivalent" if mutant.equivalent else "survived", killed_by)


def wrong(result: Result) -> bool:
    """Whether a result is not what the table promises."""
    return result.status == "survived" or (result.status == "killed" and result.equivalent != "")


def report(results: list[Result]) -> int:
    """Prints the totals and what is wrong; the exit code."""
    counts = Counter(result.status for result in results if result.breaks)
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())), file=sys.stderr)
    for result in filter(wrong, results):
        by = f" by {result.killed_by}" if result.killed_by else ""
        print(f"{result.name} ({result.file}:{result.line}) {result.status}{by}: {result.breaks}", file=sys.stderr)
    return int(any(map(wrong, results)))


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--only", metavar="NAME", action="append", help="this mutant alone, without the unchanged run")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default 1)")
    parser.add_argument("--out", type=Path, help="the JSON lines (default: standard output)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """The exit code."""
    options = parse_args(argv)
    try:
        mutants = table()
        unknown = set(options.only or ()) - {mutant.name for mutant in mutants}
        if unknown:
            raise TableError(f"no mutant is called {', '.join(sorted(unknown))}; see --list")
        if options.only:
            mutants = [mutant for mutant in mutants if mutant.name in options.only]
        if options.list:
            for mutant in mutants:
                print(f"{mutant.name:32} {Path(mutant.file).name}:{mutant.line():<5} {mutant.breaks}")
            return 0
        if not known_isas():
            raise TableError("the compiled kernels are missing, which say what this machine runs: pip install -e .")
        seconds: dict[str, float] = {}
        results = []
        out = options.out.open("w") if options.out else sys.stdout
        with ThreadPoolExecutor(options.jobs) as pool:
            for part in ([] if options.only else list(controls(mutants)), mutants):
                for result in pool.map(partial(judge, seconds=seconds), part):
                    results.append(result)
                    print(json.dumps(asdict(result)), file=out, flush=True)
                if any(map(wrong, results)) and part is not mutants:
                    break
        return report(results)
    except TableError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
