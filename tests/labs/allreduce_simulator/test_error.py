"""Claims about the exact numerics: ranks that pass messages, one at a time, in numpy, are the independent route."""

import math
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch

from labs.allreduce_simulator.codecs import PLAIN, get_rounding
from labs.allreduce_simulator.error import (
    Case,
    integer_rounding_error,
    measure,
    model_error,
    reduced,
    rounded_variance,
    rounding_error,
)
from labs.allreduce_simulator.inputs import CANCELLATION, CHUNK, DISTRIBUTIONS, drawn, given, row_parallel
from labs.allreduce_simulator.schemes import SCHEMES, Partials, get_scheme, owners_of, reduce_of
from ptqpipe.errors import UsageError
from ptqpipe.serving.collectives import codec_reference as reference
from ptqpipe.serving.collectives.codecs import get_wire_codec
from tests.labs.allreduce_simulator import measured

F32 = np.float32
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def bf16(x: Array) -> Array:
    """Round to nearest even on the upper 16 bits."""
    bits = x.astype(F32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return cast(Array, rounded.astype(np.uint32).view(F32))


def sent(codec_name: str) -> Callable[[Array], Array]:
    """The codec under the scheme, on numpy: what is tested here is who sends what to whom, in which order."""
    codec = get_rounding(codec_name, 32)
    return lambda x: np.asarray(codec.rounded(torch.from_numpy(np.ascontiguousarray(x))).numpy(), F32) if x.size else x


class Rank:
    """Holds its own partial and what it has received."""

    def __init__(self, own: Array) -> None:
        self.own = own
        self.inbox: dict[int, Array] = {}


def stripes(elements: int, ranks: int, block: int) -> list[slice]:
    """Whole blocks, equal ones first."""
    width = math.ceil(math.ceil(elements / block) / ranks) * block
    return [slice(min(elements, r * width), min(elements, (r + 1) * width)) for r in range(ranks)]


def two_shot_by_messages(partials: Array, send: Callable[[Array], Array], *, own_exact: bool) -> Array:
    ranks = [Rank(p) for p in partials]
    result = np.empty_like(partials[0])
    for owner, stripe in enumerate(stripes(partials.shape[1], len(ranks), 32)):
        for source, rank in enumerate(ranks):
            kept = source == owner and own_exact
            ranks[owner].inbox[source] = rank.own[stripe] if kept else send(rank.own[stripe])
        total = ranks[owner].inbox[0]
        for source in range(1, len(ranks)):
            total = (total + ranks[owner].inbox[source]).astype(F32)
        result[stripe] = send(total)
    return np.asarray(result)


def ring_by_messages(partials: Array, send: Callable[[Array], Array]) -> Array:
    """Step by step as ranks do it: at every step each rank sends one stripe to the next rank."""
    k = len(partials)
    cut = stripes(partials.shape[1], k, 32)
    holds = [p.copy() for p in partials]
    for step in range(k - 1):
        messages = [(r, (r - 1 - step) % k) for r in range(k)]  # rank r sends stripe r - 1 - step on
        wires = [send(holds[r][cut[s]]) for r, s in messages]
        for (r, s), wire in zip(messages, wires, strict=True):
            holds[(r + 1) % k][cut[s]] = (wire + partials[(r + 1) % k][cut[s]]).astype(F32)
    return cast(Array, np.concatenate([send(holds[s][cut[s]]) for s in range(k)]))


def semi_loop_by_messages(partials: Array, send: Callable[[Array], Array]) -> Array:
    k = len(partials)
    result = np.empty_like(partials[0])
    for owner, stripe in enumerate(stripes(partials.shape[1], k, 32)):
        right = [(owner + d) % k for d in range(k // 2, 0, -1)]
        left = [(owner - d) % k for d in range((k - 1) // 2, 0, -1)]
        total = partials[owner][stripe]
        for chain in (right, left):
            carried: Array | None = None
            for rank in chain:
                here = partials[rank][stripe]
                carried = send(here if carried is None else (carried + here).astype(F32))
            if carried is not None:
                total = (total + carried).astype(F32)
        result[stripe] = send(total)
    return np.asarray(result)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("name", ["two-shot", "two-shot-all", "ring", "semi-loop"])
def test_schemes_are_what_ranks_that_pass_messages_compute(name: str, ranks: int) -> None:
    partials = drawn("t3", 32 * 41).partials(ranks, start=0, stop=32 * 41)
    send = sent("int8")
    by_messages = {
        "two-shot": lambda p: two_shot_by_messages(p, send, own_exact=True),
        "two-shot-all": lambda p: two_shot_by_messages(p, send, own_exact=False),
        "ring": lambda p: ring_by_messages(p, send),
        "semi-loop": lambda p: semi_loop_by_messages(p, send),
    }[name](partials.numpy())
    parts = Partials(partials.reshape(ranks, -1, 32), owners_of(41, ranks))
    found = reduce_of(SCHEMES[name], 2)(parts, get_rounding("int8", 32)).reshape(-1)
    assert torch.equal(found, torch.from_numpy(by_messages))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("name", "block", "rotate"),
    [
        ("int8", 32, 0), ("int8", 64, 0), ("int8", 256, 0), ("int8", 64, 64), ("int8", 32, 128), ("int6", 64, 0),
        ("int4", 32, 16), ("fp8", 128, 0), ("mxfp8", 32, 0), ("nvfp4", 16, 0),
    ],
)  # fmt: skip
def test_two_shot_gives_the_bits_that_messages_give(name: str, block: int, rotate: int, ranks: int) -> None:
    """Encoded by each rank, summed and encoded by the owner with its own numbers as they are, decoded by all."""
    codec = get_wire_codec(name, block, hadamard=rotate)
    elements = codec.unit * 13 - 5
    partials = drawn("outliers", elements).partials(ranks, start=0, stop=elements)
    expected = torch.empty(elements)
    for owner, stripe in enumerate(stripes(elements, ranks, codec.unit)):
        if stripe.start == stripe.stop:
            continue
        parts = [None if r == owner else reference.encode(partials[r, stripe], codec) for r in range(ranks)]
        message, _ = reference.reduce(parts, partials[owner, stripe], codec)
        expected[stripe] = reference.decode(message, stripe.stop - stripe.start, codec)
    case = Case(get_scheme("two-shot"), get_rounding(name, block, rotate=rotate))
    assert torch.equal(reduced(case, partials, start=0, elements=elements, node=2), expected)


@pytest.mark.parametrize("block", [32, 64, 256])
@pytest.mark.parametrize("name", ["int8", "int6", "int4"])
def test_rounding_without_bytes_has_the_bits_of_the_bytes(name: str, block: int) -> None:
    """Normal, tiny, huge, zero, constant, subnormal and non-finite blocks, and ties."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, block, generator=generator)
    x[:20] *= 2.0 ** torch.arange(-140, 140, 14).unsqueeze(1)
    x[20], x[21], x[22], x[23, 3], x[24] = 0.0, 3.0, 1e-40, 1e30, torch.arange(block) / 2
    codec = get_wire_codec(name, block)
    for values in (x, torch.cat((x, torch.full((1, block), math.nan), torch.full((1, block), math.inf)))):
        found = get_rounding(name, block).rounded(values)
        expected = reference.decode(reference.encode(values.reshape(-1), codec), values.numel(), codec)
        assert torch.equal(found.reshape(-1).nan_to_num(7e37), expected.nan_to_num(7e37))


def test_hierarchical_is_two_shot_inside_and_then_between() -> None:
    partials = drawn("gaussian", 32 * 64).partials(8, start=0, stop=32 * 64).numpy()
    send, result = sent("int8"), np.empty(32 * 64, F32)
    for owner, stripe in enumerate(stripes(32 * 64, 8, 32)):
        sums = []
        for node in (range(4), range(4, 8)):
            values = [partials[r][stripe] if r % 4 == owner % 4 else send(partials[r][stripe]) for r in node]
            sums.append(np.add.reduce(np.stack(values), axis=0, dtype=F32))
        between = [s if node == owner // 4 else send(s) for node, s in enumerate(sums)]
        result[stripe] = send((between[0] + between[1]).astype(F32))
    parts = Partials(torch.from_numpy(partials).reshape(8, -1, 32), owners_of(64, 8))
    found = reduce_of(SCHEMES["hierarchical"], 4)(parts, get_rounding("int8", 32)).reshape(-1)
    assert torch.equal(found, torch.from_numpy(result))


def test_a_plain_bfloat16_ring_rounds_every_partial_sum() -> None:
    partials = drawn("gaussian", 32).partials(4, start=0, stop=32).numpy()
    total = partials[1]  # all of it belongs to rank 0: the chain is 1, 2, 3, 0
    for rank in (2, 3):
        total = (bf16(total) + partials[rank]).astype(F32)
    expected = bf16((bf16(total) + partials[0]).astype(F32))
    parts = Partials(torch.from_numpy(partials).reshape(4, 1, 32), owners_of(1, 4))
    assert torch.equal(reduce_of(SCHEMES["ring-bf16"], 2)(parts, PLAIN["bf16"]).reshape(-1), torch.from_numpy(expected))


@pytest.mark.parametrize("elements", [1, 63, 65, CHUNK, 3 * CHUNK + 17])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_any_size_and_world_is_measured_and_slabs_change_nothing(
    elements: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [Case(get_scheme(name), get_rounding("int8", 64)) for name in ("two-shot", "ring", "one-shot")]
    whole = measure(cases, source=drawn("gaussian", elements), ranks=ranks)
    monkeypatch.setattr("labs.allreduce_simulator.error.SLAB_NUMBERS", 1)
    parts = measure(cases, source=drawn("gaussian", elements), ranks=ranks)
    for one, other in zip(whole, parts, strict=True):
        assert one.rel_l2 == pytest.approx(other.rel_l2, rel=1e-12)
        assert one.max_error == pytest.approx(other.max_error, rel=1e-12)
        assert one.elements == elements


def test_the_measures_are_those_of_their_definition() -> None:
    partials = drawn("outliers", 2 * CHUNK).partials(3, start=0, stop=2 * CHUNK)
    codec = get_rounding("int8", 64)
    (row,) = measure([Case(get_scheme("one-shot"), codec)], source=drawn("outliers", 2 * CHUNK), ranks=3)
    exact = partials.double().sum(0).numpy()
    found = bf16(sum(codec.rounded(p).numpy() for p in partials)).astype(np.float64)  # type: ignore[arg-type]
    error, rms = found - exact, math.sqrt(np.mean(exact**2))
    assert row.rel_l2 == pytest.approx(np.linalg.norm(error) / np.linalg.norm(exact), rel=1e-9)
    blocks = np.linalg.norm(error.reshape(-1, 64), axis=1) / np.linalg.norm(exact.reshape(-1, 64), axis=1)
    assert np.sort(blocks)[(len(blocks) - 1) // 2] == pytest.approx(row.rel_l2_block, rel=1e-9)
    assert row.max_error == pytest.approx(np.abs(error).max() / rms, rel=1e-9)
    assert row.bias == pytest.approx(error.mean() / rms, rel=1e-6)
    assert row.mse == pytest.approx(np.mean(error**2), rel=1e-9)


@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_one_rounding_loses_what_the_integral_says(bits: int, block: int) -> None:
    """Within 0.6 %: 262 144 draws, and the largest number of a block, which is not quite as far off as others."""
    found = rounding_error(get_rounding(f"int{bits}", block))
    assert found == pytest.approx(integer_rounding_error(bits, block), rel=0.006)


@pytest.mark.parametrize("data", ["gaussian", "cancelling"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 16, 64])
def test_the_closed_form_is_within_3_percent(ranks: int, data: str) -> None:
    names = [n for n in SCHEMES if not SCHEMES[n].plain and n != "ring-cast"]
    if data == "cancelling":
        names = ["one-shot", "two-shot", "two-shot-all"]
    if ranks % 8 or ranks == 8:
        names = [n for n in names if not n.startswith("hierarchical")]
    rows = measure(
        [Case(get_scheme(n), get_rounding("int8", 64)) for n in names], source=drawn(data, 1 << 15), ranks=ranks
    )
    rounding = integer_rounding_error(8, 64)
    for row in rows:
        cancellation = CANCELLATION if data == "cancelling" else 1.0
        said = model_error(row.scheme, rounding, ranks=ranks, cancellation=cancellation)
        assert row.rel_l2 == pytest.approx(said, rel=0.03), row.scheme


def test_the_rounded_variances_of_8_ranks_are_those_counted_by_hand() -> None:
    """Partial sums of 1..7 ranks travel a full loop, 1..4 and 1..3 a semi-loop; the result of 8 is gathered."""
    assert rounded_variance("ring", 8) * 8 == pytest.approx(sum(range(1, 8)) + 8)
    assert rounded_variance("semi-loop", 8) * 8 == pytest.approx(1 + 2 + 3 + 4 + 1 + 2 + 3 + 8)
    assert rounded_variance("two-shot", 8) * 8 == pytest.approx(7 + 8)
    assert rounded_variance("two-shot-all", 8) * 8 == pytest.approx(8 + 8)
    assert rounded_variance("one-shot", 8) * 8 == pytest.approx(8)
    assert rounded_variance("hierarchical", 16, node=8) * 16 == pytest.approx(14 + 8 + 16)


@pytest.mark.parametrize("name", ["ring", "semi-loop", "ring-ag"])
def test_equarx_mean_squared_error(name: str) -> None:
    """One block size, 128, gives every row: semi-loop and gather to the printed digit, the full loop 9 % above."""
    (row,) = measure(
        [Case(get_scheme(name), get_rounding("int8", 128))],
        source=drawn("gaussian", 1 << 18),
        ranks=8,
        output=torch.float32,
    )
    theirs = measured.EQUARX_MSE[name]
    if name == "ring":
        assert row.mse == pytest.approx(theirs, rel=0.10)
    else:
        assert float(f"{row.mse:.1g}") == theirs


def test_equarx_naive_fp8() -> None:
    """Tensors cast to E5M2 and summed in it: .13 as they print it."""
    case = Case(get_scheme("ring-cast"), PLAIN["e5m2-cast"])
    (row,) = measure([case], source=drawn("gaussian", 1 << 18), ranks=8, output=torch.float32)
    assert round(row.mse, 2) == measured.EQUARX_MSE["ring-cast"]


def test_beyond_64_ranks_int8_two_shot_is_nearer_than_a_plain_bfloat16_ring() -> None:
    cases = [Case(get_scheme("two-shot"), get_rounding("int8", 64)), Case(get_scheme("ring-bf16"), PLAIN["bf16"])]
    quantized, plain = measure(cases, source=drawn("gaussian", 1 << 14), ranks=128)
    assert quantized.rel_l2 < 0.7 * plain.rel_l2


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_partials_do_not_depend_on_how_they_are_asked_for(name: str) -> None:
    source = drawn(name, 3 * CHUNK, seed=5)
    whole = source.partials(4, start=0, stop=3 * CHUNK)
    pieces = [source.partials(4, start=i * CHUNK, stop=(i + 1) * CHUNK) for i in range(3)]
    assert torch.equal(whole, torch.cat(pieces, dim=1))
    assert torch.equal(whole, whole.bfloat16().float())
    assert not torch.equal(whole, drawn(name, 3 * CHUNK, seed=6).partials(4, start=0, stop=3 * CHUNK))


def test_cancelling_partials_are_as_much_larger_than_their_sum_as_is_said() -> None:
    for ranks in (2, 8, 64):
        x = drawn("cancelling", 1 << 15).partials(ranks, start=0, stop=1 << 15).double()
        assert float(x.norm() / x.sum(0).norm()) == pytest.approx(CANCELLATION, rel=0.02)


def test_fewer_ranks_sum_neighbours_of_recorded_partials() -> None:
    values = torch.arange(8 * 6, dtype=torch.float32).reshape(8, 6)
    found = given("x", values).partials(4, start=0, stop=6)
    assert torch.equal(found, torch.stack([values[2 * r] + values[2 * r + 1] for r in range(4)]).bfloat16().float())
    with pytest.raises(UsageError, match="choose --ranks among 2, 4, 8"):
        given("x", values).partials(3, start=0, stop=6)


def test_a_row_parallel_layer_gives_each_rank_its_slice_of_the_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 24, generator=generator), torch.randn(7, 24, generator=generator)
    source = row_parallel("x", x, w)
    found = source.partials(3, start=0, stop=source.elements)
    expected = torch.stack([x[:, 8 * r : 8 * r + 8] @ w[:, 8 * r : 8 * r + 8].T for r in range(3)])
    torch.testing.assert_close(found, expected.reshape(3, -1), rtol=2**-7, atol=1e-5)
    assert torch.equal(found[:, 10:23], source.partials(3, start=10, stop=23))
    with pytest.raises(UsageError, match="do not divide the 24 columns"):
        source.partials(5, start=0, stop=7)


@pytest.mark.parametrize("ranks", [0, 1, 513])
def test_worlds_out_of_range_are_refused(ranks: int) -> None:
    with pytest.raises(UsageError, match=r"2\.\.512"):
        measure([Case(get_scheme("ring"), PLAIN["bf16"])], source=drawn("gaussian", 64), ranks=ranks)
