"""From which size on quantizing pays: plain against quantized, timed once, when an all-reduce is made.

Every rank takes part in every measurement, rank 0's clock decides, and its answer is broadcast, so all ranks go by
the same numbers. Two questions: which plain sum is faster, the process group's own or the two-shot without a codec; and
from which size on the quantized one beats the better of them. A size counts only if all larger ones agree.

Must not know codecs or transports: it is given functions.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

NEVER = 1 << 62  # bytes: no message is that large
SIZES = tuple(1 << power for power in range(16, 25))  # 64 KiB .. 16 MiB
DTYPE = torch.bfloat16
GAIN = 1.05  # what both the fastest and the middle one of a size's repeats must win by
REPEAT = 7
LIMIT_S = 1.5  # for one size; what takes longer is a link where the answer is clear after fewer repeats

Sum = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bytes from which on a sum goes another way.

    quantized  ... through the codec
    two_shot   ... through the plain two-shot, below ``quantized``
    """

    quantized: int
    two_shot: int


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    own: Sum,
    two_shot: Sum,
    quantized: Sum,
    sizes: tuple[int, ...] = SIZES,
) -> Thresholds:
    """Times the three sums, all in place, at every size; collective."""
    gains: list[float] = []
    plain_gains: list[float] = []
    for nbytes in sizes:
        x = torch.ones(nbytes // DTYPE.itemsize, dtype=DTYPE, device=device)
        runs = _rounds(group, x, (own, two_shot, quantized))
        gains.append(_least_gain(runs, lambda ours, schedule, codec: min(ours, schedule) / codec))
        plain_gains.append(_least_gain(runs, lambda ours, schedule, codec: ours / schedule))
    answer = torch.tensor([_from_where(gains, sizes), _from_where(plain_gains, sizes)], device=device)
    dist.broadcast(answer, group=group, group_src=0)
    first, second = (int(value) for value in answer.tolist())
    return Thresholds(first, second)


def _least_gain(runs: list[tuple[float, float, float]], gain: Callable[[float, float, float], float]) -> float:
    """The smaller one of the gains of the fastest and of the middle runs: a network that lets bursts through flatters
    the former, what else the machine does blurs the latter."""
    ways = [sorted(run[way] for run in runs) for way in range(3)]
    return min(gain(*(way[0] for way in ways)), gain(*(way[len(way) // 2] for way in ways)))


def _rounds(group: dist.ProcessGroup, x: torch.Tensor, sums: tuple[Sum, Sum, Sum]) -> list[tuple[float, float, float]]:
    """Seconds of each sum, taken in turns after one round to warm up."""
    rounds: list[tuple[float, float, float]] = []
    for turn in range(REPEAT + 1):
        a, b, c = (_seconds(group, x, run) for run in sums)
        if turn:
            rounds.append((a, b, c))
        late = torch.tensor([turn * (a + b + c) > LIMIT_S], dtype=torch.int32, device=x.device)
        dist.broadcast(late, group=group, group_src=0)
        if rounds and bool(late.item()):
            break
    return rounds


def _seconds(group: dist.ProcessGroup, x: torch.Tensor, run: Sum) -> float:
    dist.barrier(group=group)
    begun = time.perf_counter()
    run(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - begun


def _from_where(gains: list[float], sizes: tuple[int, ...]) -> int:
    """The smallest size such that it and all larger ones won."""
    found = NEVER
    for gain, nbytes in zip(reversed(gains), reversed(sizes), strict=True):
        if gain < GAIN:
            break
        found = nbytes
    return found
