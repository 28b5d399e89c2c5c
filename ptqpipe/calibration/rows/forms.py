"""What a row of data holds: a text, messages or token ids, whatever its fields are called.

A row in a known form (ShareGPT, Alpaca, question and answer, preferences) is mapped, and `Notes` have a line about it;
one in an unknown form is refused. A row without text (null, empty) is left out and counted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field as field_of
from pathlib import Path
from typing import Any

from ptqpipe.calibration.rows.chats import Messages, is_turn
from ptqpipe.calibration.rows.names import check_there
from ptqpipe.calibration.rows.stored_rows import TABLES, dataset_rows, stored_rows, suffix_of
from ptqpipe.calibration.rows.values import (
    ASKS,
    CHATS,
    FIELDS,
    TEXTS,
    TOKENS,
    Value,
    asked,
    conversation,
    nothing,
    one_field,
)
from ptqpipe.checkpoint.regular_file import kind_of
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.images import has_image

_LISTS = ("data", "rows", "train", "examples", "items", "samples", "records", "instances", "documents", "dataset")
_USUAL = ("text", "messages", "token ids")  # forms that need no line


@dataclass(slots=True)
class Notes:
    """What is said about rows that were read: their forms, those without text, what a chat template leaves out.

    rows   that were read
    forms  how many rows have which form, and in which files
    empty  rows without text, and where the first of them is
    lost   by the role of messages that a chat template leaves out: in how many rows, and the first of them
    """

    rows: int = 0
    forms: dict[str, dict[str, int]] = field_of(default_factory=dict)
    empty: tuple[int, str] = (0, "")
    lost: dict[str, tuple[int, str]] = field_of(default_factory=dict)

    def lines(self) -> list[str]:
        """A line for each form, where one is unusual; then of rows that are left out, and of messages."""
        lines = []
        for form, files in self.forms.items() if set(self.forms) - {*_USUAL} else ():
            name = next(iter(files)) if len(files) == 1 else f"{len(files)} files"
            lines.append(f"{name}: {form}, {sum(files.values()):,} of {self.rows:,} rows")
        if self.empty[0]:
            lines.append(
                f"{self.empty[0]:,} of {self.rows:,} rows have no text and are left out (first: {self.empty[1]})"
            )
        lines += [
            f"warning: the model's chat template leaves out {role} of {count:,} rows (first: {where}); check "
            "that it is the model's own, or leave them out of the data"
            for role, (count, where) in self.lost.items()
        ]
        return lines

    def _has(self, name: str, form: str) -> None:
        files = self.forms.setdefault(form, {})
        files[name] = files.get(name, 0) + 1

    def loses(self, roles: Sequence[str], where: str) -> None:
        """A row of which a chat template leaves out messages of these roles."""
        for role in roles:
            count, first = self.lost.get(role, (0, where))
            self.lost[role] = count + 1, first


def read_rows(name: str, *, field: str | None = None, notes: Notes | None = None) -> Iterator[tuple[str, Any]]:
    """(where, value) of every row with text: ``where`` says file and line, for messages about it; the value is a text,
    `Messages`, or a list of token ids.

    name   a file (`files_of` gives those of a folder), or a data set as ``owner/name[:config][:split]`` for the
           ``datasets`` library
    field  the field of a row to use; None: what is there of FIELDS

    Raises UsageError for what cannot be read, a bad line, a row of an unknown form, and where no row has text.
    """
    path, notes = Path(name).expanduser(), Notes() if notes is None else notes
    rows, empty = 0, notes.empty[0]
    for where, row in _stored(name, path):
        rows += 1
        notes.rows += 1
        form, value = _read(row, field, where)
        if value is None:
            notes.empty = notes.empty[0] + 1, notes.empty[1] or where
            continue
        if suffix_of(path) in TABLES and form == "text":
            form = f"column {next((key for key in row if row[key] is value), field)!r}"
        notes._has(path.name if path.is_file() else name, form)
        yield where, value
    if rows < 2 and notes.empty[0] - empty == rows:
        raise UsageError(f"{name} is empty; give a file with text")
    if notes.empty[0] - empty == rows:
        raise UsageError(
            f"{name} has {rows} rows, all null or empty; name another field with {arg('text_field')}, or other data"
        )


def _stored(name: str, path: Path) -> Iterator[tuple[str, Any]]:
    """(where, row) of what a name has, as it is stored."""
    if not path.is_file():
        if path.exists():
            kind = kind_of(path.stat().st_mode)
            raise UsageError(f"{name} is {kind}, expected a file with text; write the text to a file first")
        check_there(name, path)
        yield from ((f"{name}, row {number}", row) for number, row in dataset_rows(name))
        return
    unit, rows = stored_rows(path)
    for number, row in rows:
        if not unit:
            _check_no_rows(row, path)
            yield str(path), row
        elif number:
            yield f"{path}, {unit} {number}", row
        else:
            yield from _in_object(row, path)


def _check_no_rows(text: str, path: Path) -> None:
    begun = text[: 1 << 20].lstrip().removeprefix("[").lstrip()
    if not begun.startswith("{"):
        return
    try:
        row, _ = json.JSONDecoder().raw_decode(begun)
    except (ValueError, RecursionError):
        return
    if row.keys() & {*FIELDS}:
        raise UsageError(
            f"{path} holds rows of JSON, and would be read as plain text; let its name end in .jsonl or .json"
        )


def _in_object(value: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a .json file with one value: a row, or an object with a list of rows."""
    lists = [key for key in _LISTS if isinstance(value.get(key), list)] if isinstance(value, Mapping) else []
    if len(lists) == 1:
        for number, row in enumerate(value[lists[0]], 1):
            inner = row.get("row") if isinstance(row, Mapping) else None  # as the hub's viewer answers
            yield f"{path}, {lists[0]}, row {number}", inner if isinstance(inner, Mapping) else row
    elif lists:
        raise UsageError(
            f"{path} has several lists of rows ({', '.join(lists)}); write the wanted one to a file of its own"
        )
    elif isinstance(value, Mapping) and not value.keys() & {*FIELDS}:
        raise UsageError(
            f"{path} is an object with {_keys(value)}, expected rows: an array of objects, an object with a list "
            "'data', or one object per line"
        )
    else:
        yield str(path), value


