"""Claims under thousands of seeded mutations: a damaged checkpoint is refused in one line, or read as the library does.

Whatever the reader accepts is compared with the safetensors library: the same names, dtypes, shapes and bytes. Any
other exception, or more than the time allowed, fails.
"""

import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize

from ptqpipe.checkpoint.header import header_bytes
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.errors import CheckpointError
from tests.checkpoint.builders import one_line

HEADER_MUTATIONS = 6000
INDEX_MUTATIONS = 2000
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 8, -1, 1.0, 1e300, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30),
    *("", "U8", "F4", "F8_E4M3", "BF16", "u8", "a", "\0", "\ud800", "../x", "x" * 300),
    *([], [0], [0, 0], [[0]], {}, {"a": 1}),
]
# Of other files than headers, too: what is no JSON, or no number that float can hold, paths, terminals, expressions.
HOSTILE: list[Any] = [
    *(float("nan"), float("inf"), -float("inf"), 10**400, -(10**400), -1e308, 5e-324, -0.0),
    *("../../x", "/etc/passwd", "a\nb", "\x1b[2J", "\u202e", "\ud800", "x" * 20_000, "re:(.*)*(.*)*!$", "re:(", "*"),
    *("nan", "1e999", "0x10", "true", "e2m1/0/e4m3", "e9m9/16/e8m0", "nvfp4", "-", " ", "%s", "{}"),
    *([None], [[]] * 50, {"": None}, {"*": {}}, {"re:(.*)*!$": {}}, {"a": {"b": {"c": [1, {"d": None}]}}}),
]
BYTES = [b"", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\0", b"\xff", b"0"]
BYTES += [b"9", b"-", b".", b"e5", b"null", b"\n"]


def base_files() -> list[tuple[bytes, bytes]]:
    """Header text and data of three small files with scalars, empty tensors and several dtypes."""
    contents = [
        [("a", "U8", (3,)), ("b", "BF16", (2, 2)), ("c", "F32", ()), ("empty", "F32", (0, 4))],
        [("model.layers.0.w", "F8_E4M3", (4, 2)), ("model.layers.0.s", "F4", (2, 4)), ("n", "BOOL", (2,))],
        [("x", "I64", (1,))],
    ]
    files = []
    for tensors in contents:
        header = header_bytes(tensors, {"format": "pt"})
        size = sum(_nbytes(d, s) for _, d, s in tensors)
        files.append((header[8:], bytes(i % 2 for i in range(size))))
    return files


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = {"U8": 8, "BOOL": 8, "F8_E4M3": 8, "BF16": 16, "F32": 32, "I64": 64, "F4": 4}[dtype]
    for d in shape:
        bits *= d
    return bits // 8


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(items):
        yield value, key
        yield from places(child)


def mutate_json(text: bytes, rng: random.Random, values: list[Any] = VALUES) -> bytes:
    value = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        spots = list(places(value))
        if not spots:
            break
        container, key = rng.choice(spots)
        action = rng.randrange(6)
        if action == 0:
            del container[key]
        elif action == 1:
            container[key] = copy.deepcopy(rng.choice(values))
        elif action == 2 and isinstance(container[key], int):
            container[key] += rng.choice([-8, -2, -1, 1, 2, 8])
        elif action == 3:
            other, other_key = rng.choice(spots)
            container[key] = copy.deepcopy(other.get(other_key) if isinstance(other, dict) else value)
        elif action == 4 and isinstance(container, list):
            container.insert(key, copy.deepcopy(rng.choice(values)))
        elif isinstance(container, dict):
            container[rng.choice(["a", "b", "", "__metadata__", "dtype", "é"])] = container.pop(key)
    if rng.random() < 0.1:  # a duplicate key, which json.dumps cannot make
        dumped = json.dumps(value).encode()
        return dumped[:-1] + b"," + dumped[1:] if len(dumped) > 2 else dumped
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def mutate_bytes(text: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 4])):
        position = rng.randrange(len(text) + 1)
        action = rng.randrange(4)
        if action == 0:
            text = text[:position] + rng.choice(BYTES) + text[position + 1 :]
        elif action == 1:
            text = text[:position] + rng.choice(BYTES) * rng.choice([1, 3, 2000]) + text[position:]
        elif action == 2:
            text = text[:position] + text[position + rng.randrange(1, 20) :]
        else:
            text = text[:position] + bytes([rng.randrange(256)]) + text[position + 1 :]
    return text


def mutate_file(text: bytes, data: bytes, rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.5:
        text = mutate_json(text, rng)
    elif kind < 0.8:
        text = mutate_bytes(text, rng)
    if rng.random() < 0.15:
        data = data + b"\1" if rng.random() < 0.5 else data[: rng.randrange(len(data) + 1)]
    length = len(text)
    if rng.random() < 0.1:
        wrong = [0, 1, 7, length - 1, length + 1, length + len(data), 10**8, 10**8 + 1, 2**32, 2**63, 2**64 - 1]
        length = rng.choice(wrong)
    file = struct.pack("<Q", length) + text + data
    return file[: rng.randrange(len(file))] if rng.random() < 0.05 else file


def accepted(folder: Path) -> bool:
    """Opens the folder; if that succeeds, everything must agree with the library."""
    try:
        reader = CheckpointReader.open(folder)
    except CheckpointError as error:
        one_line(error)
        return False
    with reader:
        expected = {}
        for file in reader.files:
            expected.update({name: (file, info) for name, info in deserialize(file.read_bytes())})
        assert reader.entries.keys() == expected.keys()
        for name, entry in reader.entries.items():
            file, info = expected[name]
            assert (entry.file, entry.dtype, list(entry.shape)) == (file, info["dtype"], list(info["shape"]))
            assert bytes(reader.read_bytes(name)) == bytes(info["data"])
    return True


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_mutated_headers_are_refused_or_read_as_the_library_reads_them(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    files = base_files()
    path = tmp_path / "model.safetensors"
    for text, data in files:
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        assert accepted(tmp_path)
    count = 0
    for _ in range(HEADER_MUTATIONS // 4):
        path.write_bytes(mutate_file(*rng.choice(files), rng))
        count += accepted(tmp_path)
    assert 0.02 < count / (HEADER_MUTATIONS // 4) < 0.9  # both outcomes are exercised


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_mutated_indexes_are_refused_or_agree_with_the_shards(seed: int, tmp_path: Path) -> None:
    rng = random.Random(1000 + seed)
    shards = {"model-00001-of-00002.safetensors": 0, "model-00002-of-00002.safetensors": 1}
    weight_map = {}
    for file, i in shards.items():
        text, data = base_files()[i]
        (tmp_path / file).write_bytes(struct.pack("<Q", len(text)) + text + data)
        weight_map.update({name: file for name in json.loads(text) if name != "__metadata__"})
    whole = json.dumps({"metadata": {"total_size": 33}, "weight_map": weight_map}).encode()
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(whole)
    assert accepted(tmp_path)
    count = 0
    for _ in range(INDEX_MUTATIONS // 2):
        index.write_bytes((mutate_json if rng.random() < 0.6 else mutate_bytes)(whole, rng))
        if accepted(tmp_path):
            count += 1
            assert json.loads(index.read_bytes())["weight_map"].keys() == weight_map.keys()
    assert 0.02 < count / (INDEX_MUTATIONS // 2) < 0.9


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for text, data in base_files():
        whole = struct.pack("<Q", len(text)) + text + data
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            assert not accepted(tmp_path)
