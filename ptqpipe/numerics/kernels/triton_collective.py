"""Triton messages of the quantized all-reduce, bit-equal to ``codec_reference.py``: int8 with bfloat16 scales.

One program a few blocks, one pass each over what it reads and writes. Everything is decided on bits and by single
float32 operations; launches forbid fused multiply-adds, which round once where the reference rounds twice. Other codecs
have no kernel here (False): they run as the reference's torch code. Under Triton's interpreter the functions take CPU
tensors, which is how they are tested without a GPU; they have not been timed on one.

Knows messages; must not know processes. Triton is imported on first use only.
"""

from collections.abc import Sequence

import torch

from ptqpipe.numerics.kernels.cpu_collective import Wire
from ptqpipe.numerics.kernels.triton import available, interpreting

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def encode(x: torch.Tensor, message: torch.Tensor, codec: Wire) -> bool:
    """Writes the uint8 message of ``x [n]``; whether it did."""
    if not _fits(codec, x, message):
        return False
    from ptqpipe.numerics.kernels import triton_messages

    triton_messages.encode(x, message, codec.block)
    return True


def decode(message: torch.Tensor, out: torch.Tensor, codec: Wire) -> bool:
    """Decodes a message into ``out [n]``; False where no kernel can."""
    if not _fits(codec, out, message):
        return False
    from ptqpipe.numerics.kernels import triton_messages

    triton_messages.decode(message, out, codec.block)
    return True


def reduce(
    messages: Sequence[torch.Tensor | None],
    own: torch.Tensor,
    message: torch.Tensor | None,
    out: torch.Tensor,
    codec: Wire,
) -> bool:
    """Sums messages that lie at equal distances in memory, as ``cpu_collective.reduce`` does; whether it did."""
    spacing = _spacing(messages)
    if message is None or spacing is None or own.dtype != out.dtype or not _fits(codec, own, out, message):
        return False
    from ptqpipe.numerics.kernels import triton_messages

    triton_messages.reduce(messages, spacing, own, message, out, block=codec.block)
    return True


def _fits(codec: Wire, values: torch.Tensor, *others: torch.Tensor) -> bool:
    if codec.element != "int8" or codec.scale != "bf16" or codec.hadamard or values.dtype not in _DTYPES:
        return False
    where = "cpu" if interpreting() else "cuda"
    return available() and all(t.device.type == where and t.is_contiguous() for t in (values, *others))


def _spacing(messages: Sequence[torch.Tensor | None]) -> int | None:
    """Bytes from one rank's message to the next one's; None where they differ, or no message is there."""
    places = [(rank, part.data_ptr()) for rank, part in enumerate(messages) if part is not None]
    if len(places) < 2:
        return 0 if places else None
    (first, start), (second, end) = places[:2]
    spacing, left = divmod(end - start, second - first)
    return spacing if not left and all(at == start + (rank - first) * spacing for rank, at in places) else None
