"""Claims about reading ahead: what is in the system's cache afterwards, and that nothing waits for what is no file."""

import os
import threading
import time
from pathlib import Path

import pytest

from ptqpipe.checkpoint.direct import _in_cache
from ptqpipe.cli import ahead
from ptqpipe.cli.ahead import reading_ahead

MIB = 1 << 20
SECONDS = 30  # far above what any disk takes for a few MiB


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two files of 4 MiB, whose pages the system has forgotten. Skips where it does not forget them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for number in (2, 10):
        path = tmp_path / f"model-{number}.safetensors"
        path.write_bytes(bytes(4 * MIB))
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for _ in range(100):
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if not cached(path, 0):
                    break
            else:
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
    with reading_ahead(str(model)):
        for name in ("model-2.safetensors", "model-10.safetensors"):
            for mib in range(4):
                wait_until_cached(model / name, mib)


def test_files_are_read_in_the_order_of_their_numbers_and_no_more_than_the_limit(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MOST_BYTES", 6 * MIB)
    monkeypatch.setattr(ahead, "_UNDER_WAY", MIB)  # so that it waits for what it has asked for, too
    with reading_ahead(str(model)):
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
    with reading_ahead(str(model)):
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
    with reading_ahead(named):
        pass


def test_with_one_processor_nothing_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with reading_ahead(str(model)):
        assert "ptqpipe-ahead" not in [thread.name for thread in threading.enumerate()]
