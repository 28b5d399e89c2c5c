"""The header of one safetensors file: parsed strictly, written exactly.

A safetensors file is 8 bytes of little-endian header length, a JSON header, then the tensors' bytes without holes. This
file knows names, dtype strings, shapes and offsets; it touches no byte of weights. Whatever it accepts, the safetensors
library (0.8) accepts with the same meaning; it refuses more: duplicate names, unknown fields, a header that does not
start with ``{``.

Source: the format section of the safetensors README, and the behaviour of the library's own reader.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.errors import CheckpointError, read_failure

#: The dtypes of less than a byte, in bits. Their bytes are read, copied and written; no torch tensor is made of them.
SUB_BYTE_BITS: Final[Mapping[str, int]] = MappingProxyType({"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6})

#: The library refuses longer headers.
MAX_HEADER_BYTES: Final = 100_000_000
_LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 8
_MAX_BYTES: Final = 2**63 - 1
_METADATA: Final = "__metadata__"
_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})


#: A string as JSON, letters beyond ASCII as they are.
quoted: Final = json.encoder.encode_basestring


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint: where its bytes lie, before any of them is read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """One file's header as found: its tensors by offset, and what tells whether the file has changed since."""

    path: Path
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    sha256: str
    file_bytes: int
    mtime_ns: int
    ctime_ns: int


