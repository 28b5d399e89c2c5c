"""The command line: Ctrl-C, a full disk and the end of the process leave no trace and keep what is done."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from ptqpipe.errors import NumericsError
from tests.cli.calls import refused, run


def test_ctrl_c_in_a_dry_run_ends_without_a_trace(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("ptqpipe.conversion.convert_summary.plan_text", interrupted)
    result = run("convert", "model", "-o", "out", "--dry-run")
    assert result.exit_code == 130
    assert result.stderr.strip() == "Interrupted: nothing is written."
    assert not list(here.glob("*out*"))


@pytest.mark.parametrize(
    ("command", "stage", "words"),
    [
        (("generate", "model", "-q", "-o", "out"), "calibration.own_text.generate", "nothing is written"),
        (("eval", "model", "--data", "file"), "check.evaluate.command.evaluate", "stays in the cache for the next run"),
        (("demo", "-o", "out"), "pipeline.demo.run_demo", "finished are kept in out"),
        (
            ("plan", "model", "--budget", "5bits", "-o", "out"),
            "pipeline.budget.command.plan_mixed",
            "nothing is written",
        ),
        (
            ("plan", "model", "--budget", "5bits", "-o", "out", "--measure", "file"),
            "pipeline.budget.command.plan_mixed",
            "kept in out.measured.jsonl, and the same command continues",
        ),
        (("verify", "model"), "check.verify.command.verify", "nothing is written"),
        (("inspect", "model"), "check.inspect.inspect", "nothing is written"),
        (("diff", "model", "model"), "check.diff.diff", "nothing is written"),
        (("report", "model"), "check.report.command.make_report", "nothing is written"),
        (("convert", "model", "-o", "out"), "conversion.command.convert", "nothing is written"),
        (("calibrate", "model", "--data", "file", "-o", "out"), "calibration.command.calibrate", "nothing is written"),
        (("tune", "model", "--data", "file", "-o", "out"), "pipeline.tune.command.tune", "nothing is written"),
        (
            ("transform", "model", "--transforms", "rotate", "-o", "out"),
            "conversion.transform.command.transform",
            "nothing is written",
        ),
        (
            ("relayout", "model", "--container", "modelopt", "-o", "out"),
            "conversion.relayout.command.relayout",
            "nothing is written",
        ),
        (("dequantize", "model", "-o", "out"), "conversion.dequantize.dequantize", "nothing is written"),
    ],
)
def test_ctrl_c_says_in_a_sentence_what_is_kept(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], stage: str, words: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ptqpipe.{stage}", interrupted)
    result = run(*command)
    assert result.exit_code == 130
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Interrupted: ")
    assert words in line
    assert not list(here.glob("*out*"))


def test_ctrl_c_names_the_command_that_continues_where_there_is_something_to_continue(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        (here / ".out.partial").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("ptqpipe.calibration.command.calibrate", interrupted)
    command = ["calibrate", "model", "--data", "a file", "-o", "out"]
    monkeypatch.setattr(sys, "argv", ["ptqpipe", *command])
    result = run(*command)
    assert result.exit_code == 130
    assert result.stderr.strip().endswith("continue with: ptqpipe calibrate model --data 'a file' -o out --resume")


@pytest.mark.parametrize(
    ("before", "options", "told"),
    [
        (False, (), True),
        (True, (), False),
        (True, ("--resume",), True),
        (True, ("--overwrite",), True),
    ],
)
def test_an_error_says_what_became_of_what_was_finished(
    before: bool, options: tuple[str, ...], told: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this run: one that another has left is what its own error is about."""

    def fails(*_: object, **__: object) -> None:
        (here / ".out.partial").mkdir(exist_ok=True)
        raise NumericsError("there is NaN")

    if before:
        (here / ".out.partial").mkdir()
    monkeypatch.setattr("ptqpipe.calibration.command.calibrate", fails)
    result = run("calibrate", "model", "--data", "a file", "-o", "out", *options)
    assert result.exit_code == 1
    kept = "; what is finished is kept (--resume continues it, --overwrite starts over)"
    assert result.stderr.strip() == "Error: there is NaN" + (kept if told else "")


