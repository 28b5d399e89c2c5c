"""Changes of a model's weights that leave its function alone: where they may be made, and how they are folded in.

A factor per channel moves over an edge of the model (``structure.py``); a *rotation* multiplies by orthogonal matrices
that cancel each other. One file for each rotation, found by its name: ``fold(...) -> foldings``.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Protocol, cast

import torch

from ptqpipe.models.folding.find_structure import find_structure
from ptqpipe.models.folding.rotate_residual import STREAM
from ptqpipe.models.folding.rotate_values import turns
from ptqpipe.models.folding.structure import Edge, Matrix, Norm, Structure, grouped, rotated_tensors
from ptqpipe.models.folding.tensors import RUN, Folding, Op, Rotate, apply, is_exact, move_factors
from ptqpipe.numerics.schemes import ROTATION_BLOCKS

BLOCKS = (*ROTATION_BLOCKS, 256)  # channels that a folded rotation may take together; 256 is `tensors.RUN`
ROTATIONS = ("rotate_residual", "rotate_values")


class Rotation(Protocol):
    def check(self, structure: Structure, block: int, *, untie: bool) -> None: ...

    def fold(
        self,
        structure: Structure,
        edges: Sequence[Edge],
        *,
        writers: Sequence[Matrix],
        embeddings: Sequence[str],
        block: int,
        read: Callable[[str], torch.Tensor],
        matrices: Mapping[str, torch.Tensor],
    ) -> list[Folding]: ...


def get_rotation(name: str) -> Rotation:
    return cast(Rotation, import_module(f"{__name__}.{name}"))
