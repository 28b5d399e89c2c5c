"""Calibration data of a call in Python as what the commands take: names of files and data sets.

What is no file becomes a temporary file of rows, one JSON object a line: texts as they are, tokens as ``input_ids``.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ptqpipe.calibration.rows import is_data_file, weighted
from ptqpipe.errors import UsageError
from ptqpipe.models.language_model import CACHES

Data = str | Path | Iterable[Any] | None
"""A file, a data set by its name, or several; or rows: texts, token ids, messages, dicts; a ``datasets`` object or a
DataLoader, whose batches are tensors or dicts with ``input_ids``."""

MOST_BYTES = 64 << 20  # of the rows of a stream, which may have no end
_KEPT = (str, int, float, list, dict, type(None))  # types of the fields that a row of a data set keeps


@contextmanager
def data_names(data: Data) -> Iterator[list[str]]:
    """Files and data sets by name; rows are written to a temporary file, which is there meanwhile.

    UsageError for rows that are neither text nor token ids.
    """
    names = _names(data)
    if names is not None:
        yield names
        return
    with TemporaryDirectory(prefix="ptqpipe-data-") as folder:
        path = Path(folder) / "data.jsonl"
        write_rows(data, path)
        yield [str(path)]


def _names(data: Any) -> list[str] | None:
    """The names that data are; None for rows. UsageError for a list of both."""
    if data is None:
        return []
    if isinstance(data, str | Path):
        return [str(data)]
    if not isinstance(data, list | tuple) or not data:
        return None
    named = [_is_name(item) for item in data]
    if any(named) and not all(named):
        raise UsageError(f"data has files ({data[named.index(True)]}) and other rows; give one kind")
    return [str(item) for item in data] if all(named) else None


def _is_name(item: Any) -> bool:
    """Whether an item of a list is a file, and no text."""
    if not isinstance(item, str):
        return isinstance(item, Path)
    name, _ = weighted(item)
    return (not any(letter.isspace() for letter in name) and is_data_file(name)) or os.path.isfile(name)


def write_rows(data: Any, path: Path) -> None:
    """Writes rows as JSON lines. UsageError for none, and for rows that are neither text nor token ids."""
    data, written = _rows_of_table(data), 0
    whole = isinstance(data, torch.Tensor | Mapping)
    stream = not whole and not _has_length(data)
    try:
        items = enumerate([data] if whole else data)
    except TypeError:
        raise UsageError(f"data is a {type(data).__name__}; give files, texts, token ids or batches of them") from None
    with open(path, "w", encoding="utf-8") as file:
        for number, item in items:
            where = "data" if whole else f"data[{number}]"
            for row in _rows(item, where):
                written += file.write(_line(row, where))
            if stream and written > MOST_BYTES:
                break
    if not written:
        raise UsageError("data has no rows (an iterator can be read once); give texts, token ids or batches of them")


def _rows_of_table(data: Any) -> Any:
    """The rows of a table in memory, of which an iterator gives columns: pandas', Polars' and pyarrow's. Of messages,
    one row with all of them. UsageError for several data sets by the names of their splits."""
    if hasattr(data, "to_dicts"):
        return data.to_dicts()
    if hasattr(data, "to_pylist") and hasattr(data, "column_names"):
        return data.to_pylist()
    if hasattr(data, "to_dict") and hasattr(data, "columns") and hasattr(data, "iloc"):
        return data.astype(object).where(data.notna(), None).to_dict("records")
    if isinstance(data, Mapping) and data and all(_is_data_set(part) for part in data.values()):
        raise UsageError(f"data has several data sets ({', '.join(map(str, data))}); give one of them")
    if isinstance(data, list | tuple) and data and all(_is_message(item) for item in data):
        return [data]
    return data


def _is_data_set(value: Any) -> bool:
    return hasattr(value, "features") and hasattr(value, "__iter__")


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("role"), str) and "content" in item


def _line(row: Mapping[str, Any], where: str) -> str:
    """A row as a line of JSON. UsageError for values that JSON has none for, as images in memory are."""
    try:
        return f"{json.dumps(row, default=_listed)}\n"
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} cannot be written as JSON ({error}); give texts, messages and token ids") from None


def _listed(value: Any) -> Any:
    """An array, a number of NumPy or another mapping as JSON has it."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it has a {type(value).__name__}")


