"""Sums over real processes: all ranks hold the bits that one process computes from the definition, for any size.

The definition is written out once more below, without chunks, transports or kernels.
"""

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ptqpipe.errors import UsageError
from ptqpipe.serving.collectives import NEVER, QuantAllReduce, Thresholds
from ptqpipe.serving.collectives.codec_reference import decode, decode_units, encode, encode_units, rotate
from ptqpipe.serving.collectives.codecs import CODECS, DTYPES, WireCodec, get_wire_codec
from tests.serving.collectives.ranks import on_ranks

WORLDS = (2, 3, 5)
CALLS = 200  # over all ranks of a world


def partial(elements: int, rank: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed * 64 + rank)
    return (torch.randn(elements, generator=g) * torch.exp2(torch.randint(-3, 4, (elements,), generator=g))).to(dtype)


def simulated(
    xs: list[torch.Tensor], codec: WireCodec, *, own_exact: bool = True, one_shot: bool = False
) -> torch.Tensor:
    """The sum by its definition: stripe by stripe, in the order of the ranks, in float32."""
    n, world, dtype = xs[0].numel(), len(xs), xs[0].dtype
    units = math.ceil(n / codec.unit)
    stripe = math.ceil(units / world) * codec.unit
    norm = 2.0 ** -((codec.hadamard.bit_length() - 1) // 2) if codec.hadamard else 1.0
    stripes = []
    for owner in range(1 if one_shot else world):
        parts = xs if one_shot else [x[owner * stripe : (owner + 1) * stripe] for x in xs]
        length, total = parts[0].numel(), None
        for rank, part in enumerate(parts):
            if rank == owner and own_exact and not one_shot:
                term = torch.nn.functional.pad(part.float(), (0, -length % codec.unit))
                term = rotate(term * norm, codec.hadamard) if codec.hadamard else term
            else:
                term = decode_units(encode(part, codec), codec)
            total = term if total is None else total + term
        if one_shot:
            back = rotate(total, codec.hadamard) / codec.hadamard / norm if codec.hadamard else total
            stripes.append(back[:length])
        else:
            stripes.append(decode(encode_units(total, codec), length, codec))
    return torch.cat(stripes).to(dtype)


def draws(world: int) -> list[dict[str, Any]]:
    """Random calls, the same on every rank."""
    draw = random.Random(world)
    return [
        {
            "codec": draw.choice(CODECS),
            "block": draw.choice((32, 64, 128, 256)),
            "hadamard": draw.choice((0, 0, 64)),
            "elements": draw.choice((draw.randint(1, 70), draw.randint(1, 5000), draw.randint(1, 60_000))),
            "dtype": draw.choice(DTYPES),
            "chunk_bytes": draw.choice((512, 4096, 65_536)),
            "own_exact": draw.random() < 0.8,
            "in_place": draw.random() < 0.3,
            "transport": draw.choice(("auto", "p2p", "collectives")),
        }
        for _ in range(CALLS // world)
    ]


def random_calls(rank: int, world: int) -> list[torch.Tensor]:
    found = []
    for seed, call in enumerate(draws(world)):
        reduce = QuantAllReduce(
            codec=call["codec"],
            block=call["block"],
            hadamard=call["hadamard"],
            chunk_bytes=call["chunk_bytes"],
            own_exact=call["own_exact"],
            transport=call["transport"],
            min_bytes=0,
        )
        x = partial(call["elements"], rank, call["dtype"], seed)
        found.append(reduce(x, x if call["in_place"] else None))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_holds_the_bits_of_one_process(world: int) -> None:
    results = on_ranks(world, random_calls)
    for seed, call in enumerate(draws(world)):
        codec = get_wire_codec(call["codec"], call["block"], hadamard=call["hadamard"])
        xs = [partial(call["elements"], rank, call["dtype"], seed) for rank in range(world)]
        wanted = simulated(xs, codec, own_exact=call["own_exact"])
        for rank in range(world):
            assert torch.equal(results[rank][seed], wanted), (rank, call)


def one_shots(rank: int, world: int) -> list[torch.Tensor]:
    found = []
    for hadamard in (0, 64):
        reduce = QuantAllReduce(min_bytes=0, one_shot=True, hadamard=hadamard, chunk_bytes=2048)
        for n in (1, 1000, 20_001):
            x = partial(n, rank, torch.bfloat16, n)
            found += [reduce(x), reduce(x, x)]
    return found


def test_one_shot_rounds_every_partial_once() -> None:
    results = on_ranks(2, one_shots)
    at = 0
    for hadamard in (0, 64):
        for n in (1, 1000, 20_001):
            xs = [partial(n, rank, torch.bfloat16, n) for rank in range(2)]
            wanted = simulated(xs, get_wire_codec("int8", hadamard=hadamard), one_shot=True)
            for result in results:
                assert torch.equal(result[at], wanted)
                assert torch.equal(result[at + 1], wanted)
            at += 2


def shapes_and_places(rank: int, world: int) -> dict[str, Any]:
    reduce = QuantAllReduce(min_bytes=0, chunk_bytes=4096)
    x = partial(96 * 80, rank, torch.bfloat16).reshape(96, 80)
    flat = reduce(x)
    strided = x.t().contiguous().t()
    out, wide = torch.empty_like(x), torch.zeros(96, 160, dtype=x.dtype)
    returned = reduce(x, out)
    reduce(x, wide[:, ::2])
    pending = [reduce.start(x + i) for i in range(4)]
    inline = reduce(x)  # waits for those under way
    return {
        "flat": flat,
        "others": [
            reduce(strided),
            out,
            wide[:, ::2],
            inline,
            reduce(x.clone(), None),
            reduce(x.reshape(2, -1)).reshape(96, 80),
        ],
        "same_object": returned is out,
        "untouched": torch.equal(x, partial(96 * 80, rank, torch.bfloat16).reshape(96, 80)),
        "pending": [p.wait() for p in pending],
        "again": [reduce(x + i) for i in range(4)],
        "empty": reduce(torch.empty(0, 7, dtype=torch.bfloat16)).shape,
        "stats": reduce.stats(),
    }


def test_shapes_strides_places_and_background_change_nothing() -> None:
    for found in on_ranks(2, shapes_and_places):
        assert all(torch.equal(found["flat"], other) for other in found["others"])
        assert found["same_object"]
        assert found["untouched"]
        assert all(torch.equal(a, b) for a, b in zip(found["pending"], found["again"], strict=True))
        assert tuple(found["empty"]) == (0, 7)
        assert found["stats"].calls == 15


def choices(rank: int, world: int) -> dict[str, Any]:
    reduce = QuantAllReduce(min_bytes=4096)
    small, large = partial(2047, rank, torch.bfloat16), partial(2048, rank, torch.bfloat16)
    exact = [small.clone(), large.clone()]
    for x in exact:
        dist.all_reduce(x)
    whole = torch.arange(5000)
    answers = [
        reduce.should_use(n, dtype)
        for n, dtype in (
            (2047, torch.bfloat16),
            (2048, torch.bfloat16),
            (1024, torch.float32),
            (9999, torch.int64),
            (0, torch.bfloat16),
        )
    ]
    results = reduce(small), reduce(large), reduce(whole)
    plain = reduce.plain(large)
    reduce.thresholds = Thresholds(NEVER, ((4096, "one_shot"), (NEVER, "two_shot")))
    ways = [
        reduce.method_for(n, dtype) for n, dtype in ((2047, torch.bfloat16), (2048, torch.bfloat16), (1, torch.int64))
    ]
    two_shot = reduce(large)
    other = QuantAllReduce(min_bytes=NEVER, transport="collectives").plain_two_shot(large.clone())
    wanted = sum(partial(2048, r, torch.bfloat16).float() for r in range(world))
    return {
        "answers": answers,
        "small": torch.equal(results[0], exact[0]),
        "large": torch.equal(results[1], exact[1]),
        "whole": torch.equal(results[2], whole * world),
        "plain": torch.equal(plain, exact[1]),
        "two_shot": torch.equal(two_shot, torch.as_tensor(wanted).bfloat16()) and torch.equal(two_shot, other),
        "ways": ways,
        "stats": reduce.stats(),
        "auto": QuantAllReduce(min_bytes="auto").thresholds,
    }


@pytest.mark.slow
def test_small_and_foreign_tensors_stay_plain_and_all_ranks_agree_on_a_measured_threshold() -> None:
    found = on_ranks(3, choices)
    for rank in found:
        assert rank["answers"] == [False, True, True, False, False]
        assert (rank["small"], rank["large"], rank["whole"], rank["plain"]) == (True, False, True, True)
        assert rank["two_shot"], "float32 sums in the order of the ranks, rounded once"
        assert rank["ways"] == ["one_shot", "two_shot", "own"]
        assert (rank["stats"].calls, rank["stats"].plain_calls) == (1, 4)
        assert rank["auto"] == found[0]["auto"]


def plain_sums(rank: int, world: int) -> list[bool]:
    """Whether the plain schedules give the definition's bits: random sizes and dtypes, all at once or by messages."""
    draw, found = random.Random(world), []
    reduces = [QuantAllReduce(min_bytes=NEVER, transport=transport) for transport in ("auto", "p2p")]
    for reduce in reduces:
        reduce.thresholds = Thresholds(NEVER, ((3000, "one_shot"), (9000, "two_shot"), (40_000, "one_shot")))
    for seed in range(40):
        elements, dtype = draw.choice((1, 63, 64, 65, draw.randint(1, 12_000))), draw.choice(DTYPES)
        xs = [partial(elements, r, dtype, seed) for r in range(world)]
        total = xs[0].float()
        for other in xs[1:]:
            total = total + other.float()
        for reduce in reduces:
            x = xs[rank].clone()
            way = reduce.method_for(elements, dtype)
            if way == "own":
                continue
            answers = [reduce(x), reduce.start(x).wait(), reduce.plain(x), reduce.plain_one_shot(x.clone())]
            kept = torch.equal(x, xs[rank])
            answers += [reduce.plain_two_shot(x.clone()), reduce(x, x)]
            found.append(kept and all(torch.equal(answer, total.to(dtype)) for answer in answers))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_plain_schedules_add_in_float32_in_the_order_of_the_ranks_and_round_once(world: int) -> None:
    for rank in on_ranks(world, plain_sums):
        assert len(rank) > 54
        assert all(rank)


def ways(rank: int, world: int) -> list[tuple[bool, str]]:
    draw, reduce = random.Random(7), QuantAllReduce(min_bytes="auto")
    sizes = [(draw.randint(0, 1 << draw.randint(1, 40)), draw.choice((*DTYPES, torch.int64))) for _ in range(500)]
    return [(reduce.should_use(*size), reduce.method_for(*size)) for size in sizes]


@pytest.mark.slow
def test_measured_ways_are_the_same_on_all_ranks_for_any_size() -> None:
    first, *others = on_ranks(3, ways)
    assert all(other == first for other in others)
    assert all(used == (way == "quantized") for used, way in first)


def non_finite(rank: int, world: int) -> list[torch.Tensor]:
    found = []
    for codec in CODECS:
        for dtype in (torch.bfloat16, torch.float32):
            x = partial(9000, rank, dtype)
            if rank == 1:
                x[100], x[5000], x[8999] = float("nan"), float("inf"), float("-inf")
            found.append(QuantAllReduce(codec=codec, min_bytes=0, chunk_bytes=4096)(x))
    return found


def test_nan_and_infinity_take_their_block_and_no_other_number() -> None:
    results = on_ranks(3, non_finite)
    at = 0
    for name in CODECS:
        codec = get_wire_codec(name)
        bad = torch.zeros(9000, dtype=torch.bool)
        for place in (100, 5000, 8999):
            first = place // codec.block * codec.block
            bad[first : first + codec.block] = True
        for _ in range(2):
            for result in results:
                assert torch.equal(result[at].isnan(), bad), name
                assert bool(result[at][~bad].isfinite().all())
            at += 1


def accuracy(rank: int, world: int) -> dict[str, Any]:
    errors: dict[Any, float] = {}
    elements = 1 << 17
    for block in (32, 64, 128, 256):
        for amplitude in (1.0,) if block != 64 else (1e-36, 1e-20, 1e-3, 1.0, 3e5, 1e30):
            xs = [torch.randn(elements, generator=torch.Generator().manual_seed(r)) * amplitude for r in range(world)]
            exact = sum(x.double() for x in xs)
            reduce = QuantAllReduce(block=block, min_bytes=0)
            errors[block, amplitude] = float((reduce(xs[rank]).double() - exact).norm() / torch.as_tensor(exact).norm())
            errors[block, "wire"] = reduce.stats().wire_bytes / (2 * (world - 1) / world * elements * (1 + 2 / block))
    return errors


def largest_of_normals(count: int) -> float:
    """The mean of the largest magnitude of ``count`` standard normal numbers: the integral of 1 - (2 Phi - 1)^count."""
    at = torch.linspace(0, 9, 90_001, dtype=torch.float64)
    return float(torch.trapezoid(1 - torch.special.erf(at / 2**0.5) ** count, at))


@pytest.mark.parametrize("world", [2, 4])
def test_error_and_bytes_are_those_of_the_model_at_every_magnitude(world: int) -> None:
    """One rounding: E[max]/(127 sqrt 12) of the deviation; k - 1 of k partials are rounded, then the sum."""
    for errors in on_ranks(world, accuracy):
        for (block, what), found in errors.items():
            one = largest_of_normals(block) / (127 * 12**0.5)
            wanted = 1.0 if what == "wire" else one * (1 + (world - 1) / world) ** 0.5
            assert found == pytest.approx(wanted, rel=0.01 if what == "wire" else 0.03), (block, what)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("block", [32, 64, 128, 256])
def test_what_was_decoded_is_left_as_it_is_when_encoded_again(name: str, block: int) -> None:
    codec = get_wire_codec(name, block)
    for amplitude in (1e-30, 1.0, 1e30):
        x = partial(50_000, 0, torch.float32) * amplitude
        once = decode(encode(x, codec), x.numel(), codec)
        assert torch.equal(decode(encode(once, codec), x.numel(), codec), once)


def compiled(rank: int, world: int) -> dict[str, Any]:
    reduce = QuantAllReduce(min_bytes=0)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(reduce(x * 2)) + 1

    x = partial(3000, rank, torch.bfloat16).reshape(3, 1000)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.library.opcheck(torch.ops.ptqpipe.quant_all_reduce.default, (x, reduce.name), test_utils="test_schema")
    torch.library.opcheck(torch.ops.ptqpipe.quant_all_reduce.default, (x, reduce.name), test_utils="test_faketensor")
    return {"equal": torch.equal(found, model(x)), "calls": reduce.stats().calls}


@pytest.mark.slow
def test_a_compiled_model_calls_it_as_one_operator() -> None:
    for found in on_ranks(2, compiled):
        assert found["equal"]
        assert found["calls"] >= 4


def alone(rank: int, world: int) -> bool:
    reduce = QuantAllReduce()
    x = partial(5000, rank, torch.bfloat16)
    return torch.equal(reduce(x), x) and not reduce.should_use(1 << 30, torch.bfloat16)


def test_one_rank_is_its_own_sum() -> None:
    assert on_ranks(1, alone) == [True]


def refusals(rank: int, world: int) -> list[str]:
    found = []
    for keywords in (
        {"codec": "int9"},
        {"block": 48},
        {"hadamard": 5},
        {"one_shot": True},
        {"chunk_bytes": 0},
        {"transport": "x"},
    ):
        try:
            QuantAllReduce(min_bytes=0, **keywords)  # type: ignore[arg-type]
        except UsageError as error:
            found.append(str(error))
    reduce = QuantAllReduce(min_bytes=0)
    for call in (
        lambda: reduce(torch.zeros(4), torch.zeros(5)),
        lambda: reduce.quantized(torch.zeros(4, dtype=torch.int32)),
    ):
        try:
            call()
        except UsageError as error:
            found.append(str(error))
    return found


def test_what_makes_no_sense_is_refused_in_one_line() -> None:
    for found in on_ranks(3, refusals):
        assert len(found) == 8
        assert all("expected" in line or "known are" in line or "two ranks" in line for line in found)


def views() -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Pairs of x and out that share memory or have none."""
    b, plane = torch.zeros(1000), torch.zeros(20, 30)
    return {
        "a later part of the same memory": (b[:500], b[250:750]),
        "an earlier part": (b[250:750], b[:500]),
        "one number further": (b[:999], b[1:]),
        "rows of rows": (plane[:10], plane[5:15]),
        "expanded, in place": (wide := torch.zeros(1, 7).expand(5, 7), wide),
        "expanded in one dimension of three": (deep := torch.zeros(3, 1, 7).expand(3, 4, 7), deep),
        "windows that slide": (slid := torch.zeros(10).unfold(0, 3, 1), slid),
        "an expanded out": (torch.zeros(5, 7), torch.zeros(7).expand(5, 7)),
        "meta": (torch.zeros(8, device="meta"), None),
        "meta, in place": (meta := torch.zeros(8, device="meta"), meta),
        "a meta out": (torch.zeros(8), torch.zeros(8, device="meta")),
        "sparse": (torch.eye(4).to_sparse(), None),
        "a list": ([1.0, 2.0], None),  # type: ignore[dict-item]
        "numpy": (torch.zeros(4).numpy(), None),
        "nothing": (None, None),  # type: ignore[dict-item]
        "a list as out": (torch.zeros(2), [0.0, 0.0]),  # type: ignore[dict-item]
    }


def refused_views(rank: int, world: int) -> list[str]:
    """What was not refused, whichever sum it would be; afterwards the ranks still sum."""
    reduce, left = QuantAllReduce(min_bytes=0), []
    for name, (x, out) in views().items():
        for sums in (reduce, reduce.start, reduce.quantized, reduce.plain):
            try:
                sums(x, out)
            except UsageError:
                continue
            left.append(f"{name}: {sums.__name__}")
        for sums_in_place in (reduce.plain_two_shot, reduce.plain_one_shot) if out is x else ():
            try:
                sums_in_place(x)
            except UsageError:
                continue
            left.append(f"{name}: {sums_in_place.__name__}")
    assert torch.equal(reduce.plain(torch.ones(4)), torch.full((4,), float(world)))
    return left


def test_memory_that_no_sum_fits_into_is_refused_by_all_ways() -> None:
    assert on_ranks(2, refused_views) == [[], []]


def shared_memory(rank: int, world: int) -> list[bool]:
    """Whether sums are right where x and out share memory without sharing a number, or all of it."""
    same = []
    for codec_bytes in (0, 1 << 30):  # quantized, plain
        reduce = QuantAllReduce(min_bytes=codec_bytes)
        x = partial(64 * 64, rank, torch.float32).reshape(64, 64)
        wanted = reduce(x)
        beside = torch.zeros(64, 128)
        beside[:, :64] = x
        same.append(torch.equal(reduce(beside[:, :64], beside[:, 64:]), wanted))
        same.append(torch.equal(beside[:, :64], x))
        after = torch.cat([x.reshape(-1), torch.zeros(4096)])
        same.append(torch.equal(reduce(after[:4096], after[4096:]), wanted.reshape(-1)))
        for again in (x.clone(), x.t().contiguous().t()):  # by two names; transposed
            same.append(torch.equal(reduce(again, again.view_as(again)), wanted))
            same.append(torch.equal(again, wanted))
        own = x.clone()
        same.append(torch.equal(reduce(own[:, :32], own[:, :32]), reduce(x[:, :32])))
    return same


def test_memory_of_which_no_number_is_shared_or_all_are_is_summed_into() -> None:
    for found in on_ranks(2, shared_memory):
        assert found == [True] * len(found)


def test_no_process_group_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        QuantAllReduce()
