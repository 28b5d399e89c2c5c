"""Rows of a data file: plain text, .jsonl, .parquet, or a data set by name; each a text, messages or token ids.

Knows files, not tokenizers. A row is the value of the first field that is there of FIELDS, or of the one asked for.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint import nearest_path
from ptqpipe.errors import UsageError, first_line, missing_package
from ptqpipe.regular_file import MAX_TEXT_BYTES, kind_of, read_regular_text

FIELDS = ("messages", "conversations", "text", "content", "prompt", "instruction", "question", "input_ids")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+){0,2}")


def read_rows(name: str, *, field: str | None = None) -> Iterator[tuple[str, Any]]:
    """(where, value) of every row: ``where`` says file and line, for messages about it.

    name   a file, or a data set as ``owner/name[:config][:split]`` for the ``datasets`` library
    field  the field of a row to use; None: the first of FIELDS that a row has

    Raises UsageError for what cannot be read, a bad line, or a row without the field.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        if path.exists():
            kind = kind_of(path.stat().st_mode)
            remedy = "name the files in it" if path.is_dir() else "write the text to a file first"
            raise UsageError(f"{name} is {kind}, expected a file with text; {remedy}")
        if path.suffix in (".txt", ".jsonl", ".parquet", ".raw", ".json") or not _HUB_NAME.fullmatch(name):
            remedy = nearest_path(Path(name)) or "give --data a .txt, .jsonl or .parquet file"
            raise UsageError(f"{name} does not exist; {remedy}")
        yield from _fields(_dataset_rows(name), name, "row", field)
    elif path.suffix == ".jsonl":
        yield from _fields(_json_rows(path), str(path), "line", field)
    elif path.suffix == ".parquet":
        yield from _fields(_parquet_rows(path), str(path), "row", field)
    else:
        yield str(path), _text(path)


def _text(path: Path) -> str:
    try:
        text = read_regular_text(path, limit=MAX_TEXT_BYTES)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}); give a text, .jsonl or .parquet file"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; check the file") from None
    if not text.strip():
        raise UsageError(f"{path} is empty; give a file with text")
    return text


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path}, line {number} is not JSON ({first_line(error)}); expected one object a line"
            ) from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_package(str(path), "pyarrow", "pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
            if not number:
                raise UsageError(f"{path} is empty; give a file with text")
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path} is not a parquet file: {first_line(error)}; write it again") from None


def _dataset_rows(name: str) -> Iterator[tuple[int, Any]]:
    """Rows of a data set by its hub name, streamed; the train split unless named."""
    try:
        import datasets
    except ImportError:
        what = f"{name} does not exist as a .txt, .jsonl or .parquet file, and a data set by name"
        raise missing_package(what, "the datasets library", "datasets") from None
    repository, *parts = name.split(":")
    config = parts[0] if len(parts) == 2 else None
    split = parts[-1] if parts else "train"
    try:
        yield from enumerate(datasets.load_dataset(repository, config, split=split, streaming=True), 1)
    except (OSError, ValueError, RuntimeError) as error:  # offline, no such set, no such split
        raise UsageError(
            f"{name} is no file, and as a data set it cannot be loaded: {first_line(error)}; give --data a .txt, "
            ".jsonl or .parquet file, or NAME:CONFIG:SPLIT"
        ) from None


def _fields(rows: Iterable[tuple[int, Any]], name: str, unit: str, field: str | None) -> Iterator[tuple[str, Any]]:
    for number, row in rows:
        where = f"{name}, {unit} {number}"
        if not isinstance(row, Mapping):
            raise UsageError(f"{where} is {type(row).__name__}, expected an object with fields")
        found = field if field is not None else next((key for key in FIELDS if row.get(key) is not None), None)
        if found is None or row.get(found) is None:
            wanted = f"'{field}'" if field is not None else f"any of {', '.join(FIELDS)}"
            keys = ", ".join(map(str, list(row)[:6])) or "no fields"
            raise UsageError(f"{where} has {keys}, not {wanted}; name the field with --field")
        yield where, row[found]
