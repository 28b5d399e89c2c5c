"""Claims about checkpoints of more shards than a process may open files."""

import errno
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ptqpipe.checkpoint.layout import ShardLayout, TensorSpec
from ptqpipe.checkpoint.open_files import OpenFiles
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.checkpoint.writer import CheckpointWriter
from ptqpipe.errors import read_failure, write_failure

SHARDS = 400


@pytest.fixture
def few_files() -> Iterator[int]:
    """At most 128 open files, as `ulimit -n` sets them."""
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, former[1]))
    yield 128
    resource.setrlimit(resource.RLIMIT_NOFILE, former)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for i in range(SHARDS):
        save_file({f"t.{i}": torch.full((300,), i)}, folder / f"model-{i + 1:05}-of-{SHARDS:05}.safetensors")
    return folder


def test_all_shards_are_read_in_any_order_by_many_threads(source: Path, few_files: int) -> None:
    wrong: list[int] = []
    with CheckpointReader.open(source) as reader:
        reader.fingerprint()

        def read(first: int) -> None:
            for i in range(SHARDS):
                number = (first + 37 * i) % SHARDS
                found = reader.read(f"t.{number}")
                large = reader.read(f"t.{number}", memory=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
                wrong.extend([number] * (not bool((found == number).all() and (large == number).all())))

        threads = [threading.Thread(target=read, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_all_shards_are_written_and_resumed(tmp_path: Path, source: Path, few_files: int) -> None:
    layout = ShardLayout.plan([[TensorSpec(f"t.{i}", "I64", (300,))] for i in range(SHARDS)], shard_bytes=2400)
    assert len(layout.shards) == SHARDS
    for begin, mode in ((0, "new"), (SHARDS // 2, "resume")):
        with CheckpointWriter.open(tmp_path / "out", layout, run_id="x", mode=mode) as writer:  # type: ignore[arg-type]
            assert len(writer.done()) == begin
            assert all(writer.is_sound(f"t.{i}") for i in range(begin))
            for i in range(begin, SHARDS if begin else SHARDS // 2):
                writer.write(f"t.{i}", torch.full((300,), i))
                writer.commit(f"t.{i}", {})
            if begin:
                writer.finish(expected_units=[f"t.{i}" for i in range(SHARDS)])
    with CheckpointReader.open(tmp_path / "out") as reader:
        assert all(int(reader.read(f"t.{i}")[-1]) == i for i in range(SHARDS))


class File:
    opened = 0

    def __init__(self, path: Path) -> None:
        type(self).opened += 1
        self.path, self.open = path, True

    def close(self) -> None:
        assert self.open
        self.open = False


def test_a_file_that_is_used_stays_open_and_the_oldest_of_the_others_goes(few_files: int) -> None:
    files = OpenFiles(File)
    with files.use(Path("a")) as first:
        for i in range(50):
            with files.use(Path(str(i))) as other:
                assert other.open
        assert first.open
        before = File.opened
        with files.use(Path("49")) as again, files.use(Path("a")) as same:
            assert again is other
            assert same is first
        assert File.opened == before
        files.close()
        assert first.open
        assert not other.open
    files.close()
    assert not first.open


def test_the_remedies_fit_the_causes() -> None:
    @contextmanager
    def of(code: int) -> Iterator[OSError]:
        import os

        yield OSError(code, os.strerror(code))

    for code, words in (
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
        (errno.ENOENT, "put it back"),
        (errno.ESTALE, "put it back"),
        (errno.EIO, "the disk failed"),
    ):
        with of(code) as error:
            assert words in read_failure(error)
            assert words in write_failure(error)
    for code, words in (
        (errno.EROFS, "mount the file system for writing and resume=True"),
        (errno.ENOSPC, "free some space and resume=True"),
        (errno.EDQUOT, "free some space and resume=True"),
        (errno.EACCES, "change its folder's permissions"),
    ):
        with of(code) as error:
            assert words in write_failure(error)
            assert "resume=" not in write_failure(error, resumes=False)
