"""Direct I/O: any offset and length, on file systems with and without it, and what the cache already holds."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ptqpipe.checkpoint import direct
from ptqpipe.checkpoint.direct import ALIGN, LEAST_BYTES, DirectFile, OutputFile, margin
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.errors import CheckpointError

SIZE = 3 * 2**20 + 12345


@pytest.fixture
def content() -> bytes:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator).numpy().tobytes()


def drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture(params=["direct", "cached", "no direct I/O", "cache unknown"])
def path(request: pytest.FixtureRequest, tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "file"
    found.write_bytes(content)
    if request.param == "no direct I/O":
        monkeypatch.setattr(direct, "open_direct", lambda path, flags: None)
    if request.param == "cache unknown":
        monkeypatch.setattr(direct, "_in_cache", lambda fd, offset, nbytes: True)
    if request.param != "cached":
        drop_from_cache(found)
    return found


@pytest.mark.parametrize("offset", [0, 8, ALIGN - 1, ALIGN, 123_456])
@pytest.mark.parametrize("length", [1, ALIGN, 2**20 + 7, None])
def test_reads_any_range(path: Path, content: bytes, offset: int, length: int | None) -> None:
    nbytes = SIZE - offset if length is None else length
    fd = os.open(path, os.O_RDONLY)
    file = DirectFile(path, fd)
    found = file.read(torch.zeros(nbytes + margin(), dtype=torch.uint8), offset, nbytes)
    assert found is not None
    assert found.numpy().tobytes() == content[offset : offset + nbytes]
    assert (found.data_ptr() - offset) % ALIGN == 0
    file.close()


def test_a_file_that_ends_early_is_told(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    file = DirectFile(path, fd)
    assert file.read(torch.zeros(2**20 + margin(), dtype=torch.uint8), SIZE - 2**20 + 1, 2**20) is None
    file.close()


def test_what_the_cache_holds_is_known_and_looking_does_not_fill_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    assert direct._in_cache(fd, 0, 2**20)
    drop_from_cache(path)
    for _ in range(2):
        if direct._in_cache(fd, 2**20, 2**20):
            pytest.skip("the file system keeps what it is asked to drop")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 2**20, 2**20)
    assert direct._in_cache(fd, 2**20, 2**20)
    assert not direct._in_cache(fd, 0, 2**20)
    os.close(fd)


def test_half_cached_files_are_read_right(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    drop_from_cache(path)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for start in range(0, SIZE, 3 * ALIGN):
        os.pread(fd, ALIGN + 5, start)
    file = DirectFile(path, fd)
    found = file.read(torch.zeros(SIZE + margin(), dtype=torch.uint8), 0, SIZE)
    assert found is not None
    assert found.numpy().tobytes() == content
    file.close()


@pytest.mark.parametrize("cut", [1, ALIGN + 1, 2**20])
def test_short_counts_are_continued(tmp_path: Path, content: bytes, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    whole_read, whole_write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole_read(fd, [views[0][: max(cut, ALIGN)]], at))
    fd = os.open(path, os.O_RDONLY)
    file = DirectFile(path, fd)
    found = file.read(torch.zeros(SIZE + margin(), dtype=torch.uint8), 0, SIZE)
    assert found is not None
    assert found.numpy().tobytes() == content
    file.close()
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: whole_write(fd, view[: max(cut, ALIGN)], at))
    out = OutputFile(tmp_path / "out")
    out.write(memoryview(content), 77)
    out.close()
    assert (tmp_path / "out").read_bytes()[77:] == content


@pytest.mark.parametrize("direct_io", [True, False])
def test_pieces_written_by_many_threads_meet(
    tmp_path: Path, content: bytes, direct_io: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct_io:
        monkeypatch.setattr(direct, "open_direct", lambda path, flags: None)
    generator = torch.Generator().manual_seed(1)
    large = content * 4
    edges = [0, *sorted(torch.randint(0, len(large), (60,), generator=generator).tolist()), len(large)]
    out = OutputFile(tmp_path / "out")
    os.ftruncate(out.fd, len(large))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: out.write(memoryview(large)[edges[i] : edges[i + 1]], edges[i]), range(len(edges) - 1)))
    out.close()
    assert (tmp_path / "out").read_bytes() == large


def test_a_file_system_that_refuses_at_the_write_gets_the_bytes_the_common_way(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = OutputFile(tmp_path / "out")
    whole = os.pwrite

    def refuse(fd: int, view: memoryview, at: int) -> int:
        if fd != out.fd:
            raise OSError(errno.EINVAL, "alignment")
        return whole(fd, view, at)

    monkeypatch.setattr(os, "pwrite", refuse)
    out.write(memoryview(content), 5)
    out.close()
    assert (tmp_path / "out").read_bytes()[5:] == content


def test_a_full_disk_is_an_error_not_a_detour(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    out = OutputFile(tmp_path / "out")

    def full(fd: int, view: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no space"):
        out.write(memoryview(content), 0)
    out.close()


def test_the_reader_reads_into_memory_of_its_caller(tmp_path: Path) -> None:
    w = torch.randn(700, 311)
    save_file({"a": torch.ones(3, dtype=torch.uint8), "w": w}, tmp_path / "model.safetensors")
    drop_from_cache(tmp_path / "model.safetensors")
    memory = torch.zeros(w.nbytes + margin() + 100, dtype=torch.uint8)
    with CheckpointReader.open(tmp_path) as reader:
        got = reader.read("w", start=3, stop=690, memory=lambda nbytes: memory[:nbytes])
        assert torch.equal(got, w[3:690])
        assert memory.data_ptr() <= got.data_ptr() < memory.data_ptr() + memory.nbytes
        assert got.nbytes > LEAST_BYTES
        os.truncate(tmp_path / "model.safetensors", 200_000)
        with pytest.raises(CheckpointError, match="has changed since it was opened"):
            reader.read("w", memory=lambda nbytes: memory[:nbytes])
