"""How long a conversion will take, from a few seconds' measurement of this machine: rules on small units, and the disk.

Every rule of the plan runs on seeded random units: a scaled-down unit of the plan where the cost of a weight grows with
the size of its matrix (factored moments, error feedback, low-rank parts), else one matrix. Must not know what the rules
do.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt

import torch

from ptqpipe.algorithms.rows import quantize_rows
from ptqpipe.algorithms.unit import Matrix, Weight
from ptqpipe.inputs import InputStatistics
from ptqpipe.plan import Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.stages.common.input_scales import module_of
from ptqpipe.stages.common.machine import Machine, one_thread_each, processors
from ptqpipe.stages.common.quantize_unit import quantize_unit
from ptqpipe.stages.convert.memory import share_of, units_at_once
from ptqpipe.stages.convert.prepare import Prepared
from ptqpipe.statistics import BLOCK, Statistics

READ_BYTES = 32 << 20
LINEAR_SHAPE = (1024, 2048)  # of the sample where a weight costs the same in every matrix
LEAST, GROWTH = 1 << 15, 4  # weights of the smallest sample elsewhere; from one sample to the next
ENOUGH_SECONDS = 0.3  # that a sample takes: small costs beside it are lost in the noise


def estimate_seconds(prepared: Prepared, machine: Machine) -> float:
    """Seconds for the whole run: the larger of computing on all workers and reading once and writing once."""
    compute = 0.0
    timed: dict[object, _Cost] = {}
    share = share_of(prepared, machine)
    with one_thread_each():
        for unit in prepared.plan.units:
            learned = prepared.rounding is not None and prepared.rounding.has(unit.members[0].key)
            key = _key(unit, learned=learned)
            if key not in timed:
                timed[key] = _measure(unit, prepared, machine, learned=learned)
            at_once = min(units_at_once(unit, prepared, share), len(processors()))
            compute += timed[key].seconds(unit.elements) / at_once
    entries = prepared.source.reader.entries.values()
    moved = sum(entry.nbytes for entry in entries) + prepared.outputs.layout.file_bytes
    return max(compute, moved / _read_rate(prepared))


@dataclass(frozen=True, slots=True)
class _Cost:
    """Seconds of a unit of n weights: ``linear`` n + ``cubic`` n^1.5. In units of one shape, large and small, the
    products of matrices grow with n^1.5."""

    linear: float
    cubic: float = 0.0

    def seconds(self, elements: int) -> float:
        """Of a unit of so many weights."""
        return self.linear * elements + self.cubic * float(elements**1.5)

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> "_Cost":
        """The cost through two measurements (weights, seconds); neither term is negative."""
        (n, s), (m, t) = small, large
        cubic = (t / m - s / n) / (m**0.5 - n**0.5)
        if cubic <= 0:
            return cls(t / m)
        linear = t / m - cubic * m**0.5
        return cls(linear, cubic) if linear > 0 else cls(0.0, t / m**1.5)


def _key(unit: Unit, *, learned: bool) -> object:
    """Units of one key cost the same for each weight, or are of one shape."""
    rule = replace(unit.rule, match="*")
    return (learned, unit.scheme, rule, tuple(m.shape for m in unit.members) if _grows(unit) else None)


def _grows(unit: Unit) -> bool:
    """Whether a weight of a large matrix may cost more than one of a small matrix."""
    return unit.rule.calibrated or unit.scheme.low_rank is not None


def _measure(unit: Unit, prepared: Prepared, machine: Machine, *, learned: bool) -> _Cost:
    if not _grows(unit):
        sample = replace(unit, members=(replace(unit.members[0], shape=LINEAR_SHAPE),))
        return _Cost(_time(sample, prepared, machine, learned=learned) / sample.elements)
    _time(_scaled(unit, LEAST), prepared, machine, learned=learned)  # what loads on first use is loaded now
    wanted, found = LEAST, [(0, 0.0)]
    while found[-1][0] < unit.elements and (len(found) < 3 or found[-1][1] < ENOUGH_SECONDS):
        sample = _scaled(unit, wanted)
        if sample.elements > found[-1][0]:
            seconds = _time(sample, prepared, machine, learned=learned)
            if seconds < ENOUGH_SECONDS:  # so short a time is easily disturbed
                seconds = min(seconds, _time(sample, prepared, machine, learned=learned))
            found.append((sample.elements, seconds))
        wanted *= GROWTH
    if len(found) == 2:  # the smallest sample is the unit
        return _Cost(found[1][1] / found[1][0])
    return _Cost.through(found[-2], found[-1])


def _scaled(unit: Unit, elements: int) -> Unit:
    """The unit with all edges shorter by one factor, on block edges, of about so many weights; never a larger one."""
    fmt = unit.scheme.fmt

    def scaled(extent: int, block: int) -> int:
        shorter = extent * isqrt(elements << 20) // isqrt(unit.elements << 20)
        return min(extent, max(block, shorter // block * block))

    rows, columns = max(1, fmt.block[0]), max(16, fmt.block[1])
    members = tuple(replace(m, shape=(scaled(m.shape[0], rows), scaled(m.shape[1], columns))) for m in unit.members)
    return replace(unit, members=members)


def _time(unit: Unit, prepared: Prepared, machine: Machine, *, learned: bool) -> float:
    """Seconds for quantizing a unit of random weights."""
    generator = torch.Generator().manual_seed(0)
    weights = [Matrix((torch.randn(m.shape, generator=generator) * 0.02).bfloat16()) for m in unit.members]
    codes = _codes(unit, weights) if learned else None
    known = None if prepared.statistics is None else _RandomInputs(unit, prepared.statistics)
    begun = time.perf_counter()
    quantize_unit(unit, weights, lambda *_: None, statistics=known, codes=codes, device=machine.device)
    return time.perf_counter() - begun


def _codes(unit: Unit, weights: Sequence[Weight]) -> list[QTensor]:
    """Codes as good as learned ones, for timing what is done with them."""
    g = torch.tensor(1.0) if unit.scheme.fmt.has_global else None
    rows = [w.rows(0, w.shape[0]) for w in weights]
    return [quantize_rows(w, unit.scheme.fmt, search="absmax", global_scale=g) for w in rows]


class _RandomInputs:
    """`KnownInputs` that were never seen, with the moments that the real statistics have. Held-out ones are left out:
    they are used in place of the others, at the same cost."""

    def __init__(self, unit: Unit, statistics: Statistics) -> None:
        self._statistics = statistics
        self._columns = {module_of(member): member.shape[1] for member in unit.members}

    def key(self, module: str) -> str:
        return self._statistics.key(module)

    def has(self, module: str, moment: str) -> bool:
        return self._statistics.has(module, moment)

    def of(self, module: str, *, block: bool = False, full: bool = False, held: bool = False) -> InputStatistics:
        """Eight directions that all columns share, and noise: E[x x^T] = I + U U^T."""
        u = torch.randn(self._columns[module], 8, generator=torch.Generator().manual_seed(0))
        parts = u.reshape(-1, BLOCK, 8) if block else u.reshape(1, -1, 8)
        blocks = parts @ parts.transpose(1, 2) + torch.eye(parts.shape[1]) if block or full else None
        second = u.square().sum(dim=1) + 1
        return InputStatistics(
            tokens=1,
            measured=True,
            amax=second,
            mean=u[:, 0],
            second_moment=second,
            quantiles={},
            block_moment=blocks if block else None,
            full_moment=blocks[0] if blocks is not None and full else None,
        )


def _read_rate(prepared: Prepared) -> float:
    reader = prepared.source.reader
    largest = max(reader.entries.values(), key=lambda entry: entry.nbytes)
    begun = time.perf_counter()
    count = len(reader.read_bytes(largest.name, stop_byte=min(largest.nbytes, READ_BYTES)))
    return max(count, 1) / max(time.perf_counter() - begun, 1e-6)
