"""Running the jobs of a stage and finishing its output: what convert, relayout and dequantize have in common.

A job writes its tensors at their places and returns its record. Knows the writer, the workers and the ranks; it must
not know what a job computes.
"""

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from ptqpipe.checkpoint.direct import bytes_of, margin
from ptqpipe.checkpoint.files import INDEX_NAME
from ptqpipe.checkpoint.layout import ShardLayout
from ptqpipe.checkpoint.partial import Paths, check_unfinished
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.checkpoint.writer import CheckpointWriter, Mode
from ptqpipe.dtypes import DTYPES
from ptqpipe.errors import CheckpointError, OutputError
from ptqpipe.stages.common.identity import name_of
from ptqpipe.stages.common.machine import Machine, Ranks, one_thread_each
from ptqpipe.stages.common.progress import AnyJob, Progress

RECORD_FILE = "ptqpipe.json"
COPY_BYTES = 8 << 20


J = TypeVar("J", bound=AnyJob)
R = TypeVar("R")


def run_id_of(run_parts: Mapping[str, str]) -> str:
    """Identifies what decides the bytes of a run: a run resumes only itself."""
    return hashlib.sha256(json.dumps(dict(run_parts), sort_keys=True).encode()).hexdigest()


# By stage, what a record says of the run that made it beside container and version: the same words in every record.
_ASKED = {
    "relayout": ("relayout_of", "relayout_from", "converted_as", "source", "statistics", "rounding"),
    "dequantize": ("dequantized_from", "source", "dtype"),
    "transform": ("transformed_from", "statistics", "transforms", "options", "exact", "dtype", "untied"),
}


def run_parts_of(record: Mapping[str, Any], *, layout: str) -> dict[str, str] | None:
    """What decides the bytes of a run that changes a checkpoint, from what its record says before anything is written.

    layout  the digest of names, dtypes, shapes and places of all tensors

    None for a record of no such run.
    """
    stage = next((stage for stage, (first, *_) in _ASKED.items() if first in record), None)
    if stage is None:
        return None
    asked = {key: json.dumps(record.get(key), sort_keys=True) for key in _ASKED[stage]}
    return {
        "stage": stage,
        "container": str(record.get("container")),
        "layout": layout,
        "version": str(record.get("ptqpipe")),
        **asked,
    }


def named_source(reader: CheckpointReader) -> dict[str, str]:
    """How a record names the checkpoint that its own was made of."""
    return {"name": name_of(reader.path), "fingerprint": reader.fingerprint()}


def write_checkpoint(
    out: Path,
    layout: ShardLayout,
    *,
    jobs: Sequence[J],
    source: CheckpointReader,
    run_parts: Mapping[str, str],
    mode: Mode,
    machine: Machine,
    ranks: Ranks,
    work: Callable[[J, CheckpointWriter, int], Mapping[str, Any]],
    unit_bytes: int = 0,
    extra_bytes: Callable[[J], int] | None = None,
    finish: Callable[[CheckpointWriter], R],
) -> R | None:
    """Does the jobs that this rank owns and that are not done yet; rank 0 then finishes and has the result.

    source      what the jobs read
    work        (job, writer, bytes that it may cache) -> its record; called on several threads
    unit_bytes  what the largest job would like to cache
    extra_bytes  what a job needs beside that and what every worker has; jobs wait until there is so much
    finish      called once, on rank 0, when every job of every rank is on disk

    None on the other ranks. Raises what the jobs raise, and OutputError; what is done stays resumable. AlreadyComplete
    where there is nothing left to resume.
    """
    run_id = run_id_of(run_parts)
    if mode == "resume":
        check_unfinished(out, run_id)  # on every rank, before any of them waits for another
    ranks.barrier_unless_first()
    writer = CheckpointWriter.open(
        out,
        layout,
        run_id=run_id,
        run_parts=run_parts,
        source_files=source.file_states(),
        mode=mode,
        rank=ranks.rank,
        world=ranks.world,
    )
    with writer:
        ranks.barrier_if_first()
        done = writer.done()
        owners = layout.group_ranks(ranks.world)
        mine = [job for job in jobs if owners[job.group] == ranks.rank and job.id not in done]
        extra = {job.id: 0 if extra_bytes is None else extra_bytes(job) for job in mine}
        share = machine.divide_memory(unit_bytes, len(mine), reserved_bytes=max(extra.values(), default=0))
        pool = MemoryPool(share.pool_bytes)
        with one_thread_each(), Progress(mine, shown=machine.progress and ranks.rank == 0) as progress:

            def do(job: J) -> None:
                with pool.taken(extra[job.id]):
                    record = work(job, writer, share.cache_bytes)
                writer.commit(job.id, record)
                progress.advance(job)

            run_jobs(mine, do, threads=share.threads)
        writer.flush()
        if ranks.rank != 0:
            writer.close()
        ranks.barrier()
        return finish(writer) if ranks.rank == 0 else None


