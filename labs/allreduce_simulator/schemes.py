"""The sum of an AllReduce as each scheme computes it: every rounding, in the order of the wire, in one process.

A scheme gets the partials of all ranks, cut into *units* (a unit is a whole number of codec blocks, all in one stripe),
and the owner of each unit: the rank whose stripe it lies in. It returns what every rank holds at the end, float32,
before the cast to the model's dtype. All ranks hold the same bits, so there is one result.

Must not know time, topologies, or where partials come from. What a codec does to numbers is its own affair: see
``WireRounding``. Schemes: two-shot and one-shot as in ``ptqpipe.serving.collectives``; ring and semi-loop as EQuARX
describes them (arXiv 2506.17615: dequantize, add in float32, quantize again, at every hop).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ptqpipe.errors import UsageError


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True, slots=True)
class WireRounding:
    """What sending numbers does to them.

    name     as a row of a table says it
    block    elements that are rounded together; 1 when each is rounded alone
    bits     on the wire an element, scales included
    rounded  what has entered, as its receiver decodes it: the same shape and dtype
    entered  float32 ``[..., m * block]`` as it is summed: rotated, or as it is
    left     the way back from `entered`
    """

    name: str
    block: int
    bits: float
    rounded: Callable[[torch.Tensor], torch.Tensor]
    entered: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    left: Callable[[torch.Tensor], torch.Tensor] = _as_it_is


@dataclass(frozen=True, slots=True)
class Partials:
    """One message.

    values  float32 ``[ranks, units, unit]``: what each rank puts in
    owners  int64 ``[units]``: whose stripe a unit lies in
    """

    values: torch.Tensor
    owners: torch.Tensor

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.values.shape[0]

    def of(self, distance: int) -> torch.Tensor:
        """float32 ``[units, unit]``: the partial of the rank that is ``distance`` after each unit's owner."""
        rank = (self.owners + distance) % self.ranks
        return self.values[rank, torch.arange(len(self.owners))]


