"""The gate decides from given times alone: which plain sum a size takes, from where on the codec pays.

No test looks at a clock: the times are made up, with the tails that real ones have.
"""

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ptqpipe.serving.collectives import NEVER, Thresholds, gate
from ptqpipe.serving.collectives.gate import SIZES, PlainMethod, Sum, SumMethod, Times, decide, table
from tests.serving.collectives.ranks import on_ranks

KIB, MIB = 1 << 10, 1 << 20


def steady(**ms: float) -> Times:
    """Five rounds without noise."""
    return {way: [value] * 5 for way, value in ms.items()}  # type: ignore[misc]


def late(draw: random.Random, ms: float) -> float:
    """A call in three finds its core asleep: some milliseconds more, whichever way it goes; and some noise."""
    return ms * draw.uniform(0.9, 1.3) + (draw.uniform(2, 5) if draw.random() < 0.35 else 0)


def by_size(found: Thresholds) -> list[PlainMethod]:
    return [found.plain_method(nbytes) for nbytes in SIZES]


def test_each_size_takes_its_fastest_plain_sum_whatever_larger_ones_take() -> None:
    found: dict[int, Times] = {}
    for nbytes in SIZES:
        if nbytes < 200 * KIB:
            found[nbytes] = steady(own=3, one_shot=1, two_shot=2)
        elif nbytes < 3 * MIB:
            found[nbytes] = steady(own=4, one_shot=6, two_shot=2)
        else:
            found[nbytes] = steady(own=4, two_shot=5)
    wanted = ["one_shot"] * 3 + ["two_shot"] * 4 + ["own"] * 3
    answer = decide(found)
    assert by_size(answer) == wanted
    assert answer.quantized == NEVER
    assert answer.plain_method(1) == "one_shot"
    assert answer.plain_method(1 << 40) == "own", "what is larger goes by the largest"


def test_ways_that_are_as_good_as_the_group_s_own_are_not_taken() -> None:
    times = steady(own=1, one_shot=0.92, two_shot=0.93, quantized=0.96)
    assert decide(dict.fromkeys(SIZES, times)) == Thresholds(NEVER, ((NEVER, "own"),))
    times = steady(own=1, one_shot=0.9, two_shot=0.905, quantized=0.88)
    assert by_size(decide(dict.fromkeys(SIZES, times))) == ["one_shot"] * len(SIZES)


@pytest.mark.parametrize(
    ("quantized", "wanted"),
    [
        ([3, 3, 3, 3, 1, 1], 16 * MIB),  # at 8 MiB a third of the rounds that count, the smaller neighbour's, are lost
        ([3, 3, 1, 1, 1, 1], 4 * MIB),
        ([1, 1, 1, 1, 1, 1], 512 * KIB),
        ([3, 3, 3, 3, 3, 3], NEVER),
        ([1, 1, 1, 3, 3, 3], NEVER),  # what pays for small ones alone is not worth a second threshold
        ([1.9, 1.9, 1.9, 1.9, 1.9, 1.9], 512 * KIB),
        ([1.95, 1.95, 1.95, 1.95, 1.95, 1.95], NEVER),  # by 2.6 % only
    ],
)
def test_the_codec_starts_where_it_pays_and_no_larger_size_loses(quantized: list[float], wanted: int) -> None:
    sizes = [512 * KIB << power for power in range(6)]
    found = {n: steady(own=4, two_shot=2, quantized=ms) for n, ms in zip(sizes, quantized, strict=True)}
    assert decide(found).quantized == wanted


def test_the_codec_has_to_beat_the_best_plain_sum() -> None:
    times = steady(own=4, one_shot=2, two_shot=3, quantized=2.5)
    assert decide(dict.fromkeys(SIZES, times)) == Thresholds(NEVER, ((NEVER, "one_shot"),))


def noisy(seed: int, **ms: float) -> dict[int, Times]:
    draw = random.Random(seed)
    return {
        nbytes: {way: [late(draw, value) for _ in range(24)] for way, value in ms.items()}  # type: ignore[misc]
        for nbytes in SIZES
    }


def test_late_cores_hide_what_is_twice_as_fast_in_one_choice_of_twenty_at_most() -> None:
    answers = [decide(noisy(seed, own=0.6, one_shot=0.3, two_shot=0.7, quantized=0.8)) for seed in range(40)]
    right = sum(by_size(answer).count("one_shot") for answer in answers)
    assert right >= 0.95 * 40 * len(SIZES)
    assert {answer.quantized for answer in answers} == {NEVER}


