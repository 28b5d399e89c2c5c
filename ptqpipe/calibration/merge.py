"""Merges statistics of one decoder layer from several processes or devices: counts and sums add, maxima are the
largest.

Between processes it runs over torch.distributed's default group (gloo): all ranks take part in every call, in the same
order.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ptqpipe.calibration.collect import Collector


def merge_ranks(collector: Collector, *, world: int, held_out: bool = False) -> None:
    """Replaces the moments of every rank's collector by the sum over ranks (float64), which rank 0 then writes.

    held_out  whether some rank has held-out samples
    A module that only some ranks have seen (an expert without tokens) joins the group that those put it in.
    """
    if world == 1:
        return
    collector.leaders = _agree(collector.leaders, collector, world)
    for leader in dict.fromkeys(collector.leaders.values()):
        columns = collector.slots[leader].columns
        for by_leader in (collector.moments, collector.held_out) if held_out else (collector.moments,):
            moments = by_leader.setdefault(leader, collector.empty(columns))
            count = torch.tensor([moments.tokens], dtype=torch.int64)
            torch.distributed.all_reduce(count)
            moments.tokens = int(count)
            moments.amax = _reduced(moments.amax, torch.distributed.ReduceOp.MAX)
            for tensor in moments.sums():
                tensor.copy_(_reduced(tensor, torch.distributed.ReduceOp.SUM))


def merge_copies(collectors: Sequence[Collector]) -> Collector:
    """The first of the collectors of a layer's copies, with what all of them saw, on its device."""
    first, *others = collectors
    seen = [collector.leaders for collector in collectors]
    first.leaders = {
        slot: leader
        for slot in first.slots
        if (leader := next((mine[slot] for mine in seen if slot in mine), None)) is not None
    }
    for other in others:
        for mine, theirs in ((first.moments, other.moments), (first.held_out, other.held_out)):
            for leader, moments in theirs.items():
                own = mine.setdefault(leader, first.empty(first.slots[leader].columns))
                own.merge(moments.on(own.amax.device))
    return first


class Added(Protocol):
    """Sums in float64 and what they are divided by."""

    parts: list[torch.Tensor]
    total: float


def merge_added(sums: Mapping[str, Added], *, world: int) -> None:
    """Replaces the sums of every rank by those over all ranks; a rank that has seen nothing of a module has none."""
    if world == 1:
        return
    for own in sums.values():
        shapes: list[list[torch.Size]] = [[]] * world
        torch.distributed.all_gather_object(shapes, [part.shape for part in own.parts])
        shape = next((shape_there for shape_there in shapes if shape_there), [])
        own.parts = own.parts or [torch.zeros(size, dtype=torch.float64) for size in shape]
        own.parts = [_reduced(part, torch.distributed.ReduceOp.SUM) for part in own.parts]
        own.total = float(_reduced(torch.tensor(own.total, dtype=torch.float64), torch.distributed.ReduceOp.SUM))


def merge_windows(values: torch.Tensor, *, world: int) -> torch.Tensor:
    """Puts the numbers [windows] of all ranks in the order of the windows, on the CPU: rank r has windows r, r + world,
    and so on."""
    if world == 1:
        return values.cpu()
    parts: list[Any] = [None] * world
    torch.distributed.all_gather_object(parts, values.cpu())
    merged = values.new_empty(sum(map(len, parts)), device="cpu")
    for rank, of_rank in enumerate(parts):
        merged[rank::world] = of_rank
    return merged


def merge_largest(tensor: torch.Tensor | None, *, world: int) -> torch.Tensor | None:
    """The largest over ranks of a tensor that every rank has."""
    if world == 1 or tensor is None:
        return tensor
    return _reduced(tensor, torch.distributed.ReduceOp.MAX)


def _agree(leaders: Mapping[str, str], collector: Collector, world: int) -> dict[str, str]:
    """One assignment of slots to leaders, in the order of the slots.

    Each rank has moments under its own leader, the first of the modules that it saw with one tensor. Modules that are
    given one tensor are run together, so ranks that saw them saw the same of them.
    """
    answers: list[Any] = [None] * world
    torch.distributed.all_gather_object(answers, dict(leaders))
    merged: dict[str, str] = {}
    for slot in collector.slots:
        leader = next((mine[slot] for mine in answers if slot in mine), None)
        if leader is not None:
            merged[slot] = leader
    return merged


def _reduced(tensor: torch.Tensor, how: Any) -> torch.Tensor:
    """The same on every rank; through the CPU, where gloo works."""
    host = tensor.to("cpu").contiguous()
    torch.distributed.all_reduce(host, op=how)
    return host.to(tensor.device)
