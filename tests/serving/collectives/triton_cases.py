"""The Triton messages are those of ``codec_reference.py``, bit for bit. ``test_triton.py`` runs it."""

import pytest
import torch

from ptqpipe.numerics.kernels import triton_collective
from ptqpipe.numerics.kernels.triton import interpreting
from ptqpipe.serving.collectives import codec_reference as reference
from ptqpipe.serving.collectives.codecs import DTYPES, get_wire_codec
from tests.serving.collectives.test_kernels import adversarial, same

DEVICE = "cpu" if interpreting() else "cuda"


@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_and_values(block: int, dtype: torch.dtype) -> None:
    codec = get_wire_codec("int8", block)
    for n in (1, 65, 5000):
        x = adversarial(n, dtype, n)
        message = torch.full((codec.nbytes(n),), 0xA5, dtype=torch.uint8, device=DEVICE)
        assert triton_collective.encode(x.to(DEVICE), message, codec)
        assert torch.equal(message.cpu(), reference.encode(x, codec))
        out = torch.empty_like(x, device=DEVICE)
        assert triton_collective.decode(message, out, codec)
        assert same(out.cpu(), reference.decode(message.cpu(), n, codec).to(dtype))


@pytest.mark.parametrize("own", [0, 1, 2, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(own: int | None, dtype: torch.dtype) -> None:
    codec, n = get_wire_codec("int8"), 3001
    xs = [adversarial(n, dtype, seed) for seed in range(3)]
    rows = torch.zeros(3, codec.nbytes(n) + 64, dtype=torch.uint8, device=DEVICE)
    for row, x in zip(rows, xs, strict=True):
        row[: codec.nbytes(n)] = reference.encode(x, codec).to(DEVICE)
    messages = [None if rank == own else row[: codec.nbytes(n)] for rank, row in enumerate(rows)]
    mine = xs[own or 0]
    room, out = torch.empty(codec.nbytes(n), dtype=torch.uint8, device=DEVICE), torch.empty_like(mine, device=DEVICE)
    assert triton_collective.reduce(messages, mine.to(DEVICE), room, out, codec)
    there = [None if part is None else part.cpu() for part in messages]
    message, values = reference.reduce(there, mine, codec)
    assert torch.equal(room.cpu(), message)
    assert same(out.cpu(), values)


def test_what_has_no_kernel_is_left_to_the_reference() -> None:
    x, message = torch.zeros(64, device=DEVICE), torch.zeros(66, dtype=torch.uint8, device=DEVICE)
    assert not triton_collective.encode(x, message, get_wire_codec("fp8"))
    assert not triton_collective.encode(x, message, get_wire_codec("int8", hadamard=64))
