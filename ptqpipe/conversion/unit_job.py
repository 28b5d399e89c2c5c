"""The job of a unit in a conversion: reads its weights, quantizes them, and writes their parts, each at its place."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ptqpipe.checkpoint import CheckpointWriter, TensorWriter, margin
from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.checkpoint.layouts import WHOLE_ROLES, Part, PartKind, encode_part, part_offset
from ptqpipe.conversion.bias_correction import MeanErrors
from ptqpipe.conversion.input_moments import means_of, unit_extra_bytes
from ptqpipe.conversion.job import WriteJob
from ptqpipe.conversion.measured import Changes, changes_of, counting
from ptqpipe.conversion.units import check_kept_alive, learned_codes, quantize_unit
from ptqpipe.models.slices import Member
from ptqpipe.models.source import Scratch, Source, SourceRows
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization import UnitResult, WeightError, check_decode, gathered_bytes
from ptqpipe.recipe.plan import Unit
from ptqpipe.run.machine import WorkerBudget

if TYPE_CHECKING:
    from ptqpipe.conversion.conversion import Conversion

_PARTS = 4  # that a weight is read in at most: codes, scales, a global scale, and its numbers

_of_worker = threading.local()


@dataclass(frozen=True, slots=True)
class QuantizeUnit(WriteJob):
    """Quantizes the weights of a unit and writes their parts.

    parts   of each member, in order
    biases  names of those that are corrected with the unit
    """

    unit: Unit
    parts: tuple[tuple[Part, ...], ...]
    biases: tuple[str, ...] = ()

    def cache_bytes(self, work: "Conversion") -> int:
        """The weights as they are in memory, which most searches read more than once."""
        return math.ceil(sum(member.elements * _memory_bytes(work.source, member) for member in self.unit.members))

    def extra_bytes(self, work: "Conversion") -> int:
        """What choosing the codes takes, by the algorithms' own estimates."""
        unit, codes = self.unit, 0
        if work.codes is None:
            codes = unit_extra_bytes(unit, work.statistics)
            if unit.scheme.fmt.one_scale:
                size = max(_memory_bytes(work.source, member) for member in unit.members)
                codes += gathered_bytes([m.shape for m in unit.members], unit.scheme.fmt, element_bytes=size)
        whole = work.source.whole_bytes(dict.fromkeys(member.source.tensor for member in unit.members))
        return whole + codes

    def run(self, work: "Conversion", writer: CheckpointWriter, share: WorkerBudget) -> dict[str, Any]:
        """NumericsError for damaged weights, and for what a format would lose."""
        unit = self.unit
        size = self.cache_bytes(work)
        weights = _weights(unit, work.source, size if size <= share.cache_bytes else None)
        scales = work.input_scales.of(unit)
        parts = PartWriter(self, writer, input_scales=scales)
        biases = {f"{name.removesuffix('bias')}weight": name for name in self.biases}
        means = means_of(unit, work.statistics, set(biases))
        errors = MeanErrors(weights, means, parts.write_rows) if biases else None
        changed: dict[tuple[int, int], Changes] = {}
        codes = learned_codes(unit, work.codes)
        done = quantize_unit(
            unit,
            weights,
            counting(weights, (errors or parts).write_rows, changed),
            statistics=work.statistics,
            codes=codes,
            device=share.device,
        )
        check_decode([member.weight for member in unit.members], done.errors, unit.scheme.fmt)
        if codes is None:  # those were judged by what the model loses, and may differ from weights where no input is
            check_kept_alive(unit, done.errors)
        changes = changes_of(weights, unit.scheme.fmt, changed)
        columns = zip(unit.members, done.errors, parts.finish(), done.record_fields, scales, changes, strict=True)
        return {
            "members": {
                member.key: {
                    **_facts(unit, member, done, error),
                    "sha256": sha256,
                    **({} if scale is None else {"input_scale": float(scale)}),
                    **outcome,
                    **change,
                }
                for member, error, sha256, outcome, scale, change in columns
            },
            "kept": {} if errors is None else errors.write(unit.members, biases, work.source, writer),
        }


def _memory_bytes(source: Source, member: Member) -> float:
    """Bytes of an element in memory: as stored, float32 where it is decoded or rotated, with codes below 8 bits."""
    name = member.source.tensor
    low = source.below_8_bits(name)
    codes = 0 if low is None else low.bits_per_weight(source.stored[name].shape) / 8
    return codes + (4 if member.source.rotation or name in source.stored else DTYPES[source.tensors[name][0]][1])


def _weights(unit: Unit, source: Source, nbytes: int | None) -> list[SourceRows]:
    """The weights of a unit, read when asked for. ``nbytes``: once, to so much memory that the worker uses again and
    again."""
    scratch: Scratch | None = getattr(_of_worker, "scratch", None)
    if scratch is None:  # the worker's own; it goes when the worker's thread ends
        scratch = _of_worker.scratch = Scratch()
    members = unit.members
    if nbytes is not None:
        scratch.begin(nbytes + _PARTS * (64 + margin()) * len(members))
    cache = nbytes is not None
    return [SourceRows(source, m.source, shape=m.shape, cache=cache, memory=scratch.take) for m in members]


def _facts(unit: Unit, member: Member, result: UnitResult, error: WeightError) -> dict[str, Any]:
    return {
        "shape": list(member.shape),
        "format": unit.scheme.fmt.name,
        "scheme": unit.scheme.name,
        "search": unit.search,
        "proven": result.proven,
        "global_scale": result.global_scale,
        "versus_plain_global": result.versus_plain_global,
        "squared_error": error.squared_error,
        "energy": error.energy,
        "relative_mse": error.relative_mse,
        "versus_absmax": error.versus_absmax,
        "bits_per_weight": unit.scheme.bits_per_weight(member.shape),
        **({"rotation": unit.scheme.rotation} if unit.scheme.rotation else {}),
    }


class PartWriter:
    """Takes a unit's quantized rows and writes their parts at their places, with a running hash of each part."""

    def __init__(
        self, job: QuantizeUnit, writer: CheckpointWriter, *, input_scales: Sequence[torch.Tensor | None]
    ) -> None:
        self._job, self._writer, self._input_scales = job, writer, input_scales
        self._last: dict[int, QTensor] = {}
        self._written: dict[tuple[int, str], TensorWriter] = {}

    def write_rows(self, member: int, row: int, q: QTensor) -> None:
        """Rows from ``row`` on of member number ``member``, in order; row 0 begins (again)."""
        self._last[member] = q
        for part in self._job.parts[member]:
            if part.role not in WHOLE_ROLES:
                if part.role is PartKind.SCALES and row > 0 and q.fmt.shares_rows:
                    continue  # one scale for all rows, written with the first run
                self._put(member, part, q, row)

    def finish(self) -> list[dict[str, str]]:
        """Writes the parts that are not rows (global scales, right factors); the hashes of every part, by member."""
        for member, q in self._last.items():
            for part in self._job.parts[member]:
                if part.role in WHOLE_ROLES:
                    self._put(member, part, q, 0)
        return [
            {part.role.value: self._written[member, part.name].sha256 for part in parts}
            for member, parts in enumerate(self._job.parts)
        ]

    def _put(self, member: int, part: Part, q: QTensor, row: int) -> None:
        if row == 0:
            where = self._job.unit.members[member]
            expert = where.source.expert if where.stack is not None else None
            offset = part_offset(part, q.fmt, where.shape, expert=expert)
            self._written[member, part.name] = self._writer.tensor(part.name, byte_offset=offset)
        self._written[member, part.name].put(encode_part(part, q, input_global_scale=self._input_scales[member]))
