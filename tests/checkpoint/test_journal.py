"""Claims about ptqpipe.checkpoint.journal: what survives a crash, what is refused."""

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptqpipe.checkpoint.journal import Journal, RunIdentity, check_same_run, read_journal, read_journals
from ptqpipe.errors import OutputError
from tests.checkpoint.builders import one_line

RUN = RunIdentity("run", "layout", {"source": "s", "recipe": "r"})


def write(path: Path, *batches: list[tuple[str, dict[str, Any]]], identity: RunIdentity = RUN) -> None:
    journal = Journal(path, identity)
    for i, batch in enumerate(batches):
        journal.append(batch, [i])
    journal.close()


def test_batches_come_back(tmp_path: Path) -> None:
    path = tmp_path / "journal-0.jsonl"
    write(path, [("a", {"x": 1.5, "é\n": [None, "\r"]}), ("b", {})], [("c", {"n": float("inf")})])
    write(path, [("d", {})])
    content = read_journal(path)
    assert content.identity == RUN
    assert content.units == {"a": {"x": 1.5, "é\n": [None, "\r"]}, "b": {}, "c": {"n": float("inf")}, "d": {}}
    assert content.tensors == {0, 1}


def test_any_tear_loses_the_last_batch_alone_and_the_next_append_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "journal-0.jsonl"
    write(path, [("a", {})], [("b", {"text": "x" * 50})])
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 0x0A]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        content = read_journal(path)
        assert list(content.units) == ["a", "b"][: max(complete - 1, 0)]
        assert (content.identity is None) == (complete == 0)
        write(path, [("z", {})])
        assert list(read_journal(path).units) == [*content.units, "z"]


def test_a_tail_of_zeros_after_a_power_cut_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "journal-0.jsonl"
    write(path, [("a", {})])
    size = path.stat().st_size
    os.truncate(path, size + 4096)
    write(path, [("b", {})])
    assert list(read_journal(path).units) == ["a", "b"]
    assert b"\0" not in path.read_bytes()


def test_every_changed_byte_before_the_last_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal-0.jsonl"
    write(path, [("a", {"sha256": "00"})], [("b", {})])
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for position in range(last - 1):  # the line break before the last line makes that one longer, and torn
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(OutputError) as caught:
            read_journal(path)
        assert "is damaged at line" in one_line(caught.value)
    for position in range(last, len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert list(read_journal(path).units) == ["a"]


def test_a_full_disk_leaves_no_half_line_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal-0.jsonl"
    journal = Journal(path, RUN)
    whole = os.write
    calls = iter([10, None])

    def filling(fd: int, data: memoryview) -> int:
        count = next(calls)
        if count is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(fd, data[:count])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", filling)
        with pytest.raises(OSError, match="No space"):
            journal.append([("a", {})], [])
    journal.append([("b", {})], [])
    journal.close()
    assert list(read_journal(path).units) == ["b"]


def test_the_ranks_journals_are_one(tmp_path: Path) -> None:
    write(tmp_path / "journal-0.jsonl", [("a", {})])
    write(tmp_path / "journal-11.jsonl", [("b", {})])
    (tmp_path / "journal-2.jsonl").touch()
    (tmp_path / "lock-0").touch()
    assert read_journals(tmp_path).units.keys() == {"a", "b"}
    write(tmp_path / "journal-3.jsonl", identity=RunIdentity("other", "layout"))
    with pytest.raises(OutputError, match="belongs to another run"):
        read_journals(tmp_path)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ptqpipe.checkpoint.journal.VERSION", 99)
        write(tmp_path / "journal-0.jsonl")
    with pytest.raises(OutputError, match="version 99, expected 3"):
        read_journal(tmp_path / "journal-0.jsonl")


@pytest.mark.parametrize(
    ("other", "fragment"),
    [
        (RunIdentity("x", "layout", {"source": "t", "recipe": "r"}), "source changed since"),
        (RunIdentity("x", "layout", {"source": "t", "recipe": "q"}), "recipe and source changed"),
        (RunIdentity("x", "layout", RUN.parts), "the plan changed"),
        (RunIdentity("run", "other", RUN.parts), "the layout of the shards changed"),
    ],
)
def test_a_refused_resume_says_what_changed(other: RunIdentity, fragment: str, tmp_path: Path) -> None:
    check_same_run(RUN, RUN, partial=tmp_path)
    with pytest.raises(OutputError) as caught:
        check_same_run(RUN, other, partial=tmp_path)
    assert fragment in one_line(caught.value)


def test_the_same_run_of_other_files_is_refused_by_their_names(tmp_path: Path) -> None:
    begun = replace(RUN, files={"a": "1", "b": "2", "c": "3"})
    check_same_run(begun, replace(begun), partial=tmp_path)
    for files, words in (
        ({"a": "1", "b": "0", "c": "3"}, "source's 'b' was written to"),
        ({"a": "0", "b": "0", "c": "3"}, "source's 'a' (one of 2 files) was"),
        ({"a": "1", "b": "2"}, "source's 'c' was"),
        ({}, "source's 'a' (one of 3 files) was"),
    ):
        with pytest.raises(OutputError, match=re.escape(words)):
            check_same_run(begun, replace(begun, files=files), partial=tmp_path)
