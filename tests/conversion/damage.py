"""Ways to damage a checkpoint folder, one function each; they know the file format and nothing of ptqpipe's checks."""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Header = dict[str, Any]


def copy(folder: Path, to: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(folder, to)
    return to


def shards(folder: Path) -> list[Path]:
    """The weight files."""
    return sorted(folder.glob("*.safetensors"))


def read_header(path: Path) -> tuple[Header, int]:
    """(the header, where the data begin)."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), 8 + length


def place_of(folder: Path, name: str) -> tuple[Path, int, int]:
    """(file, first byte, length) of a tensor."""
    for path in shards(folder):
        header, start = read_header(path)
        if name in header:
            begin, end = header[name]["data_offsets"]
            return path, start + begin, end - begin
    raise KeyError(name)


def tensor_bytes(folder: Path, name: str) -> bytearray:
    """The bytes of a tensor."""
    path, begin, length = place_of(folder, name)
    return bytearray(path.read_bytes()[begin : begin + length])


def put(folder: Path, name: str, data: bytes) -> None:
    """Overwrites a tensor with as many bytes."""
    path, begin, length = place_of(folder, name)
    assert len(data) == length
    with open(path, "r+b") as file:
        file.seek(begin)
        file.write(data)


def change_byte(folder: Path, name: str, index: int, change: Callable[[int], int]) -> None:
    """Changes one byte of a tensor."""
    data = tensor_bytes(folder, name)
    data[index] = change(data[index]) & 0xFF
    put(folder, name, bytes(data))


def swap(folder: Path, a: str, b: str) -> None:
    """Exchanges the bytes of two tensors of one size."""
    first, second = tensor_bytes(folder, a), tensor_bytes(folder, b)
    put(folder, a, bytes(second))
    put(folder, b, bytes(first))


def edit_header(path: Path, edit: Callable[[Header], Header]) -> None:
    """Rewrites a header; the data stay."""
    header, start = read_header(path)
    data = path.read_bytes()[start:]
    text = json.dumps(edit(header)).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def rename(folder: Path, old: str, new: str) -> None:
    """Gives a tensor another name, in the header and the index."""
    path, _, _ = place_of(folder, old)
    edit_header(path, lambda header: {new if key == old else key: value for key, value in header.items()})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        edit_json(index, lambda c: c["weight_map"].update({new: c["weight_map"].pop(old)}))


def drop(folder: Path, name: str) -> None:
    """Takes a tensor out of its file, bytes and all."""
    path, begin, length = place_of(folder, name)
    header, start = read_header(path)
    data = path.read_bytes()
    path.write_bytes(data[:begin] + data[begin + length :])
    cut = begin - start

    def shifted(header: Header) -> Header:
        kept = {key: value for key, value in header.items() if key != name}
        for key, value in kept.items():
            if key != "__metadata__" and value["data_offsets"][0] >= cut + length:
                value["data_offsets"] = [offset - length for offset in value["data_offsets"]]
        return kept

    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    text = json.dumps(shifted(header)).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def retype(folder: Path, name: str, dtype: str) -> None:
    """Gives a tensor another dtype of the same width."""
    path, _, _ = place_of(folder, name)

    def edit(header: Header) -> Header:
        header[name]["dtype"] = dtype
        return header

    edit_header(path, edit)


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    """Changes a JSON file in place; a record gets the sha256 of what it says now."""
    content = json.loads(path.read_text())
    edit(content)
    if path.name == "ptqpipe.json":
        write_record(path.parent, content)
    else:
        path.write_text(json.dumps(content, indent=2))


def write_record(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes a record as somebody does who knows how it vouches for itself: with the sha256 of the file that has 64
    zeros in its place. One without a sha256 stays without."""
    text = json.dumps({key: value for key, value in content.items() if key != "sha256"}, indent=2, ensure_ascii=False)
    if "sha256" in content:
        blank = f'{text[:-2]},\n  "sha256": "{"0" * 64}"\n}}\n'
        text = blank.replace("0" * 64 + '"\n}\n', hashlib.sha256(blank.encode()).hexdigest() + '"\n}\n')
    (folder / "ptqpipe.json").write_text(text)


def edit_config(folder: Path, edit: Callable[[Any], object]) -> None:
    """Changes quantization_config."""
    edit_json(folder / "config.json", lambda config: edit(config["quantization_config"]))


def disown(folder: Path) -> Path:
    """Takes away what says that ptqpipe wrote it: it becomes another tool's checkpoint."""
    (folder / "ptqpipe.json").unlink()
    edit_config(folder, lambda described: described.pop("ptqpipe"))
    return folder


def rehash(folder: Path, weight: str, role: str, tensor: str) -> None:
    """Makes the record describe the damaged bytes, as whoever hides a change would."""
    digest = hashlib.sha256(tensor_bytes(folder, tensor)).hexdigest()
    edit_json(folder / "ptqpipe.json", lambda record: record["weights"][weight]["sha256"].update({role: digest}))
