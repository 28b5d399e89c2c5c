"""Log-probabilities in at most 16 bits each: all that a KL divergence needs of the model that others are compared with.

-log p is stored in steps of 1/2048 nat up to 32 nats: the high byte of every token of the vocabulary, and the low byte
of those with less than 16 nats alone. The others, each below 1.2e-7, come back in steps of 1/8 nat. An error d of the
log-probabilities moves a mean KL by about d^2 / 2, weighted with p: 1e-8 nats, and as much again for what the rare
tokens add. labs/evaluation/NOTES.md has the measured errors.
"""

import torch

from ptqpipe.errors import not_finite

STEPS = 2048  # of a nat
MOST = 2  # bytes for each token of the vocabulary, at most
_FINE = 128  # high bytes below it have a low byte: 16 nats
_ROWS = 2**24  # numbers that are encoded or decoded at once
_FIRST = 1e-6  # nats: puts the most likely token before those that rounding made equal to it


def encode(logits: torch.Tensor) -> torch.Tensor:
    """uint8 bytes for logits [rows, vocabulary] of any float dtype. NumericsError for NaN."""
    top = logits.argmax(-1).to(torch.int32).view(torch.uint8)
    highs, lows = [], []
    for rows in torch.split(logits, max(1, _ROWS // logits.shape[1])):
        nats = -rows.float().log_softmax(-1)
        if bool(nats.isnan().any()):
            raise not_finite("the source gives logits that are not numbers (NaN)", logits.dtype)
        codes = (nats * STEPS).round().clamp_(0, 2**16 - 1).to(torch.int32)
        high = (codes >> 8).to(torch.uint8)
        highs.append(high.flatten())
        lows.append((codes & 255).to(torch.uint8)[high < _FINE])
    return torch.cat([top, *highs, *lows])


def decode(raw: torch.Tensor, rows: int, vocabulary: int) -> torch.Tensor | None:
    """float32 [rows, vocabulary] log-probabilities, not normalized to the last bit; None for bytes of another size."""
    count = rows * vocabulary
    if len(raw) < 4 * rows + count:
        return None
    top, high, low = raw[: 4 * rows], raw[4 * rows : 4 * rows + count], raw[4 * rows + count :]
    values, read = torch.empty(rows, vocabulary), 0
    for block, part in zip(
        torch.split(values, step := max(1, _ROWS // vocabulary)), torch.split(high, step * vocabulary), strict=True
    ):
        fine = part < _FINE
        end = read + int(fine.sum())
        if end > len(low):
            return None
        nats = part.to(torch.float32).mul_(256).add_(128)
        nats[fine] += low[read:end].to(torch.float32) - 128
        torch.div(nats.view(block.shape), -STEPS, out=block)
        read = end
    if read != len(low):
        return None
    first = top.clone().view(torch.int32).to(torch.int64)[:, None]
    return values.scatter_(1, first, values.amax(-1, keepdim=True) + _FIRST)
