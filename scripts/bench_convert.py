"""Measures ``ptqpipe convert`` end to end: wall time against the disk and against the search alone, and peak memory.

Usage: python scripts/bench_convert.py [--cases llama-8b:nvfp4 ...] [--layers N] [--repeat 3] [--scratch DIR]

A case is SHAPE:FORMAT[@CONTAINER][:absmax] (absmax: the global scale from amax instead of the searched one). For each,
alternating, ``--repeat`` times in one run, every measurement in a process of its own:

convert  ``python -m ptqpipe convert``, from the start of the interpreter to its exit, everything on disk
copy     reading all bytes of the source and writing as many as the output has, through one loop of 8 MiB pieces, fsync
direct   the same past the page cache, as convert reads and writes (ptqpipe/checkpoint/direct.py), in pieces of 32 MiB
search   what convert computes for every unit (scales, codes, errors), weights in memory (as codes where the source has
         fewer than 8 bits), on the same number of threads; loading is not timed

PTQPIPE_ISA=avx2 measures as on a processor without AVX-512; the line says so.

The package's bytecode is written before, which an installed one has.

The source's pages are dropped from the system's cache before every convert and copy (posix_fadvise), outputs deleted
after. Memory is sampled every 20 ms over the process and its children, and asked from the kernel at the end (the larger
counts). One JSON line a case: medians, all runs, ratio = convert / max(copy, search), ratio_direct with the direct
copy. The disk must hold the source and one output (25 GB for llama-8b to fp8); a source is made by
make_synthetic_model.py, in the layout of a vendor (gpt-oss-1gb) by make_published_layout.py, and removed after its
cases.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from make_published_layout import LAYOUTS

PIECE = 8 << 20
DIRECT_PIECE = 32 << 20
SAMPLE_SECONDS = 0.02
HELD_BYTES = 3 << 30  # weights that the search measurement holds at once
DEFAULT_CASES = (
    "llama-8b:nvfp4",
    "llama-8b:nvfp4:absmax",
    "llama-8b:mxfp4",
    "llama-8b:fp8",
    "moe-fused:nvfp4",
    "moe-fused:mxfp4",
    "moe-fused:fp8",
)


@dataclass(frozen=True, slots=True)
class Case:
    """What is converted to what."""

    shape: str
    format: str
    global_scale: str
    container: str | None

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From SHAPE:FORMAT[@CONTAINER][:absmax]."""
        shape, output, *rest = text.split(":")
        fmt, _, container = output.partition("@")
        return cls(shape, fmt, rest[0] if rest else "search", container or None)


@dataclass(frozen=True, slots=True)
class Run:
    """One measured process: seconds from start to exit, CPU seconds, peak resident bytes of it and its children."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def measured(command: Sequence[str]) -> tuple[Run, str]:
    """Runs a command to its end; SystemExit with its last words if it fails."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = [0]
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, peak, stop))
    watcher.start()
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read() if process.stderr else ""))
    reader.start()
    output = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    stop.set()
    watcher.join()
    reader.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}:\n{errors[0][-2000:]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, max(peak[0], usage.ru_maxrss * 1024)), output


def _watch(pid: int, peak: list[int], stop: threading.Event) -> None:
    while not stop.wait(SAMPLE_SECONDS):
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
            peak[0] = max(peak[0], sum(member.memory_info().rss for member in family))
        except psutil.Error:
            continue


def compile_package() -> None:
    """Writes the bytecode of ptqpipe, as installing it does: without it every process compiles what it imports."""
    subprocess.run(
        [sys.executable, "-P", "-m", "compileall", "-q", str(Path(__file__).parents[1] / "ptqpipe")], check=True
    )


