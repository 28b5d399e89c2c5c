"""Checkpoints whose tensors are in memory: a folder with all files of a model but its weights, and who holds those.

While `holding` lasts, readers in this process find the weights in the folder as if the safetensors library had written
them: the same names, order and bytes, so the same fingerprint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ptqpipe.checkpoint.direct import bytes_of
from ptqpipe.checkpoint.dtypes import DTYPE_NAMES
from ptqpipe.checkpoint.header import FileHeader, TensorEntry, header_of

Files = Mapping[str, tuple[Mapping[str, torch.Tensor], Mapping[str, str]]]
"""Name of a file -> (its tensors by name, contiguous; its metadata)."""

#: How the library sorts tensors before it sorts them by name (safetensors 0.8, `prepare`).
_ORDER: Final = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)


@dataclass(frozen=True, slots=True)
class InMemoryCheckpoint:
    """The weights of one folder: the headers that files of them would have, and the tensors."""

    headers: tuple[FileHeader, ...]
    tensors: Mapping[str, torch.Tensor]

    def fill(self, entry: TensorEntry, view: memoryview, start: int) -> None:
        """Writes the tensor's bytes from ``start`` on into the whole of a buffer."""
        flat = self.tensors[entry.name].detach().reshape(-1).view(torch.uint8)
        view[:] = bytes_of(flat[start : start + len(view)].cpu())


_held: dict[Path, InMemoryCheckpoint] = {}
_lock = threading.Lock()


def held_in(folder: Path) -> InMemoryCheckpoint | None:
    """The weights that are held in memory for a folder, None for none."""
    return _held.get(folder.resolve()) if _held else None


@contextmanager
def holding(folder: Path, files: Files) -> Iterator[None]:
    """Readers of ``folder``, which is there and has no weights, find these tensors in it meanwhile. They must stay as
    they are; on whatever device they are, they are read from there."""
    headers = tuple(_header(folder / name, *files[name]) for name in sorted(files))
    tensors = {name: tensor for held, _ in files.values() for name, tensor in held.items()}
    key = folder.resolve()
    with _lock:
        _held[key] = InMemoryCheckpoint(headers, tensors)
    try:
        yield
    finally:
        with _lock:
            del _held[key]


def _header(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> FileHeader:
    entries = [(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    return header_of(path, sorted(entries, key=lambda entry: (_ORDER.index(entry[1]), entry[0])), metadata)