def _read(row: Any, field: str | None, where: str) -> Value:
    if isinstance(row, str):
        return "text", row if row.strip() else None
    if isinstance(row, list) and row and all(is_turn(turn) for turn in row):
        return conversation(row, {}, where)
    if not isinstance(row, Mapping):
        raise UsageError(f'{where} is {type(row).__name__}, expected an object with fields, like {{"text": "..."}}')
    if field is not None:
        if field not in row:
            raise _no_field(row, f"'{field}'", where)
        return one_field(row, field, where)
    if is_turn(row):
        raise UsageError(
            f"{where} is a single message ({_keys(row)}); put all messages of a conversation into one row, "
            '{"messages": [...]}, or name the field of its text with ' + arg("text_field")
        )
    for key in (*CHATS, *TEXTS):
        if not nothing(row.get(key)):
            return one_field(row, key, where)
    ask = next((key for key in ASKS if not nothing(row.get(key))), None)
    if ask is not None:
        return asked(row, ask, where)
    for key in ("chosen", TOKENS):
        if not nothing(row.get(key)):
            form, value = one_field(row, key, where)
            return f"{form} in 'chosen' alone" if key == "chosen" else form, value
    if not row.keys() & {*FIELDS}:
        raise _no_field(row, f"any of {', '.join(FIELDS)}", where)
    return "text", None


def _keys(row: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, list(row)[:6])) or "no fields"


def _no_field(row: Mapping[Any, Any], wanted: str, where: str) -> UsageError:
    return UsageError(
        f"{where} has {_keys(row)}, not {wanted}; choose one with {arg('text_field')}, or rename it to text"
    )


def size_of(value: Any) -> int:
    """How many characters a row has, about; of token ids, how many these are."""
    if isinstance(value, Messages):
        return sum(len(str(message["content"])) for message in value)
    return len(value)


def shows_images(value: Any) -> bool:
    """Whether a row is messages, of which one has an image."""
    return isinstance(value, Messages) and any(has_image(message["content"]) for message in value)