def test_what_was_measured_is_written_even_if_nobody_reads_what_is_printed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("ptqpipe.check.evaluate.command.evaluate", lambda *_, **__: {"version": 1})
    monkeypatch.setattr(click, "echo", closed)
    result = run("eval", "model", "--data", "file", "-o", "found.json", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    assert json.loads((here / "found.json").read_text()) == {"version": 1}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes where it may not")
def test_a_read_only_target_is_one_line(here: Path) -> None:
    (here / "shut").mkdir(mode=0o500)
    assert "permissions" in refused("convert", "model", "-o", "shut/out")


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_disk_that_fills_up_is_one_line_and_the_run_resumes(here: Path) -> None:
    """The file system's own refusal, by the largest file that this process may write."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY)); "
        "from ptqpipe.cli import main; main(sys.argv[1:])"
    )
    args = ["convert", "model", "-o", "out", "-q"]
    full = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=120)
    assert full.returncode == 1
    assert "Traceback" not in full.stderr
    assert "cannot be written" in full.stderr.splitlines()[-1]
    assert not (here / "out").exists()
    assert run(*args, "--resume").exit_code == 0
    assert run("verify", "out", "--source", "model").exit_code == 0


MEMORY = (
    MemoryError(),
    MemoryError("the system has no 5 bytes"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
)


@pytest.mark.parametrize("error", MEMORY, ids=lambda error: f"{type(error).__name__} {error}"[:40])
@pytest.mark.parametrize(
    ("command", "stage", "remedy"),
    [
        (
            ("convert", "model", "-o", "out"),
            "conversion.command.convert",
            "lower --workers or --max-memory, or raise the limit",
        ),
        (("inspect", "model"), "check.inspect.inspect", "; raise the limit"),
    ],
)
def test_what_memory_does_not_suffice_for_is_one_line_with_what_this_command_can_do(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, command: tuple[str, ...], stage: str, remedy: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"ptqpipe.{stage}", fails)
    result = run(*command)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: out of memory")
    assert remedy in line


@pytest.mark.parametrize(
    ("command", "stage", "remedy"),
    [
        (
            ("convert", "model", "-o", "out"),
            "conversion.command.convert",
            "lower --workers, lower --max-memory, use --device",
        ),
        (("inspect", "model"), "check.inspect.inspect", "; end other programs on it"),
    ],
)
def test_a_full_gpu_is_no_limit_of_the_process(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], stage: str, remedy: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(f"ptqpipe.{stage}", fails)
    result = run(*command)
    assert result.exit_code == 1
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: out of memory on the GPU (CUDA out of memory. Tried to allocate 2 GiB); end other")
    assert remedy in line
    assert "ulimit" not in line


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), RuntimeError("pthread_create failed"), OSError("pthread_create")]
)
def test_what_threads_do_not_suffice_for_is_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("ptqpipe.conversion.command.convert", fails)
    result = run("convert", "model", "-o", "out")
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert "starts no more threads" in line
    assert "lower --workers" in line


def test_other_errors_of_these_kinds_are_bugs_and_keep_their_trace(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("ptqpipe.conversion.command.convert", fails)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run("convert", "model", "-o", "out")


@pytest.mark.parametrize("limit_mb", [600, 1000, 1600])
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_limit_of_memory_ends_in_one_line(here: Path, limit_mb: int) -> None:
    """The kernel's own refusals, wherever they come: while libraries are imported, when threads start, in the work."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit_mb << 20},) * 2); "
    code += "from ptqpipe.__main__ import run; run()"
    command = [sys.executable, "-c", code, "convert", "model", "-o", "out", "-q", "--workers", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "Traceback" not in done.stderr
    if done.returncode != 0:
        assert done.stderr.strip().splitlines()[-1].startswith("Error"), done.stderr
    assert run("convert", "model", "-o", "again").exit_code == 0


def test_ctrl_c_while_the_command_line_is_imported_leaves_no_trace() -> None:
    script = (
        "import sys; from importlib.abc import MetaPathFinder\n"
        "class Interrupts(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from ptqpipe.__main__ import run; run()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (130, "")


STUCK = """
import sys, threading, time
from datetime import timedelta
import click
import ptqpipe.__main__, ptqpipe.cli
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
store.set_timeout(timedelta(seconds=1))

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2)

def wait():
    try:
        store.get("what nobody sets")  # in C++; over while the interpreter's own end would still sleep
    except Exception:
        pass

@click.command()
def main():
    global slow
    slow = Slow()
    threading.Thread(target=wait, name="ptqpipe-engine", daemon=True).start()
    time.sleep(0.3)
    click.echo("said")
    sys.exit(7)

ptqpipe.cli.main = lambda: main(args=[])
ptqpipe.__main__.run()
"""


@pytest.mark.slow
def test_a_thread_that_waits_for_a_dead_rank_does_not_spoil_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (7, "said\n"), done.stderr


ENDING = """
import atexit, sys, threading
import ptqpipe.__main__, ptqpipe.cli

class Kept:
    def __del__(self, say=print):
        say("taken apart")

kept = Kept()
atexit.register(print, "asked")
if sys.argv[1:]:
    threading.Thread(target=threading.Event().wait).start()  # for ever, and no daemon
ptqpipe.cli.main = lambda: sys.exit(3)
ptqpipe.__main__.run()
"""


@pytest.mark.parametrize("options", [(), ("waits",)], ids=["idle", "waiting"])
def test_what_a_command_leaves_behind_is_neither_taken_apart_nor_waited_for(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", ENDING, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "asked\n"), done.stderr
