"""Forks of a template are what the tests take them for: what a command of this interpreter does, a fork does, too."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.template import SETTLED

SEEN = """
import json, os, sys
from pathlib import Path
streams = [os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in range(3)]
own = [sys.argv, sys.orig_argv[1:], __name__, os.getcwd(), sys.path, dict(os.environ), os.getppid(), streams]
own += [sys.stdin.read(), sys.stdout.line_buffering, *(len(os.listdir(f"/proc/self/{of}")) for of in ("fd", "task"))]
own += [os.getpid() == os.getsid(0), __import__("signal").getsignal(2).__name__]
print(json.dumps(own))
"""
CHILD = "import os, sys; print(os.getppid() == int(sys.argv[1]), 'torch' in sys.modules)"
PARENT = f"""
import os, subprocess, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.communicate()[0].split(), child.returncode)
"""

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the libraries of a template have it, and what lm_eval sets where it is imported: ``forks`` takes it away."""
    for name, value in SETTLED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", "1")


def both(*arguments: str, monkeypatch: pytest.MonkeyPatch, **how: Any) -> list["subprocess.CompletedProcess[str]"]:
    """What a fork does and what an interpreter does."""
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False} | how
    forked = subprocess.run([sys.executable, *arguments], **options)
    monkeypatch.undo()
    return [forked, subprocess.run([sys.executable, *arguments], **options)]


@pytest.mark.parametrize("kind", ["code", "module", "file", "safe code", "safe file"])
def test_a_fork_sees_what_an_interpreter_sees(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    program = {"code": ("-c", SEEN), "module": ("-m", "seen"), "file": (str(tmp_path / "seen.py"),)}[kind.split()[-1]]
    program = ("-P", *program) if kind.startswith("safe") else program
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "more"), "OF_THE_TEST": "a\nb"}
    forked, plain = both(
        *program, "one", "", "two words",
        monkeypatch=monkeypatch, cwd=tmp_path, env=environment, input="given", start_new_session=kind == "code",
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    assert (forked.returncode, forked.stderr) == (0, plain.stderr)
    assert forked.stdout == plain.stdout


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('words')", 1),
        ("import atexit, os; atexit.register(os.write, 1, b'last'); print('first')", 0),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", 0),
    ],
)
def test_a_fork_ends_as_an_interpreter_does(code: str, ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forked, plain = both("-c", code, monkeypatch=monkeypatch)
    assert (forked.returncode, forked.stdout, forked.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert forked.returncode == ends


def test_an_error_that_nobody_catches_is_a_trace_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    forked, plain = both("-c", "1 / 0", monkeypatch=monkeypatch)
    assert forked.returncode == plain.returncode == 1
    assert forked.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_sitecustomize_on_the_path_comes_first(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import json; json.loads = lambda text: 'replaced'")
    command = [sys.executable, "-c", "import json; print(json.loads('1'))"]
    for path, said in ((str(tmp_path), "replaced\n"), ("", "1\n")):
        environment = {**os.environ, "PYTHONPATH": path}
        assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == said


def test_the_interpreters_that_a_fork_starts_are_forks_of_it_and_its_children() -> None:
    command = [sys.executable, "-c", PARENT, "--tp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "['True', 'True'] 0\n"


def test_a_fork_in_waiting_ends_with_the_one_that_would_start_it() -> None:
    code = "import os, sys; print(*open(f'/proc/self/task/{os.getpid()}/children').read().split(), flush=True); input()"
    command = [sys.executable, "-c", code, "--tp", "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        waiting = process.stdout.readline().split()
        process.kill()
    assert len(waiting) == 2
    for pid in waiting:  # or the time limit of the test; one that has ended stays until it is asked for its exit code
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
                signal.sigtimedwait([], 0.02)


@pytest.mark.interpreter
def test_what_is_marked_is_an_interpreter_of_its_own() -> None:
    command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_variables_that_are_read_at_the_start_of_an_interpreter_get_one() -> None:
    command = [sys.executable, "-c", "import sys; print('torch' in sys.modules, sys.flags.hash_randomization)"]
    for change, said in (({}, "True 1\n"), ({"PYTHONHASHSEED": "0"}, "False 0\n")):
        environment = {**os.environ, **change}
        assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == said
