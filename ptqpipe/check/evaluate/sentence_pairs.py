"""Pairs of sentences on which embedders are compared: from a file of pairs, or cut from text."""

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptqpipe.calibration.rows import files_of, read_rows
from ptqpipe.checkpoint.regular_file import MAX_TEXT_BYTES, read_regular_text
from ptqpipe.errors import UsageError, arg, first_line

MOST = 2000  # pairs that are made of a text
LEAST = 2  # a rank correlation needs two
_WORDS = (4, 60)  # of a sentence of a text: shorter ones are headings, longer ones tables
_ENDS = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[。！？])|\n+")


@dataclass(frozen=True, slots=True)
class SentencePairs:
    """first[i] and second[i] are pair i. ``sha256`` of all of them, as they are read."""

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps([self.first, self.second]).encode()).hexdigest()

    @classmethod
    def of(cls, name: str, pairs: Sequence[tuple[str, str]]) -> "SentencePairs":
        """UsageError for fewer than two pairs."""
        if len(pairs) < LEAST:
            raise UsageError(f"{name} has {len(pairs)} pairs of sentences, expected {LEAST} or more; give more text")
        first, second = zip(*pairs, strict=True)
        return cls(name, first, second)


def read_pairs(path: Path) -> SentencePairs:
    """A file with a pair a line: two columns with a tab between them, or of .jsonl a list of two strings, or an object
    with two fields that are strings. Empty lines are left out. UsageError for anything else."""
    try:
        lines = read_regular_text(path, limit=MAX_TEXT_BYTES).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(f"{arg('pairs', path)} cannot be read: {reason}; give a file with a pair a line") from None
    parse = _columns if path.suffix not in (".jsonl", ".json") else _fields
    pairs = [parse(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise UsageError(f"{arg('pairs', path)} is empty; give a file with two sentences a line, a tab between them")
    return SentencePairs.of(path.name, pairs)


def _columns(line: str, where: str) -> tuple[str, str]:
    columns = [column.strip() for column in line.split("\t")]
    if len(columns) != 2 or not all(columns):
        raise UsageError(
            f"{where} has {sum(map(bool, columns))} columns with text, expected two sentences with a tab between them; "
            "correct it, or give .jsonl"
        )
    return columns[0], columns[1]


def _fields(line: str, where: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no JSON: {first_line(error)}; correct it") from None
    values = list(row.values()) if isinstance(row, dict) else row if isinstance(row, list) else []
    texts = [value.strip() for value in values if isinstance(value, str) and value.strip()]
    if len(texts) != 2:
        raise UsageError(
            f"{where} has {len(texts)} strings with text, expected the two sentences of a pair; correct it, or keep "
            "two fields"
        )
    return texts[0], texts[1]


def pairs_of_text(name: str, shown: str, *, field: str | None = None) -> SentencePairs:
    """At most MOST pairs of a text, half of them neighbours in it, half at random; a sentence is in one pair alone.

    name   a file, a folder of them or a data set, as eval's ``data``
    shown  what it is called in the result

    UsageError for rows that are no text, and for too few sentences.
    """
    couples = list[tuple[str, str]]()
    for file in files_of([name]):
        for where, value in read_rows(file, field=field):
            if not isinstance(value, str):
                raise UsageError(
                    f"{where} is no text: an embedder has no chat template and takes sentences; give text, or "
                    f"{arg('pairs', 'FILE')}"
                )
            sentences = sentences_of(value)
            couples += zip(sentences[::2], sentences[1::2], strict=False)
    random.Random(0).shuffle(couples)
    half = min(MOST // 2, len(couples) // 2)
    apart = couples[half : 2 * half]  # each sentence gets the next couple's for a partner
    crossed = [(a, d) for (a, _), (_, d) in zip(apart, [*apart[1:], *apart[:1]], strict=True)]
    return SentencePairs.of(shown, [*couples[:half], *crossed])


def sentences_of(text: str) -> list[str]:
    parts = (" ".join(part.split()) for part in _ENDS.split(text))
    return [part for part in parts if _WORDS[0] <= _words(part) <= _WORDS[1] or _is_without_spaces(part)]


def _words(part: str) -> int:
    return sum(any(map(str.isalpha, word)) for word in part.split())


def _is_without_spaces(part: str) -> bool:
    """Whether a script without spaces makes its words uncountable; long enough to be a sentence."""
    return len(part.split()) == 1 and 8 <= len(part) <= 200 and not part.isascii()
