"""What the stages of a run leave for each other: the journal of the run, and the sha256 of every file in it.

    .OUT.stages/lock-0             held by the process of the run, over all stages
    .OUT.stages/journal-0.jsonl    what decides the bytes, by name; then a line for each file that is complete

A run that is resumed believes no file whose bytes are not those that were written: its stage is done again. Must not
know what a stage does.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import KINDS, Journal, RunIdentity, file_sha256, journal_name, output_errors, read_journal
from ptqpipe.errors import PtqError
from ptqpipe.quantization.learned_codes import CODES_FILE, LearnedCodes

_REPLACES = "replaces"


class Ledger:
    """The journal of a run that has begun; ``files`` are the sha256 that it has, by the path in ``folder``."""

    def __init__(self, begun: Path, folder: Path, identity: RunIdentity, out: Path) -> None:
        """Continues the journal in ``begun``, or begins it.

        folder  where the stages' outputs lie
        out     the output, which a run that was begun with ``overwrite`` may replace if it is there now
        """
        path = begun / journal_name(0)
        self._begun, self._folder = begun, folder
        with output_errors(begun):
            entries = read_journal(path).units if path.exists() else {}
            self._journal = Journal(path, identity)
            if identity.replaces and _REPLACES not in entries:
                entries[_REPLACES] = {"inode": os.stat(out).st_ino if out.exists() else 0}
                self._journal.append([(_REPLACES, entries[_REPLACES])], [])
        self._replaces = entries.pop(_REPLACES, {}).get("inode", 0)
        self.files = {name: str(entry["sha256"]) for name, entry in entries.items()}

    def replaces(self, out: Path) -> bool:
        """Whether what lies at the output is still what was there when the run began to replace it."""
        return out.exists() and os.stat(out).st_ino == self._replaces

    def add(self, file: Path) -> None:
        """A file of the folder is complete."""
        name = file.relative_to(self._folder).as_posix()
        if name not in self.files:
            self.files[name] = file_sha256(file)
            with output_errors(self._begun):
                self._journal.append([(name, {"sha256": self.files[name]})], [])

    def remove_damaged(self) -> Iterator[Path]:
        """Files whose bytes are not those that were written; removes what each of them is a part of."""
        for file in damaged(self._folder, self.files):
            with output_errors(self._folder):
                _remove(self._folder / file.relative_to(self._folder).parts[0])
            yield file

    def close(self) -> None:
        self._journal.close()


def damaged(folder: Path, files: Mapping[str, str]) -> Iterator[Path]:
    """The first damaged file of each output of a stage in a folder: one whose sha256 differs from that in ``files``, or
    from that in the index beside it. Learned codes that are gone have been written into the output."""
    for path in sorted(folder.glob("[!.]*")):
        names = [name for name in files if name.partition("/")[0] == path.name]
        bad_file = next((folder / name for name in names if not _is_sound(folder / name, files[name])), None)
        index = next((name for name in KINDS if (path / name).is_file()), None)
        if bad_file is None and index is not None:
            try:
                with (LearnedCodes if index == CODES_FILE else Statistics).open(path) as opened:
                    bad_file = opened.damaged_file()
            except PtqError:
                bad_file = path / index
        if bad_file is not None:
            yield bad_file


def _is_sound(file: Path, sha256: str) -> bool:
    return file.is_file() and file_sha256(file) == sha256


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
