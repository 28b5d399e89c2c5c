"""The time of an AllReduce: bytes over links, work over engines, latency, and how far a chunk pipeline hides them.

    seconds = latency + (sum of busy times) / chunks + (longest busy time) * (chunks - 1) / chunks

The first chunk passes every stage alone; from then on the busiest resource sets the pace. With an engine that does not
overlap nothing is hidden. Ranks are alike and links are not shared with others: no stragglers, no congestion.

Must not know numerics. Schemes have the names of ``schemes.py`` where they are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

from labs.allreduce_simulator.topologies import Fabric, Topology
from ptqpipe.errors import UsageError

PLAIN_BYTES = 2  # an element of bfloat16
_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class MessageSize:
    """What is reduced.

    elements  of one rank
    bits      on the wire an element where it is quantized
    block     elements that share a scale: stripes are whole blocks
    """

    elements: int
    bits: float = 8.25
    block: int = 64

    @property
    def payload(self) -> float:
        """Bytes an element where it is quantized."""
        return self.bits / 8

    def stripe(self, ranks: int) -> int:
        """Elements of one rank's stripe."""
        return -(-self.elements // (ranks * self.block)) * self.block


@dataclass(frozen=True, slots=True)
class Schedule:
    """Busy seconds of every resource over the whole message, and what no pipeline hides."""

    latency: float
    compute: float
    wires: tuple[float, ...]
    chunks: int

    def seconds(self, *, overlaps: bool) -> float:
        """The formula at the top of this file."""
        busy = (self.compute, *self.wires)
        if not overlaps:
            return self.latency + sum(busy)
        return self.latency + sum(busy) / self.chunks + max(busy) * (self.chunks - 1) / self.chunks


@dataclass(frozen=True, slots=True)
class _Call:
    """One scheme on one machine: what the formulas share. ``w`` is the bytes per element of what is sent."""

    topology: Topology
    ranks: int
    message: MessageSize
    chunks: int

    @property
    def stripe(self) -> int:
        return self.message.stripe(self.ranks)

    def encode(self, elements: float, w: float) -> float:
        return elements * (PLAIN_BYTES + w) / (self.topology.engine.encode * _GIGA)

    def decode(self, elements: float, w: float) -> float:
        return elements * (PLAIN_BYTES + w) / (self.topology.engine.decode * _GIGA)

    def add(self, elements: float, w: float) -> float:
        engine = self.topology.engine
        return elements * w / ((engine.plain_add if w == PLAIN_BYTES else engine.add) * _GIGA)

    def host(self, sent: float) -> float:
        host = self.topology.engine.host
        return sent / (host * _GIGA) if host else 0.0


def exchange_seconds(fabric: Fabric, ranks: int, nbytes: float) -> float:
    """Every rank sends ``nbytes`` to every other, different ones: a reduce-scatter by all-to-all."""
    rate = fabric.link * _GIGA
    if fabric.shape == "switch":
        return (ranks - 1) * nbytes / rate
    if fabric.shape == "mesh":
        return nbytes / rate
    return (ranks * ranks // 4) / 2 * nbytes / rate  # sum of the distances, half of it in each direction


def spread_seconds(fabric: Fabric, ranks: int, nbytes: float) -> float:
    """Every rank sends the same ``nbytes`` to every other: an all-gather. A ring passes them on, both ways."""
    if fabric.shape == "ring":
        return (ranks - 1) / 2 * nbytes / (fabric.link * _GIGA)
    return exchange_seconds(fabric, ranks, nbytes)


def hop_seconds(fabric: Fabric, ranks: int, nbytes: float) -> float:
    """Every rank sends ``nbytes`` to the next one. A mesh has ranks - 1 rings at once, a ring two."""
    lanes = {"switch": 1, "mesh": ranks - 1, "ring": 2}[fabric.shape]
    return nbytes / (fabric.link * lanes * _GIGA)


def _latency(fabric: Fabric, ranks: int, chunks: int) -> float:
    """Seconds of one all-to-all phase, size aside. On a ring the farthest rank is half of it away."""
    steps = ranks // 2 if fabric.shape == "ring" else 1
    return (fabric.step_us * steps + fabric.message_us * (ranks - 1) * chunks) / 1e6


def _two_shot(call: _Call, *, quantized: bool) -> Schedule:
    inner, k, m = call.topology.inner, call.ranks, call.stripe
    w = call.message.payload if quantized else PLAIN_BYTES
    wire = exchange_seconds(inner, k, m * w) + spread_seconds(inner, k, m * w)
    compute = call.add((k - 1) * m, w) + call.host(2 * (k - 1) * m * w)
    if quantized:
        compute += call.encode(k * m, w) + call.decode(k * m, w)
    latency = 2 * (_latency(inner, k, call.chunks) + quantized * call.topology.quantized_step_us / 1e6)
    return Schedule(latency, compute, (wire,), call.chunks)


def _one_shot(call: _Call, *, quantized: bool) -> Schedule:
    inner, k, n = call.topology.inner, call.ranks, call.message.elements
    w = call.message.payload if quantized else PLAIN_BYTES
    wire = spread_seconds(inner, k, n * w)
    compute = call.add((k - 1) * n, w) + call.host((k - 1) * n * w) + (call.encode(n, w) if quantized else 0)
    latency = _latency(inner, k, call.chunks) + quantized * call.topology.quantized_step_us / 1e6
    return Schedule(latency, compute, (wire,), call.chunks)


def _ring(call: _Call, *, reduce: bool, gather: bool, cast: bool = False) -> Schedule:
    """``reduce``, ``gather``: which halves are quantized. ``cast``: 8 bits without scales or codec work."""
    fabric, k, m = call.topology.inner, call.ranks, call.stripe
    if call.topology.outer is not None and k > call.topology.node:  # all NICs of a machine carry rings side by side
        outer = call.topology.outer
        fabric = Fabric("switch", min(fabric.link, outer.link * call.topology.node), outer.step_us, outer.message_us)
    widths = [1.0 if cast else call.message.payload if half else PLAIN_BYTES for half in (reduce, gather)]
    wire = sum((k - 1) * hop_seconds(fabric, k, m * w) for w in widths)
    compute = (k - 1) * (call.add(m, widths[0]) + (call.encode(m, widths[0]) if reduce else 0))
    if gather:
        compute += call.encode(m, widths[1]) + call.decode(k * m, widths[1])
    compute += sum(call.host((k - 1) * m * w) for w in widths)
    steps = 2 * (k - 1) * (fabric.step_us + fabric.message_us)
    steps += (k - 1) * (reduce + gather) * call.topology.quantized_step_us
    chunks = max(1, call.chunks // k)  # a hop moves a stripe; its parts follow each other
    return Schedule(steps / 1e6, compute, (wire,), chunks)


def _semi_loop(call: _Call, *, quantized: bool) -> Schedule:
    """Chains of k/2 hops in each direction: fewer steps, but one direction carries k/2 of k - 1 stripes, not half."""
    fabric, k, m = call.topology.inner, call.ranks, call.stripe
    w = call.message.payload if quantized else PLAIN_BYTES
    hops = k // 2
    busiest = 2 * hops if fabric.shape == "ring" else k - 1  # two lanes share what one port carries alone
    wire = 2 * busiest * hop_seconds(fabric, k, m * w)
    compute = (k - 1) * call.add(m, w) + call.host(2 * (k - 1) * m * w)
    if quantized:
        compute += call.encode(k * m, w) + call.decode(k * m, w)
    step_us = fabric.step_us + fabric.message_us + quantized * call.topology.quantized_step_us
    return Schedule(2 * hops * step_us / 1e6, compute, (wire,), max(1, call.chunks // k))


def _hierarchical(call: _Call, *, inner: bool, outer: bool) -> Schedule:
    """Reduce-scatter inside machines, two-shot between them on each rank's part, all-gather inside."""
    topology = call.topology
    if topology.outer is None or call.ranks <= topology.node or call.ranks % topology.node:
        raise UsageError(
            f"{topology.name} has no second level at {call.ranks} ranks; choose a multiple of its machines"
        )
    g, machines = topology.node, call.ranks // topology.node
    w_in, w_out = (call.message.payload if level else float(PLAIN_BYTES) for level in (inner, outer))
    part, m = call.message.stripe(g), call.stripe
    back = w_out if outer else w_in  # what crossed the network goes on inside as it is
    near = exchange_seconds(topology.inner, g, part * w_in) + spread_seconds(topology.inner, g, part * back)
    far = exchange_seconds(topology.outer, machines, m * w_out) + spread_seconds(topology.outer, machines, m * w_out)
    compute = call.add((g - 1) * part, w_in) + call.add((machines - 1) * m, w_out)
    if inner:
        compute += call.encode(call.message.elements, w_in)
    if outer:
        compute += call.encode(part + m, w_out) + call.decode(call.message.elements, back)
    latency = _latency(topology.inner, g, call.chunks) + _latency(topology.outer, machines, call.chunks)
    return Schedule(2 * latency, compute, (near, far), call.chunks)


def _multimem(call: _Call) -> Schedule:
    """The switch adds: a rank sends N and N / k, and receives as much; the GPU's work is in the measured rate."""
    if not call.topology.multimem or (call.topology.node and call.ranks > call.topology.node):
        raise UsageError(
            f"{call.topology.name} does not reduce in its switch at {call.ranks} ranks; choose another scheme"
        )
    nbytes = call.message.elements * PLAIN_BYTES
    wire = (1 + 1 / call.ranks) * nbytes / (call.topology.multimem * _GIGA)
    return Schedule(2 * call.topology.inner.step_us / 1e6, 0.0, (wire,), call.chunks)


_PLAIN: dict[str, Callable[[_Call], Schedule]] = {
    "one-shot-bf16": lambda call: _one_shot(call, quantized=False),
    "two-shot-bf16": lambda call: _two_shot(call, quantized=False),
    "ring-bf16": lambda call: _ring(call, reduce=False, gather=False),
    "semi-loop-bf16": lambda call: _semi_loop(call, quantized=False),
    "hierarchical-bf16": lambda call: _hierarchical(call, inner=False, outer=False),
    "multimem-bf16": _multimem,
}
_QUANTIZED: dict[str, Callable[[_Call], Schedule]] = {
    "one-shot": lambda call: _one_shot(call, quantized=True),
    "two-shot": lambda call: _two_shot(call, quantized=True),
    "ring": lambda call: _ring(call, reduce=True, gather=True),
    "ring-rs": lambda call: _ring(call, reduce=True, gather=False),
    "ring-ag": lambda call: _ring(call, reduce=False, gather=True),
    "ring-cast": lambda call: _ring(call, reduce=False, gather=False, cast=True),
    "semi-loop": lambda call: _semi_loop(call, quantized=True),
    "hierarchical": lambda call: _hierarchical(call, inner=True, outer=True),
    "hierarchical-outer": lambda call: _hierarchical(call, inner=False, outer=True),
}
PLAIN_SCHEMES = tuple(_PLAIN)
TIMED_SCHEMES = (*_PLAIN, *_QUANTIZED)


def seconds(scheme: str, topology: Topology, *, ranks: int, message: MessageSize) -> float:
    """Seconds of one call, in the number of chunks that suits it best, none smaller than the machine's.

    UsageError for a scheme or world that the machine does not have.
    """
    if scheme not in TIMED_SCHEMES:
        raise UsageError(f"unknown scheme {scheme!r}; known are {', '.join(TIMED_SCHEMES)}")
    if not 2 <= ranks <= topology.max_ranks:
        raise UsageError(f"{topology.name} joins 2 to {topology.max_ranks} ranks, not {ranks}; choose another topology")
    schedule_of = (_PLAIN | _QUANTIZED)[scheme]
    start = topology.start_us
    if scheme in _QUANTIZED and scheme != "ring-cast":
        start += topology.quantized_start_us
    most = max(1, round(message.elements * PLAIN_BYTES / topology.chunk_bytes))
    counts = {most >> shift for shift in range(most.bit_length())}
    schedules = (schedule_of(_Call(topology, ranks, message, chunks)) for chunks in counts)
    return start / 1e6 + min(schedule.seconds(overlaps=topology.engine.overlaps) for schedule in schedules)
