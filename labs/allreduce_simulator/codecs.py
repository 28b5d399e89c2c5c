"""What sending does to numbers, in the simulator: the codecs of the real transports, and plain types.

Every rounding has the bits that the bytes of ``codec_reference.py`` have. Must not know schemes.
"""

import torch

from labs.allreduce_simulator.schemes import WireRounding
from ptqpipe.errors import UsageError
from ptqpipe.serving.collectives import codec_reference as reference
from ptqpipe.serving.collectives.codecs import CODECS, WireCodec, get_wire_codec

_SMALLEST_SCALE = 2.0**-127  # of a block that is not zero; its inverse is a float


def cast(name: str, dtype: torch.dtype) -> WireRounding:
    """Numbers sent in ``dtype``: float32 and bfloat16, or float8 without a scale (EQuARX's "naive" row)."""
    return WireRounding(name, 1, 8.0 * dtype.itemsize, lambda x: x.to(dtype).float())


PLAIN: dict[str, WireRounding] = {
    "fp32": cast("fp32", torch.float32),
    "bf16": cast("bf16", torch.bfloat16),
    "e5m2-cast": cast("e5m2-cast", torch.float8_e5m2),
}


def sent(codec: WireCodec) -> WireRounding:
    """A codec of the transports: what its receiver decodes. Rotated numbers are summed as they are, like there.

    Its name is the codec's, with the elements of a scale and of a rotation; its block those between which a message may
    be cut.
    """
    size = codec.hadamard
    half = _log2(size) // 2

    def rounded(x: torch.Tensor) -> torch.Tensor:
        found = _rounded_integers(x, codec) if codec.integers else None
        if found is not None:
            return found
        message = reference.encode_units(x.reshape(-1), codec)
        return reference.decode_units(message, codec).reshape(x.shape)

    name = f"{codec.name}/{codec.block}"
    if not size:
        return WireRounding(name, codec.unit, codec.bits, rounded)
    return WireRounding(
        f"{name}+h{size}",
        codec.unit,
        codec.bits,
        rounded,
        entered=lambda x: reference.rotate(x * 2.0**-half, size),
        left=lambda x: reference.rotate(x, size) * 2.0 ** (half - _log2(size)),
    )


def _rounded_integers(x: torch.Tensor, codec: WireCodec) -> torch.Tensor | None:
    """What decoding the encoded ``x`` gives, without packing its bytes. None where a number is not finite."""
    blocks = x.reshape(-1, codec.block)
    amax = blocks.abs().amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(amax).all()):
        return None
    scale = (amax * _reciprocal(codec.top)).bfloat16().float()  # to the nearest, as codec_reference.py does
    if float(scale.min()) < _SMALLEST_SCALE:
        scale = torch.where(scale < _SMALLEST_SCALE, 0, scale)
        inverse = torch.where(scale > 0, 1 / scale, 0)
    else:
        inverse = 1 / scale
    return (blocks * inverse).round_().clamp_(-codec.top, codec.top).mul_(scale).reshape(x.shape)


def _reciprocal(top: float) -> float:
    """1/top as a float32 number."""
    return float(torch.tensor(1 / top, dtype=torch.float64).float())


def _log2(size: int) -> int:
    return size.bit_length() - 1


def get_rounding(name: str, block: int, *, rotate: int = 0) -> WireRounding:
    """The codec called ``name`` in blocks of ``block`` (MX and NVFP4 have their own), behind a rotation if ``rotate``.

    UsageError for unknown names and sizes that do not fit.
    """
    if name in PLAIN:
        return PLAIN[name]
    if name not in CODECS:
        raise UsageError(f"unknown codec {name!r}; known are {', '.join((*CODECS, *PLAIN))}")
    return sent(get_wire_codec(name, block, hadamard=rotate))
