"""The two codes that each weight may have: that of the start, and its neighbour on the other side of the float weight.

A weight moves to the neighbour where p + v >= 1/2: p is the float weight's place between the two (0 where the start
left it more than half a step away, on purpose), and v in [-1/2, 1/2] is learned, by the straight-through gradient. The
scales are the start's and stay. After AdaRound (Nagel et al., arXiv 2004.10568) and SignRound (Cheng et al., arXiv
2309.05516); what differs: any start, and scales that are proven optimal instead of learned clips.
"""

import torch

from ptqpipe.numerics.formats import Codec
from ptqpipe.numerics.qtensor import QTensor, code_values


class Choice:
    """The code of every weight of one matrix, its neighbour towards the float weight, and what chooses between them,
    where the float matrix is.

    gain  logarithm of what the matrix is multiplied by, float32 0-d; may require a gradient. None: 0
    """

    def __init__(self, w: torch.Tensor, q: QTensor, gain: torch.Tensor | None = None) -> None:
        self.gain = gain
        codec = q.fmt.element
        block = q.fmt.block_extent(q.shape)
        scale = q.block_scales().to(w.device).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        values, codes = (tensor.to(w.device) for tensor in _sorted_codes(codec))
        y = torch.where(scale > 0, w.float() / scale, torch.zeros(()))
        chosen = q.codes.to(w.device)
        start = torch.searchsorted(values, code_values(chosen, codec))
        # The other choice lies on the side of the float weight: none for a weight beyond the largest code.
        other = (start + torch.where(y >= values[start], 1, -1)).clamp(0, len(values) - 1)
        span = values[other] - values[start]
        self._codes, self._start, self._other = codes, chosen, other.to(torch.int16)
        self.base = values[start] * scale
        self.step = span * scale
        place = torch.where(span != 0, (y - values[start]) / span.masked_fill(span == 0, 1.0), torch.zeros(()))
        self.place = torch.where(place < 0.5 + 2**-20, place.clamp(max=0.5 - 2**-20), torch.zeros(()))
        self.v = torch.zeros_like(self.place, requires_grad=True)

    def weight(self) -> torch.Tensor:
        """The decoded matrix, float32, with the straight-through gradient to ``v``."""
        hard = (self.place + self.v.detach() >= 0.5).float()
        decoded = self.base + self.step * (hard + (self.v - self.v.detach()))
        return decoded if self.gain is None else decoded * self.gain.exp()

    @property
    def moves(self) -> torch.Tensor:
        """bool [N, K]: which weights leave their codes."""
        return (self.place + self.v.detach() >= 0.5) & (self.step != 0)

    def moved(self, moves: torch.Tensor) -> torch.Tensor:
        """uint8 [N, K]: the codes where these weights have left theirs."""
        return torch.where(moves, self._codes[self._other.long()], self._start)

    def codes(self) -> torch.Tensor:
        """uint8 [N, K]: those chosen."""
        return self.moved(self.moves)


def with_codes(q: QTensor, codes: torch.Tensor) -> QTensor:
    """``q`` with other codes [N, K]."""
    return QTensor.from_codes(codes, q.scales, fmt=q.fmt, global_scale=q.global_scale)


def _sorted_codes(codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Every distinct value of a codec, ascending, and a code of it."""
    codes = torch.arange(1 << codec.bits, dtype=torch.uint8)
    values = code_values(codes, codec)
    finite = torch.isfinite(values)
    codes, values = codes[finite], values[finite]
    order = torch.argsort(values, stable=True)
    codes, values = codes[order], values[order]
    first = torch.ones(len(values), dtype=torch.bool)
    first[1:] = values[1:] != values[:-1]
    return values[first], codes[first]