def test_noise_turns_a_useless_codec_on_for_small_messages_one_time_of_ten_at_most() -> None:
    answers = [decide(noisy(seed, own=0.4, two_shot=0.4, quantized=0.4)) for seed in range(60)]
    assert sum(answer.quantized < 8 * MIB for answer in answers) <= 6


def test_one_disturbed_size_goes_with_its_neighbours() -> None:
    found = dict.fromkeys(SIZES, steady(own=2, one_shot=1, two_shot=3, quantized=0.5))
    found[MIB] = steady(own=2, one_shot=20, two_shot=3, quantized=9)
    assert decide(found) == Thresholds(SIZES[0], ((NEVER, "one_shot"),))


def test_ratios_are_of_the_same_round() -> None:
    """Every second round is ten times as slow, for all; in each the one-shot wins by a tenth."""
    own = [1.0, 10.0] * 8
    found: dict[int, Times] = {MIB: {"own": own, "one_shot": [t / 1.1 for t in own], "two_shot": own[::-1]}}
    assert decide(found).plain_method(MIB) == "one_shot"


def test_every_size_goes_by_the_nearest_measured_one() -> None:
    draw = random.Random(0)
    for _ in range(300):
        sizes = sorted(draw.sample([1 << power for power in range(6, 30)], draw.randint(1, 8)))
        best: dict[int, PlainMethod] = {nbytes: draw.choice(gate.PLAIN) for nbytes in sizes}
        thresholds = Thresholds(NEVER, table(best))
        assert len(thresholds.plain) <= len(sizes)
        for nbytes in [draw.randint(1, 1 << 31) for _ in range(20)] + [draw.choice(sizes) + draw.randint(-1, 1)]:
            distance = {size: max(size / nbytes, nbytes / size) for size in sizes}
            near = [size for size in sizes if distance[size] <= min(distance.values()) * (1 + 1e-12)]
            assert thresholds.plain_method(nbytes) in {best[size] for size in near}


def test_without_a_measurement_plain_sums_are_the_group_s_own() -> None:
    assert {Thresholds(0).plain_method(1 << power) for power in range(40)} == {"own"}


FAKE_MS: dict[SumMethod, list[float]] = {  # by rank: rank 0's clock and the others' disagree about everything
    "own": [3.0, 1.0, 1.0],
    "one_shot": [2.0, 2.0, 2.0],
    "two_shot": [2.5, 3.0, 0.5],
    "quantized": [1.0, 9.0, 9.0],
}


def measured(rank: int, world: int) -> dict[str, Any]:
    import torch.distributed as dist

    calls: list[tuple[int, SumMethod]] = []
    kept = gate._seconds

    def sums(nbytes: int) -> Mapping[SumMethod, Sum]:
        def count(way: SumMethod) -> Sum:
            return lambda x: calls.append((x.nbytes, way))

        return {way: count(way) for way in FAKE_MS if way != "one_shot" or nbytes < MIB}

    def seconds(group: dist.ProcessGroup, x: torch.Tensor, run: Sum) -> float:
        run(x)
        return FAKE_MS[calls[-1][1]][rank]

    gate._seconds = seconds
    try:
        assert dist.group.WORLD is not None
        found = gate.measure(dist.group.WORLD, torch.device("cpu"), sums, sizes=(4 * KIB, 64 * KIB, MIB, 2 * MIB))
    finally:
        gate._seconds = kept
    return {"found": found, "calls": calls}


def test_all_ranks_go_by_the_clock_of_rank_0_and_sum_in_the_same_order() -> None:
    ranks = on_ranks(3, measured)
    for rank in ranks:
        assert rank["found"] == Thresholds(64 * KIB, ((256 * KIB, "one_shot"), (NEVER, "two_shot")))
        assert rank["calls"] == ranks[0]["calls"]
    tried = {nbytes: {way for size, way in ranks[0]["calls"] if size == nbytes} for nbytes in (4 * KIB, 64 * KIB, MIB)}
    assert tried == {
        4 * KIB: {"own", "one_shot", "two_shot"},
        64 * KIB: {"own", "one_shot", "two_shot", "quantized"},
        MIB: {"own", "two_shot", "quantized"},
    }
