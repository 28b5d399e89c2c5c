"""Claims about texts: what becomes tokens, and one line for what does not."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ptqpipe.check.evaluate.tokenized_text import check_text, read_text
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.runtime.loading import load_tokenizer


def letters(text: str, *, verbose: bool = True) -> dict[str, list[int]]:
    """A token a letter."""
    return {"input_ids": [ord(c) for c in text]}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_a_text_is_one_stream(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("hello\nyou")
    found = read_text(file, lambda: letters)
    assert bytes(found.tokens.tolist()) == b"hello\nyou"
    assert found.name == file.name


def test_the_field_of_a_row_can_be_named(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"text": "no", "body": "yes"})
    assert bytes(read_text(file, lambda: letters, field="body").tokens.tolist()) == b"yes"
    with pytest.raises(UsageError, match="max_tokens=1: expected 2 or more"):
        read_text(file, lambda: letters, max_tokens=1)


def test_the_digest_is_of_the_tokens_that_are_used(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("abcdef")
    expected = hashlib.sha256(b"".join(ord(c).to_bytes(8, "little") for c in "abc")).hexdigest()
    assert read_text(file, lambda: letters, max_tokens=3).sha256 == expected
    file.write_text("abcxyz")
    assert read_text(file, lambda: letters, max_tokens=3).sha256 == expected


def test_no_more_is_tokenized_than_is_asked_for(tmp_path: Path) -> None:
    given: list[str] = []

    def counting(text: str, *, verbose: bool = True) -> dict[str, list[int]]:
        given.append(text)
        return letters(text)

    long = "abcde" * 100
    (tmp_path / "a.txt").write_text(long)
    rows = lines(tmp_path / "a.jsonl", *({"text": word} for word in ("ab", *["cd" * 100] * 9)))
    assert bytes(read_text(tmp_path / "a.txt", lambda: counting, max_tokens=3).tokens.tolist()) == b"abc"
    assert given.pop() == long[:192]
    assert bytes(read_text(rows, lambda: counting, max_tokens=6).tokens.tolist()) == b"ab\n\ncd"
    assert given.pop() == "ab\n\n" + "cd" * 100 + "\n\n" + "cd" * 91
    assert len(read_text(tmp_path / "a.txt", lambda: counting).tokens) == 500


def test_rows_of_text_are_parted_by_a_blank_line(tmp_path: Path) -> None:
    found = read_text(lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two", "id": 3}), lambda: letters)
    assert bytes(found.tokens.tolist()) == b"one\n\ntwo"


class Beginning:
    """A token a letter, with one before each text."""

    bos_token_id = 1

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1, *letters(text)["input_ids"]]}


def test_a_text_knows_the_token_that_each_of_its_windows_begins_with(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefg")
    found = read_text(tmp_path / "a.txt", Beginning)
    assert found.begin == 1
    assert found.windows(3).tolist() == [[1, ord("a"), ord("b")], [1, ord("d"), ord("e")]]
    plain = read_text(tmp_path / "a.txt", lambda: letters)
    assert (plain.begin, plain.windows(3)[1].tolist()) == (None, [ord(c) for c in "def"])
    assert read_text(lines(tmp_path / "b.jsonl", {"input_ids": [5, 6]}), Beginning).begin is None


def test_rows_of_tokens_need_no_tokenizer(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"input_ids": [5, 6]}, {"input_ids": [7]})
    found = read_text(file, lambda: load_tokenizer(tmp_path))
    assert found.tokens.tolist() == [5, 6, 7]


def test_parquet_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    assert bytes(read_text(tmp_path / "a.parquet", lambda: letters).tokens.tolist()) == b"one\n\ntwo"
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(UsageError, match="is not a parquet file"):
        read_text(tmp_path / "b.parquet", lambda: letters)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"x", "gives 1 tokens"),
        ("a.txt", b"abc\xff", r"not UTF-8 text \(byte 3\)"),
        ("a.jsonl", b'{"text": "a"}\n{oops\n', "line 2 is not JSON"),
        ("a.jsonl", b"[1, 2]\n", "line 1 is list"),
        ("a.jsonl", b'{"words": "a"}\n', "line 1 has words, not any of"),
        ("a.jsonl", b'{"input_ids": {"a": 1}}\n', "line 1, 'input_ids' is dict, expected a text"),
        ("a.jsonl", b'{"input_ids": [1, 2]}\n{"text": "a"}\n', "mixes"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_text(tmp_path / name, lambda: letters)


@pytest.mark.parametrize(
    ("row", "message"),
    [({"words": "a"}, "line 4 has words, not any of"), ({"input_ids": [1, 2]}, "mixes rows of text")],
)
def test_a_bad_row_is_known_before_any_work(row: Any, message: str, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", *[{"text": "some words"}] * 3, row)
    for call in (read_text, check_text):
        with pytest.raises(UsageError, match=message):
            call(str(file), Beginning)


def test_a_folder_is_one_stream_of_its_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    lines(tmp_path / "a.jsonl", {"text": "one"})
    (tmp_path / "notes.md").write_text("not data")
    found = read_text(tmp_path, lambda: letters)
    assert bytes(found.tokens.tolist()) == b"one\n\ntwo"
    assert found.name == tmp_path.name


def test_a_data_set_by_name_is_read_no_further_than_its_tokens_need(monkeypatch: pytest.MonkeyPatch) -> None:
    given = itertools.count()

    def endless(*_: Any, **__: Any) -> Iterator[dict[str, str]]:
        return ({"text": f"{number:100}"} for number in given)

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", endless)
    found = read_text("owner/name:config:split", lambda: letters, max_tokens=50)
    assert found.tokens.numel() == 50
    assert found.name == "owner/name:config:split"
    assert next(given) < 100


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(UsageError, match="no chat template"):
        read_text(file, lambda: letters)


def test_a_missing_file_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_text(tmp_path / "none.txt", lambda: letters)
    with pytest.raises(UsageError, match="is a folder without"):
        read_text(tmp_path, lambda: letters)


def test_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        read_text(tmp_path / "a.txt", lambda: load_tokenizer(tmp_path))
