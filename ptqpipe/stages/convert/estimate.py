"""How long a conversion will take, from a second's measurement of this machine: search rate and read rate."""

import time

import torch

from ptqpipe.algorithms import rtn
from ptqpipe.formats import Format
from ptqpipe.stages.common.machine import Machine
from ptqpipe.stages.convert.run import Prepared

SAMPLE_SHAPE = (1024, 2048)
READ_BYTES = 32 << 20


class _Sample:
    """A seeded random matrix, since the search's cost hardly depends on the numbers."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self._w = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._w[start:stop]


def estimate_seconds(prepared: Prepared, machine: Machine) -> float:
    """Seconds for the whole run: the larger of computing on all workers and reading once and writing once."""
    compute = 0.0
    rates: dict[tuple[Format, str, str], float] = {}
    for unit in prepared.plan.units:
        key = (unit.scheme.fmt, unit.rule.search, unit.rule.global_scale)
        if key not in rates:
            rates[key] = _seconds_per_weight(*key, machine)
        compute += unit.elements * rates[key]
    entries = prepared.source.reader.entries.values()
    moved = sum(entry.nbytes for entry in entries) + prepared.outputs.layout.file_bytes
    return max(compute / machine.workers, moved / _read_rate(prepared))


def _seconds_per_weight(fmt: Format, search: str, global_scale: str, machine: Machine) -> float:
    weight = _Sample(SAMPLE_SHAPE)
    begun = time.perf_counter()
    rtn.quantize(
        [weight],
        fmt,
        names=["sample"],
        search=search,
        search_global=global_scale == "search",
        sink=lambda *_: None,
        device=machine.device,
    )
    return (time.perf_counter() - begun) / (SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1])


def _read_rate(prepared: Prepared) -> float:
    reader = prepared.source.reader
    largest = max(reader.entries.values(), key=lambda entry: entry.nbytes)
    begun = time.perf_counter()
    count = len(reader.read_bytes(largest.name, stop_byte=min(largest.nbytes, READ_BYTES)))
    return max(count, 1) / max(time.perf_counter() - begun, 1e-6)
