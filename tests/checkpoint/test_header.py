"""Claims about ptqpipe.checkpoint.header; the oracle is the safetensors library's own reader."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.checkpoint.header import SUB_BYTE_BITS, header_bytes, parse_file, tensor_bytes
from ptqpipe.errors import CheckpointError
from tests.checkpoint.builders import entry, one_line, raw_file, u8_file

U8 = entry("U8", [1], 0, 1)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse_file(path)
    assert path.name in str(caught.value)
    return one_line(caught.value)


def test_the_dtype_table_is_the_librarys() -> None:
    with pytest.raises(SafetensorError) as caught:
        deserialize(struct.pack("<Q", 60) + b'{"a":{"dtype":"?","shape":[1],"data_offsets":[0,1]}}'.ljust(60))
    known = {word for word in str(caught.value).split("`")[1::2] if word != "?"}
    assert known == DTYPES.keys() | SUB_BYTE_BITS.keys()


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_means_what_it_means_to_the_library(name: str, tmp_path: Path) -> None:
    dtype, itemsize = DTYPES[name]
    assert torch.empty(0, dtype=dtype).element_size() == itemsize
    if name != "F8_E8M0":  # the library's torch writer of 0.8 has no name for it
        path = tmp_path / "a.safetensors"
        path.write_bytes(save({"t": torch.zeros(3, 2, dtype=dtype)}))
        (found,) = parse_file(path).entries
        assert (found.dtype, found.shape, found.nbytes) == (name, (3, 2), 6 * itemsize)


@pytest.mark.parametrize("name", [*DTYPES, *SUB_BYTE_BITS])
def test_the_library_takes_our_header_of_each_dtype(name: str) -> None:
    nbytes = tensor_bytes(name, (2, 4))
    data = bytes(range(nbytes)) if name != "BOOL" else bytes(nbytes)
    ((found, info),) = deserialize(header_bytes([("x", name, (2, 4))]) + data)
    assert (found, info["dtype"], list(info["shape"]), bytes(info["data"])) == ("x", name, [2, 4], data)


def test_headers_are_padded_so_that_data_begin_on_a_multiple_of_eight() -> None:
    for length in range(1, 20):
        header = header_bytes([("n" * length, "F32", (1,))], {"format": "pt"})
        assert len(header) % 8 == 0
        assert struct.unpack("<Q", header[:8]) == (len(header) - 8,)
        assert header[8:9] == b"{"


def test_a_header_is_pinned_to_the_byte() -> None:
    text = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]},'
        b'"\xc3\xa9":{"dtype":"U8","shape":[],"data_offsets":[4,5]}}'
    )
    text += b" " * (-len(text) % 8)
    assert (
        header_bytes([("a", "BF16", (2, 1)), ("é", "U8", ())], {"format": "pt"}) == struct.pack("<Q", len(text)) + text
    )


def test_a_header_is_what_a_json_writer_makes_of_any_name() -> None:
    names = ['"quoted"', "back\\slash", "new\nline", "\x7f\x00", "ü.weight", "\U0001f600", ""]
    kinds = [("BF16", (2, 3)), ("F4", (1, 2)), ("U8", ()), ("F8_E4M3", (0, 7)), ("I64", (4,)), ("F32", (1, 1, 1))]
    header: dict[str, Any] = {"__metadata__": {"ö": '"'}}
    position, entries = 0, []
    for name, (dtype, shape), nbytes in zip(names, [*kinds, kinds[0]], [12, 1, 1, 0, 32, 4, 12], strict=True):
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
        entries.append((name, dtype, shape))
    written = header_bytes(entries, {"ö": '"'})
    assert written[8:].rstrip() == json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def test_entries_come_in_the_order_of_their_bytes_with_absolute_offsets(tmp_path: Path) -> None:
    header = {"b": entry("U8", [2], 1, 3), "__metadata__": {"k": "v"}, "a": entry("I8", [], 0, 1)}
    path = raw_file(tmp_path / "m.safetensors", header, b"123")
    found = parse_file(path)
    data_start = path.stat().st_size - 3
    places = [(e.name, e.offset - data_start, e.nbytes, e.shape) for e in found.entries]
    assert places == [("a", 0, 1, ()), ("b", 1, 2, (2,))]
    assert found.metadata == {"k": "v"}


def test_a_file_without_tensors_has_none(tmp_path: Path) -> None:
    header = parse_file(raw_file(tmp_path / "m.safetensors", {}))
    assert (header.entries, header.metadata) == ((), {})


MALFORMED = {
    "array": (b'["a"]', b"", "begins with"),
    "not JSON": (b"{nonsense}", b"", "does not parse"),
    "not UTF-8": (b'{"\xff":1}', b"", "not UTF-8"),
    "lone surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1", "not valid Unicode"),
    "lone surrogate in metadata": (b'{"__metadata__":{"a":"\\udc00"}}', b"", "not valid Unicode"),
    "duplicate name": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}', b"", "duplicate key 'a'"),
    "duplicate field": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"1", "duplicate"),
    "NaN": (b'{"a":NaN}', b"", "NaN is not JSON"),
    "nested": (b'{"a":' + b"[" * 200_000, b"", "nested too deeply"),
    "nested shape": (
        b'{"a":{"dtype":"U8","data_offsets":[0,1],"shape":' + b"[" * 900 + b"]" * 900 + b"}}",
        b"1",
        "shape",
    ),
    "long integer": (b'{"a":{"dtype":"U8","data_offsets":[0,1],"shape":[' + b"9" * 5000 + b"]}}", b"1", "parse"),
    "trailing NUL": (b"{}\0", b"", "does not parse"),
    "entry not an object": ({"a": [1]}, b"", "fields 'list'"),
    "missing field": ({"a": {"dtype": "U8", "shape": [1]}}, b"1", "expected ['data_offsets', 'dtype', 'shape']"),
    "extra field": ({"a": {**U8, "strides": [1]}}, b"1", "'strides'"),
    "unknown dtype": ({"a": entry("INT4", [1], 0, 1)}, b"1", "dtype 'INT4'"),
    "dtype not a string": ({"a": {**U8, "dtype": ["U8"]}}, b"1", "dtype ['U8']"),
    "negative dimension": ({"a": entry("U8", [-1], 0, 1)}, b"1", "[-1]"),
    "minus zero": (b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', b"", "shape [-1]"),
    "boolean dimension": ({"a": entry("U8", [True], 0, 1)}, b"1", "[True]"),
    "float dimension": ({"a": entry("U8", [1.0], 0, 1)}, b"1", "[1.0]"),
    "huge dimension": ({"a": entry("U8", [2**63], 0, 1)}, b"1", "2**63 - 1"),
    "overflowing product": ({"a": entry("F32", [2**40, 2**40], 0, 1)}, b"1", "exceeds 2**63 - 1"),
    "shape a string": ({"a": {**U8, "shape": "1"}}, b"1", "shape '1'"),
    "three offsets": ({"a": {**U8, "data_offsets": [0, 1, 2]}}, b"1", "[begin, end]"),
    "boolean offset": ({"a": {**U8, "data_offsets": [False, True]}}, b"1", "[begin, end]"),
    "negative offset": ({"a": {**U8, "data_offsets": [-1, 0]}}, b"1", "[-1, 0]"),
    "end before begin": ({"a": entry("U8", [1], 1, 0)}, b"1", "-1 bytes"),
    "wrong size": ({"a": entry("BF16", [3], 0, 5)}, b"12345", "5 bytes, expected 6 for BF16 [3]"),
    "hole": ({"a": U8, "b": entry("U8", [1], 2, 3)}, b"123", "leaves a hole after 'a'"),
    "hole before": ({"a": entry("U8", [1], 1, 2)}, b"12", "leaves a hole after the beginning"),
    "overlap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123", "overlaps 'a'"),
    "beyond the file": ({"a": entry("U8", [4], 0, 4)}, b"123", "the file is truncated"),
    "trailing bytes": ({"a": U8}, b"123", "2 bytes after the last tensor"),
    "half a byte": ({"a": entry("F4", [3], 0, 2)}, b"12", "whole byte"),
    "metadata a list": ({"__metadata__": []}, b"", "expected an object of strings"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "expected an object of strings"),
    "line break in a name": ({"a\nb": entry("U8", [2], 0, 1)}, b"1", "'a\\nb'"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers_are_one_clear_line(case: str, tmp_path: Path) -> None:
    header, data, fragment = MALFORMED[case]
    message = refused(raw_file(tmp_path / "m.safetensors", header, data))  # type: ignore[arg-type]
    assert fragment in message


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"", "has 0 bytes, expected at least 8"),
        (b"1234567", "has 7 bytes"),
        (struct.pack("<Q", 3) + b"{}", "claims a header of 3 bytes but has 10"),
        (struct.pack("<Q", 100_000_001) + b"{}", "expected at most 100000000"),
        (struct.pack("<Q", 2**64 - 1), "18446744073709551615"),
        (struct.pack("<Q", 0), "begins with b''"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "not a safetensors file"),
    ],
)
def test_files_that_are_no_safetensors_are_named(content: bytes, fragment: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    assert fragment in refused(path)


def test_folders_pipes_and_absent_files_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "d.safetensors").mkdir()
    assert "not a regular file" in refused(tmp_path / "d.safetensors")
    os.mkfifo(tmp_path / "p.safetensors")
    assert "not a regular file" in refused(tmp_path / "p.safetensors")
    assert "No such file" in refused(tmp_path / "absent.safetensors")
    (tmp_path / "l.safetensors").symlink_to("nowhere")
    assert "No such file" in refused(tmp_path / "l.safetensors")


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = u8_file(tmp_path / "m.safetensors", "a")
    path.chmod(0)
    euid = os.geteuid()
    if euid == 0:
        os.seteuid(65534)  # permissions do not hold root back
    try:
        assert "Permission denied" in refused(path)
    finally:
        os.seteuid(euid)


@pytest.mark.parametrize(
    "entries",
    [
        [("a", "U8", (1,)), ("a", "U8", (1,))],
        [("__metadata__", "U8", (1,))],
        [("a", "INT4", (1,))],
        [("a", "U8", (-1,))],
        [("\ud800", "U8", (1,))],
    ],
)
def test_headers_that_nobody_reads_are_not_made(entries: list[tuple[str, str, tuple[int, ...]]]) -> None:
    with pytest.raises(ValueError):
        header_bytes(entries)
