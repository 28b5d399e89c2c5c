"""Writes a checkpoint that appears whole or not at all; a killed run continues where it stopped.

Tensors are written at their planned places, by any number of threads, in any order. A unit counts as done only
after its bytes and then its line in the journal are on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Literal

import torch

from ptqpipe.checkpoint.direct import OutputFile, bytes_of, margin
from ptqpipe.checkpoint.dtypes import DTYPE_NAMES
from ptqpipe.checkpoint.finish import add_files, check_shards, check_units, checked_names
from ptqpipe.checkpoint.header import TensorEntry, shown
from ptqpipe.checkpoint.journal import Journal, Piece, RunIdentity, fdatasync, journal_name, read_journals
from ptqpipe.checkpoint.layout import ShardLayout
from ptqpipe.checkpoint.lock import RankLock
from ptqpipe.checkpoint.open_files import OpenFiles
from ptqpipe.checkpoint.partial import Paths, check_space, discard, fsync_folder, join, output_errors, prepare, publish
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.errors import OutputError

#: A batch goes to the journal when this many bytes or seconds have gathered.
BATCH_BYTES: Final = 256 * 2**20
BATCH_SECONDS: Final = 2.0
#: The size of the pieces in which a tensor is copied.
COPY_BYTES: Final = 8 * 2**20

Mode = Literal["new", "resume", "overwrite"]


class CheckpointWriter:
    """One rank's hand on the output; use as a context manager, or call `finish`, `close` or `abort`.

    Rank 0 opens first, the others after it has (a barrier between). Leaving the context without `finish`
    keeps the partial folder for ``resume``.
    """

    def __init__(self, paths: Paths, layout: ShardLayout, *, identity: RunIdentity, rank: int, lock: RankLock) -> None:
        """Use `open`."""
        self.paths: Final = paths
        self.layout: Final = layout
        self.rank: Final = rank
        self._lock_file: RankLock | None = lock
        self._replaces: Final = identity.replaces
        self._names: Final = list(layout.entries)
        self._number: dict[str, int] = {name: i for i, name in enumerate(self._names)}
        self._shards = {shard.file: shard for shard in layout.shards}
        self._state = threading.Lock()  # of what follows; held for no I/O
        self._flushing = threading.Lock()  # one batch at a time
        self._files: Final = OpenFiles(self._open_file)
        self._begun: set[str] = set()
        self._dirty: set[str] = set()
        self._written: dict[str, list[tuple[int, int]]] = {}
        self._complete: list[int] = []
        self._pending: list[tuple[str, dict[str, Any], list[Piece]]] = []
        self._pending_bytes = 0
        self._flushed_at = time.monotonic()
        self._failure: OutputError | None = None
        self._of_thread = threading.local()
        with output_errors(paths.partial):
            self._former = read_journals(paths.partial).pieces
            self._journal = Journal(paths.partial / journal_name(rank), identity)
            fsync_folder(paths.partial)

    @classmethod
    def open(
        cls,
        out: Path,
        layout: ShardLayout,
        *,
        run_id: str,
        mode: Mode,
        rank: int = 0,
        world: int = 1,
        run_parts: Mapping[str, str] = MappingProxyType({}),
        source_files: Mapping[str, str] = MappingProxyType({}),
    ) -> CheckpointWriter:
        """Locks the partial folder next to ``out``; writes nothing under ``out`` itself.

        ``run_id`` identifies plan, source and recipe together; ``run_parts`` names them one by one, so that a
        refused resume can say which changed; ``source_files`` are what a resumed run must find untouched. Raises
        OutputError: the output exists, a leftover is in the way or another run's, another process writes it, no space.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        paths = Paths.of(out)
        identity = RunIdentity(run_id, layout.digest, dict(run_parts), dict(source_files), replaces=mode == "overwrite")
        lock, identity_there = prepare(paths, identity, mode=mode) if rank == 0 else join(paths, identity, rank)
        try:
            if rank == 0:
                check_space(paths, layout.file_bytes)
            return cls(paths, layout, identity=identity_there or identity, rank=rank, lock=lock)
        except BaseException:
            if identity_there is None and rank == 0:  # nothing of worth was begun
                with contextlib.suppress(OSError):
                    discard(paths, paths.partial)
            lock.release()
            raise

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(OutputError):  # the first error is the one to report
            self.close()  # after Ctrl-C: what is committed is kept

    def write(self, name: str, data: torch.Tensor | bytes | bytearray | memoryview, *, byte_offset: int = 0) -> None:
        """Puts bytes at their place, from byte ``byte_offset`` of the tensor on; any thread, any order, in pieces.

        A tensor must have the planned dtype, or be uint8 (raw bytes). Raises OutputError when the disk refuses.
        """
        self.tensor(name, byte_offset=byte_offset).put(data)

    def _write(self, name: str, view: memoryview, byte_offset: int) -> None:
        entry = self.layout.entries[name]
        if not 0 <= byte_offset <= byte_offset + len(view) <= entry.nbytes:
            raise ValueError(f"bytes [{byte_offset}, {byte_offset + len(view)}) of {shown(name)}, {entry.nbytes} long")
        if self._failure is not None:
            raise self._failure
        path = self._path(entry.file)
        with output_errors(path), self._files.use(path) as file:
            file.write(view, entry.offset + byte_offset)
        with self._state:
            self._dirty.add(entry.file.name)
            self._pending_bytes += len(view)
            self._note_written(name, byte_offset, byte_offset + len(view), entry.nbytes)

    def tensor(self, name: str, *, byte_offset: int = 0) -> TensorWriter:
        """Writes a tensor, or its part from byte ``byte_offset`` on, in pieces that follow each other, of the unit that
        this thread commits next. Begun again at the same byte, what was written there before is forgotten."""
        writer = self._open_pieces()[name, byte_offset] = TensorWriter(self, name, byte_offset)
        return writer

    def _open_pieces(self) -> dict[tuple[str, int], TensorWriter]:
        pieces: dict[tuple[str, int], TensorWriter] | None = getattr(self._of_thread, "pieces", None)
        if pieces is None:
            pieces = self._of_thread.pieces = {}
        return pieces

    def commit(self, unit_id: str, record: Mapping[str, Any]) -> None:
        """Records that a job's tensors are written, all of them by this thread. Durable once a batch has gathered, or
        after `flush`.

        ``record`` is JSON and comes back from `done`. While one thread syncs a batch, others are not held up.
        """
        stored, written = _json_copy(record), self._open_pieces()
        pieces = [
            (self._number[name], offset, piece.nbytes, piece.sha256)
            for (name, offset), piece in written.items()
            if piece.nbytes
        ]
        written.clear()
        with self._state:
            self._pending.append((unit_id, stored, pieces))
            due = self._pending_bytes >= BATCH_BYTES or time.monotonic() - self._flushed_at >= BATCH_SECONDS
        if due and self._flushing.acquire(blocking=False):
            try:
                self._flush_batch()
            finally:
                self._flushing.release()

    def flush(self) -> None:
        """Syncs what is written and journals what is committed. Raises OutputError."""
        with self._flushing:
            self._flush_batch()

    def done(self) -> dict[str, dict[str, Any]]:
        """The records of all units that are on disk, of all ranks, in the order of ranks and then of time."""
        return read_journals(self.paths.partial).units

    def is_sound(self, unit_id: str) -> bool:
        """Whether the bytes of a unit that an earlier run has finished are those that it wrote: reads all of them."""
        return all(self._is_sound(*piece) for piece in self._former.get(unit_id, ()))

    def _is_sound(self, number: int, start: int, nbytes: int, sha256: str) -> bool:
        entry, digest = self.layout.entries[self._names[number]], hashlib.sha256()
        place, path = entry.offset + start, self._path(entry.file)
        buffer = memoryview(bytearray(min(nbytes, COPY_BYTES)))
        with output_errors(path), self._files.use(path) as file:
            for done in range(0, nbytes, COPY_BYTES):
                piece = buffer[: nbytes - done]
                if file.read(piece, place + done) != len(piece):
                    return False
                digest.update(piece)
        return digest.hexdigest() == sha256

    def finish(
        self,
        *,
        expected_units: Iterable[str],
        extra: Mapping[str, bytes] = MappingProxyType({}),
        copy: Sequence[tuple[Path, str]] = (),
    ) -> None:
        """Checks that nothing is missing, adds the other files, and gives the output its name. Rank 0, last of all.

        ``extra`` maps names to contents (config.json, ptqpipe.json with its "run_id"); ``copy`` pairs source files
        with names. Raises OutputError naming the unit or tensor that is missing; the partial folder stays.
        """
        if self.rank != 0:
            raise ValueError(f"rank {self.rank} cannot finish; rank 0 does, after the others have closed")
        names = checked_names(self.layout, [*extra, *(name for _, name in copy)])
        self.flush()
        check_units(self.paths, self.layout, expected_units)
        check_shards(self.paths, self.layout)
        add_files(self.paths, self.layout, contents=extra, copy=copy, names=names)
        self._close_files()
        publish(self.paths, replace=self._replaces)
        self._release()

    def close(self) -> None:
        """Flushes and lets go; the partial folder stays, for `finish` by rank 0 or for ``resume``. Idempotent."""
        if self._lock_file is not None:
            try:
                self.flush()
            finally:
                self.abort()

    def abort(self) -> None:
        """Lets go without flushing: units not yet journalled will be done again. Idempotent."""
        if self._lock_file is not None:
            self._close_files()
            self._release()

    def _path(self, file: str | Path) -> Path:
        if self._lock_file is None:
            raise ValueError("the writer is closed")
        return self.paths.growing / file

    def _open_file(self, path: Path) -> OutputFile:
        """A shard; made in full size, header first, when it is touched for the first time."""
        opened, shard = OutputFile(path), self._shards[path.name]
        if shard.file in self._begun:
            return opened
        try:
            os.ftruncate(opened.fd, shard.file_bytes)
            opened.write(memoryview(shard.header), 0)
            fsync_folder(path.parent)
        except OSError:
            opened.close()
            raise
        with self._state:
            self._begun.add(shard.file)
            self._dirty.add(shard.file)
        return opened

    def _note_written(self, name: str, start: int, stop: int, nbytes: int) -> None:
        """Merges a written range; the state lock is held."""
        ranges = sorted([*self._written.get(name, []), (start, stop)])
        merged = [ranges[0]]
        for begin, end in ranges[1:]:
            if begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        if merged == [(0, nbytes)]:
            self._complete.append(self._number[name])
            self._written.pop(name, None)
        else:
            self._written[name] = merged

    def _flush_batch(self) -> None:
        """Data to disk, then the line that claims them. After a failed sync nothing more is claimed: the system
        forgets which pages it could not write, and a second sync would succeed for nothing."""
        if self._failure is not None:
            raise self._failure
        with self._state:
            units, self._pending = self._pending, []
            tensors, self._complete = self._complete, []
            dirty, self._dirty = sorted(self._dirty), set()
            self._pending_bytes, self._flushed_at = 0, time.monotonic()
        try:
            for path in map(self._path, dirty):
                with output_errors(path), self._files.use(path) as file:
                    fdatasync(file.fd)
            if units or tensors:
                records = [(unit, record) for unit, record, _ in units]
                pieces = {unit: parts for unit, _, parts in units}
                with output_errors(self.paths.partial / journal_name(self.rank)):
                    self._journal.append(records, tensors, pieces)
        except OutputError as error:
            self._failure = error
            raise

    def _close_files(self) -> None:
        self._files.close()
        self._journal.close()

    def _release(self) -> None:
        if self._lock_file is not None:
            self._lock_file.release()
            self._lock_file = None


