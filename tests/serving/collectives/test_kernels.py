"""The compiled messages are those of ``codec_reference.py``, bit for bit, on every instruction set of this machine."""

from collections.abc import Callable, Iterator

import pytest
import torch

from ptqpipe.numerics.kernels import cpu_collective, cpu_library as lib
from ptqpipe.serving.collectives import codec_reference as reference
from ptqpipe.serving.collectives.codecs import CODECS, DTYPES, WireCodec, get_wire_codec

WIRES = [
    *(get_wire_codec(name, block) for name in ("int8", "int6", "int4", "fp8") for block in (32, 64, 128, 256)),
    *(get_wire_codec(name) for name in ("mxfp8", "nvfp4")),
    *(get_wire_codec(name, hadamard=64) for name in CODECS),
    *(get_wire_codec("int8", block, hadamard=size) for block, size in ((32, 32), (128, 128), (64, 16), (64, 256))),
]
SIZES = (1, 63, 64, 65, 1000, 5000)


def wire_id(codec: WireCodec) -> str:
    return f"{codec.name}/{codec.block}" + (f"h{codec.hadamard}" if codec.hadamard else "")


def adversarial(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Magnitudes 2^-140..2^120 by runs, zeros, constants, ties, negative zeros, NaN and infinities."""
    g = torch.Generator().manual_seed(seed)
    powers = torch.randint(-140, 120, (n // 48 + 1, 1), generator=g).float().exp2().expand(-1, 48).reshape(-1)[:n]
    x = torch.randn(n, generator=g) * torch.where(torch.arange(n) % 400 < 200, powers, 1.0)
    x = torch.where(torch.arange(n) % 700 < 100, (x * 8).round() / 8, x)  # ties
    if n > 900:
        x[300:380], x[400:430], x[450], x[611], x[680], x[777] = (
            0,
            -0.0,
            1e30,
            float("nan"),
            float("-inf"),
            float("inf"),
        )
        x[860] = torch.finfo(torch.float32).max
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but that one NaN is like another (torch's own casts differ in them)."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        torch.where(a.isnan(), torch.zeros_like(a), a).view(bits),
        torch.where(b.isnan(), torch.zeros_like(b), b).view(bits),
    )


ISAS = lib.known_isas()
built = pytest.mark.skipif(not ISAS, reason="no compiled kernels")


@pytest.fixture(params=ISAS or [pytest.param("none", marks=built)])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    lib.force_isa(request.param)
    yield request.param
    lib.force_isa(None)


@pytest.fixture
def every_isa() -> Iterator[Callable[[], Iterator[str]]]:
    """Gives the instruction sets, each in force until the next: what they are held to is computed once."""

    def one_after_another() -> Iterator[str]:
        for name in ISAS:
            lib.force_isa(name)
            yield name

    yield one_after_another
    lib.force_isa(None)


@built
@pytest.mark.parametrize("codec", WIRES, ids=wire_id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_and_their_values_are_the_references(
    every_isa: Callable[[], Iterator[str]], codec: WireCodec, dtype: torch.dtype
) -> None:
    for n in SIZES:
        x = adversarial(n, dtype, n)
        wanted = reference.encode(x, codec)
        values = reference.decode(wanted, n, codec).to(dtype)
        for isa in every_isa():
            message, out = torch.full((codec.nbytes(n),), 0xA5, dtype=torch.uint8), torch.empty_like(x)
            assert cpu_collective.encode(x, message, codec)
            assert torch.equal(message, wanted), (n, isa)
            assert cpu_collective.decode(message, out, codec)
            assert same(out, values), (n, isa)


@built
@pytest.mark.parametrize("codec", WIRES, ids=wire_id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_their_messages_are_the_references(
    every_isa: Callable[[], Iterator[str]], codec: WireCodec, dtype: torch.dtype
) -> None:
    n = 2085
    xs = [adversarial(n, dtype, seed) for seed in range(3)]
    encoded = [reference.encode(x, codec) for x in xs]
    for own in (0, 2, None):
        messages, mine = [None if rank == own else each for rank, each in enumerate(encoded)], xs[own or 0]
        for requantize in (True, False):
            message, values = reference.reduce(messages, mine, codec, requantize=requantize)
            for isa in every_isa():
                room, out = torch.empty(codec.nbytes(n), dtype=torch.uint8), torch.empty_like(mine)
                assert cpu_collective.reduce(messages, mine, room if requantize else None, out, codec)
                assert same(out, values), (own, requantize, isa)
                assert not requantize or torch.equal(room, message), (own, isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_sums_are_float32_in_order_rounded_once(isa: str, dtype: torch.dtype) -> None:
    for n in SIZES:
        xs = [adversarial(n, dtype, seed) for seed in range(4)]
        total = xs[0].float()
        for x in xs[1:]:
            total = total + x.float()
        out = torch.empty_like(xs[0])
        assert cpu_collective.add([xs[0], None, xs[2].view(torch.uint8), xs[3]], xs[1], out)
        assert same(out, total.to(dtype))


def test_a_sum_may_replace_its_own_part(isa: str) -> None:
    codec, xs = get_wire_codec("int8"), [adversarial(700, torch.bfloat16, seed) for seed in range(2)]
    messages = [reference.encode(xs[0], codec), None]
    room, apart, inside = torch.empty(codec.nbytes(700), dtype=torch.uint8), torch.empty_like(xs[1]), xs[1].clone()
    assert cpu_collective.reduce(messages, xs[1], room, apart, codec)
    assert cpu_collective.reduce(messages, inside, room, inside, codec)
    assert same(apart, inside)
