"""A comparison of AllReduces: which worlds, codecs, inputs, schemes and machines, by name or as objects, and its rows.

Must not know files, nor how rows are shown.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from labs.allreduce_simulator.codecs import get_rounding
from labs.allreduce_simulator.compare import TimeRow, break_even, compare, schemes_for
from labs.allreduce_simulator.error import MAX_RANKS, ErrorRow, errors_of, rounding_of
from labs.allreduce_simulator.inputs import Inputs, drawn
from labs.allreduce_simulator.schemes import WireRounding, get_scheme
from labs.allreduce_simulator.time import PLAIN_BYTES
from labs.allreduce_simulator.topologies import TOPOLOGIES, Topology, get_topology
from ptqpipe.errors import UsageError

DEFAULT_SCHEMES = ("ring-bf16", "two-shot-bf16", "one-shot", "two-shot", "hierarchical", "semi-loop", "ring")
DEFAULT_TOPOLOGIES = (*TOPOLOGIES, "ethernet-1g", "ethernet-10g", "ethernet-100g", "ethernet-400g")
DEFAULT_SIZES = tuple((64 << 10) * 4**i for i in range(8))  # 64 KiB .. 1 GiB


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where quantizing pays on one machine. ``nbytes`` is None where it never does."""

    topology: str
    ranks: int
    bits: float
    nbytes: int | None


def worlds(text: str) -> tuple[int, ...]:
    """Numbers of ranks: ``8``, ``2,3,8``, or ``8..512``, which doubles. UsageError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:\.\.\s*(\d{1,6})\s*)?", part)
        if match is None:
            raise UsageError(f"ranks {text!r} are not a list; write 8, 2,4,8 or 8..512 (which doubles)")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 2 <= first <= last <= MAX_RANKS:
            raise UsageError(f"ranks {part.strip()!r} are outside of 2..{MAX_RANKS} or run backwards; write 8..512")
        while first <= last:
            found.append(first)
            first *= 2
    return tuple(dict.fromkeys(found))


def names(text: str, known: Callable[[str], object]) -> tuple[str, ...]:
    """A comma-separated list, each of which ``known`` accepts."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise UsageError(f"{text!r} names nothing; give at least one name")
    for name in found:
        known(name)
    return found


def sources_of(data: str, *, elements: int, seed: int) -> tuple[Inputs, ...]:
    """Distributions by name. UsageError for unknown ones."""
    return tuple(drawn(name, elements, seed=seed) for name in names(data, lambda n: drawn(n, elements, seed=seed)))


def schemes_of(text: str | None) -> tuple[str, ...]:
    """Schemes by name, the usual ones when None. UsageError for unknown ones."""
    return DEFAULT_SCHEMES if text is None else names(text, get_scheme)


def codecs_of(text: str, *, block: int, hadamard: int = 0) -> tuple[WireRounding, ...]:
    """Codecs by name. UsageError for unknown ones."""
    known = names(text, lambda name: get_rounding(name, block, rotate=hadamard))
    return tuple(get_rounding(name, block, rotate=hadamard) for name in known)


def topologies_of(text: str | None) -> tuple[Topology, ...]:
    """Machines by name; all of the table and four networks when None."""
    chosen = DEFAULT_TOPOLOGIES if text is None else names(text, get_topology)
    return tuple(get_topology(name) for name in chosen)


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """Every scheme with every codec over every source and world; every size on every machine and world.

    node   ranks of a machine for the hierarchical schemes, which are left out of worlds that it does not divide
    sizes  bytes of the bfloat16 messages that are timed, with the bits and blocks of the first codec
    """

    ranks: tuple[int, ...]
    codecs: tuple[WireRounding, ...]
    sources: tuple[Inputs, ...]
    schemes: tuple[str, ...]
    topologies: tuple[Topology, ...]
    node: int = 8
    sizes: tuple[int, ...] = DEFAULT_SIZES

    def __post_init__(self) -> None:
        if min(self.sizes) < PLAIN_BYTES:
            raise UsageError(f"a message of {min(self.sizes)} bytes is no bfloat16 number; give at least {PLAIN_BYTES}")
        if not 2 <= self.node <= MAX_RANKS:
            raise UsageError(f"a node of {self.node} ranks is outside of 2..{MAX_RANKS}; give what one machine holds")


def request_of(
    ranks: str,
    codecs: tuple[WireRounding, ...],
    sources: tuple[Inputs, ...],
    schemes: str | None,
    topologies: str | None,
    node: int,
    sizes: tuple[int, ...],
) -> SimulationRequest:
    """A request from names, comma-separated; None and no sizes for the usual ones. UsageError for unknown names."""
    chosen = worlds(ranks), codecs, sources, schemes_of(schemes), topologies_of(topologies), node
    return SimulationRequest(*chosen, sizes or DEFAULT_SIZES)


def error_rows(request: SimulationRequest) -> Iterator[ErrorRow]:
    """The rows of one source and world after another, as they are measured."""
    roundings = [(codec, rounding_of(codec)) for codec in request.codecs]
    for source, ranks in product(request.sources, request.ranks):
        yield from errors_of(source, request.schemes, roundings, ranks=ranks, node=request.node)


def time_rows(request: SimulationRequest) -> tuple[list[TimeRow], list[BreakEven]]:
    """The best plain against the best quantized scheme, size by size, and from which size on quantizing pays.

    UsageError where no machine joins as many ranks.
    """
    bits, block = request.codecs[0].bits, request.codecs[0].block
    fitting = ("two-shot", "hierarchical")
    places = [(t, k) for t in request.topologies for k in request.ranks if schemes_for(t, k, fitting)]
    if not places:
        known = ", ".join(f"{t.name} (2 to {t.max_ranks})" for t in request.topologies)
        raise UsageError(f"no topology joins {', '.join(map(str, request.ranks))} ranks: {known}; choose other worlds")
    rows = [compare(t, ranks=k, nbytes=nbytes, bits=bits, block=block) for t, k in places for nbytes in request.sizes]
    return rows, [BreakEven(t.name, k, bits, break_even(t, ranks=k, bits=bits, block=block)) for t, k in places]