def drop_cache(folder: Path) -> None:
    """Asks the system to forget the cached pages of every file of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copy_child(source: Path, target: Path, write_bytes: int) -> None:
    """Reads everything below ``source`` and writes ``write_bytes`` to ``target``, on disk when it returns."""
    total = folder_bytes(source)
    read = written = 0
    with open(target, "wb", buffering=0) as out:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            with open(path, "rb", buffering=0) as file:
                buffer = bytearray(PIECE)
                while count := file.readinto(buffer):
                    read += count
                    due = write_bytes * read // total - written
                    while due > 0:
                        step = out.write(memoryview(buffer)[: min(due, PIECE)])
                        written, due = written + step, due - step
        os.fsync(out.fileno())


def direct_child(source: Path, target: Path, write_bytes: int) -> None:
    """``copy_child`` past the page cache."""
    import torch

    from ptqpipe.checkpoint.direct import DirectFile, OutputFile, bytes_of, margin

    total = folder_bytes(source)
    read = written = 0
    memory = torch.empty(DIRECT_PIECE + margin(), dtype=torch.uint8)
    out = OutputFile(target)
    os.ftruncate(out.fd, write_bytes)
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        file, size = DirectFile(path, fd), path.stat().st_size
        for start in range(0, size, DIRECT_PIECE):
            got = file.read(memory, start, min(DIRECT_PIECE, size - start))
            if got is None:
                raise SystemExit(f"{path} ended early")
            read += got.numel()
            step = write_bytes * read // total - written
            out.write(bytes_of(got)[:step], written)
            written += step
        file.close()
    os.fsync(out.fd)
    out.close()


def search_child(source: Path, case: Case, workers: int) -> dict[str, float]:
    """Seconds of what convert computes, weights in memory, summed over groups of units that fit ``HELD_BYTES``."""
    import torch

    from ptqpipe.conversion.prepare import prepare
    from ptqpipe.conversion.unit_job import QuantizeUnit
    from ptqpipe.models.source import SourceRows
    from ptqpipe.quantization import rtn
    from ptqpipe.quantization.unit import Task
    from ptqpipe.recipe.options import RecipeOptions

    torch.set_num_threads(1)
    options = RecipeOptions(format=case.format, global_scale=case.global_scale, container=case.container)
    prepared = prepare(source, options=options, out=source.parent / "never-written")
    seconds = cpu_seconds = elements = 0.0

    def work(item: tuple[Any, list[SourceRows]]) -> None:
        unit, weights = item
        names = [member.weight for member in unit.members]
        rtn.quantize(Task(weights, unit.scheme.fmt, names, lambda member, row, q: None, options=unit.rule))

    def flush(held: list[tuple[Any, list[SourceRows]]]) -> tuple[float, float]:
        begun, cpu_begun = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, held))
        return time.perf_counter() - begun, time.process_time() - cpu_begun

    with prepared.source:
        held: list[tuple[Any, list[SourceRows]]] = []
        size = 0
        for job in prepared.jobs:
            if not isinstance(job, QuantizeUnit):
                continue
            weights = [SourceRows(prepared.source, m.source, shape=m.shape, cache=True) for m in job.unit.members]
            held.append((job.unit, weights))
            for weight in weights:  # reads it all: codes below 8 bits, or numbers
                codes = weight.quantized(0, weight.shape[0])
                numbers = 0 if codes is not None else weight.rows(0, 1).element_size() * math.prod(weight.shape)
                size += numbers if codes is None else codes.nbytes
            elements += job.unit.elements
            if size >= HELD_BYTES:
                wall, cpu = flush(held)
                seconds, cpu_seconds = seconds + wall, cpu_seconds + cpu
                held, size = [], 0
        wall, cpu = flush(held)
    return {"seconds": seconds + wall, "cpu_seconds": cpu_seconds + cpu, "elements": elements}


def measure_case(
    case: Case, source: Path, scratch: Path, *, repeat: int, workers: int, max_memory: str, alone: bool
) -> dict[str, Any]:
    """Everything about one case; ``alone``: of the conversion, without what it is compared with."""
    out, copied = scratch / "converted", scratch / "copied"
    converts: list[Run] = []
    copies: list[Run] = []
    directs: list[Run] = []
    searches: list[dict[str, float]] = []
    written = 0
    load = os.getloadavg()
    for _ in range(repeat):
        shutil.rmtree(out, ignore_errors=True)
        drop_cache(source)
        command = [
            sys.executable,
            "-P",
            "-m",
            "ptqpipe",
            "convert",
            str(source),
            "--format",
            case.format,
            "-o",
            str(out),
        ]
        command += ["--global-scale", case.global_scale, "--workers", str(workers), "--max-memory", max_memory, "-q"]
        command += ["--container", case.container] if case.container else []
        run, _ = measured(command)
        converts.append(run)
        written = folder_bytes(out)
        shutil.rmtree(out)
        if alone:
            continue
        drop_cache(source)
        run, _ = measured([sys.executable, __file__, "--child-copy", str(source), str(copied), str(written)])
        copies.append(run)
        copied.unlink()
        drop_cache(source)
        run, _ = measured([sys.executable, __file__, "--child-direct", str(source), str(copied), str(written)])
        directs.append(run)
        copied.unlink()
        spelled = f"{case.shape}:{case.format}{'@' + case.container if case.container else ''}:{case.global_scale}"
        _, output = measured([sys.executable, __file__, "--child-search", str(source), spelled, str(workers)])
        searches.append(json.loads(output))
    wall = statistics.median(run.seconds for run in converts)
    peak = max(run.peak_bytes for run in converts)
    found = {
        "case": f"{case.shape}:{case.format}" + (":absmax" if case.global_scale == "absmax" else ""),
        "source_bytes": folder_bytes(source),
        "output_bytes": written,
        "workers": workers,
        "max_memory": max_memory,
        "convert_s": round(wall, 2),
        "peak_rss_mib": round(peak / 2**20, 1),
        "peak_rss_goal_mib": 2048,
        "convert_cpu_s": round(statistics.median(run.cpu_seconds for run in converts), 2),
        "all_convert_s": [round(run.seconds, 2) for run in converts],
        "load_average_before": round(load[0], 1),
        "processors": os.cpu_count(),
        "isa": os.environ.get("PTQPIPE_ISA", "the best"),
    }
    if alone:
        return found
    copy = statistics.median(run.seconds for run in copies)
    direct = statistics.median(run.seconds for run in directs)
    search = statistics.median(run["seconds"] for run in searches)
    elements = searches[0]["elements"]
    return found | {
        "quantized_elements": int(elements),
        "copy_s": round(copy, 2),
        "search_s": round(search, 2),
        "ratio": round(wall / max(copy, search), 3),
        "ratio_goal": 1.25,
        "direct_s": round(direct, 2),
        "ratio_direct": round(wall / max(direct, search), 3),
        "search_cpu_s": round(statistics.median(run["cpu_seconds"] for run in searches), 2),
        "copy_cpu_s": round(statistics.median(run.cpu_seconds for run in copies), 2),
        "convert_mparam_per_s": round(elements / wall / 1e6, 1),
        "all_copy_s": [round(run.seconds, 2) for run in copies],
        "all_direct_s": [round(run.seconds, 2) for run in directs],
        "all_search_s": [round(run["seconds"], 2) for run in searches],
    }


def make_source(shape: str, target: Path, layers: int | None) -> None:
    """The synthetic checkpoint, unless it is there already."""
    if (target / "config.json").exists():
        return
    published = shape in LAYOUTS
    script = Path(__file__).with_name("make_published_layout.py" if published else "make_synthetic_model.py")
    command = [sys.executable, str(script), str(target), "--layout" if published else "--shape", shape]
    subprocess.run(command + (["--layers", str(layers)] if layers else []), check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Parses the options, measures, prints."""
    if sys.argv[1:2] == ["--child-copy"]:
        copy_child(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
        return
    if sys.argv[1:2] == ["--child-direct"]:
        direct_child(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
        return
    if sys.argv[1:2] == ["--child-search"]:
        print(json.dumps(search_child(Path(sys.argv[2]), Case.parse(sys.argv[3]), int(sys.argv[4]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(DEFAULT_CASES), metavar="SHAPE:FORMAT[:absmax]")
    parser.add_argument("--layers", type=int, help="layers of every source [the shape's]")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-memory", default="2GiB")
    parser.add_argument("--scratch", type=Path, default=Path("bench-scratch"), help="folder for sources and outputs")
    parser.add_argument("--alone", action="store_true", help="measure the conversion alone")
    parser.add_argument("--keep-sources", action="store_true", help="leave the synthetic sources for the next run")
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args()
    cases = [Case.parse(text) for text in options.cases]
    options.scratch.mkdir(parents=True, exist_ok=True)
    compile_package()
    for shape in dict.fromkeys(case.shape for case in cases):
        source = options.scratch / shape
        make_source(shape, source, options.layers)
        for case in (case for case in cases if case.shape == shape):
            result = measure_case(
                case,
                source,
                options.scratch,
                repeat=options.repeat,
                workers=options.workers,
                max_memory=options.max_memory,
                alone=options.alone,
            )
            line = json.dumps({**result, "layers": options.layers})
            print(line, flush=True)
            if options.results:
                with open(options.results, "a", encoding="utf-8") as file:
                    file.write(line + "\n")
        if not options.keep_sources:
            shutil.rmtree(source)


if __name__ == "__main__":
    main()
