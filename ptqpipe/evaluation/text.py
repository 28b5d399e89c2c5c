"""Texts as tokens: local files, and a model's tokenizer.

``.jsonl``: one object a line, its ``text``, or ``input_ids`` that are tokens already; ``.parquet`` the same by column;
anything else is read as UTF-8 text. Rows follow each other in one stream, texts parted by a blank line.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe.errors import UsageError, first_line, missing_package
from ptqpipe.regular_file import MAX_TEXT_BYTES, read_regular_text


@dataclass(frozen=True, slots=True)
class Text:
    """A file as tokens: int64 [n]. ``sha256`` is that of the tokens that are used, as little-endian int64."""

    name: str
    tokens: torch.Tensor
    sha256: str


def read_text(file: Path, tokenizer: Callable[[], Any], *, max_tokens: int | None = None) -> Text:
    """The first ``max_tokens`` tokens of a file. UsageError for a file that cannot be read or holds nothing.

    tokenizer  gives transformers' tokenizer of the model; called for texts only
    """
    file = Path(file)
    content = _content(file)
    if isinstance(content, str):
        ids = tokenizer()(content, verbose=False)["input_ids"] if content.strip() else []
    else:
        ids = content
    tokens = torch.tensor(ids, dtype=torch.int64)[:max_tokens]
    if tokens.numel() < 2:
        raise UsageError(f"{file} gives {tokens.numel()} tokens, expected 2 or more; choose another file")
    digest = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
    return Text(file.name, tokens, digest)


def _content(file: Path) -> str | list[int]:
    """The text of a file, or its tokens."""
    if not file.is_file():
        raise UsageError(f"{file} {'is no file' if file.exists() else 'does not exist'}; give a text or .jsonl file")
    if file.suffix == ".parquet":
        return _joined(_parquet_rows(file), file)
    try:
        text = read_regular_text(file, limit=MAX_TEXT_BYTES)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; give a text or .jsonl file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text (byte {error.start}); give a text or .jsonl file") from None
    if file.suffix != ".jsonl":
        return text
    return _joined(_json_rows(text, file), file)


def _json_rows(text: str, file: Path) -> Iterable[Mapping[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UsageError(f"{file}, line {number} is not JSON; expected one object a line") from None
        if not isinstance(row, dict):
            raise UsageError(f"{file}, line {number} is {type(row).__name__}, expected an object with 'text'")
        yield row


def _parquet_rows(file: Path) -> Iterable[Mapping[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_package(str(file), "pyarrow", "pyarrow") from None
    try:
        rows: list[Mapping[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UsageError(f"{file} is not a parquet file: {first_line(error)}") from None
    return rows


def _joined(rows: Iterable[Mapping[str, Any]], file: Path) -> str | list[int]:
    texts: list[str] = []
    ids: list[int] = []
    for number, row in enumerate(rows, 1):
        found = row.get("input_ids")
        if isinstance(found, list) and all(isinstance(token, int) for token in found):
            ids += found
        elif isinstance(row.get("text"), str):
            texts.append(row["text"])
        else:
            keys = ", ".join(map(str, list(row)[:5])) or "nothing"
            raise UsageError(f"{file}, row {number} has {keys}; expected 'text', or 'input_ids' as a list of numbers")
    if texts and ids:
        raise UsageError(f"{file} mixes rows of text and rows of input_ids; part them")
    return ids or "\n\n".join(texts)
