"""Claims about ptqpipe.checkpoint.writer: what is written, what is refused, and what holds when the disk does not."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ptqpipe.checkpoint import layout as layout_module, writer as writer_module
from ptqpipe.checkpoint.dtypes import DTYPE_NAMES
from ptqpipe.checkpoint.layout import ShardLayout, TensorSpec
from ptqpipe.checkpoint.partial import completed_run
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.checkpoint.writer import CheckpointWriter
from ptqpipe.errors import CheckpointError, OutputError
from tests.checkpoint.builders import one_line
from tests.checkpoint.runs import (
    EXTRA,
    LAYOUT,
    RUN_ID,
    SIZES,
    content,
    convert,
    open_writer,
    snapshot,
    specs,
    write_unit,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "t.json").write_text('{"t": 1}')
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(OutputError) as caught:
        action()
    return one_line(caught.value)


def test_the_library_reads_what_is_written_bit_for_bit(out: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [d for d in DTYPE_NAMES if d not in (torch.float8_e8m0fnu, torch.bool)]
    tensors = {}
    for i, dtype in enumerate(dtypes):
        bits = torch.randint(0, 256, (24 * torch.empty(0, dtype=dtype).element_size(),), generator=generator)
        tensors[f"x.{i}"] = bits.to(torch.uint8).view(dtype).reshape(4, 6)
        tensors[f"y.{i}"] = tensors[f"x.{i}"].t()  # not contiguous
        tensors[f"s.{i}"] = tensors[f"x.{i}"][1, 2]  # a scalar
    tensors["bool"] = torch.tensor([True, False, True])
    groups = [[TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape))] for n, t in tensors.items()]
    layout = ShardLayout.plan(groups, shard_bytes=600)
    with CheckpointWriter.open(out, layout, run_id="r", mode="new") as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.commit("all", {})
        writer.finish(expected_units=["all"])
    found = {n: t for s in layout.shards for n, t in load_file(out / s.file).items()}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    with CheckpointReader.open(out) as reader:
        assert set(reader.entries) == set(tensors)


def test_the_output_is_exactly_what_was_planned(source: Path, out: Path) -> None:
    convert(out, source)
    assert {p.name for p in out.parent.iterdir()} == {"source", "out"}
    files = snapshot(out)
    assert files.keys() == {*LAYOUT.weight_files, *EXTRA, "t.json", "sub/t.json"}
    assert sum(len(files[name]) for name in LAYOUT.weight_files) == LAYOUT.file_bytes
    for unit in SIZES:
        for spec in specs(unit):
            place = LAYOUT.entries[spec.name]
            assert files[place.file.name][place.offset : place.offset + place.nbytes] == content(
                spec.name, place.nbytes
            )
    assert completed_run(out) == RUN_ID
    assert completed_run(out) != "other"


def test_threads_in_any_order_write_the_same_bytes(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BATCH_BYTES", 100)
    convert(out.with_name("one"), source)
    with open_writer(out) as writer:
        threads = [threading.Thread(target=write_unit, args=(writer, unit)) for unit in reversed(SIZES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        copy = [(source / "t.json", "t.json"), (source / "t.json", "sub/t.json")]
        writer.finish(expected_units=SIZES, extra=EXTRA, copy=copy)
    assert snapshot(out) == snapshot(out.with_name("one"))


def test_several_ranks_write_the_same_bytes_and_resume_with_another_number(source: Path, out: Path) -> None:
    convert(out.with_name("one"), source)
    owners = dict(zip(SIZES, LAYOUT.group_ranks(3), strict=True))
    assert set(owners.values()) == {0, 1, 2}
    first = open_writer(out, world=3)
    others = [open_writer(out, rank=rank, world=3) for rank in (1, 2)]
    for unit, rank in owners.items():
        if rank:
            write_unit(others[rank - 1], unit)
    for writer in others:
        writer.close()
    first.abort()
    with open_writer(out, mode="resume") as writer:
        assert writer.done().keys() == {unit for unit, rank in owners.items() if rank}
        for unit in SIZES.keys() - writer.done().keys():
            write_unit(writer, unit)
        copy = [(source / "t.json", "t.json"), (source / "t.json", "sub/t.json")]
        writer.finish(expected_units=SIZES, extra=EXTRA, copy=copy)
    assert snapshot(out) == snapshot(out.with_name("one"))


def test_a_rank_without_rank_0_is_refused(out: Path) -> None:
    assert "was not started by rank 0" in refused(lambda: open_writer(out, rank=1, world=2))
    with open_writer(out, world=2), pytest.raises(OutputError, match="started by another run"):
        open_writer(out, rank=1, world=2, run_id="other")


def test_each_rank_resumes_with_the_files_that_it_began_with_itself(out: Path) -> None:
    """Machines may have a copy of the source each, whose times differ; what a rank began with must be untouched."""
    here, there = {"x.safetensors": "copied at 1"}, {"x.safetensors": "copied at 2"}
    with open_writer(out, world=2, source_files=here), open_writer(out, rank=1, world=2, source_files=there) as writer:
        write_unit(writer, "a")
    assert "was written to" in refused(lambda: open_writer(out, mode="resume", world=2, source_files=there))
    with open_writer(out, mode="resume", world=2, source_files=here):
        with pytest.raises(OutputError, match="was written to"):
            open_writer(out, mode="resume", rank=1, world=2, source_files=here)
        open_writer(out, mode="resume", rank=1, world=2, source_files=there).close()
        open_writer(out, mode="resume", rank=2, world=3, source_files={"x.safetensors": "copied at 3"}).close()


def test_only_rank_0_finishes(out: Path) -> None:
    with (
        open_writer(out, world=2),
        open_writer(out, rank=1, world=2) as writer,
        pytest.raises(ValueError, match="rank 0"),
    ):
        writer.finish(expected_units=[])


def test_what_exists_is_never_taken_without_being_asked(source: Path, out: Path) -> None:
    out.mkdir()
    (out / "mine").write_text("dear")
    message = refused(lambda: convert(out, source))
    assert "overwrite=True" in message
    assert "no unfinished run" in refused(lambda: convert(out, source, mode="resume"))
    assert snapshot(out) == {"mine": b"dear"}
    assert [p.name for p in out.parent.iterdir() if p.name.startswith(".")] == []
    assert "no model that overwrite=True may replace" in refused(lambda: convert(out, source, mode="overwrite"))
    assert snapshot(out) == {"mine": b"dear"}
    (out / "model.safetensors").write_bytes(b"")
    convert(out, source, mode="overwrite")
    assert "mine" not in snapshot(out)
    assert "already complete" in refused(lambda: convert(out, source, mode="resume"))


def test_an_empty_folder_is_taken_and_a_file_is_not(source: Path, out: Path) -> None:
    out.mkdir()
    convert(out, source)
    assert (out / "config.json").exists()
    assert "is a file" in refused(lambda: convert(source / "t.json", source))
    assert "root folder" in refused(lambda: convert(Path("/"), source))


def test_an_output_that_appears_meanwhile_is_not_replaced(source: Path, out: Path) -> None:
    def appear(unit: str) -> None:
        out.mkdir(exist_ok=True)
        (out / "mine").write_text("dear")

    assert "exists and is not empty" in refused(lambda: convert(out, source, after_unit=appear))
    assert "exists and is not empty" in refused(lambda: convert(out, source, mode="resume"))
    assert snapshot(out) == {"mine": b"dear"}
    (out / "mine").unlink()
    convert(out, source, mode="resume")
    assert completed_run(out) == RUN_ID


def test_an_output_behind_a_link_is_written_where_it_points(source: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    out.symlink_to("disk/real")
    convert(out, source)
    assert out.is_symlink()
    assert completed_run(tmp_path / "disk" / "real") == RUN_ID


def interrupted(out: Path, source: Path, unit: str = "c") -> None:
    def stop(done: str) -> None:
        if done == unit:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(out, source, after_unit=stop)
    assert not out.exists()


def test_an_interrupted_run_resumes_without_doing_units_again(source: Path, out: Path) -> None:
    interrupted(out, source)
    again: list[str] = []
    assert "resume=True continues it, overwrite=True discards it" in refused(lambda: convert(out, source))
    convert(out, source, mode="resume", after_unit=again.append)
    assert again == ["d", "e"]
    convert(out.with_name("one"), source)
    assert snapshot(out) == snapshot(out.with_name("one"))


def test_a_leftover_is_discarded_on_demand(source: Path, out: Path) -> None:
    interrupted(out, source)
    again: list[str] = []
    convert(out, source, mode="overwrite", after_unit=again.append)
    assert again == list(SIZES)


def test_another_runs_leftover_is_not_resumed(source: Path, out: Path) -> None:
    interrupted(out, source)
    assert "started by another run" in refused(lambda: open_writer(out, mode="resume", run_id="other"))
    other = ShardLayout.plan([specs(unit) for unit in SIZES], shard_bytes=10**6)
    message = refused(lambda: CheckpointWriter.open(out, other, run_id=RUN_ID, mode="resume"))
    assert "layout of the shards changed" in message
    convert(out, source, mode="resume")


def test_records_come_back_as_json(out: Path) -> None:
    with open_writer(out) as writer:
        writer.commit("a", {"t": (1, 2), "x": 0.1, 3: None})  # type: ignore[dict-item]
        with pytest.raises(TypeError):
            writer.commit("b", {"t": torch.zeros(1)})
        writer.flush()
        assert writer.done() == {"a": {"t": [1, 2], "x": 0.1, "3": None}}


def test_missing_units_and_tensors_stop_the_finish(source: Path, out: Path) -> None:
    writer = open_writer(out)
    for unit in list(SIZES)[1:]:
        write_unit(writer, unit)
    assert "lacks 1 units, the first 'a'" in refused(lambda: writer.finish(expected_units=SIZES))
    writer.write("a.0", content("a.0", 300))
    writer.write("a.1", content("a.1", 40)[:39])
    writer.commit("a", {})
    assert "'a.1' was planned but never written in full" in refused(lambda: writer.finish(expected_units=SIZES))
    writer.write("a.1", content("a.1", 40)[20:], byte_offset=20)
    writer.finish(expected_units=SIZES, extra=EXTRA)
    convert(out.with_name("one"), source)
    assert all(snapshot(out)[f] == data for f, data in snapshot(out.with_name("one")).items() if f.startswith("model"))


def test_shards_changed_from_outside_are_not_published(source: Path, out: Path) -> None:
    def truncate(unit: str) -> None:
        if unit == "e":
            os.truncate(out.parent / ".out.partial" / "out" / LAYOUT.shards[0].file, 100)

    assert "changed from outside" in refused(lambda: convert(out, source, after_unit=truncate))
    assert not out.exists()


def test_a_file_that_the_library_cannot_open_gets_no_name(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header with a hole between two tensors, as a fault of the layout would make it."""
    real = layout_module.header_bytes
    monkeypatch.setattr(
        layout_module,
        "header_bytes",
        lambda *args: real(*args).replace(b"[0,12]", b"[0,11]").replace(b"[12,24]", b"[11,24]"),
    )
    layout = ShardLayout.plan([[TensorSpec("a", "F32", (3,)), TensorSpec("b", "F32", (3,))]], shard_bytes=600)
    writer = CheckpointWriter.open(out, layout, run_id="r", mode="new")
    for name in "ab":
        writer.write(name, torch.ones(3))
    writer.commit("all", {})
    line = refused(lambda: writer.finish(expected_units=["all"]))
    assert "is not what the safetensors library can open" in line
    assert not out.exists()
    writer.close()


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("../x", "inside it"),
        ("/x", "inside it"),
        ("", "inside it"),
        ("a/../../x", "inside it"),
        ("config.json", "written twice"),
        ("./config.json", "written twice"),
        (LAYOUT.shards[0].file, "written twice"),
        ("model.safetensors.index.json", "written twice"),
    ],
)
def test_further_files_stay_inside_and_do_not_collide(name: str, fragment: str, source: Path, out: Path) -> None:
    with open_writer(out) as writer:
        for unit in SIZES:
            write_unit(writer, unit)
        message = refused(lambda: writer.finish(expected_units=SIZES, extra=EXTRA, copy=[(source / "t.json", name)]))
    assert fragment in message
    assert not out.exists()


