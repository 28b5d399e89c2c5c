"""Learned codes that are needed once: each file of them goes when all of its codes are durably in the output.

The last file stays until whoever made the folder removes it, so that a resumed run finds codes to open.
"""

import os
import threading
from collections.abc import Sequence

from ptqpipe.checkpoint import CheckpointWriter, output_errors
from ptqpipe.conversion.job import WriteJob
from ptqpipe.conversion.unit_job import QuantizeUnit
from ptqpipe.quantization.learned_codes import LearnedCodes


class Consumed:
    """The files of a folder of codes, with the units that still need each. Threads may call it."""

    def __init__(self, codes: LearnedCodes, jobs: Sequence[QuantizeUnit]) -> None:
        """``jobs``: all that write codes of the folder, those that are done already among them."""
        self._codes = codes
        self._jobs = jobs
        self._lock = threading.Lock()
        self._left: dict[str, set[str]] | None = None

    def after_commit(self, job: WriteJob, writer: CheckpointWriter) -> None:
        """A job is in the journal. Removes what no unit needs any more, after what is written is on disk."""
        with self._lock:
            if self._left is None:
                self._left = self._find(writer)
            for units in self._left.values():
                units.discard(job.id)
            free = [file for file, units in self._left.items() if not units]
            if not free or len(self._left) == 1:
                return
            writer.flush()
            for file in free[: len(self._left) - 1]:
                del self._left[file]
                self._remove(file)

    def _find(self, writer: CheckpointWriter) -> dict[str, set[str]]:
        """File that is there -> the units whose codes it has and that are not done. A unit lies in one file."""
        done = writer.done()
        unfinished: dict[str, set[str]] = {}
        for job in self._jobs:
            file = self._codes.file_of(job.unit.members[0].key)
            if file is not None:
                unfinished.setdefault(file, set()).update({job.id} - done.keys())
        return unfinished

    def _remove(self, file: str) -> None:
        """Its space is free at once, though a reader has it open; a name that no reader looks for comes first."""
        path = self._codes.path / file
        gone = path.with_name(f"{file}.consumed")
        with output_errors(path):
            path.rename(gone)
            os.truncate(gone, 0)
            gone.unlink()
