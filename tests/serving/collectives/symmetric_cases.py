"""Sums over symmetric memory as they are launched, a process a rank. Run by ``test_symmetric.py``, interpreted.

Programs of a launch follow one another in the interpreter, those of different ranks run side by side, so the kernel
waits for real: for ranks that are slow at the worst places, with the operating system's order of everything else.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ptqpipe.errors import UsageError
from ptqpipe.numerics.kernels import triton_symmetric
from ptqpipe.serving.collectives import QuantAllReduce
from ptqpipe.serving.collectives.codecs import DTYPES, get_wire_codec
from ptqpipe.serving.collectives.symmetric import SymmetricExchange, SymmetricMemory, buffer_bytes
from ptqpipe.serving.collectives.wire import Stats, cut
from tests.serving.collectives.ranks import on_ranks
from tests.serving.collectives.test_allreduce import partial, simulated

CALLS = 8


def shared(world: int, message_bytes: int) -> list[torch.Tensor]:
    """A zeroed buffer a rank, which processes that are forked from here on see, too."""
    buffers = [torch.zeros(buffer_bytes(world, message_bytes), dtype=torch.uint8) for _ in range(world)]
    return [buffer.share_memory_() for buffer in buffers]  # type: ignore[no-untyped-call]


def draws(world: int) -> list[dict[str, Any]]:
    """Random calls, the same on every rank; most take one launch, some several, and some leave stripes empty."""
    draw = random.Random(world)
    return [
        {
            "block": draw.choice((32, 64, 128, 256)),
            "elements": draw.choice((draw.randint(1, 300), draw.randint(1, 4000), draw.randint(4000, 16_000))),
            "dtype": draw.choice(DTYPES),
            "own_exact": draw.random() < 0.8,
            "in_place": draw.random() < 0.3,
        }
        for _ in range(CALLS)
    ]


def late(function: Callable[..., Any], draw: random.Random) -> Callable[..., Any]:
    """``function``, now and then up to 60 ms late."""

    def run(*arguments: Any) -> Any:
        if draw.random() < 0.2:
            time.sleep(draw.random() * 0.06)
        return function(*arguments)

    return run


def random_calls(rank: int, world: int, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    for phase in ("push_parts", "arrive", "reduce", "decode"):
        setattr(triton_symmetric, phase, late(getattr(triton_symmetric, phase), random.Random(rank)))
    memory, found = SymmetricMemory(tuple(buffers), rank, 3), []
    for seed, call in enumerate(draws(world)):
        codec, x = get_wire_codec("int8", call["block"]), partial(call["elements"], rank, call["dtype"], seed)
        layout = cut(x.numel(), world, unit=codec.unit, chunk_elements=1 << 20)
        out = x if call["in_place"] else torch.full_like(x, 77)
        SymmetricExchange(memory, codec, layout, x, out, Stats(), call["own_exact"]).two_shot()
        found.append(out)
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_holds_the_bits_of_one_process_however_late_some_are(world: int) -> None:
    results = on_ranks(world, random_calls, shared(world, 7000))
    for seed, call in enumerate(draws(world)):
        xs = [partial(call["elements"], rank, call["dtype"], seed) for rank in range(world)]
        wanted = simulated(xs, get_wire_codec("int8", call["block"]), own_exact=call["own_exact"])
        for rank in range(world):
            assert torch.equal(results[rank][seed], wanted), (rank, call)


def reducers(rank: int, world: int, buffers: list[torch.Tensor]) -> dict[str, Any]:
    memory = SymmetricMemory(tuple(buffers), rank, 3)
    reduce = QuantAllReduce(min_bytes=4096, transport=memory)
    large, small = partial(3000, rank, torch.bfloat16).reshape(3, 1000), partial(100, rank, torch.bfloat16)
    refused = ""
    try:
        QuantAllReduce(codec="int4", min_bytes=0, transport=memory)
    except UsageError as error:
        refused = str(error)
    return {
        "sum": reduce(large).flatten(),
        "background": reduce.start(large).wait().flatten(),
        "strided": reduce(large.t()).t().reshape(-1),
        "small": reduce(small),
        "two_shot": reduce.plain_two_shot(large.clone()).flatten(),
        "stats": reduce.stats(),
        "refused": refused,
        "elsewhere": QuantAllReduce(min_bytes=0, transport="p2p")(large).flatten(),
    }


def test_quant_all_reduce_sends_its_quantized_sums_through_the_memory_it_is_given() -> None:
    found = on_ranks(3, reducers, shared(3, 48_000))
    xs = [partial(3000, rank, torch.bfloat16) for rank in range(3)]
    for rank in found:
        assert torch.equal(rank["sum"], simulated(xs, get_wire_codec("int8")))
        assert all(torch.equal(rank["sum"], rank[way]) for way in ("background", "elsewhere"))
        assert torch.equal(rank["two_shot"], sum(x.float() for x in xs).bfloat16())  # type: ignore[union-attr]
        assert (rank["stats"].calls, rank["stats"].plain_calls) == (3, 1)
        assert "int8" in rank["refused"]
    # 47 blocks in stripes of 16, 16 and 15: two parts to others, and the sum of one's own to two others.
    assert [rank["stats"].wire_bytes for rank in found] == [3 * 66 * blocks for blocks in (63, 63, 62)]


def waits_in_vain(rank: int, world: int, buffers: list[torch.Tensor]) -> bool:
    memory = replace(SymmetricMemory(tuple(buffers), rank, 3), looks=5)
    codec, x = get_wire_codec("int8"), partial(1000, rank, torch.bfloat16)
    if rank:
        layout = cut(x.numel(), world, unit=codec.unit, chunk_elements=1 << 20)
        SymmetricExchange(memory, codec, layout, x, x, Stats()).two_shot()
    return memory.gave_up()


def test_a_check_gives_up_on_a_rank_that_never_comes_and_says_so() -> None:
    assert on_ranks(3, waits_in_vain, shared(3, 48_000)) == [False, True, True]


def test_buffers_and_programs_that_cannot_be_are_refused() -> None:
    buffers = tuple(shared(2, 1000))
    for many in (0, 2000):
        with pytest.raises(UsageError, match="expected 1 to"):
            SymmetricMemory(buffers, 0, many)
    with pytest.raises(UsageError, match="room for a block"):
        SymmetricMemory(tuple(torch.zeros(8300, dtype=torch.uint8) for _ in range(2)), 0, 1)
