"""Commands that write a checkpoint: what each provides (`CheckpointJob`), and what runs it (`write_checkpoint`).

convert, relayout, dequantize and transform decide every byte's place from headers, and are then the same: workers do
the jobs that are not in the journal yet, rank 0 writes the config files and the record, and the folder gets its name.
"""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

import torch

from ptqpipe.checkpoint import (
    INDEX_NAME,
    RECORD_FILE,
    CheckpointWriter,
    Mode,
    Paths,
    ShardLayout,
    TensorSpec,
    check_unfinished,
    file_sha256,
    holder_of,
    json_bytes,
    name_of,
    natural_key,
    run_id_of,
    sealed,
)
from ptqpipe.conversion.card import CARD, ORIGINAL, card, original_card
from ptqpipe.errors import OutputError, arg
from ptqpipe.models.families import check_config
from ptqpipe.models.source import Source
from ptqpipe.run.machine import (
    BASE_BYTES,
    WORKER_BYTES,
    Job,
    Machine,
    MemoryPool,
    Ranks,
    WorkerBudget,
    one_thread_each,
    peak_bytes,
    progress_bar,
    run_jobs,
)
from ptqpipe.run.quantities import disk_size, memory_size


@dataclass(frozen=True, slots=True)
class WriteJob(Job, ABC):
    """Writes some tensors of a checkpoint. ``work`` is the `CheckpointJob` that it is of."""

    @abstractmethod
    def run(self, work: Any, writer: CheckpointWriter, share: WorkerBudget) -> Mapping[str, Any]:
        """Writes the tensors at their places; the journal entry (JSON). Called on many threads."""

    def cache_bytes(self, work: Any) -> int:
        """What a worker that does this job would like to keep in memory."""
        return 0

    def extra_bytes(self, work: Any) -> int:
        """What this job needs in addition to that and to what every worker has; it waits until it is free."""
        return 0


@dataclass(frozen=True, slots=True)
class CopyTensor(WriteJob):
    """Copies a tensor of the source byte for byte, under the name of ``spec``. ``reason``: why it stays as it is."""

    tensor: str
    spec: TensorSpec
    reason: str = ""

    def run(self, work: "CheckpointJob[Any]", writer: CheckpointWriter, share: WorkerBudget) -> dict[str, Any]:
        return {"kept": {self.spec.name: work.copy(self, writer)}}


J = TypeVar("J", bound=WriteJob)


