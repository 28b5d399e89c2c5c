"""A small safetensors file next to an index (statistics and learned codes of one decoder layer), written whole.

Must not know what the tensors are. The weights of models have `writer.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ptqpipe.checkpoint.direct import bytes_of
from ptqpipe.checkpoint.header import header_bytes
from ptqpipe.checkpoint.partial import output_errors
from ptqpipe.dtypes import DTYPE_NAMES


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes tensors of any dtype and device in the order of their names; on disk when this returns. Its sha256 in hex.

    The file appears under its name only when it is complete: a run that is killed meanwhile leaves nothing that another
    one would read. Raises OutputError.
    """
    names = sorted(tensors)
    header = header_bytes([(name, DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape)) for name in names])
    digest, growing = hashlib.sha256(), path.with_name(f"{path.name}.growing")
    with output_errors(path):
        with open(growing, "wb") as file:
            chunks = (bytes_of(tensors[name].cpu().contiguous()) for name in names)
            for chunk in itertools.chain((memoryview(header),), chunks):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        growing.replace(path)
    return digest.hexdigest()
