"""What --data names, as rows: plain text, .jsonl, .parquet, folders of them, or data sets by name.

A row is a text, messages or token ids: the value of the first field that is there of FIELDS, or of the one asked for.
`row_tokens` makes tokens of it.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptqpipe.chat_template import TemplateError, render
from ptqpipe.checkpoint import nearest_path
from ptqpipe.errors import UsageError, first_line, missing_package, tokenizer_errors
from ptqpipe.images import has_image
from ptqpipe.regular_file import MAX_TEXT_BYTES, kind_of, read_regular_text

FIELDS = ("messages", "conversations", "text", "content", "prompt", "instruction", "question", "input_ids")
PIECE = 1 << 18  # characters that are tokenized at once
MAX_TOKEN = 1 << 31
_SUFFIXES = (".txt", ".jsonl", ".parquet")  # of the files of a folder that are data
_WEIGHT = re.compile(r"(.+)=([+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf|infinity))", re.I | re.S)
_LARGEST = 1e9  # of weights: their sums must be finite
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+){0,2}")


def files_of(names: Iterable[str], *, option: str = "--data") -> list[str]:
    """The files and data sets that an ``option`` names: of a folder all .txt, .jsonl and .parquet files in it, by name.

    A name may end in ``=WEIGHT`` (`weighted`) and keeps that; the files of a folder share its weight by their sizes.
    UsageError for a folder without any, for a file that does not exist, and for one that is there twice.
    """
    found: list[str] = []
    for name in names:
        if not name:
            raise UsageError(f"a name in {option} is empty; give a .txt, .jsonl or .parquet file")
        plain, weight = weighted(name)
        folder = Path(plain).expanduser()
        if not folder.is_dir():
            _check_there(plain, folder, option)
            found.append(name)
            continue
        files = sorted(str(file) for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise UsageError(
                f"{plain} is a folder without {', '.join(_SUFFIXES)} files; name a folder or file with text"
            )
        if weight is not None:
            sizes = [max(1, Path(file).stat().st_size) for file in files]  # one without text is refused when it is read
            files = [f"{file}={weight * size / sum(sizes)!r}" for file, size in zip(files, sizes, strict=True)]
        found += files
    check_once(found, option, weights=option == "--data")
    return found


def check_once(names: Iterable[str], option: str, *, weights: bool = False) -> None:
    """UsageError for text that is given twice: what is held out of it would be what a model is calibrated on, and what
    is measured on it would count twice. ``weights``: whether a name may end in one."""
    seen = set[str]()
    for name in names:
        plain, _ = weighted(name)
        path = Path(plain).expanduser()
        known = str(path.resolve()) if path.exists() else plain
        if known in seen:
            more = f", {plain}=2 for twice its share of the windows" if weights else ""
            raise UsageError(f"{option} has {plain} twice; give it once{more}")
        seen.add(known)


def weighted(name: str) -> tuple[str, float | None]:
    """A name of --data and its weight, ``text.txt=2``; None where it has none. UsageError for a weight that is none."""
    found = _WEIGHT.fullmatch(name)
    if found is None or os.path.exists(os.path.expanduser(name)):
        return name, None
    weight = float(found[2])
    if not 0 < weight <= _LARGEST:
        raise UsageError(f"--data {name} has the weight {found[2]}, expected a number above 0, at most {_LARGEST:.0f}")
    return found[1], weight


def _check_there(name: str, path: Path, option: str = "--data") -> None:
    """UsageError for a name that is no file, and none of a data set either."""
    if not path.exists() and (path.suffix in (*_SUFFIXES, ".raw", ".json") or not _HUB_NAME.fullmatch(name)):
        remedy = nearest_path(Path(name)) or f"give {option} a .txt, .jsonl or .parquet file"
        raise UsageError(f"{name} does not exist; {remedy}")


def read_rows(name: str, *, field: str | None = None) -> Iterator[tuple[str, Any]]:
    """(where, value) of every row: ``where`` says file and line, for messages about it.

    name   a file (`files_of` gives those of a folder), or a data set as ``owner/name[:config][:split]`` for the
           ``datasets`` library
    field  the field of a row to use; None: the first of FIELDS that a row has

    Raises UsageError for what cannot be read, a bad line, or a row without the field.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        if path.exists():
            kind = kind_of(path.stat().st_mode)
            raise UsageError(f"{name} is {kind}, expected a file with text; write the text to a file first")
        _check_there(name, path)
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
    for number, line in enumerate(_lines(_text(path)), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path}, line {number} is not JSON ({first_line(error)}); expected one object per line"
            ) from None


