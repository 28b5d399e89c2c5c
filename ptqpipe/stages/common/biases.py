"""Bias correction: b += (W - What) E[x], so that the mean of a layer's output is that of the float layer.

A bias belongs to the job of its weight, whose error it makes up for. Knows plans and statistics; must not know how the
weight was quantized.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ptqpipe.algorithms.unit import Sink, Weight
from ptqpipe.checkpoint.writer import CheckpointWriter
from ptqpipe.errors import NumericsError
from ptqpipe.plan import FLOAT_DTYPES, Member, Plan
from ptqpipe.qtensor import QTensor
from ptqpipe.recipe import Recipe
from ptqpipe.source import Source

REASON = "bias corrected by the mean error of its weight"


def corrected_biases(plan: Plan, source: Source, recipe: Recipe) -> dict[str, str]:
    """Weight -> the kept bias that is corrected with it; empty unless the recipe asks for it."""
    if not recipe.bias_correction:
        return {}
    kept = {item.name for item in plan.kept}
    found = {}
    for unit in plan.units:
        for member in unit.members:
            name = f"{member.module}.bias"
            fits = name in kept and source.tensors[name][1] == (member.shape[0],)
            if fits and source.tensors[name][0] in FLOAT_DTYPES and member.source.expert is None:
                found[member.weight] = name
    return found


def with_reasons(plan: Plan, biases: dict[str, str]) -> Plan:
    """The plan, with what becomes of these biases."""
    names = set(biases.values())
    return replace(plan, kept=tuple(replace(k, reason=REASON) if k.name in names else k for k in plan.kept))


class MeanErrors:
    """A sink that passes rows on and sums (W - What) E[x] of every row. A row that is sent again counts once."""

    def __init__(self, weights: Sequence[Weight], means: Sequence[torch.Tensor | None], sink: Sink) -> None:
        self._weights, self._means, self._sink = weights, means, sink
        self._shifts = [torch.zeros(weight.shape[0], dtype=torch.float64) for weight in weights]

    def take(self, member: int, row: int, q: QTensor) -> None:
        """As `Sink`."""
        self._sink(member, row, q)
        mean = self._means[member]
        if mean is not None:
            stop = row + q.shape[0]
            error = self._weights[member].rows(row, stop).double() - q.dequantize().double().cpu()
            self._shifts[member][row:stop] = (error * mean.double()).sum(dim=1)

    def write(
        self, members: Sequence[Member], biases: dict[str, str], source: Source, writer: CheckpointWriter
    ) -> dict[str, Any]:
        """Writes the corrected biases; the record's entries of kept tensors. NumericsError where one overflows."""
        told = {}
        for member, shift in zip(members, self._shifts, strict=True):
            name = biases.get(member.weight)
            if name is None:
                continue
            stored = source.reader.read(name)
            corrected = (stored.double() + shift).to(stored.dtype)
            if not bool(torch.isfinite(corrected).all()):
                raise NumericsError(f"{name} would not be finite after bias correction; leave bias_correction out")
            raw = corrected.contiguous().view(torch.uint8)
            writer.write(name, raw)
            sha256 = hashlib.sha256(raw.numpy().data).hexdigest()
            told[name] = {"reason": REASON, "sha256": sha256, "bytes": len(raw)}
        return told