def _has_length(data: Any) -> bool:
    """Whether data end. A DataLoader of a stream has a length by its class alone."""
    try:
        return len(data) >= 0
    except TypeError:
        return False


def _rows(item: Any, where: str) -> Iterator[dict[str, Any]]:
    """The rows of one item of the data: a text, messages, tokens, or a batch."""
    if isinstance(item, str):
        yield {"text": item}
    elif isinstance(item, Mapping) and item.get("input_ids") is not None:
        for tokens in _tokens(item["input_ids"], item.get("attention_mask"), f"{where}['input_ids']"):
            yield {"input_ids": tokens}
    elif isinstance(item, Mapping):
        kept = {str(n): _listed(v) if hasattr(v, "tolist") else v for n, v in item.items()}
        kept = {name: value for name, value in kept.items() if isinstance(value, _KEPT)}
        yield from _unbatched(kept)
    elif isinstance(item, list | tuple) and item and all(isinstance(part, Mapping) for part in item):
        yield {"messages": [dict(part) for part in item]}
    else:  # of a batch of several tensors, the first one has the tokens
        several = isinstance(item, list | tuple) and item and isinstance(item[0], torch.Tensor) and item[0].dim() > 0
        for tokens in _tokens(item[0] if several else item, None, where):
            yield {"input_ids": tokens}


def _unbatched(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a batch of texts, as a DataLoader collates them: {name: [text of each row]}; a row as it is."""
    columns = list(row.values())
    count = len(columns[0]) if columns and isinstance(columns[0], list) else 0
    batch = count and all(
        isinstance(c, list) and len(c) == count and not isinstance(c[0], Mapping | list) for c in columns
    )
    if not batch or not any(isinstance(column[0], str) for column in columns):
        yield row
        return
    for number in range(count):
        yield {name: value[number] for name, value in row.items()}


def _tokens(value: Any, mask: Any, where: str) -> Iterator[list[int]]:
    """The token ids of each row of ``[tokens]`` or ``[rows, tokens]``, without those that ``mask`` leaves out."""
    wrong = UsageError(
        f"{where} is {type(value).__name__}, expected a text, token ids, or a batch with input_ids [rows, tokens]"
    )
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):  # rows of different lengths
        for number, row in enumerate(value):
            yield from _tokens(row, None if mask is None else mask[number], f"{where}[{number}]")
        return
    try:
        ids = torch.as_tensor(value).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise wrong from None
    if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.dtype == torch.bool or not ids.numel():
        raise wrong
    rows = ids.reshape(-1, ids.shape[-1])
    kept = torch.ones_like(rows) if mask is None else torch.as_tensor(mask).cpu().reshape(rows.shape)
    for row, used in zip(rows, kept, strict=True):
        if bool(used.any()):
            yield row[used.bool()].tolist()


def recorded(model: Any, forward_loop: Callable[[Any], Any]) -> list[list[int]]:
    """The token ids that ``forward_loop(model)`` calls the model with, row by row.

    Calls that go on with a sequence (the steps of ``generate`` behind its prompt) are left out. UsageError where it
    calls it not once, or without token ids.
    """
    rows: list[list[int]] = []

    def look(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        past = next((named[name] for name in CACHES if named.get(name) is not None), None)
        if past is not None and past.get_seq_length() > 0:
            return
        ids = named.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor):
            raise UsageError("forward_loop calls the model without input_ids; calibration runs on token ids alone")
        rows.extend(_tokens(ids, named.get("attention_mask"), "input_ids"))

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with torch.no_grad():
            forward_loop(model)
    finally:
        handle.remove()
    if not rows:
        raise UsageError("forward_loop did not call the model it was given; call it with input_ids, batch by batch")
    return rows
