"""Claims about what other packages print: it stays off the terminal, tears no bar, and is not lost."""

import io
import logging
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest

from ptqpipe.cli import foreign
from ptqpipe.errors import PtqWarning
from ptqpipe.run.machine import counting_bar


def child(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that has held back what others say, and then runs ``body``."""
    head = "import os, sys, warnings, logging\nfrom ptqpipe.cli.foreign import hold_back\nhold_back(os.environ)\n"
    call = [sys.executable, "-c", head + textwrap.dedent(body)]
    return subprocess.run(call, capture_output=True, text=True, timeout=300, env={"PATH": "/usr/bin", **environment})


SAYS = """
    warnings.warn("old name", FutureWarning)
    warnings.warn_explicit("deeper", UserWarning, "torch/nn/module.py", 7)
    logging.getLogger("some.package").warning("advice")
"""


def test_others_are_silent_and_ptqpipe_is_not() -> None:
    done = child(SAYS + "    from ptqpipe.errors import PtqWarning\n    warnings.warn('a cut text', PtqWarning)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "warning: a cut text\n")


def test_who_asks_for_warnings_gets_them() -> None:
    done = child(SAYS, PYTHONWARNINGS="default")
    assert all(word in done.stderr for word in ("FutureWarning: old name", "UserWarning: deeper", "advice"))


def test_behind_the_trace_of_a_bug_they_are_not_lost() -> None:
    done = child(SAYS + "    raise KeyError('a bug')")
    trace, behind = done.stderr.split("KeyError: 'a bug'\n")
    assert "Traceback" in trace
    assert [line.split(": ", 1)[-1] for line in behind.splitlines()] == [
        "FutureWarning: old name", "UserWarning: deeper", "advice",
    ]  # fmt: skip
    assert "old name" not in trace


def test_packages_with_handlers_of_their_own_are_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "warnoptions", [])
    chosen = {"TRANSFORMERS_VERBOSITY": "debug"}
    foreign.hold_back(chosen)
    assert chosen.pop("TRANSFORMERS_VERBOSITY") == "debug"
    assert chosen == {"HF_HUB_VERBOSITY": "error", "DATASETS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class Screen(io.StringIO):
    """A terminal; `lines` is what stands on it."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        found, row, at = [""], 0, 0
        for char in self.getvalue().replace("\x1b[A", "\v"):
            if char == "\n":
                row, at = row + 1, 0
                found += [""] * (row == len(found))
            elif char == "\v":
                row -= 1
            elif char == "\r":
                at = 0
            else:
                found[row] = found[row][:at].ljust(at) + char + found[row][at + 1 :]
                at += 1
        return [line.rstrip() for line in found]


def test_lines_that_others_print_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in pieces, by a logger, from another thread, below two bars at once."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with counting_bar(4, "layers", shown=True, title="tune") as advance:
        advance(1, "layer 1 of 4")
        print("one", file=sys.stderr)
        sys.stderr.write("two in ")
        advance(1, "layer 2 of 4")
        sys.stderr.write("pieces\nthree\n")
        thread = threading.Thread(target=lambda: print("four", file=sys.stderr))
        thread.start()
        thread.join()
        with counting_bar(2, "steps", shown=True, title="inner", leave=False) as inner:
            inner(1, "")
            print("five", file=sys.stderr)
        logging.StreamHandler(sys.stderr).emit(logging.makeLogRecord({"msg": "six"}))
        sys.stderr.write("no end")
        advance(2, "layer 4 of 4")
    assert sys.stderr is screen
    text = [line for line in screen.lines if line and not line.startswith("inner")]
    assert text[:6] == ["one", "two in pieces", "three", "four", "five", "six"]
    assert sum(line.startswith("tune: 100%") for line in text) == 1
    assert all(line.startswith("tune:") or line in ("no end",) for line in text[6:])


def test_without_a_bar_stderr_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with counting_bar(4, "layers", shown=False):
        assert sys.stderr is screen


def test_every_warning_of_the_package_is_its_own_kind() -> None:
    package = Path(foreign.__file__).resolve().parents[1]
    calls = [
        (path, text[at : at + 400])
        for path in package.rglob("*.py")
        if path.name != "hook.py"  # which may import nothing
        for text in [path.read_text(encoding="utf-8")]
        for at in range(len(text))
        if text.startswith("warnings.warn(", at) or text.startswith("partial(warnings.warn", at)
    ]
    assert len(calls) >= 8
    assert not [path for path, call in calls if "PtqWarning" not in call.partition("stacklevel")[0]]
    assert issubclass(PtqWarning, UserWarning)
