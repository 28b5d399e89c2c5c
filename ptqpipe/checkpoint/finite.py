"""Counts NaN and infinities in the bytes of float tensors: either makes a model useless.

Knows dtypes; must not know what is done with the counts.
"""

from __future__ import annotations

import math

import torch

from ptqpipe.checkpoint.dtypes import DTYPES


class NotFinite:
    """Counts NaN and infinities in the bytes of a tensor, a chunk at a time; none in types that are not weights'."""

    def __init__(self, dtype: str) -> None:
        """``dtype`` by its name in safetensors."""
        self._dtype = DTYPES[dtype][0] if dtype in ("F16", "BF16", "F32", "F64") else None
        self.nan = self.inf = 0

    def look(self, raw: torch.Tensor) -> None:
        """Counts in a chunk of uint8 that holds whole numbers."""
        if self._dtype is None or not len(raw):
            return
        numbers = raw.view(self._dtype)
        if all(math.isfinite(float(edge)) for edge in torch.aminmax(numbers)):  # they propagate NaN
            return
        nan = int(torch.isnan(numbers).sum())
        self.nan, self.inf = self.nan + nan, self.inf + int((~torch.isfinite(numbers)).sum()) - nan

    @property
    def count(self) -> int:
        """Both together."""
        return self.nan + self.inf

    @property
    def text(self) -> str:
        """Both counts as text."""
        return f"{self.nan} NaN and {self.inf} inf"
