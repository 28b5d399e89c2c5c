"""Weights as rows of the tensors of a checkpoint: where each lies, and what names it."""

from collections.abc import Mapping
from dataclasses import dataclass

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (safetensors dtype, shape) of the tensors of a checkpoint, as a reader of plain weights sees them."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A view of a weight's rows in a source tensor: rows start, start+step, ... of [out, in].

    ``expert`` selects from a 3-D stack; ``transposed`` says the tensor (or each expert) is [in, out]. The columns of
    [out, in] are rotated by blocks of ``rotation`` when they are read (``rotation.py``).
    """

    tensor: str
    start: int = 0
    step: int = 1
    expert: int | None = None
    transposed: bool = False
    rotation: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One weight of a unit. ``weight`` is its logical name; ``shape`` is (N, K) = (out, in).

    With ``stack`` the weight is expert number ``source.expert`` of a 3-D weight that stays one tensor of ``stack``
    experts on disk, and ``weight`` names that stack.
    """

    weight: str
    shape: tuple[int, int]
    source: Slice
    stack: int | None = None

    @property
    def module(self) -> str:
        return self.weight.removesuffix(".weight")

    @property
    def key(self) -> str:
        """Its name in records: the weight's name, with the expert in brackets in a stack."""
        return self.weight if self.stack is None else f"{self.weight}[{self.source.expert}]"

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1]
