"""The rows of a file or a data set as they are stored: a whole text, or values of JSON, CSV, Parquet and Arrow.

Rows are read one after another, so a file of rows never lies in memory as a whole; a plain text does. Text is UTF-8, or
UTF-16 and UTF-32 with a byte order mark, which is no part of it. What is no data of these kinds is refused with a line.
"""

import bz2
import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from ptqpipe.checkpoint import nearest_path
from ptqpipe.checkpoint.regular_file import MAX_JSON_BYTES, MAX_TEXT_BYTES, open_regular
from ptqpipe.errors import UsageError, arg, first_line, missing_package

_LINES = (".jsonl", ".ndjson", ".jsonlines", ".jl", ".ldjson")
TABLES = (".csv", ".tsv")
_ARROW = (".parquet", ".arrow", ".feather")
DATA_SUFFIXES = (".txt", *_LINES, ".json", *TABLES, *_ARROW)  # of the files of a folder that are data
_MARKUP = (".html", ".htm", ".xml", ".yaml", ".yml", ".ipynb", ".rtf")  # text, of which much is no sentence of anybody
_COMPRESSED: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda file: _zstandard(file),
}
_MAGIC = {
    b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image", b"GIF8": "a GIF image", b"%PDF": "a PDF document",
    b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "compressed by gzip", b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ": "compressed by xz", b"BZh": "compressed by bzip2", b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"GGUF": "a GGUF model", b"SQLite format 3": "an SQLite database", b"\x93NUMPY": "a NumPy array",
    b"\x80\x02": "a pickle", b"\x80\x03": "a pickle", b"\x80\x04": "a pickle", b"\x80\x05": "a pickle",
}  # fmt: skip
_MARKS = (  # UTF-32's little-endian mark begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
_DELIMITERS = ",;\t|"
_BATCH = 64  # rows of Parquet and Arrow that are Python objects at once


class Stored(NamedTuple):
    """The rows of a file, with numbers from 1 that count lines or rows, as ``unit`` says; "" for a whole text. The one
    value of a .json file has the number 0."""

    unit: str
    rows: Iterator[tuple[int, Any]]


def suffix_of(path: Path) -> str:
    """The lower-case suffix of what a file holds: of ``a.jsonl.gz`` that is ``.jsonl``."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() if last in _COMPRESSED else last


def stored_rows(path: Path) -> Stored:
    """The rows of a file. UsageError for one that cannot be read, here or while they are read."""
    suffix = suffix_of(path)
    if suffix in _MARKUP:
        raise UsageError(
            f"{path} is a {suffix} file, of which markup would become text; write its text to a .txt or .jsonl file"
        )
    if suffix in _ARROW:
        return Stored("row", _guarded(path, _arrow_rows(path, parquet=suffix == ".parquet")))
    if suffix in TABLES:
        return Stored("row", _guarded(path, _table_rows(path, suffix)))
    if suffix == ".json":
        return Stored("row", _guarded(path, _json_rows(path)))
    if suffix in _LINES:
        return Stored("line", _guarded(path, _rows_of_lines(path)))
    return Stored("", _guarded(path, _whole_text(path)))


def _guarded(path: Path, rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """The rows, with one line for what a disk, a compressed file or its encoding has wrong."""
    try:
        yield from rows
    except UnicodeDecodeError as error:
        raise _not_text(path, error.encoding) from None
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise UsageError(f"{path} is damaged: {first_line(error)}; copy or compress it again") from None
    except OSError as error:
        damaged = error.strerror is None  # what unpacks a file has no number of an error
        what = f"is damaged: {first_line(error)}" if damaged else f"cannot be read: {error.strerror}"
        raise UsageError(f"{path} {what}; {'copy or compress it again' if damaged else 'check the file'}") from None


@contextmanager
def _bytes_of(path: Path) -> "Iterator[io.BufferedReader[Any]]":
    with open_regular(path) as raw, io.BufferedReader(raw) as file:
        unpack = _COMPRESSED.get(path.suffix.lower())
        if unpack is None:
            yield file
            return
        with closing(unpack(file)) as inner, io.BufferedReader(inner) as unpacked:
            yield unpacked


def _zstandard(file: BinaryIO) -> BinaryIO:
    try:
        import pyarrow
    except ImportError:
        raise missing_package("a .zst file", "pyarrow", "pyarrow") from None
    stream: BinaryIO = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    return stream


@contextmanager
def _text_of(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """The file as text, decoded. UsageError for what is known to be none; UnicodeDecodeError while it is read."""
    with _bytes_of(path) as file:
        head = file.peek(64)[:64]
        kind = next((what for magic, what in _MAGIC.items() if head.startswith(magic)), None)
        if kind is None and len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
            kind = "a safetensors file"
        if kind is not None:
            packed = kind.startswith("compressed")
            remedy = "let its name end like .jsonl.gz" if packed else "give a .txt, .jsonl or .parquet file with text"
            raise UsageError(f"{path} is {kind}, expected text; {remedy}")
        encoding = next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")
        with io.TextIOWrapper(file, encoding=encoding, newline=newline) as text:
            yield text


def _not_text(path: Path, encoding: str) -> UsageError:
    """The error for bytes that are no text of an encoding: where the first of them is."""
    name = "UTF-8" if encoding.startswith("utf-8") else encoding.upper().removesuffix("-LE").removesuffix("-BE")
    decoder, offset, line = codecs.getincrementaldecoder(encoding)(), 0, 1
    with _bytes_of(path) as file:
        while True:
            part, pending = file.read(1 << 20), len(decoder.getstate()[0])
            try:
                line += decoder.decode(part, final=not part).count("\n")
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                offset += error.start - pending
                break
            if not part:
                break
            offset += len(part)
    marked = "" if name == "UTF-8" else f", nor {name} as its byte order mark says"
    remedy = "write it again" if marked else "convert it: iconv -f LATIN1 -t UTF-8, with the encoding that it has"
    return UsageError(f"{path} is not UTF-8 text{marked} (byte {offset}), line {line}; {remedy}")


def _no_nul(text: str, path: Path, where: str = "") -> str:
    """The text. UsageError for one with NUL, which is UTF-16 without its mark, or no text."""
    if "\0" in text:
        raise UsageError(
            f"{path}{where} has a NUL character: it is not text, or UTF-16 without a byte order mark; convert it to "
            "UTF-8: iconv -f UTF-16LE -t UTF-8"
        )
    return text


def _whole_text(path: Path) -> Iterator[tuple[int, Any]]:
    with _text_of(path) as file:
        size = os.stat(path).st_size
        text = "" if size > MAX_TEXT_BYTES else file.read(MAX_TEXT_BYTES + 1)
    if max(size, len(text)) > MAX_TEXT_BYTES:
        raise UsageError(f"{path} has more than {MAX_TEXT_BYTES} bytes; split it, or write rows to a .jsonl file")
    yield 1, _no_nul(text, path)


def _rows_of_lines(path: Path, *, unit: str = "line") -> Iterator[tuple[int, Any]]:
    with _text_of(path) as file:
        for number in itertools.count(1):
            line = file.readline(MAX_JSON_BYTES)
            if not line:
                return
            if len(line) == MAX_JSON_BYTES:
                raise UsageError(f"{path}, {unit} {number} has more than {MAX_JSON_BYTES} characters; split it")
            if not line.strip():
                continue
            try:
                yield number, json.loads(_no_nul(line, path, f", {unit} {number}"))
            except (ValueError, RecursionError) as error:
                pretty = " of an object in several lines, or of an array: name it .json" if line.strip() in "[{" else ""
                remedy = f"it seems the beginning{pretty}" if pretty else "expected one object per line"
                raise UsageError(f"{path}, line {number} is not JSON ({first_line(error)}); {remedy}") from None


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Of a .json file: the elements of an array; JSON lines, which often have this name; else the one value."""
    with _text_of(path) as file:
        head = file.read(1 << 16)
        while head and not head.strip():
            head = file.read(1 << 16)
        head = head.lstrip()
        number = 0
        try:
            if head.startswith("["):
                for number, value in enumerate(elements(head[1:], file.read, most=MAX_JSON_BYTES), 1):
                    yield number, value
                return
            first = head.partition("\n")[0]
            if "\n" not in head or not _is_json(first) or not head[len(first) :].strip():
                text = head + file.read(MAX_JSON_BYTES)
                if len(text) >= MAX_JSON_BYTES:
                    raise UsageError(f"{path} is one object of more than {MAX_JSON_BYTES} characters; write JSON lines")
                if text:
                    yield 0, json.loads(_no_nul(text, path))
                return
        except (ValueError, RecursionError) as error:
            if isinstance(error, UnicodeDecodeError):
                raise
            where = f"{path}, behind row {number}," if number else str(path)
            reason = getattr(error, "msg", "") or first_line(error)
            raise UsageError(f"{where} is not JSON ({reason}); expected an array of rows, or one row a line") from None
    yield from _rows_of_lines(path)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _table_rows(path: Path, suffix: str) -> Iterator[tuple[int, Any]]:
    """Of CSV, by the header's names; a line {name: text} each."""
    csv.field_size_limit(MAX_JSON_BYTES)  # of the whole process; Python's own is a mere 128 KiB
    with _text_of(path, newline="") as file:
        head = file.readline(MAX_JSON_BYTES)
        if head.lower().startswith("sep="):  # Excel's line
            head = file.readline(MAX_JSON_BYTES)
        outside = "".join(head.split('"')[::2])
        delimiter = "\t" if suffix == ".tsv" else max(_DELIMITERS, key=outside.count)
        lines = itertools.chain([head], iter(lambda: file.readline(MAX_JSON_BYTES), ""))
        reader = csv.reader((_no_nul(line, path) for line in lines), delimiter=delimiter, strict=True)
        names, number = list[str](), 0
        try:
            names = [name.strip() for name in next(reader, [])]
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise UsageError(f"{path} has several columns named {twice!r}; rename one")
            for number, fields in enumerate((row for row in reader if row), 1):
                if len(fields) != len(names):
                    raise UsageError(
                        f"{path}, row {number} has {len(fields)} fields, its header has {len(names)} "
                        f"({', '.join(names[:6])}); quote a text that has {delimiter!r} or line ends in it"
                    )
                yield number, {n: v.replace("\r\n", "\n") for n, v in zip(names, fields, strict=True)}
        except csv.Error as error:
            raise UsageError(f"{path}, row {number + 1} is not CSV ({error}); check its quotes") from None


def _arrow_rows(path: Path, *, parquet: bool) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
    except ImportError:
        raise missing_package(str(path), "pyarrow", "pyarrow") from None
    try:
        with _bytes_of(path) as file:
            yield from enumerate(_objects(_parquet_batches(file) if parquet else _arrow_batches(file)), 1)
    except (ValueError, pyarrow.ArrowException) as error:
        kind = "a parquet" if parquet else "an Arrow"
        raise UsageError(f"{path} is not {kind} file: {first_line(error)}; write it again") from None


def _objects(batches: Iterable[Any]) -> Iterator[Any]:
    """The rows of pyarrow's batches, a few at a time."""
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH):
            yield from batch.slice(start, _BATCH).to_pylist()