@dataclass(frozen=True)
class CheckpointJob(ABC, Generic[J]):
    """A checkpoint that is decided to the byte: where everything will lie, and what makes it. Has read no weight.

    out     the output folder, which is not there yet
    source  what the jobs read; whoever opened it closes it
    stage   the command, where `head` decides the bytes
    """

    stage: ClassVar[str] = ""

    out: Path
    source: Source
    layout: ShardLayout
    jobs: tuple[J, ...]

    @property
    def head(self) -> dict[str, Any]:
        """The head of the record: what this run is to do, and with what."""
        return {}

    @property
    def run_parts(self) -> Mapping[str, str]:
        """What decides the bytes, by name: an unfinished run is continued only by one with the same parts."""
        return parts_of_stage(self.stage, self.head, layout=self.layout.digest)

    def before_jobs(self, writer: CheckpointWriter, machine: Machine) -> None:
        """Called on each rank when it is clear that the output may be written, before any job, on the first rank before
        the others: finds what several jobs need, where the journals do not have it yet, and keeps it there."""

    def can_redo(self, job: J) -> bool:
        """Whether what a job reads is still there, once it is done."""
        return True

    def after_commit(self, job: J, writer: CheckpointWriter) -> None:
        """Called when a job's entry is in the journal, though perhaps not on disk yet (`CheckpointWriter.flush`). On
        many threads."""

    @abstractmethod
    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """The config files by name; the source's files of these names are not carried over."""

    @abstractmethod
    def record(self, done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The content of ptqpipe.json, from the journal's entry of every job, in the order of the jobs."""

    @property
    def run_id(self) -> str:
        """Identifies the run: the sha256 of `run_parts`."""
        return run_id_of(self.run_parts)

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def cache_bytes(self, job: J) -> int:
        return job.cache_bytes(self)

    def extra_bytes(self, job: J) -> int:
        return job.extra_bytes(self)

    def least_memory(self) -> tuple[int, J | None]:
        """(bytes of memory that are needed with one job at a time, the job that needs the most; None for none)."""
        extra, most = self._largest_extra
        return BASE_BYTES + WORKER_BYTES + extra, most if extra else None

    def share_of(self, machine: Machine, jobs: Sequence[J]) -> WorkerBudget:
        """What the workers get of a machine's memory for these jobs."""
        reserved = self._largest_extra[0] if jobs is self.jobs else max(map(self.extra_bytes, jobs), default=0)
        return machine.divide_memory(self._largest_cache, len(jobs), reserved_bytes=reserved)

    def most_memory(self, machine: Machine) -> int:
        """What a run takes at most, by the counts that the memory is shared out by: no more than it may."""
        share, extra = self.share_of(machine, self.jobs), self._largest_extra[0]
        each = WORKER_BYTES + min(share.cache_bytes, self._largest_cache)
        return min(machine.memory_bytes, BASE_BYTES + share.threads * each + share.workers * extra)

    @cached_property
    def _largest_extra(self) -> tuple[int, J | None]:
        """The most that a job needs, and that job. Of a hundred thousand jobs, so once."""
        most = max(self.jobs, key=self.extra_bytes, default=None)
        return (0 if most is None else self.extra_bytes(most)), most

    @cached_property
    def _largest_cache(self) -> int:
        return max(map(self.cache_bytes, self.jobs), default=0)

    def at_once(self, job: J, share: WorkerBudget) -> int:
        """How many jobs that need as much as this one are done at the same time."""
        extra = self.extra_bytes(job)
        return share.workers if not extra else max(1, min(share.workers, share.pool_bytes // extra))

    def copy(self, job: CopyTensor, writer: CheckpointWriter) -> dict[str, Any]:
        """Copies a tensor; its part of the record."""
        written = writer.tensor(job.spec.name).copy(self.source.reader, job.tensor)
        return {"sha256": written.sha256, "bytes": written.nbytes}


class Run(TypedDict, total=False):
    """How a stage runs: on which machine, among which ranks, what it may do to what lies at the output, and what takes
    the line about the work before it begins."""

    mode: Mode
    machine: Machine
    ranks: Ranks
    log: Callable[[str], None] | None


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A finished checkpoint: where it lies, what was written, and what that cost.

    record            the content of its ptqpipe.json
    source_container  the layout of the source, "plain" for one that is not quantized
    warnings          what readers of the output get wrong
    written_bytes     of weights and index
    """

    out: Path
    record: Mapping[str, Any]
    source_container: str
    warnings: tuple[str, ...]
    source_bytes: int
    written_bytes: int
    seconds: float
    peak_rss_bytes: int

    def __repr__(self) -> str:
        return f"<WriteResult {self.out}: {self.written_bytes} bytes in {self.seconds:.1f} s>"

    @property
    def cost(self) -> str:
        """What was written and what that took, for a terminal."""
        return f"{disk_size(self.written_bytes)} in {self.seconds:.1f} s, peak {memory_size(self.peak_rss_bytes)}"

    def to_json(self, **facts: Any) -> dict[str, Any]:
        """The outcome as data: where, ``facts``, and the cost."""
        cost = {key: getattr(self, key) for key in ("written_bytes", "seconds", "peak_rss_bytes")}
        return {"out": str(self.out), **facts, **cost}


def write_checkpoint(
    work: CheckpointJob[J],
    *,
    mode: Mode = "new",
    machine: Machine | None = None,
    ranks: Ranks | None = None,
    log: Callable[[str], None] | None = None,
) -> WriteResult | None:
    """Does the jobs that this rank owns and that are not done yet; rank 0 then finishes. None on the other ranks.

    log  takes a line about the work, once it is clear that the output may be written

    Raises what the jobs raise, CheckpointError where the source has changed since it was opened, and OutputError; what
    is done stays resumable. AlreadyComplete where there is nothing left to resume.
    """
    check_config(work.source.reader.config, work.source.tensors)
    machine, ranks, begun = machine or Machine(), ranks or Ranks(), time.monotonic()
    if mode == "resume":
        check_unfinished(work.out, work.run_id)  # on every rank, before any of them waits for another
    ranks.barrier_unless_first()
    writer = CheckpointWriter.open(
        work.out,
        work.layout,
        run_id=work.run_id,
        run_parts=work.run_parts,
        source_files=work.source.reader.file_states(),
        mode=mode,
        rank=ranks.rank,
        world=ranks.world,
    )
    with writer:
        ranks.barrier_if_first()
        if log is not None and ranks.rank == 0:
            sizes = f"{disk_size(work.source.reader.nbytes)} -> {disk_size(work.layout.file_bytes)}"
            log(f"{name_of(work.source.reader.path)} -> {work.out}: {len(work.source.tensors)} tensors, {sizes}")
        ranks.barrier_unless_first()
        with one_thread_each():
            work.before_jobs(writer, machine)
        ranks.barrier_if_first()
        _do_jobs(work, writer, machine, ranks)
        writer.flush()
        if ranks.rank != 0:
            writer.close()
        ranks.barrier()
        if ranks.rank != 0:
            return None
        record = _finish(work, writer)
    return WriteResult(
        work.out,
        record,
        work.source.container_name,
        work.warnings,
        source_bytes=work.source.reader.nbytes,
        written_bytes=work.layout.file_bytes,
        seconds=time.monotonic() - begun,
        peak_rss_bytes=peak_bytes(),
    )


def _do_jobs(work: CheckpointJob[J], writer: CheckpointWriter, machine: Machine, ranks: Ranks) -> None:
    """The jobs of this rank that the journal does not have."""
    done = writer.done()
    owners = work.layout.group_ranks(ranks.world)
    owned = sorted((job for job in work.jobs if owners[job.group] == ranks.rank), key=lambda job: natural_key(job.id))
    finished = [job for job in owned if job.id in done]
    damaged = _damaged(finished, work, writer, machine)
    mine = [job for job in owned if job.id not in done or job.id in damaged]
    former = [job for job in finished if job.id not in damaged]
    share = work.share_of(machine, mine)
    pool = MemoryPool(share.pool_bytes)
    shown = machine.progress and ranks.rank == 0
    with one_thread_each(), progress_bar(mine, shown=shown, done=former) as advance:

        def do(job: J) -> None:
            with pool.reserve(work.extra_bytes(job)):
                record = job.run(work, writer, share)
            writer.commit(job.id, record)
            work.after_commit(job, writer)
            advance(job)

        run_jobs(mine, do, threads=share.threads)


def _damaged(jobs: Sequence[J], work: CheckpointJob[J], writer: CheckpointWriter, machine: Machine) -> set[str]:
    """Those of the finished jobs that are to be done again, since what they wrote has other bytes by now.

    OutputError for one that cannot be.
    """
    damaged: set[str] = set()

    def look(job: J) -> None:
        if not writer.is_sound(job.id):
            damaged.add(job.id)

    run_jobs(jobs, look, threads=machine.workers)
    lost = next((job for job in jobs if job.id in damaged and not work.can_redo(job)), None)
    if lost is not None:
        raise OutputError(
            f"{writer.paths.partial} has other bytes of '{lost.id}' than were written, and what they were made of is "
            f"deleted; {arg('overwrite', True)} starts over"
        )
    return damaged


def _finish(work: CheckpointJob[J], writer: CheckpointWriter) -> dict[str, Any]:
    """The closing steps, on rank 0: the config files, the model card, ptqpipe.json with the sha256 of all files but the
    weights, and what is carried over from the source's folder; then the output has its name. The record."""
    reader = work.source.reader
    reader.check_unchanged()
    contents = {name: json_bytes(config) for name, config in work.configs().items()}
    files = {path.relative_to(reader.path).as_posix(): path for path in reader.extra_files}
    carried = [(path, name) for name, path in files.items() if name not in (*contents, RECORD_FILE, CARD)]
    original = original_card(work.source)
    carried += [(original, ORIGINAL)] if original is not None and ORIGINAL not in files else []
    record = work.record(records_of(work.jobs, writer.done()))
    contents[CARD] = card(work.source, record, nbytes=work.layout.file_bytes, warnings=work.warnings)
    index = work.layout.index_json()
    written = contents if index is None else {**contents, INDEX_NAME: index.encode()}
    hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in written.items()}
    hashes |= {name: file_sha256(path) for path, name in carried}
    record = sealed({**record, "files": dict(sorted(hashes.items()))})
    contents[RECORD_FILE] = json_bytes(record)
    writer.finish(expected_units=[job.id for job in work.jobs], extra=contents, copy=carried)
    return record


def write_whole(name: str, numbers: torch.Tensor, writer: CheckpointWriter, reason: str) -> dict[str, Any]:
    """Writes a whole tensor; its entry of the record."""
    written = writer.tensor(name).put(numbers)
    return {"reason": reason, "sha256": written.sha256, "bytes": written.nbytes}


def records_of(jobs: Iterable[Job], done: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The record of every job, in the order of the jobs. OutputError where one is missing."""
    records = []
    for job in jobs:
        if job.id not in done:
            raise OutputError(f"unit '{job.id}' is missing from the journal; run again with {arg('resume', True)}")
        records.append(done[job.id])
    return records


def merged(done: Iterable[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """The entries under ``key`` of all jobs' records, which are dictionaries by the name of a tensor."""
    return {name: entry for record in done for name, entry in record.get(key, {}).items()}


# By stage, the fields of a record, apart from container and version, that say what its run was to do.
_HEAD = {
    "relayout": ("relayout_of", "relayout_from", "converted_as", "source", "statistics", "rounding"),
    "dequantize": ("dequantized_from", "source", "dtype"),
    "transform": ("transformed_from", "statistics", "transforms", "options", "exact", "dtype", "untied"),
}


def parts_of_stage(stage: str, record: Mapping[str, Any], *, layout: str) -> dict[str, str]:
    """What decides the bytes of a run of relayout, dequantize or transform, from its record.

    layout  the digest of names, dtypes, shapes and places of all tensors
    """
    return {
        "stage": stage,
        "container": str(record.get("container")),
        "layout": layout,
        "version": str(record.get("ptqpipe")),
        **{key: json.dumps(record.get(key), sort_keys=True) for key in _HEAD[stage]},
    }


def run_parts_of(record: Mapping[str, Any], *, layout: str) -> dict[str, str] | None:
    """`parts_of_stage` for the stage that wrote a record; None for a record of another one."""
    stage = next((stage for stage, (first, *_) in _HEAD.items() if first in record), None)
    return None if stage is None else parts_of_stage(stage, record, layout=layout)


def named_source(source: Source) -> dict[str, str]:
    return {"name": name_of(source.reader.path), "fingerprint": source.reader.fingerprint()}


def as_quantized(source: Source, record: Mapping[str, Any]) -> Source:
    """The source as it was quantized: with the factors that the record says were folded into it before; itself where
    there were none, or it is another model than they are of. Closing either closes both.

    CheckpointError for factors that are damaged.
    """
    transformed = record.get("transformed")
    if not isinstance(transformed, Mapping) or "foldings" not in transformed or source.container is not None:
        return source
    before = transformed.get("from")
    same = isinstance(before, Mapping) and before.get("fingerprint") == source.reader.fingerprint()
    return source.folded(transformed["foldings"]) if same else source


def is_unfinished(out: Path, *, alive: bool = False) -> bool:
    """Whether a run that ``resume`` continues exists next to ``out``.

    alive  one counts, too, that another process is at
    """
    paths = Paths.of(out)
    folders = [folder for folder in (paths.partial, paths.stages) if folder.is_dir()]
    return bool(folders) and (alive or not any(map(holder_of, folders)))