def owners_of(units: int, ranks: int) -> torch.Tensor:
    """int64 ``[units]``: stripes of equal length, the last one shorter (what is added to fill it is left out)."""
    stripe = max(1, -(-units // ranks))
    return torch.arange(units) // stripe


Reduce = Callable[[Partials, WireRounding], torch.Tensor]


def two_shot(parts: Partials, codec: WireRounding, *, own_exact: bool = True) -> torch.Tensor:
    """Every partial is rounded once on its way to the owner, the sum (float32, in rank order) once on its way back.

    own_exact  the owner adds its own partial as it is
    """
    return codec.rounded(_sum_of_rounded(parts.values, parts.owners if own_exact else None, codec))


def one_shot(parts: Partials, codec: WireRounding) -> torch.Tensor:
    """Every partial goes to every rank; one rounding. Each decodes its own as well, so that all agree."""
    return _sum_of_rounded(parts.values, None, codec)


def _sum_of_rounded(values: torch.Tensor, exact: torch.Tensor | None, codec: WireRounding) -> torch.Tensor:
    """float32 ``[units, unit]``: the sum over axis 0 in order; ``exact`` says which of them is not rounded."""
    total: torch.Tensor | None = None
    for rank in range(values.shape[0]):
        term = codec.rounded(values[rank])
        if exact is not None:
            term = torch.where((exact == rank).unsqueeze(1), values[rank], term)
        total = term if total is None else total + term
    assert total is not None
    return total


def ring(parts: Partials, codec: WireRounding, *, reduce: bool = True, gather: bool = True) -> torch.Tensor:
    """A unit starts at the rank after its owner and goes round to it, rounded before each of its k - 1 hops.

    reduce, gather  whether the reduce-scatter and the all-gather are rounded
    """
    total = parts.of(1)
    for hop in range(2, parts.ranks + 1):
        total = (codec.rounded(total) if reduce else total) + parts.of(hop)
    return codec.rounded(total) if gather else total


def ring_cast(parts: Partials, codec: WireRounding) -> torch.Tensor:
    """A ring in the codec's own type, as if it were the tensor's: inputs, partial sums and the result are in it."""
    return ring(Partials(codec.rounded(parts.values), parts.owners), codec)


def semi_loop(parts: Partials, codec: WireRounding) -> torch.Tensor:
    """Two chains of half the ring meet at the owner, k/2 hops and (k-1)/2 hops long; then the all-gather."""
    total = parts.of(0)
    for direction, length in ((1, parts.ranks // 2), (-1, (parts.ranks - 1) // 2)):
        chain: torch.Tensor | None = None
        for distance in range(length, 0, -1):
            here = parts.of(direction * distance)
            chain = codec.rounded(here if chain is None else chain + here)
        if chain is not None:
            total = total + chain
    return codec.rounded(total)


def hierarchical(parts: Partials, codec: WireRounding, *, node: int, inner: bool = True) -> torch.Tensor:
    """Two-shot among the ``node`` ranks of a machine, then among the machines, then back the same way.

    inner  whether the exchange inside a machine is rounded too. The way back is rounded once: the same bytes go on.
    Raises UsageError when ``node`` does not divide the ranks.
    """
    if parts.ranks % node:
        raise UsageError(f"{parts.ranks} ranks do not fill machines of {node}; choose a node size that divides them")
    sums = []
    for first in range(0, parts.ranks, node):
        values = parts.values[first : first + node]
        sums.append(_sum_of_rounded(values, parts.owners % node, codec) if inner else _plain_sum(values))
    return codec.rounded(_sum_of_rounded(torch.stack(sums), parts.owners // node, codec))


def _plain_sum(values: torch.Tensor) -> torch.Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


@dataclass(frozen=True, slots=True)
class ReduceScheme:
    """A row of ``SCHEMES``.

    reduce    what it does to numbers; needs a node size when ``two_level``
    quantized whether the codec is the user's; otherwise ``plain`` names what is sent
    """

    name: str
    reduce: Reduce | None
    plain: str = ""
    two_level: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the user's codec is what it sends."""
        return not self.plain


def _ring_of(*, reduce: bool, gather: bool) -> Reduce:
    return lambda parts, codec: ring(parts, codec, reduce=reduce, gather=gather)


SCHEMES: dict[str, ReduceScheme] = {
    scheme.name: scheme
    for scheme in (
        ReduceScheme("ring-fp32", ring, plain="fp32"),
        ReduceScheme("ring-bf16", ring, plain="bf16"),
        ReduceScheme("two-shot-bf16", two_shot, plain="bf16"),
        ReduceScheme("one-shot", one_shot),
        ReduceScheme("two-shot", two_shot),
        ReduceScheme("two-shot-all", lambda parts, codec: two_shot(parts, codec, own_exact=False)),
        ReduceScheme("hierarchical", None, two_level=True),
        ReduceScheme("hierarchical-outer", None, two_level=True),  # plain inside a machine
        ReduceScheme("ring", ring),
        ReduceScheme("ring-rs", _ring_of(reduce=True, gather=False)),
        ReduceScheme("ring-ag", _ring_of(reduce=False, gather=True)),
        ReduceScheme("ring-cast", ring_cast),  # EQuARX's "naive" FP8
        ReduceScheme("semi-loop", semi_loop),
    )
}


def get_scheme(name: str) -> ReduceScheme:
    """The scheme called ``name``. UsageError with the known names."""
    if name not in SCHEMES:
        raise UsageError(f"unknown scheme {name!r}; known are {', '.join(SCHEMES)}")
    return SCHEMES[name]


def reduce_of(scheme: ReduceScheme, node: int) -> Reduce:
    """What the scheme does to numbers, on machines of ``node`` ranks."""
    if scheme.reduce is not None:
        return scheme.reduce
    inner = scheme.name == "hierarchical"
    return lambda parts, codec: hierarchical(parts, codec, node=node, inner=inner)
