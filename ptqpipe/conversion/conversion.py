"""The `Rewrite` of convert: a published checkpoint in, a packed low-precision checkpoint out.

What ``conversion/prepare.py`` has decided from headers is a `Conversion`: its jobs quantize unit by unit and write
each part at its place. Memory is a few chunks for each worker, whatever the size of the model; the bytes depend on
source and recipe alone. tune takes its plan and its units, and runs no job of it.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import CheckpointWriter, TensorWriter, margin
from ptqpipe.checkpoint.dtypes import DTYPES, NotFinite
from ptqpipe.checkpoint.layouts import WHOLE_ROLES, Part, PartKind, encode_part, part_offset
from ptqpipe.conversion.consume import Consumed
from ptqpipe.conversion.input_moments import InputScales, describe_statistics, means_of, unit_extra_bytes
from ptqpipe.conversion.job import CopyTensor, Rewrite, merged, named_source, write_whole
from ptqpipe.conversion.kv_cache import write_scales
from ptqpipe.conversion.measured import Changes, certificate, changes_of, counting
from ptqpipe.conversion.planned_outputs import MeanErrors, OutputJob, Outputs, QuantizeUnit
from ptqpipe.conversion.units import learned_codes, quantize_unit
from ptqpipe.errors import NumericsError
from ptqpipe.models.layout_issues import layout_warnings
from ptqpipe.models.slices import Member
from ptqpipe.models.source import Scratch, Source, SourceRows
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization import UnitResult, WeightError, check_decode, gathered_bytes
from ptqpipe.quantization.learned_codes import TRAINED_REASON, Rounding
from ptqpipe.recipe.plan import Unit
from ptqpipe.run.machine import WorkerBudget

# A weight whose squared error is above this share of its energy is gone; the coarsest formats leave a tenth of it.
LOST = 0.5

_PARTS = 4  # that a weight is read in at most: codes, scales, a global scale, and its numbers

_of_worker = threading.local()


@dataclass(frozen=True)
class Conversion(Rewrite[OutputJob]):
    """A conversion that is decided to the byte and has read no weight. A context manager; or call ``close``.

    outputs       what the recipe writes for the source
    input_scales  the static scales of the units' inputs
    statistics    None where none were given
    rounding      learned codes that are written as they are; None for none
    consumed      removes them as they are written; None keeps them
    more          further entries of the record
    doubts        what is not known of the source, or contradicts its config.json
    """

    outputs: Outputs
    input_scales: InputScales
    statistics: Statistics | None = None
    rounding: Rounding | None = None
    consumed: Consumed | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()

    @property
    def run_parts(self) -> Mapping[str, str]:
        """As `Rewrite`: source, recipe, layout and version, statistics and learned codes where there are any."""
        data = {"statistics": self.statistics, "rounding": self.rounding}
        return {
            "source": self.source.reader.fingerprint(),
            "recipe": self.outputs.recipe.digest,
            "layout": self.layout.digest,
            "version": __version__,
            **{name: opened.digest for name, opened in data.items() if opened is not None},
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """As `Rewrite`: of the source, of the container, and of parts that only a rule which names them quantizes."""
        outputs, config = self.outputs, self.source.reader.config
        warnings = layout_warnings(outputs.container_name, outputs.targets, config)
        issues = (
            f"{modules[0]} ({len(modules)} of this kind): {issue.symptom}" for issue, modules in outputs.failing(config)
        )
        return (*self.doubts, *warnings, *issues)

    def cache_bytes(self, job: OutputJob) -> int:
        """As `Rewrite`: a unit's weights as they are in memory, which most searches read more than once."""
        if not isinstance(job, QuantizeUnit):
            return 0
        return math.ceil(sum(member.elements * _memory_bytes(self.source, member) for member in job.unit.members))

    def extra_bytes(self, job: OutputJob) -> int:
        """As `Rewrite`: what choosing the codes of a unit takes, by the algorithms' own estimates."""
        if not isinstance(job, QuantizeUnit):
            return 0
        unit, codes = job.unit, 0
        if self.rounding is None:
            codes = unit_extra_bytes(unit, self.statistics)
            if unit.scheme.fmt.one_scale:
                size = max(_memory_bytes(self.source, member) for member in unit.members)
                codes += gathered_bytes([m.shape for m in unit.members], unit.scheme.fmt, element_bytes=size)
        whole = self.source.whole_bytes(dict.fromkeys(member.source.tensor for member in unit.members))
        return whole + codes

    def do(self, job: OutputJob, writer: CheckpointWriter, share: WorkerBudget) -> Mapping[str, Any]:
        """As `Rewrite`. NumericsError for damaged weights, and for what a format would lose."""
        if isinstance(job, QuantizeUnit):
            return self._quantize(job, writer, share)
        if isinstance(job, CopyTensor):
            return {"kept": {job.tensor: self._keep(job, writer)}}
        assert self.statistics is not None  # `check_cached`
        return {"kept": write_scales(job.module, job.specs, self.statistics, writer)}

    def _quantize(self, job: QuantizeUnit, writer: CheckpointWriter, share: WorkerBudget) -> dict[str, Any]:
        """Quantizes a unit, writes its parts, and returns its record."""
        unit = job.unit
        size = self.cache_bytes(job)
        weights = _weights(job, self.source, size if size <= share.cache_bytes else None)
        scales = self.input_scales.of(unit)
        parts = PartWriter(job, writer, input_scales=scales)
        biases = {f"{name.removesuffix('bias')}weight": name for name in job.biases}
        errors = MeanErrors(weights, means_of(unit, self.statistics, set(biases)), parts.take)
        changed: dict[tuple[int, int], Changes] = {}
        codes = learned_codes(unit, self.rounding)
        done = quantize_unit(
            unit,
            weights,
            counting(weights, errors.take if biases else parts.take, changed),
            statistics=self.statistics,
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
            "kept": errors.write(unit.members, biases, self.source, writer),
        }

    def _keep(self, job: CopyTensor, writer: CheckpointWriter) -> dict[str, Any]:
        """Copies a kept tensor byte for byte; one that the source stores quantized is written decoded, as bfloat16.

        One that was trained with the codes has their folder's values. NaN and infinities, which make a model useless
        wherever they are, are copied, too, and the record counts them.
        """
        if job.reason == TRAINED_REASON:
            assert self.rounding is not None
            return write_whole(job.tensor, self.rounding.value(job.tensor, like=job.spec), writer, job.reason)
        bad = NotFinite(job.spec.dtype)
        if job.tensor in self.source.stored:
            written = _write_decoded(self.source, job.tensor, writer.tensor(job.tensor), look=bad.look)
        else:
            written = writer.tensor(job.tensor).copy(self.source.reader, job.tensor, look=bad.look)
        entry = {"reason": job.reason, "sha256": written.sha256, "bytes": written.nbytes}
        return entry | ({"not_finite": bad.text} if bad.count else {})

    def committed(self, job: OutputJob, writer: CheckpointWriter) -> None:
        """As `Rewrite`."""
        if self.consumed is not None and isinstance(job, QuantizeUnit):
            self.consumed.committed(job, writer)

    def can_redo(self, job: OutputJob) -> bool:
        """As `Rewrite`: learned codes may be gone."""
        if self.consumed is None or self.rounding is None or not isinstance(job, QuantizeUnit):
            return True
        return all(self.rounding.file_of(member.key) is not None for member in job.unit.members)

    def with_record_entries(self, more: Mapping[str, Any], *, consumes: bool) -> "Conversion":
        """The same with further entries of the record. ``consumes``: its folder of learned codes shrinks as they are
        written, and with the output only the last file of it is left."""
        jobs = [job for job in self.jobs if isinstance(job, QuantizeUnit)]
        consumed = Consumed(self.rounding, jobs) if consumes and self.rounding is not None else None
        return replace(self, consumed=consumed, more=more)

    def configs(self) -> dict[str, dict[str, Any]]:
        """As `Rewrite`."""
        return self.outputs.configs(self.source, version=__version__)

    def record(self, done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As `Rewrite`: recipe, versions, and fate, error and hash of every tensor, in the plan's order."""
        weights = merged(done, "members")
        certified = certificate(weights)
        return {
            "ptqpipe": __version__,
            "torch": torch.__version__,
            "run_id": self.run_id,
            "container": self.outputs.container_name,
            "source": named_source(self.source),
            "recipe": self.outputs.recipe.to_json(),
            **({} if self.statistics is None else {"statistics": describe_statistics(self.statistics)}),
            **({} if self.rounding is None else {"rounding": self.rounding.describe()}),
            **({"certificate": certified} if certified else {}),
            "weights": weights,
            "kept": merged(done, "kept"),
            "consumed": sorted(self.source.consumed),
            **({"doubts": list(self.doubts)} if self.doubts else {}),
            **self.more,
        }

    def __enter__(self) -> "Conversion":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files of the source, of the statistics and of learned codes."""
        for opened in (self.source, self.statistics, self.rounding):
            if opened is not None:
                opened.close()


def _memory_bytes(source: Source, member: Member) -> float:
    """Bytes of an element in memory: as stored, float32 where it is decoded or rotated, with codes below 8 bits."""
    name = member.source.tensor
    low = source.below_8_bits(name)
    codes = 0 if low is None else low.bits_per_weight(source.stored[name].shape) / 8
    return codes + (4 if member.source.rotation or name in source.stored else DTYPES[source.tensors[name][0]][1])


def _weights(job: QuantizeUnit, source: Source, nbytes: int | None) -> list[SourceRows]:
    """The weights of a unit, read when asked for. ``nbytes``: once, to so much memory that the worker uses again and
    again."""
    scratch: Scratch | None = getattr(_of_worker, "scratch", None)
    if scratch is None:  # the worker's own; it goes when the worker's thread ends
        scratch = _of_worker.scratch = Scratch()
    members = job.unit.members
    if nbytes is not None:
        scratch.begin(nbytes + _PARTS * (64 + margin()) * len(members))
    cache = nbytes is not None
    return [SourceRows(source, m.source, shape=m.shape, cache=cache, memory=scratch.take) for m in members]


def _facts(unit: Unit, member: Member, result: UnitResult, error: WeightError) -> dict[str, Any]:
    """The fields of the record for any quantized weight: its rule, and its errors."""
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


def check_kept_alive(unit: Unit, errors: Sequence[WeightError]) -> None:
    """NumericsError for a weight of which mostly zeros are left: its scale, often a shared one, cannot hold it."""
    for member, error in zip(unit.members, errors, strict=True):
        if error.relative_mse > LOST:
            others = [m.weight for m in unit.members if m is not member]
            shared = f", at the scale that it shares with {' and '.join(others)}" if others else ""
            raise NumericsError(
                f"{member.weight} would lose {min(error.relative_mse, 1.0):.0%} of its energy in "
                f"{unit.scheme.fmt.name}{shared}; repair the source, or keep it: --ignore '{member.module}'"
            )


class PartWriter:
    """Takes a unit's quantized rows and writes their parts at their places, with a running hash of each part."""

    def __init__(
        self, job: QuantizeUnit, writer: CheckpointWriter, *, input_scales: Sequence[torch.Tensor | None]
    ) -> None:
        self._job, self._writer, self._input_scales = job, writer, input_scales
        self._last: dict[int, QTensor] = {}
        self._written: dict[tuple[int, str], TensorWriter] = {}

    def take(self, member: int, row: int, q: QTensor) -> None:
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


def _write_decoded(
    source: Source, name: str, written: TensorWriter, *, look: Callable[[torch.Tensor], None]
) -> TensorWriter:
    """Writes a stored quantized weight as bfloat16. ``look`` sees every chunk."""
    stored = source.stored[name]
    for expert in stored.planes:
        w = stored.plain(source.quantized(name, expert=expert)).bfloat16()
        raw = (w.t() if stored.transposed else w).contiguous().reshape(-1).view(torch.uint8)
        written.put(raw)
        look(raw)
    return written
