"""The hidden states of all samples between two decoder layers: in memory, or in a file where they do not fit.

Knows batches of tensors, nothing of models. The file is read and written, not mapped: mapped pages would count as
memory of this process.
"""

import os
import tempfile
from pathlib import Path

import torch

from ptqpipe.checkpoint import bytes_of, output_errors
from ptqpipe.errors import OutputError, arg


class InMemory:
    """Hidden states as a list."""

    def __init__(self) -> None:
        self._batches: dict[int, torch.Tensor] = {}

    def get(self, index: int) -> torch.Tensor:
        """The tensor itself: do not change it."""
        return self._batches[index]

    def put(self, index: int, x: torch.Tensor) -> None:
        """Keeps a copy on the CPU."""
        self._batches[index] = x.detach().to("cpu", copy=True)

    def another(self) -> "InMemory":
        """An empty place for hidden states of the same batches."""
        return InMemory()

    def close(self) -> None:
        """Forgets them."""
        self._batches = {}


class OnDisk:
    """Hidden states in one file without a name, which the system removes whatever happens to this process."""

    def __init__(self, folder: Path) -> None:
        """A new file in ``folder``. OutputError where it cannot be created."""
        self._places: dict[int, tuple[int, torch.Size, torch.dtype]] = {}
        self._end = 0
        self._folder = folder
        with output_errors(folder):
            self._fd, name = tempfile.mkstemp(dir=folder, prefix="activations-")
            os.unlink(name)

    def get(self, index: int) -> torch.Tensor:
        """A fresh tensor."""
        offset, shape, dtype = self._places[index]
        x = torch.empty(shape, dtype=dtype)
        view, done = bytes_of(x), 0
        with output_errors(self._folder):
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], offset + done)
                if not count:
                    raise OutputError(
                        f"activations in {self._folder} ended early; check the disk and {arg('resume', True)}"
                    )
                done += count
        return x

    def put(self, index: int, x: torch.Tensor) -> None:
        """Writes it at its place; a batch keeps the size of its first tensor."""
        x = x.detach().cpu().contiguous()
        view, done = bytes_of(x), 0
        offset = self._places[index][0] if index in self._places else self._end
        self._end = max(self._end, offset + len(view))
        self._places[index] = (offset, x.shape, x.dtype)
        with output_errors(self._folder):
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], offset + done)

    def another(self) -> "OnDisk":
        """An empty place for hidden states of the same batches, in a file of its own."""
        return OnDisk(self._folder)

    def close(self) -> None:
        """Closes the file, which is then gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


Activations = InMemory | OnDisk
"""One tensor for each batch, replaced by one of the same shape as the layers go by: ``get``, ``put``, ``close``."""