class TensorWriter:
    """Bytes of one tensor of the output, piece after piece, and the sha256 of all of them. For one thread."""

    def __init__(self, writer: CheckpointWriter, name: str, byte_offset: int) -> None:
        """Use `CheckpointWriter.tensor`."""
        self._writer, self._entry, self._first = writer, writer.layout.entries[name], byte_offset
        self._digest = hashlib.sha256()
        self.nbytes = 0

    def put(self, data: torch.Tensor | bytes | bytearray | memoryview) -> TensorWriter:
        """Appends the numbers of ``data``, of the planned dtype or uint8, in row-major order; returns itself.

        Raises OutputError.
        """
        raw = _as_bytes(data, self._entry)
        self._writer._write(self._entry.name, raw, self._first + self.nbytes)
        self._digest.update(raw)
        self.nbytes += len(raw)
        return self

    def copy(
        self, reader: CheckpointReader, source: str, *, look: Callable[[torch.Tensor], None] | None = None
    ) -> TensorWriter:
        """Copies a tensor of a checkpoint byte for byte; ``look`` sees every chunk, as uint8 that holds whole numbers.

        Raises CheckpointError where it cannot be read.
        """
        total = reader.entries[source].nbytes
        buffer = torch.empty(min(total, COPY_BYTES) + margin(), dtype=torch.uint8)
        for start in range(0, total, COPY_BYTES):
            stop = min(start + COPY_BYTES, total)
            chunk = reader.read_raw(source, start=start, stop=stop, memory=lambda nbytes: buffer[:nbytes])
            self.put(chunk)
            if look is not None:
                look(chunk)
        return self

    @property
    def sha256(self) -> str:
        """Digest of the bytes written so far, in hex."""
        return self._digest.hexdigest()


def _as_bytes(data: torch.Tensor | bytes | bytearray | memoryview, entry: TensorEntry) -> memoryview:
    if not isinstance(data, torch.Tensor):
        return memoryview(data).cast("B")
    if data.dtype != torch.uint8 and DTYPE_NAMES.get(data.dtype) != entry.dtype:
        raise ValueError(f"{shown(entry.name)} is planned as {entry.dtype}, got {data.dtype}")
    return bytes_of(data.detach().cpu().contiguous())


def _json_copy(record: Mapping[str, Any]) -> dict[str, Any]:
    """A copy after a JSON round trip, so that a resumed run sees the same values. Raises TypeError, ValueError."""
    copied: dict[str, Any] = json.loads(json.dumps(record))
    return copied
