"""Claims about kill -9 and power cuts: at whichever system call the process dies, nothing is lost and it resumes.

A child runs the small conversion of runs.py with every system call that changes the disk counted, and kills
itself with SIGKILL before the n-th, for every n; at a write, half of it is done. In the harsher half of the tests
the child also undoes what no fdatasync has confirmed, as a power cut may.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ptqpipe.checkpoint import writer as writer_module
from ptqpipe.errors import AlreadyComplete, WrongOutput
from tests.checkpoint.killing import dies
from tests.checkpoint.runs import convert, snapshot

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place: thousands of fsyncs are not what these tests are about."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture
def source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(writer_module, "BATCH_BYTES", 400)
    path = folder / "source"
    path.mkdir()
    (path / "t.json").write_text('{"t": 1}')
    return path


def resume(out: Path, source: Path) -> None:
    """What a user does after a kill: the same call with --resume, wherever it came. Nothing else is left behind."""
    with suppress(AlreadyComplete):
        convert(out, source, mode="resume")
    assert not list(out.parent.glob(f".{out.name}.*"))


@pytest.mark.slow
@pytest.mark.parametrize("power_cut", [False, True])
def test_killed_at_any_call_the_output_is_absent_or_whole_and_resumes_to_the_same_bytes(
    power_cut: bool, folder: Path, source: Path
) -> None:
    convert(folder / "expected", source)
    expected = snapshot(folder / "expected")
    out = folder / "out"
    for n in range(1, 1000):
        died = dies(n, lambda: convert(out, source), power_cut=power_cut)
        if out.exists():
            assert snapshot(out) == expected
        resume(out, source)
        assert snapshot(out) == expected
        shutil.rmtree(out)
        if not died:
            break
    assert n > 80
    assert not died


@pytest.mark.slow
def test_killed_while_replacing_the_former_output_is_never_lost(folder: Path, source: Path) -> None:
    convert(folder / "expected", source)
    expected = snapshot(folder / "expected")
    former = {"model.safetensors": b"dear", "sub/yours": b"too"}
    out, partial = folder / "out", folder / ".out.partial"
    places = set()
    for n in range(1, 1000):
        for name, data in former.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(data)
        died = dies(n, lambda: convert(out, source, mode="overwrite"), power_cut=False)
        if out.exists():
            assert snapshot(out) in (former, expected)
            places.add("former" if snapshot(out) == former else "new")
        else:
            assert snapshot(partial / "old") == former
            places.add("aside")
        # before the journal has its first line there is nothing to resume, and OUT is in the way
        begun = any(b"\n" in p.read_bytes() for p in partial.glob("journal-*"))
        if not begun and snapshot(out) == former:
            with pytest.raises(WrongOutput, match="overwrite=True replaces it"):
                convert(out, source, mode="resume")
            assert [path.name for path in folder.iterdir() if "out" in path.name] == ["out"]
            convert(out, source, mode="overwrite")
        resume(out, source)
        assert snapshot(out) == expected
        shutil.rmtree(out)
        if not died:
            break
    assert not died
    assert places == {"former", "aside", "new"}


def test_a_run_killed_again_and_again_still_ends(folder: Path, source: Path) -> None:
    convert(folder / "expected", source)
    out = folder / "out"
    for n in [30, 45, 25, 60, 33, 41, 70, 52, 90, 110]:
        if not dies(n, lambda: resume(out, source), power_cut=True):
            break
    resume(out, source)
    assert snapshot(out) == snapshot(folder / "expected")
