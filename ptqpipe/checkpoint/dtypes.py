"""Names of number types, as files and users write them, and their torch dtypes. The only place that lists them."""

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
