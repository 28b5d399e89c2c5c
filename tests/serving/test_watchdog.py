"""Claims about what notices ranks that hang, and about processes that end with the one that started them."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ptqpipe.serving import rank_processes as ranks
from ptqpipe.serving.rank_processes import RankInfo, WorkerRanks
from ptqpipe.serving.watchdog import LOOK_S, STOPPED_S, Stopped, Watchdog

LOOKS = 5
NUMBER = torch.ones(1)


def operation(watchdog: Watchdog, release: threading.Event) -> threading.Thread:
    """One under way in a thread, until it is released."""
    begun = threading.Event()

    def collective() -> torch.Tensor:
        begun.set()
        release.wait(30)
        return NUMBER

    thread = threading.Thread(target=lambda: watchdog(collective), daemon=True)
    thread.start()
    assert begun.wait(30)
    return thread


def test_an_operation_that_takes_too_long_is_noticed_at_the_last_look() -> None:
    watchdog, release = Watchdog(wait_s=LOOKS * LOOK_S), threading.Event()
    operation(watchdog, release)
    assert [watchdog.look() for _ in range(LOOKS + 2)] == [False] * LOOKS + [True, True]
    release.set()


def test_operations_that_end_are_not_added_up() -> None:
    watchdog = Watchdog(wait_s=LOOKS * LOOK_S)
    for _ in range(3 * LOOKS):
        release = threading.Event()
        thread = operation(watchdog, release)
        assert not watchdog.look()
        release.set()
        thread.join()
        assert not watchdog.look()


def test_an_operation_that_fails_has_ended() -> None:
    watchdog = Watchdog(wait_s=LOOKS * LOOK_S)

    def fails() -> torch.Tensor:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        watchdog(fails)
    assert not any(watchdog.look() for _ in range(3 * LOOKS))


def test_what_an_operation_gives_is_handed_on() -> None:
    assert Watchdog()(lambda: NUMBER) is NUMBER


def test_whoever_watches_is_told_once_who_does_not_answer() -> None:
    watchdog, release, told = Watchdog(wait_s=2 * LOOK_S), threading.Event(), threading.Event()
    said: list[str] = []

    def failed(what: str) -> None:
        said.append(what)
        told.set()

    operation(watchdog, release)
    watchdog.watch(failed, lambda: "rank 1 (process 5)")
    assert told.wait(30)
    release.set()
    assert said == ["rank 1 (process 5) has not answered for 0.2 s; the service cannot go on without it"]


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's letters are Linux's")
def test_a_process_counts_as_stopped_after_a_while_and_not_when_it_goes_on(sleeper: "subprocess.Popen[bytes]") -> None:
    stopped, most = Stopped(), round(STOPPED_S / LOOK_S)
    assert not any(stopped.look(sleeper.pid) for _ in range(2 * most))
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert not any(stopped.look(sleeper.pid) for _ in range(most - 1))
    sleeper.send_signal(signal.SIGCONT)
    os.waitpid(sleeper.pid, os.WCONTINUED)
    assert not stopped.look(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert [stopped.look(sleeper.pid) for _ in range(most)] == [False] * (most - 1) + [True]


def test_of_ranks_that_have_ended_the_one_that_was_killed_is_named(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ended because that one did not answer it."""
    monkeypatch.setattr(ranks, "_LOST_S", 0.3)
    found = WorkerRanks(RankInfo(size=3), {1: sleeper})
    assert (found.lost("reset by peer"), found.broken) == ("a rank does not answer: reset by peer", False)
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    ended.wait()
    found.processes = {1: ended, 2: sleeper}
    assert found.lost("reset by peer").startswith(f"rank 1 (process {ended.pid}) ended with code 1; ")
    sleeper.kill()
    sleeper.wait()
    assert found.lost("reset by peer").startswith(f"rank 2 (process {sleeper.pid}) was killed by signal 9; ")
    assert found.broken


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode().strip(), flush=True)
time.sleep(60)
"""
CHILD = """
import sys, time
from ptqpipe.run.processes import end_with_parent
end_with_parent({parent})
print("here", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    code = CHILD.format(parent="int(sys.argv[1])")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid, said = parent.stdout.readline().decode().split()
    assert said == "here"
    parent.kill()
    parent.wait()
    for _ in range(1200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
            return
        if state == "Z":  # it has ended; whoever it was given to has not asked for its status yet
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"it goes on ({state})")


def test_a_child_whose_parent_has_gone_before_it_looks_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD.format(parent=1 << 30)], capture_output=True, timeout=240)
    assert (done.returncode, done.stdout) == (1, b"")