def _parquet_batches(file: BinaryIO) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as opened:
        yield from opened.iter_batches(batch_size=_BATCH)


def _arrow_batches(file: BinaryIO) -> Iterator[Any]:
    """Of a file or a stream, which the datasets library saves."""
    import pyarrow.ipc

    if file.peek(6).startswith(b"ARROW1"):  # type: ignore[attr-defined]
        with pyarrow.ipc.open_file(file) as opened:
            for number in range(opened.num_record_batches):
                yield opened.get_batch(number)
        return
    with pyarrow.ipc.open_stream(file) as stream:
        yield from stream


def dataset_rows(name: str) -> Iterator[tuple[int, Any]]:
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
    except Exception as error:  # of what kind depends on the set's files and on the network
        meant = nearest_path(Path(name))
        remedy = meant or f"give {arg('data')} a .txt, .jsonl or .parquet file, or NAME:CONFIG:SPLIT"
        if not meant and (os.environ.get("HF_HUB_OFFLINE") == "1" or isinstance(error, ConnectionError)):
            remedy = (
                f"the hub is out of reach, or HF_HUB_OFFLINE is 1: give {arg('data')} a .txt, .jsonl or .parquet file"
            )
        raise UsageError(
            f"{name} is no file, and as a data set it cannot be loaded: {first_line(error)}; {remedy}"
        ) from None