def _lines(text: str) -> Iterator[str]:
    """Without a copy of all of them."""
    start = 0
    while start <= len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


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
            raise UsageError(f"{where} has {keys}, not {wanted}; choose one with --field")
        yield where, row[found]


def row_tokens(tokenizer: Callable[[], Any], value: Any, where: str, *, begins: bool = True) -> Iterator[Sequence[int]]:
    """The tokens of one row, in pieces: text, messages, or token ids as they are.

    tokenizer  gives transformers' tokenizer of the model; not called for token ids
    where      file and line, for messages
    begins     whether a text is the beginning of its row, where special tokens go, and not one of its later `pieces`

    UsageError for a row of another kind, token ids that no model has, and messages without a chat template.
    """
    if isinstance(value, str):
        for number, piece in enumerate(pieces(value)):
            with tokenizer_errors(where):
                ids = tokenizer()(piece, add_special_tokens=begins and number == 0, verbose=False)["input_ids"]
            yield ids
    elif isinstance(value, list) and value and all(isinstance(token, int) for token in value):
        if not all(0 <= token < MAX_TOKEN for token in value):
            worst = next(token for token in value if not 0 <= token < MAX_TOKEN)
            raise UsageError(f"{where} has token id {worst}, expected the model's tokens; tokenize the data again")
        yield value
    elif isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        if shows_images(value):
            raise UsageError(
                f"{where} has an image, which only calibrate and tune take, for a model of images; leave such rows out"
            )
        yield _chat_tokens(tokenizer(), value, where)
    else:
        raise UsageError(
            f"{where} is {type(value).__name__}, expected a text, a list of messages or a list of token ids; name "
            "another field with --field"
        )


def pieces(text: str) -> Iterator[str]:
    """A long text cut after line ends: what a tokenizer returns takes many times the text's memory."""
    start = 0
    while len(text) - start > PIECE:
        end = text.find("\n", start + PIECE) + 1
        if not end:
            break
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def size_of(value: Any) -> int:
    """How many characters a row has, about; of token ids, how many these are."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sum(len(str(message.get("content", ""))) for message in value if isinstance(message, dict))
    return len(value) if isinstance(value, str | list) else 0


def shows_images(value: Any) -> bool:
    """Whether a row is messages, of which one has an image."""
    messages = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
    return any(has_image(message.get("content")) for message in messages)


def _chat_tokens(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> list[int]:
    text = chat_text(tokenizer, messages, where)
    with tokenizer_errors(where):
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def chat_text(tokenizer: Any, messages: list[dict[str, Any]], where: str, *, template: str | None = None) -> str:
    """What the chat template of a tokenizer, or else ``template``, makes of messages. UsageError without one, and for
    messages that do not fit it."""
    template = getattr(tokenizer, "chat_template", None) or template
    if not template:
        raise UsageError(
            f"{where} is a list of messages, and the model's tokenizer has no chat template; give plain text with "
            "--field"
        )
    try:
        return render(tokenizer, messages, template, {})
    except TemplateError as error:
        if not error.ends or not error.compiles:
            raise UsageError(f"{where}: the model's chat template is of no use: {error}; give plain text") from None
        whole = all({"role", "content"} <= message.keys() for message in messages)
        remedy = "leave the row out, or give plain text" if whole else "expected role and content"
        raise UsageError(f"{where} does not fit the model's chat template: {error}; {remedy}") from None
