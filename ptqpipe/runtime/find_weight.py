"""Finds a checkpoint's weight in a loaded model by its values, since models merge experts in their own ways. Must not
know what is done with it.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ptqpipe.errors import CheckpointError, arg
from ptqpipe.models.slices import Member


def find_place(model: Any, member: Member, w: torch.Tensor) -> torch.Tensor:
    """The view of the model's parameter that equals ``w`` [out, in]. CheckpointError where none does."""
    for name, parameter in _near(model, member.module):
        for view in _views(name, parameter.detach(), w.shape, member):
            if view.shape == w.shape and torch.equal(view, w):
                return view
    raise CheckpointError(
        f"the model has no parameter that equals {member.weight}; measure is not possible, use {arg('stats')}"
    )


def _near(model: Any, module: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters below the longest prefix of the module's name that the model knows."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        try:
            parent = model.get_submodule(".".join(parts[:end]))
        except AttributeError:
            continue
        yield from parent.named_parameters()
        return


def _views(name: str, p: torch.Tensor, shape: torch.Size, member: Member) -> Iterator[torch.Tensor]:
    """Views of a parameter that may be [out, in] weights: whole, an expert, half of its rows or every other one; either
    orientation."""
    planes = [p]
    if p.dim() == 3:
        numbers = [int(part) for part in member.module.split(".") if part.isdigit()]
        planes = [p[e] for e in dict.fromkeys(reversed(numbers)) if e < p.shape[0]]
    for plane in planes:
        if plane.dim() != 2:
            continue
        for matrix in (plane, plane.t()):
            n = shape[0]
            yield matrix
            if matrix.shape[0] == 2 * n:
                yield from (matrix[:n], matrix[n:], matrix[::2], matrix[1::2])
