"""What sending does to numbers, for the simulator: plain types, casts without a scale, and the codecs of this package.

Must not know schemes. The block codecs are those that the transports use, byte for byte.
"""

from dataclasses import dataclass

import torch

from ptqpipe.errors import UsageError


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers sent in ``dtype``: float32 and bfloat16, or float8 without a scale (EQuARX's "naive" row)."""

    name: str
    dtype: torch.dtype
    block: int = 1

    @property
    def bits(self) -> float:
        """Bits an element."""
        return 8.0 * self.dtype.itemsize

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Rounding``."""
        return x.to(self.dtype).float()


PLAIN: dict[str, Plain] = {
    "fp32": Plain("fp32", torch.float32),
    "bf16": Plain("bf16", torch.bfloat16),
    "e5m2-cast": Plain("e5m2-cast", torch.float8_e5m2),
}


@dataclass(frozen=True, slots=True)
class Integer:
    """Symmetric integers with one bfloat16 scale a block, rounded up so that nothing saturates."""

    width: int
    block: int

    @property
    def name(self) -> str:
        """As a row of a table says it."""
        return f"int{self.width}/{self.block}"

    @property
    def bits(self) -> float:
        """Bits an element."""
        return self.width + 16 / self.block

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Rounding``."""
        blocks = x.reshape(-1, self.block)
        top = float((1 << (self.width - 1)) - 1)
        scale = (blocks.abs().amax(dim=1, keepdim=True) / top).bfloat16().float()
        inverse = torch.where(scale > 0, 1 / scale, scale)
        return ((blocks * inverse).round().clamp(-top, top) * scale).reshape(x.shape)


def get_rounding(name: str, block: int, *, hadamard: int = 0) -> "Plain | Integer":
    """The codec called ``name``. UsageError with the known names."""
    if name in PLAIN:
        return PLAIN[name]
    if not 16 <= block <= 4096:
        raise UsageError(f"block {block} is out of range; use 16 to 4096 elements, 32 to 256 are usual")
    if name in ("int8", "int6", "int4"):
        return Integer(int(name[3:]), block)
    raise UsageError(f"unknown codec {name!r}; known are int8, int6, int4, {', '.join(PLAIN)}")
