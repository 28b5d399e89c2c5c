"""Decides how a sum of a given size is computed: the methods are timed against each other once, when an all-reduce
is created.

Every rank takes part in every measurement, rank 0's clock decides, and its answer is broadcast, so all ranks go by
the same numbers. Two questions: which plain sum is the fastest, for each size; and from which size on the quantized one
beats that. A core that wakes late costs many a call a factor of ten, whatever its method, so all methods take their
turns in every round, in changing order, and the median of the rounds' ratios decides, those of the next smaller and
the next larger size included: what is faster does not change from one size to the next and back.

Must not know codecs or transports: it is given functions.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

PlainMethod = Literal["own", "one_shot", "two_shot"]
SumMethod = Literal["own", "one_shot", "two_shot", "quantized"]
PLAIN: tuple[PlainMethod, ...] = get_args(PlainMethod)

NEVER = 1 << 62  # bytes: no message is that large
SIZES = tuple(1 << power for power in (12, 14, 16, 18, 19, 20, 21, 22, 23, 24))  # 4 KiB .. 16 MiB
QUANTIZED_FROM = 1 << 16  # bytes of messages that are tried with the codec; smaller ones are decided by their latency
DTYPE = torch.bfloat16
GAIN = 1.05  # what the codec must win by where it starts
PLAIN_GAIN = 1.1  # what another plain sum must beat the group's own by
ROUNDS, ENOUGH_S = 96, 0.13  # for one size: as many rounds, or as long and ...
LEAST_ROUNDS, LIMIT_S = 5, 1.2  # ... as many; a link that is so slow gives clear answers after fewer
OFTEN = 8  # rounds after which the ranks ask each other every OFTEN rounds only whether it is enough
DOUBT = 1.0  # of the codec, in roots of n: so far below the middle of n ratios lies one that 39 of 40 medians exceed
PLAIN_DOUBT = 0.5  # of plain sums: five of six

Sum = Callable[[torch.Tensor], object]
Times = Mapping[SumMethod, Sequence[float]]  # seconds by method; the same place in each is the same round


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Which sizes use which method.

    quantized  bytes from which on sums go through the codec
    plain      (bytes below which, method) of the others, ascending; from the last on, and without any, the group's own
    """

    quantized: int
    plain: tuple[tuple[int, PlainMethod], ...] = ()

    def plain_method(self, nbytes: int) -> PlainMethod:
        """The method of a message that is not quantized."""
        for below, method in self.plain:
            if nbytes < below:
                return method
        return "own"


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    sums: Callable[[int], Mapping[SumMethod, Sum]],
    *,
    sizes: tuple[int, ...] = SIZES,
) -> Thresholds:
    """Times the sums of a message, all in place, at every size (bytes); "own" is one of them. Collective."""
    times: dict[int, Times] = {}
    for nbytes in sizes:
        methods = dict(sums(nbytes))
        if nbytes < QUANTIZED_FROM:
            methods.pop("quantized", None)
        times[nbytes] = _rounds(group, torch.empty(nbytes // DTYPE.itemsize, dtype=DTYPE, device=device), methods)
    mine = decide(times)
    own_choice = [PLAIN.index(mine.plain_method(nbytes)) for nbytes in sizes]
    answer = torch.tensor([mine.quantized, *own_choice], dtype=torch.int64, device=device)
    dist.broadcast(answer, group=group, group_src=0)
    first, *agreed = (int(value) for value in answer.tolist())
    return Thresholds(first, table({nbytes: PLAIN[method] for nbytes, method in zip(sizes, agreed, strict=True)}))


def decide(times: Mapping[int, Times]) -> Thresholds:
    """From the times of each measured size."""
    sizes = sorted(times)
    best = {nbytes: _fastest_plain(times, index) for index, nbytes in enumerate(sizes)}
    start = NEVER
    for index, nbytes in reversed(list(enumerate(sizes))):
        if "quantized" in times[nbytes]:
            ratios = log_ratios(_around(times, index, {best[nbytes], "quantized"}), best[nbytes], "quantized")
            if statistics.median(ratios) < 0:
                break  # and what is smaller stays plain, too
            if _pays(ratios, GAIN, DOUBT):
                start = nbytes
    return Thresholds(start, table(best))


def log_ratios(several: Sequence[Times], slower: SumMethod, faster: SumMethod) -> list[float]:
    """Log ratios of the rounds' times; above 0 where ``faster`` is faster."""
    return [math.log(a / b) for times in several for a, b in zip(times[slower], times[faster], strict=True)]


def _fastest_plain(times: Mapping[int, Times], index: int) -> PlainMethod:
    tried = [method for method in PLAIN if method in times[sorted(times)[index]]]
    several = _around(times, index, set(tried))
    ratios = {method: log_ratios(several, "own", method) for method in tried}
    faster = {
        method: statistics.median(ratios[method]) for method in tried if _pays(ratios[method], PLAIN_GAIN, PLAIN_DOUBT)
    }
    return max(faster, key=lambda method: faster[method], default="own")


def _around(times: Mapping[int, Times], index: int, methods: AbstractSet[SumMethod]) -> list[Times]:
    """The times of a size and of its neighbours that tried these methods, too."""
    return [times[nbytes] for nbytes in sorted(times)[max(0, index - 1) : index + 2] if methods <= set(times[nbytes])]


def _pays(ratios: list[float], gain: float, doubt: float) -> bool:
    """Whether the median is so large and, as far as one can know, above 0."""
    low = max(0, int(len(ratios) / 2 - doubt * math.sqrt(len(ratios))))
    return statistics.median(ratios) >= math.log(gain) and sorted(ratios)[low] > 0


def table(best: Mapping[int, PlainMethod]) -> tuple[tuple[int, PlainMethod], ...]:
    """The plain methods by size, from those of the measured sizes: each size goes by the nearest (by ratio) of them."""
    sizes = sorted(best)
    ranges: list[tuple[int, PlainMethod]] = []
    for nbytes, larger in zip(sizes, [*sizes[1:], None], strict=True):
        below = NEVER if larger is None else math.isqrt(nbytes * larger - 1) + 1  # the geometric mean, rounded up
        if ranges and ranges[-1][1] == best[nbytes]:
            ranges.pop()
        ranges.append((below, best[nbytes]))
    return tuple(ranges)


def _rounds(group: dist.ProcessGroup, x: torch.Tensor, methods: Mapping[SumMethod, Sum]) -> Times:
    """Seconds of each method, all in every round, after one round to warm up."""
    times: dict[SumMethod, list[float]] = {method: [] for method in methods}
    order, draw = list(methods), random.Random(x.numel())  # the same order on all ranks
    begun = time.perf_counter()
    for turn in range(ROUNDS + 1):
        draw.shuffle(order)
        for method in order:
            took = _seconds(group, x, methods[method])
            if turn:
                times[method].append(took)
        if turn and (turn <= OFTEN or turn % OFTEN == 0):
            spent = time.perf_counter() - begun
            enough = spent > LIMIT_S or (turn >= LEAST_ROUNDS and spent > ENOUGH_S)
            stop = torch.tensor([enough], dtype=torch.int32, device=x.device)
            dist.broadcast(stop, group=group, group_src=0)
            if bool(stop.item()):
                break
    return times


def _seconds(group: dist.ProcessGroup, x: torch.Tensor, run: Sum) -> float:
    x.fill_(1)
    dist.barrier(group=group)
    begun = time.perf_counter()
    run(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - begun
