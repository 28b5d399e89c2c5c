"""Texts as tokens: what data names (`rows`) and a model's tokenizer, and the sample text of the package.

Rows follow each other in one stream, texts parted by a blank line.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ptqpipe.calibration.rows import (
    Messages,
    Notes,
    begin_token,
    begun,
    check_once,
    files_of,
    has_beginning,
    read_rows,
    row_tokens,
    size_of,
)
from ptqpipe.errors import UsageError, arg, tokenizer_errors

SAMPLE = Path(__file__).resolve().parent / "sample.txt"
SAMPLE_NAME = "sample text"
LEAST = 2  # tokens: the first is not predicted
MAX_CHARACTERS = 64  # of a token: so much of a text is read for each token that is asked for


@dataclass(frozen=True, slots=True)
class Text:
    """A text as tokens: int64 [n].

    sha256  of the tokens that are used, as little-endian int64
    begin   the token that each of its windows begins with; None for a tokenizer that puts none before a text, and for
            rows of tokens, which are as they are
    notes   in which form the rows are, and what was left out
    """

    name: str
    tokens: torch.Tensor
    sha256: str
    begin: int | None = None
    notes: tuple[str, ...] = ()

    def windows(self, length: int) -> torch.Tensor:
        """int64 [n, length]: the text cut into windows, what is left of it aside."""
        count = len(self.tokens) // length
        return begun(self.tokens[: count * length].view(count, length), self.begin)


def read_texts(
    names: Sequence[str], tokenizer: Callable[[], Any], *, field: str | None, max_tokens: int | None
) -> tuple[Text, ...]:
    """`read_text` of several. UsageError where one is given twice."""
    check_once(names, "data")
    return tuple(read_text(name, tokenizer, field=field, max_tokens=max_tokens) for name in names)


def read_text(
    name: str | Path, tokenizer: Callable[[], Any], *, field: str | None = None, max_tokens: int | None = None
) -> Text:
    """The first ``max_tokens`` tokens of what ``data`` names: a file, all files of a folder, or a data set by name.

    tokenizer  gives transformers' tokenizer of the model; called for texts only
    field      of a row that is used; None: the first of the usual ones that it has

    UsageError for data that cannot be read or hold nothing.
    """
    texts: list[str] = []
    ids: list[int] = []
    notes, begins = Notes(), False
    begin = cache(lambda: begin_token(tokenizer()))
    for where, value in _rows(str(name), field, max_tokens, notes):
        if isinstance(value, str):
            texts.append(value)
            begins = True
        else:
            for tokens in row_tokens(tokenizer, value, where, notes=notes):
                begins = begins or (isinstance(value, Messages) and has_beginning(value, tokens, begin()))
                ids += tokens
    if texts and ids:
        raise _mixed(name)
    if texts:
        with tokenizer_errors(str(name)):
            ids = tokenizer()("\n\n".join(texts), verbose=False)["input_ids"]
    ids_tensor = torch.tensor(ids, dtype=torch.int64)[:max_tokens]
    if max_tokens is not None and max_tokens < LEAST:
        raise UsageError(f"{arg('max_tokens', max_tokens)}: expected 2 or more: each is predicted from those before it")
    if ids_tensor.numel() < LEAST:
        raise _too_short(name, ids_tensor.numel())
    digest = hashlib.sha256(ids_tensor.numpy().astype("<i8").tobytes()).hexdigest()
    path = Path(name).expanduser()
    shown = SAMPLE_NAME if path == SAMPLE else path.resolve().name if path.exists() else str(name)
    return Text(shown, ids_tensor, digest, begin() if begins else None, tuple(notes.lines()))


def check_text(name: str, tokenizer: Callable[[], Any], *, field: str | None = None) -> list[str]:
    """Lines about the rows, as `Text.notes`. Of files all rows are looked at, but only the first ones tokenized; of a
    data set by name only these are read. UsageError for what `read_text` could not read."""
    tokens, kinds, notes = 0, set[bool](), Notes()
    for file in files_of([name]):
        for where, value in read_rows(file, field=field, notes=notes):
            kinds.add(isinstance(value, str))
            if len(kinds) > 1:
                raise _mixed(name)
            if tokens < LEAST:
                first = itertools.islice(row_tokens(tokenizer, value, where, notes=notes), 1)
                tokens += sum(map(len, first))
            elif not Path(file).expanduser().is_file():
                break
    if tokens < LEAST:
        raise _too_short(name, tokens)
    return notes.lines()


def _mixed(name: str | Path) -> UsageError:
    return UsageError(
        f"{name} mixes rows of text with rows of messages or tokens; write each kind to a file of its own"
    )


def _too_short(name: str | Path, tokens: int) -> UsageError:
    return UsageError(f"{name} gives {tokens} tokens, expected {LEAST} or more; give another text")


def _rows(name: str, field: str | None, max_tokens: int | None, notes: Notes) -> Iterator[tuple[str, Any]]:
    """The rows of all files; only as many, and of the last one so much, as ``max_tokens`` tokens need."""
    left = math.inf if max_tokens is None else MAX_CHARACTERS * max(LEAST, max_tokens)
    for file in files_of([name]):
        for where, value in read_rows(file, field=field, notes=notes):
            yield where, value[: int(left)] if isinstance(value, str) and len(value) > left else value
            left -= size_of(value)
            if left <= 0:
                return
