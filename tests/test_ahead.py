"""Claims about what goes on beside imports: what is in the system's cache afterwards, that nothing waits for what is no
file, and when Python looks for cycles."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ptqpipe.checkpoint.direct import _in_cache
from ptqpipe.cli import ahead
from ptqpipe.cli.ahead import importing
from tests.quick_disk import waiting

MIB = 1 << 20
SECONDS = 30  # far above what any disk takes for a few MiB


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two files of 4 MiB, whose pages the system has forgotten. Skips where it does not forget them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for number in (2, 10):
        path = tmp_path / f"model-{number}.safetensors"
        path.write_bytes(bytes(4 * MIB))
        with open(path, "rb") as file, waiting():
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached(path, 0):
            pytest.skip("this file system lies in memory")
    return tmp_path


def cached(path: Path, mib: int) -> bool:
    with open(path, "rb") as file:
        return _in_cache(file.fileno(), mib * MIB, MIB)


def wait_until_cached(path: Path, mib: int) -> None:
    end = time.monotonic() + SECONDS
    while not cached(path, mib):
        assert time.monotonic() < end, f"MiB {mib} of {path.name} has not been read"
        time.sleep(0.01)


def test_the_weights_of_every_file_are_read(model: Path) -> None:
    with importing(str(model)):
        for name in ("model-2.safetensors", "model-10.safetensors"):
            for mib in range(4):
                wait_until_cached(model / name, mib)


def test_files_are_read_in_the_order_of_their_numbers_and_no_more_than_the_limit(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MOST_BYTES", 6 * MIB)
    monkeypatch.setattr(ahead, "_UNDER_WAY", MIB)  # so that it waits for what it has asked for, too
    with importing(str(model)):
        wait_until_cached(model / "model-2.safetensors", 3)
        wait_until_cached(model / "model-10.safetensors", 1)
    assert not cached(model / "model-10.safetensors", 3)


def test_nothing_is_read_after_the_context(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    entered = threading.Event()

    def advise(fd: int, start: int, nbytes: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            asked.append(start)
            entered.set()
            left.wait(SECONDS)

    left = threading.Event()
    monkeypatch.setattr(os, "posix_fadvise", advise)
    with importing(str(model)):
        assert entered.wait(SECONDS)
        threading.Timer(0.05, left.set).start()  # while the context ends
    assert asked == [0]
    assert "ptqpipe-ahead" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("what", ["pipe", "broken link", "folder without weights", "no folder", "name on the hub"])
def test_what_cannot_be_read_is_left_to_whoever_needs_it(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    path = tmp_path / "model.safetensors"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "broken link":
        path.symlink_to(tmp_path / "nowhere")
    named = {"no folder": str(path), "name on the hub": "Qwen/Qwen3-8B"}.get(what, str(tmp_path))
    with importing(named):
        pass


def test_with_one_processor_nothing_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with importing(str(model)):
        assert "ptqpipe-ahead" not in [thread.name for thread in threading.enumerate()]


IMPORTING = """
import gc, sys
from ptqpipe.cli.ahead import importing
from tests.quick_disk import waiting
looked = []
gc.callbacks.append(lambda phase, info: looked.append(phase))
{before}
with importing(None):
    kept = [[] for _ in range(200_000)]
inside = len(looked)
more = [[] for _ in range(5_000)]
print(inside > 0, len(looked) > inside, any(kept is found for found in gc.get_objects()))
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [("", "False True False"), ("sys.modules['torch'] = sys", "True True True"), ("gc.disable()", "False False True")],
    ids=["first import", "torch is there", "none are looked for anyway"],
)
def test_cycles_are_looked_for_after_the_first_import_and_not_among_what_it_brought(before: str, said: str) -> None:
    """(in the context, after it, whether what came in the context will be looked at)."""
    command = [sys.executable, "-c", IMPORTING.format(before=before)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == said + "\n"
