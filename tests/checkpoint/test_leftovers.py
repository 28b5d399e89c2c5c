"""Claims about what a killed run, or one that is alive, has left beside an output: --resume always comes to an end."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ptqpipe.checkpoint.lock import RankLock, holder_of, locked
from ptqpipe.checkpoint.partial import Paths, check_output
from ptqpipe.errors import AlreadyComplete, OutputError, WrongOutput
from tests.checkpoint.holding import another_process_in
from tests.checkpoint.runs import convert, open_writer, snapshot, write_unit


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "t.json").write_text('{"t": 1}')
    return path


def begun(out: Path) -> Path:
    """The partial folder of a run of one unit."""
    with open_writer(out) as writer:
        write_unit(writer, "a")
    return Paths.of(out).partial


def without(out: Path, *names: str) -> None:
    """A folder of a finished run of which so much is removed already."""
    partial = begun(out)
    for name in names:
        path = partial / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def renamed(out: Path) -> None:
    begun(out).rename(Paths.of(out).gone)


LEFT: dict[str, Callable[[Path], None]] = {
    "nothing": lambda out: None,
    "an empty folder": lambda out: Paths.of(out).partial.mkdir(),
    "a lock": lambda out: without(out, "out", "journal-0.jsonl"),
    "a journal": lambda out: without(out, "out"),
    "a journal without its lock": lambda out: without(out, "out", "lock-0"),
    "what was renamed": renamed,
    "a part of what was renamed": lambda out: (Paths.of(out).gone / "old").mkdir(parents=True),
}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("mode", ["resume", "overwrite"])
def test_beside_a_complete_output_nothing_keeps_a_call_from_its_end(
    left: str, mode: str, tmp_path: Path, source: Path
) -> None:
    LEFT[left](tmp_path / "out")
    leftovers = [
        path for path in (Paths.of(tmp_path / "out").partial, Paths.of(tmp_path / "out").gone) if path.exists()
    ]
    aside = [path.rename(path.with_name(f"{path.name}.aside")) for path in leftovers]
    convert(tmp_path / "out", source)
    expected = snapshot(tmp_path / "out")
    for path in aside:
        path.rename(path.with_name(path.name.removesuffix(".aside")))
    if mode == "resume":
        with pytest.raises(AlreadyComplete, match="is already complete, by this very run"):
            convert(tmp_path / "out", source, mode="resume")
    else:
        convert(tmp_path / "out", source, mode="overwrite")
    assert snapshot(tmp_path / "out") == expected
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize("left", LEFT)
def test_without_an_output_the_run_starts_again(left: str, tmp_path: Path, source: Path) -> None:
    LEFT[left](tmp_path / "out")
    convert(tmp_path / "out", source, mode="resume")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize("left", LEFT)
def test_beside_an_output_of_another_run_it_is_refused_and_nothing_is_lost(left: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    LEFT[left](out)
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"dear")
    for _ in range(2):
        with pytest.raises(WrongOutput, match="is no output of this run; overwrite=True replaces it"):
            open_writer(out, mode="resume")
        assert snapshot(out) == {"model.safetensors": b"dear"}
        assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize("mode", ["new", "resume", "overwrite"])
@pytest.mark.parametrize("folder", ["partial", "stages"])
@pytest.mark.parametrize("output", [False, True])
def test_while_another_process_is_at_it_every_call_names_that_and_changes_nothing(
    mode: str, folder: str, output: bool, tmp_path: Path, source: Path
) -> None:
    out = tmp_path / "out"
    if output:
        convert(out, source)
    held = getattr(Paths.of(out), folder)
    with another_process_in(held) as pid:
        (held / "journal-0.jsonl").write_text("")
        (held / "out").mkdir()
        before = snapshot(tmp_path)
        for call in (lambda: convert(out, source, mode=mode), lambda: check_output(out, mode=mode)):
            with pytest.raises(OutputError, match=rf"is being written by process {pid} on .*; wait for it") as caught:
                call()
            assert not {"resume=", "overwrite="} & {word[: word.find("=") + 1] for word in str(caught.value).split()}
        assert snapshot(tmp_path) == before
        assert holder_of(held).startswith(f"process {pid} ")
    assert holder_of(held) == ""


def test_a_lock_is_of_the_folder_that_has_its_name(tmp_path: Path) -> None:
    """Its holder renames the folder before it empties it: whoever has opened the lock then makes another one."""
    folder = tmp_path / "folder"
    folder.mkdir()
    lock = RankLock(folder)
    assert holder_of(folder) == ""  # of another process
    folder.rename(tmp_path / "gone")
    assert not lock.in_place()
    with locked(folder) as other:
        assert other.in_place()
        assert not lock.in_place()
    assert {path.name for path in tmp_path.iterdir()} == {"gone"}
    lock.release()