def shown(value: object, *, limit: int = 160) -> str:
    """``repr`` of a value from a file, cut to ``limit`` characters, so that a message stays one line."""
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor, for a dtype string and a shape.

    Raises ValueError for an unknown dtype, a negative dimension, a size above 2**63 - 1 (zero dimensions left
    aside, as the library multiplies them in order), or a sub-byte tensor that does not end on a byte.
    """
    return _tensor_bytes(dtype, tuple(shape))


@lru_cache(maxsize=1024)
def _tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = SUB_BYTE_BITS[dtype] if dtype in SUB_BYTE_BITS else 8 * DTYPES[dtype][1] if dtype in DTYPES else 0
    if not bits:
        raise ValueError(f"dtype {shown(dtype)} is unknown, expected one of {', '.join([*DTYPES, *SUB_BYTE_BITS])}")
    if any(d < 0 for d in shape):
        raise ValueError(f"shape {shown(list(shape))} has a negative dimension")
    total = 1
    for d in shape:
        total *= d or 1
        if total * bits > _MAX_BYTES:
            raise ValueError(f"shape {shown(list(shape))} of {dtype} exceeds 2**63 - 1 bits")
    total_bits = math.prod(shape) * bits
    if total_bits % 8:
        raise ValueError(f"shape {shown(list(shape))} of {dtype} does not end on a whole byte")
    return total_bits // 8


def parse_file(path: Path) -> FileHeader:
    """The header of one safetensors file: its tensors in the order of their bytes, its metadata, its sha256, the
    file's size, and when its content and its inode were changed.

    Every entry is in bounds, the entries cover the data without overlap or hole. Raises CheckpointError, in one line,
    for a file that is absent, unreadable, not regular, truncated, or has a malformed header.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before open(): opening a pipe would block for ever
            _bad(path, "is not a regular file", "remove it, or name the model's folder")
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            raw = _header_text(path, file.fileno(), status.st_size)
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read: {read_failure(error)}") from None
    tensors, metadata = _parse_json(path, raw)
    data_start = _LENGTH_BYTES + len(raw)
    entries = _place(path, tensors, data_start=data_start, data_bytes=status.st_size - data_start)
    sha256, sizes = hashlib.sha256(raw).hexdigest(), (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return FileHeader(path, entries, MappingProxyType(metadata), sha256, *sizes)


def header_bytes(
    entries: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """The bytes before the data of a file that holds these tensors (name, dtype, shape) one after another.

    The JSON is padded with spaces so that the data begin on a multiple of 8. Raises ValueError for what no
    reader would take: duplicate or reserved names, unknown dtypes, text that is not UTF-8, more than 100 MB.
    """
    header = [f"{quoted(_METADATA)}:{_compact(dict(metadata))}"] if metadata else []
    names, position = {_METADATA}, 0
    for name, dtype, shape in entries:  # written here, since `json.dumps` takes three times as long
        if name in names:
            raise ValueError(f"tensor name {shown(name)} is duplicate or reserved")
        names.add(name)
        nbytes, described = _described(dtype, tuple(shape))
        header.append(f'{quoted(name)}:{{{described},"data_offsets":[{position},{position + nbytes}]}}')
        position += nbytes
    text = f"{{{','.join(header)}}}".encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes exceeds {MAX_HEADER_BYTES}; use more shards")
    return struct.pack("<Q", len(text)) + text


@lru_cache(maxsize=1024)
def _described(dtype: str, shape: tuple[int, ...]) -> tuple[int, str]:
    """A tensor's bytes, and what a header says of its dtype and shape."""
    return tensor_bytes(dtype, shape), f'"dtype":{quoted(dtype)},"shape":{_compact(shape)}'


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def header_of(path: Path, entries: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> FileHeader:
    """The header of a file at ``path`` with these tensors (name, dtype, shape). Reads nothing."""
    raw = header_bytes(entries, metadata)
    placed, position = [], len(raw)
    for name, dtype, shape in entries:
        placed.append(TensorEntry(name, dtype, tuple(shape), path, position, tensor_bytes(dtype, shape)))
        position += placed[-1].nbytes
    sha256 = hashlib.sha256(raw[_LENGTH_BYTES:]).hexdigest()
    return FileHeader(path, tuple(placed), MappingProxyType(dict(metadata)), sha256, position, 0, 0)


def pread_exactly(fd: int, nbytes: int, offset: int) -> bytes:
    """``nbytes`` from a file, fewer only where it ends. Raises OSError."""
    parts: list[bytes] = []
    while nbytes > 0 and (part := os.pread(fd, nbytes, offset)):
        parts.append(part)
        nbytes -= len(part)
        offset += len(part)
    return b"".join(parts)


def parse_json_object(
    path: Path, raw: bytes, *, what: str = "JSON", remedy: str = "download or write it again"
) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no duplicate keys, no NaN, no nesting beyond the interpreter's limit.

    Raises CheckpointError naming the file.
    """
    try:
        text = raw.decode("utf-8")
        # A call for each of 400,000 numbers takes its time, as does one for each of 100,000 objects below.
        hooks: dict[str, Any] = {"parse_constant": _no_constant, "parse_int": _no_minus_zero if "-0" in text else None}
        value = json.loads(text, **hooks)
        if text.count(":") != _keys(value):  # a key twice has a colon more than there are keys; others lie in strings
            value = json.loads(text, object_pairs_hook=_no_duplicates, **hooks)
    except RecursionError:
        _bad(path, f"has {what} that is nested too deeply", remedy)
    except UnicodeDecodeError as error:
        _bad(path, f"has {what} that is not UTF-8 (byte {error.start})", remedy)
    except ValueError as error:
        _bad(path, f"has {what} that does not parse: {shown(str(error))[1:-1]}", remedy)
    if not isinstance(value, dict):
        _bad(path, f"has {what} of type {type(value).__name__}, expected an object", remedy)
    return value


def _bad(path: Path, what: str, remedy: str) -> NoReturn:
    raise CheckpointError(f"{shown(str(path), limit=400)} {what}; {remedy}")


_AGAIN: Final = "the file is damaged, download or write it again"


def _header_text(path: Path, fd: int, size: int) -> bytes:
    prefix = pread_exactly(fd, _LENGTH_BYTES, 0)
    if prefix == b"version ":
        _bad(path, "is a Git LFS pointer, not the weights themselves", "run 'git lfs pull' in its folder")
    if len(prefix) < _LENGTH_BYTES:
        _bad(path, f"has {len(prefix)} bytes, expected at least {_LENGTH_BYTES}", _AGAIN)
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        _bad(path, f"claims a header of {length} bytes, expected at most {MAX_HEADER_BYTES}", "not a safetensors file")
    if length > size - _LENGTH_BYTES:
        _bad(path, f"claims a header of {length} bytes but has {size} bytes in all", _AGAIN)
    raw = pread_exactly(fd, length, _LENGTH_BYTES)
    if len(raw) != length:
        _bad(path, f"ends within its header, at byte {_LENGTH_BYTES + len(raw)}", _AGAIN)
    if raw[:1] != b"{":
        _bad(path, f"has a header that begins with {shown(raw[:8])}, expected '{{'", _AGAIN)
    return raw


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        name = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {shown(name)}")
    return result


def _keys(value: object) -> int:
    if not isinstance(value, dict):
        return -1
    return len(value) + sum([len(part) for part in value.values() if type(part) is dict])


def _no_minus_zero(text: str) -> int:
    """ "-0" would pass as 0, which the library refuses; -1 is refused wherever a count is expected."""
    return -1 if text == "-0" else int(text)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _parse_json(path: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    tensors = parse_json_object(path, raw, what="a header", remedy=_AGAIN)
    metadata = tensors.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _bad(path, f"has {_METADATA} {shown(metadata)}, expected an object of strings", _AGAIN)
    if not all(map(_is_unicode, (*metadata, *metadata.values()))):
        _bad(path, f"has {_METADATA} that is not valid Unicode", _AGAIN)
    return tensors, metadata


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_BYTES  # type(), because True is an int to isinstance


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can escape and UTF-8 cannot hold."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _bad_tensor(path: Path, name: str, what: str, remedy: str = _AGAIN) -> NoReturn:
    _bad(path, f"has tensor {shown(name)}{what}", remedy)


def _fields(path: Path, name: str, value: object) -> tuple[str, tuple[int, ...], int, int]:
    """One tensor's dtype, shape, begin and end, each of the right type; the caller places them."""
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        _bad_tensor(path, name, f" with fields {shown(got)}, expected {sorted(_FIELDS)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in SUB_BYTE_BITS):
        what = f" of dtype {shown(dtype)}, expected one of {', '.join([*DTYPES, *SUB_BYTE_BITS])}"
        _bad_tensor(path, name, what, "convert it to one of these first")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        _bad_tensor(path, name, f" of shape {shown(shape)}, expected a list of integers from 0 to 2**63 - 1")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        _bad_tensor(path, name, f" at data_offsets {shown(offsets)}, expected two integers [begin, end]")
    if not _is_unicode(name):
        _bad_tensor(path, name, ", a name that is not valid Unicode")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _place(path: Path, tensors: dict[str, Any], *, data_start: int, data_bytes: int) -> tuple[TensorEntry, ...]:
    """Entries by offset, after the check that they cover the data exactly: no overlap, hole or rest."""
    fields = sorted(((name, *_fields(path, name, value)) for name, value in tensors.items()), key=lambda f: f[3:])
    entries: list[TensorEntry] = []
    position, before = 0, ""
    for name, dtype, shape, begin, end in fields:
        try:
            nbytes = tensor_bytes(dtype, shape)
        except ValueError as error:
            _bad(path, f"has tensor {shown(name)} that cannot be: {error}", _AGAIN)
        if begin == position and end - begin == nbytes and end <= data_bytes:  # as nearly all of 100,000 are
            entries.append(TensorEntry(name, dtype, shape, path, data_start + begin, nbytes))
            position, before = end, name
            continue
        label = f"has tensor {shown(name)}"
        before = shown(before) if before else "the beginning of the data"
        if end - begin != nbytes:
            _bad(path, f"{label} of {end - begin} bytes, expected {nbytes} for {dtype} {shown(list(shape))}", _AGAIN)
        if begin != position:
            kind = "overlaps" if begin < position else "leaves a hole after"
            _bad(path, f"{label} that {kind} {before}: begins at {begin}, expected {position}", _AGAIN)
        _bad(path, f"{label} that ends at {end} of {data_bytes} data bytes: the file is truncated", _AGAIN)
    if position != data_bytes:
        _bad(path, f"has {data_bytes - position} bytes after the last tensor, expected none", _AGAIN)
    return tuple(entries)
