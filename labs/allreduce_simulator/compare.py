"""Plain against quantized AllReduce on one machine: the faster scheme of each kind, and from which size on one pays.

Must not know how a time comes about.
"""

import math
from dataclasses import dataclass

from labs.allreduce_simulator.time import PLAIN_BYTES, PLAIN_SCHEMES, MessageSize, seconds
from labs.allreduce_simulator.topologies import Topology
from ptqpipe.errors import UsageError


def schemes_for(topology: Topology, ranks: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``names`` that a machine and world have. One of machines has two-level schemes and plain rings."""
    if not 2 <= ranks <= topology.max_ranks:
        return ()
    if topology.outer is not None:
        whole = ranks > topology.node and ranks % topology.node == 0
        return tuple(name for name in names if whole and (name.startswith("hierarchical") or name == "ring-bf16"))
    flat = tuple(name for name in names if not name.startswith("hierarchical"))
    return flat if topology.multimem else tuple(name for name in flat if name != "multimem-bf16")


def default_schemes(topology: Topology) -> tuple[str, ...]:
    """The quantized schemes worth a thought: few roundings; on a ring, where all-to-all is slow, EQuARX's as well."""
    few = ("one-shot", "two-shot", "hierarchical", "hierarchical-outer")
    return (*few, "ring", "semi-loop") if topology.inner.shape == "ring" else few


@dataclass(frozen=True, slots=True)
class TimeRow:
    """The best plain and the best quantized AllReduce of one size.

    nbytes   of the bfloat16 message of one rank
    ideal    16 over the bits on the wire
    """

    topology: str
    ranks: int
    nbytes: int
    bits: float
    plain: str
    plain_us: float
    quantized: str
    quantized_us: float

    @property
    def speedup(self) -> float:
        """Plain over quantized."""
        return self.plain_us / self.quantized_us

    @property
    def percent_of_ideal(self) -> float:
        """The speed-up against what the bytes alone allow."""
        return 100 * self.speedup * self.bits / 16


def compare(
    topology: Topology,
    *,
    ranks: int,
    nbytes: int,
    bits: float = 8.25,
    block: int = 64,
    schemes: tuple[str, ...] | None = None,
) -> TimeRow:
    """The fastest plain scheme against the fastest of ``schemes``. UsageError where none of them fits."""
    message = MessageSize(max(1, nbytes // PLAIN_BYTES), bits, block)

    def best(names: tuple[str, ...]) -> tuple[float, str]:
        fitting = schemes_for(topology, ranks, names)
        if not fitting:
            raise UsageError(f"none of {', '.join(names)} fits {topology.name} at {ranks} ranks; choose another world")
        return min((seconds(name, topology, ranks=ranks, message=message), name) for name in fitting)

    (plain, plain_name), (quantized, quantized_name) = best(PLAIN_SCHEMES), best(schemes or default_schemes(topology))
    return TimeRow(topology.name, ranks, nbytes, bits, plain_name, plain * 1e6, quantized_name, quantized * 1e6)


SMALLEST, LARGEST = 1 << 10, 4 << 30  # bytes between which a break-even is looked for


def break_even(
    topology: Topology, *, ranks: int, bits: float = 8.25, block: int = 64, schemes: tuple[str, ...] | None = None
) -> int | None:
    """Bytes of the smallest message from which on quantizing is never slower, to 1 %; None if there is none."""

    def pays(nbytes: float) -> bool:
        row = compare(topology, ranks=ranks, nbytes=int(nbytes), bits=bits, block=block, schemes=schemes)
        return row.speedup >= 1

    grid = [SMALLEST * 2 ** (i / 2) for i in range(int(2 * math.log2(LARGEST / SMALLEST)) + 1)]
    losing = [i for i, nbytes in enumerate(grid) if not pays(nbytes)]
    if not losing:
        return SMALLEST
    if losing[-1] == len(grid) - 1:
        return None
    low, high = grid[losing[-1]], grid[losing[-1] + 1]
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pays(middle) else (middle, high)
    return int(high)
