"""Biases that are corrected by the mean error of their weight, b += (W - What) E[x], so that the mean of a layer's
output is that of the float layer. A bias belongs to the job of its weight.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ptqpipe.checkpoint import CheckpointWriter
from ptqpipe.checkpoint.dtypes import FLOAT_DTYPES
from ptqpipe.conversion.job import write_whole
from ptqpipe.errors import NumericsError
from ptqpipe.models.slices import Member
from ptqpipe.models.source import Source
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization import RowWriter, Weight
from ptqpipe.quantization.learned_codes import TRAINED_REASON
from ptqpipe.recipe.plan import Plan
from ptqpipe.recipe.recipe import Recipe

BIAS_REASON = "bias corrected by the mean error of its weight"


def corrected_biases(plan: Plan, source: Source, recipe: Recipe) -> dict[str, str]:
    """Weight -> the kept bias that is corrected with it; empty unless the recipe asks for it."""
    if not recipe.bias_correction:
        return {}
    kept = {item.name for item in plan.kept}
    biases = {}
    for unit in plan.units:
        for member in unit.members:
            name = f"{member.module}.bias"
            fits = name in kept and source.tensors[name][1] == (member.shape[0],)
            if fits and source.tensors[name][0] in FLOAT_DTYPES and member.source.expert is None:
                biases[member.weight] = name
    return biases


def with_reasons(plan: Plan, biases: Mapping[str, str], *, trained: Collection[str] = ()) -> Plan:
    """The plan, with what becomes of the corrected biases, and of the tensors that were trained with the codes."""
    reasons = dict.fromkeys(trained, TRAINED_REASON) | dict.fromkeys(biases.values(), BIAS_REASON)
    kept = (replace(k, reason=reasons[k.name]) if k.name in reasons else k for k in plan.kept)
    return replace(plan, kept=tuple(kept))


class MeanErrors:
    """A sink that passes rows on and sums (W - What) E[x] of every row. A row that is sent again counts once."""

    def __init__(self, weights: Sequence[Weight], means: Sequence[torch.Tensor | None], sink: RowWriter) -> None:
        self._weights, self._means, self._sink = weights, means, sink
        self._shifts = [torch.zeros(weight.shape[0], dtype=torch.float64) for weight in weights]

    def write_rows(self, member: int, row: int, q: QTensor) -> None:
        self._sink(member, row, q)
        mean = self._means[member]
        if mean is not None:
            stop = row + q.shape[0]
            error = self._weights[member].rows(row, stop).double() - q.dequantize().double().cpu()
            self._shifts[member][row:stop] = (error * mean.double()).sum(dim=1)

    def write(
        self, members: Sequence[Member], biases: Mapping[str, str], source: Source, writer: CheckpointWriter
    ) -> dict[str, Any]:
        """Writes the corrected biases; the record's entries of kept tensors. NumericsError where one overflows."""
        entries = {}
        for member, shift in zip(members, self._shifts, strict=True):
            name = biases.get(member.weight)
            if name is None:
                continue
            stored = source.reader.read(name)
            corrected = (stored.double() + shift).to(stored.dtype)
            if not bool(torch.isfinite(corrected).all()):
                raise NumericsError(f"{name} would not be finite after bias correction; leave bias_correction out")
            entries[name] = write_whole(name, corrected, writer, BIAS_REASON)
        return entries
