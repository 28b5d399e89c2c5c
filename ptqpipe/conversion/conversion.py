"""The `CheckpointJob` of convert: a published checkpoint in, a packed low-precision checkpoint out.

What ``conversion/prepare.py`` has decided from headers is a `Conversion`: its jobs quantize unit by unit and write
each part at its place. Memory is a few chunks for each worker, whatever the size of the model; the bytes depend on
source and recipe alone. tune takes its plan and its units, and runs no job of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import CheckpointWriter, TensorWriter
from ptqpipe.checkpoint.dtypes import NotFinite
from ptqpipe.conversion.consume import Consumed
from ptqpipe.conversion.input_moments import describe_statistics
from ptqpipe.conversion.input_scales import InputScales
from ptqpipe.conversion.job import CheckpointJob, CopyTensor, merged, named_source, write_whole
from ptqpipe.conversion.measured import certificate
from ptqpipe.conversion.planned_outputs import OutputJob, Outputs
from ptqpipe.conversion.unit_job import QuantizeUnit
from ptqpipe.models.layout_issues import layout_warnings
from ptqpipe.models.source import Source
from ptqpipe.quantization.learned_codes import TRAINED_REASON, LearnedCodes
from ptqpipe.run.machine import Machine


@dataclass(frozen=True)
class Conversion(CheckpointJob[OutputJob]):
    """A conversion that is decided to the byte and has read no weight. A context manager; or call ``close``.

    outputs       what the recipe writes for the source
    input_scales  the static scales of the units' inputs
    statistics    None where none were given
    codes         learned codes that are written as they are; None for none
    consumed      removes them as they are written; None keeps them
    more          further entries of the record
    doubts        what is not known of the source, or contradicts its config.json
    """

    outputs: Outputs
    input_scales: InputScales
    statistics: Statistics | None = None
    codes: LearnedCodes | None = None
    consumed: Consumed | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()

    @property
    def run_parts(self) -> Mapping[str, str]:
        """As `CheckpointJob`: source, recipe, layout and version, statistics and learned codes where there are any."""
        data = {"statistics": self.statistics, "rounding": self.codes}
        return {
            "source": self.source.reader.fingerprint(),
            "recipe": self.outputs.recipe.digest,
            "layout": self.layout.digest,
            "version": __version__,
            **{name: opened.digest for name, opened in data.items() if opened is not None},
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of the source, of the container, and of parts that only a rule which names them quantizes."""
        outputs, config = self.outputs, self.source.reader.config
        warnings = layout_warnings(outputs.container_name, outputs.targets, config)
        issues = (
            f"{modules[0]} ({len(modules)} of this kind): {issue.symptom}" for issue, modules in outputs.failing(config)
        )
        return (*self.doubts, *warnings, *issues)

    def copy(self, job: CopyTensor, writer: CheckpointWriter) -> dict[str, Any]:
        """Copies a kept tensor byte for byte; one that the source stores quantized is written decoded, as bfloat16.

        One that was trained with the codes has their folder's values. NaN and infinities, which make a model useless
        wherever they are, are copied, too, and the record counts them.
        """
        if job.reason == TRAINED_REASON:
            assert self.codes is not None
            return write_whole(job.tensor, self.codes.value(job.tensor, like=job.spec), writer, job.reason)
        bad = NotFinite(job.spec.dtype)
        if job.tensor in self.source.stored:
            written = _write_decoded(self.source, job.tensor, writer.tensor(job.tensor), look=bad.look)
        else:
            written = writer.tensor(job.tensor).copy(self.source.reader, job.tensor, look=bad.look)
        entry = {"reason": job.reason, "sha256": written.sha256, "bytes": written.nbytes}
        return entry | ({"not_finite": bad.text} if bad.count else {})

    def before_jobs(self, writer: CheckpointWriter, machine: Machine) -> None:
        """Propagates the energies of inputs, where a unit that is not done yet needs them."""
        done = writer.done()
        jobs = (job for job in self.jobs if isinstance(job, QuantizeUnit) and job.id not in done)
        if any(job.unit.rule.propagates for job in jobs):
            self.source.propagated.compute(workers=machine.workers)

    def after_commit(self, job: OutputJob, writer: CheckpointWriter) -> None:
        if self.consumed is not None:
            self.consumed.after_commit(job, writer)

    def can_redo(self, job: OutputJob) -> bool:
        """As `CheckpointJob`: learned codes may be gone."""
        if self.consumed is None or self.codes is None or not isinstance(job, QuantizeUnit):
            return True
        return all(self.codes.file_of(member.key) is not None for member in job.unit.members)

    def with_record_entries(self, more: Mapping[str, Any], *, consumes: bool) -> "Conversion":
        """The same with further entries of the record. ``consumes``: its folder of learned codes shrinks as they are
        written, and with the output only the last file of it is left."""
        jobs = [job for job in self.jobs if isinstance(job, QuantizeUnit)]
        consumed = Consumed(self.codes, jobs) if consumes and self.codes is not None else None
        return replace(self, consumed=consumed, more=more)

    def configs(self) -> dict[str, dict[str, Any]]:
        return self.outputs.configs(self.source, version=__version__)

    def record(self, done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As `CheckpointJob`: recipe, versions, and fate, error and hash of every tensor, in the plan's order."""
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
            **({} if self.codes is None else {"rounding": self.codes.describe()}),
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
        for opened in (self.source, self.statistics, self.codes):
            if opened is not None:
                opened.close()


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
