"""A small safetensors file next to an index (statistics and learned codes of one decoder layer), written whole.

The weights of models have `writer.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ptqpipe.checkpoint.direct import bytes_of
from ptqpipe.checkpoint.dtypes import DTYPE_NAMES
from ptqpipe.checkpoint.header import header_bytes
from ptqpipe.checkpoint.partial import output_errors

#: The metadata of a sealed file: the sha256 of all of its bytes as they are with zeros there. It stands first.
_SEAL, _OPEN, _SEAL_WITHIN = "sha256", "0" * 64, 4096
_COPY_BYTES = 8 * 2**20


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, sealed: bool = False) -> str:
    """Writes tensors of any dtype and device in the order of their names; on disk when this returns. Its sha256 in hex.

    The file appears under its name only when it is complete: a run that is killed meanwhile leaves nothing that another
    one would read. Raises OutputError.

    sealed  the file itself says what its bytes were (`is_sealed`), for one that is in no index
    """
    names, metadata = sorted(tensors), {_SEAL: _OPEN} if sealed else {}
    entries = [(name, DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape)) for name in names]
    header = header_bytes(entries, metadata)
    digest, growing = hashlib.sha256(), path.with_name(f"{path.name}.growing")
    with output_errors(path):
        with open(growing, "wb") as file:
            chunks = (bytes_of(tensors[name].cpu().contiguous()) for name in names)
            for chunk in itertools.chain((memoryview(header),), chunks):
                digest.update(chunk)
                file.write(chunk)
            if sealed:
                file.seek(header.index(_OPEN.encode()))
                file.write(digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        growing.replace(path)
    return digest.hexdigest()


def is_sealed(path: Path) -> bool:
    """Whether a file is there, with the bytes that `write_tensors` has sealed. Reads all of them."""
    try:
        with open(path, "rb") as file:
            head = file.read(_SEAL_WITHIN)
            name = f'"{_SEAL}":"'.encode()
            start = head.find(name) + len(name)
            seal = head[start : start + len(_OPEN)]
            if start < len(name) or len(seal) != len(_OPEN):
                return False
            digest = hashlib.sha256(head[:start] + _OPEN.encode() + head[start + len(_OPEN) :])
            while chunk := file.read(_COPY_BYTES):
                digest.update(chunk)
    except OSError:
        return False
    return digest.hexdigest().encode() == seal