# The elements of a JSON array one after another, without all of its text in memory.


_SPACE = re.compile(r"[ \t\r\n]*")
_PART = 1 << 18  # characters that are read at once


def elements(text: str, read: Callable[[int], str], *, most: int) -> Iterator[Any]:
    """The elements of an array, of which ``text`` is the beginning, behind its bracket.

    read  gives so many of the characters behind ``text``, fewer at the end
    most  characters of an element

    ValueError for what is no array, or has a larger element; RecursionError for one that is nested too deeply.
    """
    decoder, offset, expected, more = json.JSONDecoder(), 0, "value or end", _PART
    while True:
        offset = _end_of_space(text, offset)
        if offset == len(text):
            text, offset = read(_PART), 0
            if not text:
                raise ValueError("the array has no end")
        elif text[offset] == "]" and expected != "value":
            if (text[offset + 1 :] + read(_PART)).strip():
                raise ValueError("there is more behind the array")
            return
        elif expected == "comma or end":
            if text[offset] != ",":
                raise ValueError("expected a comma or the end of the array")
            offset, expected = offset + 1, "value"
        else:
            try:
                value, end = decoder.raw_decode(text, offset)
                # a number at the end of what is read may go on behind it
                part = "" if end < len(text) else read(_PART)
            except ValueError:
                part = read(more)
                if not part:
                    raise
                if len(text) - offset > most:
                    raise ValueError(f"an element has more than {most} characters") from None
                more *= 2  # so that a long element is not decoded from its beginning too often
            if part:
                text, offset = text[offset:] + part, 0
                continue
            yield value
            offset, expected, more = end, "comma or end", _PART


def _end_of_space(text: str, offset: int) -> int:
    match = _SPACE.match(text, offset)
    return offset if match is None else match.end()