def test_a_file_to_carry_that_is_gone_is_the_sources_fault(source: Path, out: Path) -> None:
    (source / "t.json").unlink()
    with pytest.raises(CheckpointError, match=r"t\.json' cannot be read"):
        convert(out, source)
    (source / "t.json").write_text("{}")
    convert(out, source, mode="resume")


def test_writes_outside_a_tensor_or_of_another_dtype_are_bugs(out: Path) -> None:
    with open_writer(out) as writer:
        for data, offset in [(b"x" * 301, 0), (b"x", 300), (b"x", -1)]:
            with pytest.raises(ValueError, match=r"of 'a\.0'"):
                writer.write("a.0", data, byte_offset=offset)
        with pytest.raises(ValueError, match="planned as U8"):
            writer.write("a.0", torch.zeros(75))
        with pytest.raises(KeyError):
            writer.write("nobody", b"")
    with pytest.raises(ValueError, match="closed"):
        writer.write("a.0", b"x")


@pytest.mark.usefixtures("forks")
def test_two_processes_cannot_write_one_output(out: Path, source: Path) -> None:
    with open_writer(out):
        for mode in ("new", "resume", "overwrite"):
            assert f"is being written by process {os.getpid()}" in refused(lambda m=mode: open_writer(out, mode=m))  # type: ignore[misc]
    child = (
        "import sys, pathlib\nfrom tests.checkpoint.runs import *\n"
        "w = open_writer(pathlib.Path(sys.argv[1]), mode='resume')\nprint('ready', flush=True)\ninput()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", child, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert f"is being written by process {process.pid}" in refused(lambda: open_writer(out, mode="overwrite"))
        process.send_signal(signal.SIGKILL)
        process.wait()
    convert(out, source, mode="resume")  # the system frees a dead process's lock


def test_a_rank_of_a_former_run_that_still_writes_is_noticed(out: Path) -> None:
    first = open_writer(out, world=4)
    straggler = open_writer(out, rank=3, world=4)
    first.abort()
    assert "is being written by" in refused(lambda: open_writer(out, mode="resume"))
    straggler.close()
    open_writer(out, mode="resume").close()


def test_a_file_system_without_locks_is_reported(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(RuntimeWarning, match="without locks"):
        open_writer(out).close()


def failing(name: str, code: int, *, after: int) -> Callable[..., Any]:
    whole, calls = getattr(os, name), iter(range(10**6))

    def call(*args: Any) -> Any:
        if next(calls) >= after:
            raise OSError(code, os.strerror(code))
        return whole(*args)

    return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize(
    ("name", "after"), [("pwrite", 0), ("pwrite", 7), ("fdatasync", 0), ("write", 1), ("fsync", 9)]
)
def test_every_disk_error_is_one_line_and_resumable(
    name: str, after: int, code: int, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BATCH_BYTES", 400)
    with monkeypatch.context() as patch:
        broken = failing(name, code, after=after)
        patch.setattr(os, name, broken)
        if name == "fdatasync":
            patch.setattr("ptqpipe.checkpoint.writer.fdatasync", broken)
        message = refused(lambda: convert(out, source))
    assert os.strerror(code) in message
    assert ("free some space" in message) == (code in (errno.ENOSPC, errno.EDQUOT))
    assert not out.exists()
    mode = "resume" if (out.parent / ".out.partial").exists() else "new"
    convert(out, source, mode=mode)  # type: ignore[arg-type]
    convert(out.with_name("one"), source)
    assert snapshot(out) == snapshot(out.with_name("one"))


def test_short_writes_are_continued(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(out.with_name("one"), source)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:13], offset))
    convert(out, source)
    assert snapshot(out) == snapshot(out.with_name("one"))


def test_after_a_failed_sync_nothing_more_is_claimed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the system forgets pages that it failed to write: a second fdatasync succeeds though they are lost
    writer = open_writer(out)
    write_unit(writer, "a")
    with monkeypatch.context() as patch:
        patch.setattr("ptqpipe.checkpoint.writer.fdatasync", failing("fdatasync", errno.EIO, after=0))
        refused(writer.flush)
    for action in (writer.flush, lambda: write_unit(writer, "b"), writer.close):
        assert "Input/output error" in refused(action)
    with open_writer(out, mode="resume") as again:
        assert again.done() == {}


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file may grow beyond 50 bytes, as on a file system that is full or takes no large files."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, former[1]))
    yield 50
    resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_the_systems_own_refusal_of_a_large_file_is_one_line(out: Path, small_files: int) -> None:
    message = refused(lambda: open_writer(out))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    assert "File too large" in message


def test_too_little_space_is_said_before_anything_is_written(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=LAYOUT.file_bytes - 1))
        message = refused(lambda: CheckpointWriter.open(out, LAYOUT, run_id=RUN_ID, mode="new"))
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=LAYOUT.file_bytes))
        CheckpointWriter.open(out, LAYOUT, run_id=RUN_ID, mode="new").close()
    assert "B free" in message


def test_a_refused_start_leaves_nothing_behind(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    refused(lambda: open_writer(out))
    assert list(out.parent.iterdir()) == []


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that nobody may write to")
def test_a_read_only_target_is_one_line() -> None:
    message = refused(lambda: open_writer(Path("/sys/kernel/ptqpipe-test")))
    assert "cannot be written" in message
    assert "choose another out" in message


def test_a_target_under_a_file_is_one_line(source: Path) -> None:
    assert "is a file" in refused(lambda: open_writer(source / "t.json" / "out"))
