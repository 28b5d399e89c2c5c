"""Names of number types, as files and users write them, and their torch dtypes. The only place that lists them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

DTYPES: Mapping[str, tuple[torch.dtype, int]] = MappingProxyType(
    {
        "BOOL": (torch.bool, 1),
        "U8": (torch.uint8, 1),
        "I8": (torch.int8, 1),
        "F8_E4M3": (torch.float8_e4m3fn, 1),
        "F8_E4M3FNUZ": (torch.float8_e4m3fnuz, 1),
        "F8_E5M2": (torch.float8_e5m2, 1),
        "F8_E5M2FNUZ": (torch.float8_e5m2fnuz, 1),
        "F8_E8M0": (torch.float8_e8m0fnu, 1),
        "I16": (torch.int16, 2),
        "U16": (torch.uint16, 2),
        "F16": (torch.float16, 2),
        "BF16": (torch.bfloat16, 2),
        "I32": (torch.int32, 4),
        "U32": (torch.uint32, 4),
        "F32": (torch.float32, 4),
        "I64": (torch.int64, 8),
        "U64": (torch.uint64, 8),
        "F64": (torch.float64, 8),
        "C64": (torch.complex64, 8),
    }
)
"""safetensors dtype string -> (torch dtype, bytes per element): every one of whole bytes that safetensors 0.8 knows."""
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, (dtype, _) in DTYPES.items()})
"""torch dtype -> safetensors dtype string."""
FLOATS: Mapping[str, tuple[str, torch.dtype]] = MappingProxyType(
    {"bf16": ("BF16", torch.bfloat16), "fp16": ("F16", torch.float16), "fp32": ("F32", torch.float32)}
)
"""The short names of the floats that models are stored in -> (safetensors dtype string, torch dtype)."""
FLOAT_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(dict(FLOATS.values()))
"""The floats that models are stored in: safetensors dtype string -> torch dtype."""


class NotFinite:
    """Counts NaN and infinities in the bytes of a tensor, a chunk at a time; none in types that are not weights'.
    Either makes a model useless."""

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
        return self.nan + self.inf

    @property
    def text(self) -> str:
        return f"{self.nan} NaN and {self.inf} inf"
