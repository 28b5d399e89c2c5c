"""A folder of one file a decoder layer, statistics or learned codes: `LayerFolder` makes it and `OpenFolder` reads it.

Lock, journal, one file per block, an index written last, and one rename. A killed run continues behind the last block
whose line is in the journal; one that failed before its first block leaves nothing behind.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from ptqpipe.checkpoint.files import file_sha256, json_bytes
from ptqpipe.checkpoint.header import shown
from ptqpipe.checkpoint.journal import Journal, RunIdentity, journal_name, read_journals, run_id_of
from ptqpipe.checkpoint.lock import RankLock
from ptqpipe.checkpoint.partial import Paths, check_unfinished, discard, output_errors, prepare, publish
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.checkpoint.writer import Mode
from ptqpipe.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that has finished: its folder or file, what an index of it says, and what it took.

    notes  lines for people, of what was found on the way
    """

    out: Path
    content: Mapping[str, Any]
    seconds: float
    peak_rss_bytes: int
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Finished {self.out} in {self.seconds:.1f} s>"


class LayerFolder:
    """Use as a context manager; `finish` gives it its name."""

    def __init__(
        self,
        out: Path,
        parts: Mapping[str, str],
        *,
        source: CheckpointReader,
        index_file: str,
        mode: Mode,
        rank: int = 0,
        wait: Callable[[], None] = lambda: None,
        beside: str = "",
        lost_with: Callable[[str], Sequence[str]] = lambda unit: (),
    ) -> None:
        """Rank 0 prepares the folder while the others wait. OutputError, AlreadyComplete.

        source      the model, whose files a resumed run must find untouched
        parts       what decides the numbers of this run; which of them changed is what a refused ``resume`` says
        index_file  the file whose "run_id" says which run made a complete folder
        wait        returns when every rank has called it
        beside      a folder beside the one that becomes the output, where the units' files are written first
        lost_with   further units that are to be done again where one is
        """
        self.paths = Paths.of(out)
        self.files = self.paths.partial / beside if beside else self.paths.growing
        self.run_id = run_id_of(parts)
        self._source = source
        self._index_file = index_file
        self._replace = mode == "overwrite"
        self._lock: RankLock | None = None
        self._journal: Journal | None = None
        if mode == "resume":
            check_unfinished(self.paths.out, self.run_id, index_file=index_file)
        if rank != 0:
            wait()
        if rank == 0:
            identity = RunIdentity(self.run_id, "", dict(parts), source.file_states(), self._replace)
            self._lock, former = prepare(self.paths, identity, mode=mode, index_file=index_file)
            self._replace = (former or identity).replaces
            with output_errors(self.paths.partial):
                self._journal = Journal(self.paths.partial / journal_name(0), former or identity)
                self.files.mkdir(exist_ok=True)
                self._withdraw_damaged(lost_with)
            wait()
        journals = read_journals(self.paths.partial)
        self._order = {unit: i for i, unit in enumerate(journals.units)}
        self.done: dict[str, dict[str, Any]] = {
            unit: record for unit, record in journals.units.items() if unit not in journals.withdrawn
        }

    def _withdraw_damaged(self, lost_with: Callable[[str], Sequence[str]]) -> None:
        """Units of which the file is not the one that was written count as never done. Files of no other unit go."""
        assert self._journal is not None
        units = {unit: record for unit, record in read_journals(self.paths.partial).units.items() if "sha256" in record}
        lost = [unit for unit, record in units.items() if not self._is_sound(record)]
        if lost:
            others = [other for unit in lost for other in lost_with(unit)]
            self._journal.append([(unit, None) for unit in (*lost, *others)], [])
        kept = {record["file"] for unit, record in units.items() if unit not in lost}
        for file in self.files.iterdir():
            if file.name not in kept:
                file.unlink()

    def _is_sound(self, record: Mapping[str, Any]) -> bool:
        file = self.files / record["file"]
        return file.is_file() and file_sha256(file) == str(record["sha256"])

    def commit(self, unit: str, record: Mapping[str, Any]) -> None:
        """A block's file is on disk; ``record`` is JSON, with its name and sha256. Rank 0 keeps it."""
        self.done[unit] = dict(record)
        if unit in self._order:  # done again: at its former place, since indexes have the order of the journal
            places = {name: self._order.get(name, len(self._order)) for name in self.done}
            self.done = {name: self.done[name] for name in sorted(self.done, key=lambda name: places[name])}
        if self._journal is not None:
            with output_errors(self.paths.partial):
                self._journal.append([(unit, self.done[unit])], [])

    def finish(self, content: Mapping[str, Any]) -> None:
        """Rank 0: the index, and the rename. CheckpointError where the model has changed since it was opened."""
        self._source.check_unchanged()
        file = self.paths.growing / self._index_file
        with output_errors(file), open(file, "wb") as handle:
            handle.write(json_bytes(content))
            handle.flush()
            os.fsync(handle.fileno())
        self._let_go_of_journal()
        publish(self.paths, replace=self._replace, index_file=self._index_file)

    def __enter__(self) -> "LayerFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._let_go_of_journal()
        if kind is not None and self._lock is not None and not self.done:  # nothing of worth was begun
            with contextlib.suppress(OSError):
                discard(self.paths, self.paths.partial)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _let_go_of_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


class OpenFolder:
    """A finished folder; its tensors are read when asked. Use as a context manager, or `close` it. Threads may read.

    Codes and moments are all legal numbers, so that nothing but the sha256 of a file can tell a flipped bit: it is
    compared before the file's first tensor is read.

    path, content  of the folder, and of its index
    """

    def __init__(self, path: Path, content: Mapping[str, Any], *, hashes: Mapping[str, str], remedy: str) -> None:
        """``hashes``: sha256 in hex by the file's name; a file of none is not checked."""
        self.path = path
        self.content = content
        self._reader = CheckpointReader.open(path)
        self._unchecked, self._remedy = dict(hashes), remedy
        self._lock = threading.Lock()

    @property
    def digest(self) -> str:
        """sha256 that identifies the tensors; decides the bytes of the checkpoints that are made with them."""
        return str(self.content["digest"])

    @property
    def model_fingerprint(self) -> str:
        return str(self.content["model"]["fingerprint"])

    def _read(self, name: str) -> torch.Tensor:
        """A tensor. CheckpointError where its file is not the one that the index tells of, or cannot be read."""
        if name in self._reader.entries:
            self._check(self._reader.entries[name].file)
        return self._reader.read(name)

    def damaged_file(self) -> Path | None:
        """The first of the files that are there whose bytes are not those that were written; reads all of them."""
        for file in self._reader.files:
            try:
                self._check(file)
            except CheckpointError:
                return file
        return None

    def _check(self, file: Path) -> None:
        """Reads the file once for it, and then likely from memory."""
        with self._lock:
            if file.name not in self._unchecked:
                return
            if file_sha256(file) != self._unchecked[file.name]:
                raise CheckpointError(
                    f"{shown(str(file))} is damaged: its sha256 is not the one that was recorded; {self._remedy}"
                )
            del self._unchecked[file.name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()
