"""Makes safetensors files and folders byte by byte, by hand, for the tests of ptqpipe.checkpoint."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def entry(dtype: str, shape: Sequence[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def raw_file(path: Path, header: bytes | Mapping[str, Any], data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def u8_file(path: Path, *names: str) -> Path:
    """A file of one-byte tensors; the i-th holds i."""
    header = {name: entry("U8", [1], i, i + 1) for i, name in enumerate(names)}
    return raw_file(path, header, bytes(range(len(names))))


def index_file(folder: Path, weight_map: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def one_line(error: BaseException) -> str:
    """The message, once it is known to be one line of a length that a terminal shows."""
    text = str(error)
    assert text
    assert "\n" not in text
    assert "\r" not in text
    assert len(text) < 1500
    return text
