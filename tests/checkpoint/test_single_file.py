"""Claims about files that a command writes at its end: a bad place is found first, and nothing but the file is left."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ptqpipe.checkpoint.single_file import check_file, write_file
from ptqpipe.errors import OutputError, OutputExists


@pytest.fixture
def small_files() -> Iterator[None]:
    """The file system's own refusal: no file of this process may grow beyond 9000 bytes."""
    former, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, former[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, former)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_file_is_written_whole_with_its_folder_and_nothing_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / ("x" * 250)
    check_file(out)
    assert list(tmp_path.iterdir()) == []
    write_file(out, "größe\udcff\n")
    assert out.read_bytes() == "größe\\udcff\n".encode()
    assert os.listdir(out.parent) == [out.name]
    assert out.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("bad", ["folder", "file/x", "/proc/x", "/dev/full", "x" * 300, "~no-such-user/x"])
def test_a_place_for_no_file_is_one_line_that_names_it_and_the_remedy(tmp_path: Path, bad: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError) as caught:
        check_file(Path(bad) if bad.startswith("~") else tmp_path / bad)
    assert bad in str(caught.value)
    assert "another out" in str(caught.value)
    assert "partial" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it may not")
def test_a_folder_without_permission_is_found(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="permissions"):
        check_file(tmp_path / "shut" / "x")


def test_a_full_disk_is_found_first_and_leaves_nothing(tmp_path: Path, small_files: None) -> None:
    out = tmp_path / "out.json"
    check_file(out, nbytes=8000)
    with pytest.raises(OutputError, match="cannot be written"):
        check_file(out, nbytes=10_000)
    out.write_text("former")
    with pytest.raises(OutputError, match="cannot be written"):
        write_file(out, "x" * 10_000)
    assert out.read_text() == "former"
    assert os.listdir(tmp_path) == ["out.json"]


def test_only_a_file_of_ones_own_may_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "notes"
    out.write_text("mine")
    with pytest.raises(OutputExists, match="exists and is not a poem"):
        check_file(out, own=lambda head: head.startswith(b"O "), what="a poem")
    out.write_text("O rose")
    check_file(out, own=lambda head: head.startswith(b"O "), what="a poem")
    assert OutputExists.exit_code == 2