class MemoryPool:
    """Memory that jobs share: each waits until what it needs is free. A job that needs more than all has it alone."""

    def __init__(self, nbytes: int) -> None:
        self._free = self._total = max(0, nbytes)
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Holds ``nbytes`` of it."""
        share = min(nbytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= share)
            self._free -= share
        try:
            yield
        finally:
            with self._changed:
                self._free += share
                self._changed.notify_all()


def run_jobs(jobs: Sequence[J], do: Callable[[J], None], *, threads: int) -> None:
    """All jobs on ``threads`` threads, in order; the first error ends the run after the jobs in flight."""
    stop = threading.Event()

    def unless_stopped(job: J) -> None:
        if not stop.is_set():
            do(job)

    pending: set[Future[None]] = set()
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="ptqpipe") as pool:
        try:
            for job in jobs:
                pending.add(pool.submit(unless_stopped, job))
                while len(pending) >= threads + 1:
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in finished:
                        future.result()
            for future in pending:
                future.result()
        except BaseException:
            stop.set()
            raise


def records_of(jobs: Iterable[AnyJob], done: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The record of every job, in the order of the jobs. OutputError where one is missing."""
    found = []
    for job in jobs:
        if job.id not in done:
            raise OutputError(f"unit '{job.id}' is missing from the journal; run again with --resume")
        found.append(done[job.id])
    return found


def finish_checkpoint(
    writer: CheckpointWriter,
    jobs: Sequence[AnyJob],
    reader: CheckpointReader,
    *,
    record: Callable[[list[Mapping[str, Any]]], dict[str, Any]],
    configs: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The closing steps of a run, on rank 0: the config files, ptqpipe.json, what is carried along from the source's
    folder; then the output has its name. The content of ptqpipe.json, with the sha256 of all these files but itself.

    record   makes it of the jobs' records, which are in the order of the jobs
    configs  by name; the source's files of these names are not carried

    CheckpointError where the source has changed since it was opened, OutputError where a record is missing.
    """
    reader.check_unchanged()
    extra = {name: json_bytes(config) for name, config in configs.items()}
    carried = [(path, name) for path, name in carried_files(reader) if name not in (*extra, RECORD_FILE)]
    index = writer.layout.index_json()
    written = extra if index is None else {**extra, INDEX_NAME: index.encode()}
    hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in written.items()}
    hashes |= {name: file_sha256(path) for path, name in carried}
    content = {**record(records_of(jobs, writer.done())), "files": dict(sorted(hashes.items()))}
    extra[RECORD_FILE] = json_bytes(content)
    writer.finish(expected_units=[job.id for job in jobs], extra=extra, copy=carried)
    return content


def file_sha256(path: Path) -> str:
    """sha256 of a whole file. CheckpointError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error.strerror}; check the file") from None


def is_unfinished(out: Path) -> bool:
    """Whether a run that --resume continues lies beside ``out``."""
    return Paths.of(out).partial.is_dir()


class NotFinite:
    """Counts NaN and infinities in the bytes of a tensor, a chunk at a time; none in types that are not weights'."""

    def __init__(self, dtype: str) -> None:
        """``dtype`` as safetensors spells it."""
        self._dtype = DTYPES[dtype][0] if dtype in ("F16", "BF16", "F32", "F64") else None
        self.nan = self.inf = 0

    def look(self, raw: torch.Tensor) -> None:
        """Counts in a chunk of uint8 that holds whole numbers."""
        if self._dtype is None or not len(raw):
            return
        numbers = raw.view(self._dtype)
        if all(math.isfinite(float(edge)) for edge in torch.aminmax(numbers)):  # they propagate NaN
            return
        nan = int(torch.isnan(numbers).sum())
        self.nan, self.inf = self.nan + nan, self.inf + int((~torch.isfinite(numbers)).sum()) - nan

    @property
    def count(self) -> int:
        """Both together."""
        return self.nan + self.inf

    @property
    def text(self) -> str:
        """Both in words."""
        return f"{self.nan} NaN and {self.inf} inf"


def copy_tensor(
    reader: CheckpointReader,
    source: str,
    writer: CheckpointWriter,
    name: str,
    *,
    look: Callable[[torch.Tensor], None] | None = None,
) -> tuple[str, int]:
    """Copies a tensor byte for byte to ``name``; (sha256, bytes) of what was copied. ``look`` sees every chunk."""
    total = reader.entries[source].nbytes
    digest = hashlib.sha256()
    if total == 0:
        writer.write(name, b"")
    buffer = torch.empty(min(total, COPY_BYTES) + margin(), dtype=torch.uint8)
    for start in range(0, total, COPY_BYTES):
        stop = min(start + COPY_BYTES, total)
        chunk = reader.read_raw(source, start_byte=start, stop_byte=stop, memory=lambda nbytes: buffer[:nbytes])
        writer.write(name, chunk, byte_offset=start)
        if look is not None:
            look(chunk)
        digest.update(bytes_of(chunk))
    return digest.hexdigest(), total


def carried_files(reader: CheckpointReader) -> list[tuple[Path, str]]:
    """The files beside the weights that go along (tokenizer, templates, code): path and name."""
    return [(path, path.relative_to(reader.path).as_posix()) for path in reader.extra_files]


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """A JSON file's bytes. A half of a surrogate pair, which a source's config may hold escaped, stays escaped."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(content, indent=2) + "\n").encode()
