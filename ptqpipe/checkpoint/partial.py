"""The hidden folder in which an output is written: its lock, its journals, and its files before they are renamed.

    .NAME.partial/lock-<rank>           held by the process that writes
    .NAME.partial/journal-<rank>.jsonl  what is on disk
    .NAME.partial/out/                  becomes NAME by one rename
    .NAME.stages/                       what earlier stages of the same command have made, until it is done
    .NAME.partial/old/                  the former NAME, from just before that rename to just after it
    .NAME.gone/                         what either was, once nothing of it is needed, until it is deleted

A crash at any point leaves the former NAME, or the new one, or (between two renames of an output that is replaced) the
former in ``old/``, which the next run puts back. Whatever is left, a resumed run goes on from it or says that the
output is complete: a folder that is done is renamed before it is emptied, so that no half of one is taken for an
unfinished run, and one without a journal, or without ``out/``, is treated as if it were not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn

from ptqpipe.checkpoint.files import RECORD_FILE
from ptqpipe.checkpoint.header import shown
from ptqpipe.checkpoint.journal import (
    JournalContent,
    RunIdentity,
    check_same_run,
    journal_name,
    read_journal,
    read_journals,
)
from ptqpipe.checkpoint.lock import RankLock, lock_folder, refuse_held
from ptqpipe.checkpoint.regular_file import read_json
from ptqpipe.errors import AlreadyComplete, OutputError, OutputExists, WrongOutput, arg, write_failure
from ptqpipe.run.quantities import disk_size

#: Folders that hold .safetensors and are no models, by the file that each has.
KINDS: Final = MappingProxyType({"stats.json": "statistics", "rounding.json": "learned codes"})


@contextlib.contextmanager
def output_errors(what: Path) -> Iterator[None]:
    """Turns an OSError into an OutputError of one line that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{shown(str(what), limit=400)} cannot be written: {write_failure(error)}") from None


def fsync_folder(folder: Path) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Paths:
    """The output's path, and the hidden paths next to it."""

    out: Path

    @classmethod
    def of(cls, out: Path) -> Paths:
        """Resolves links, so that the rename happens where the data are. Raises OutputError for a root folder, and for
        a path that leads through a file or nowhere."""
        try:
            resolved = Path(out).expanduser().resolve()
            file = next((parent for parent in resolved.parents if parent.exists() and not parent.is_dir()), None)
        except (OSError, RuntimeError, ValueError) as error:  # a long name, an unknown user's home, links in a circle
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise WrongOutput(
                f"{shown(str(out))} cannot be the output: {reason}; choose another {arg('out')}"
            ) from None
        if file is not None:
            raise WrongOutput(
                f"{shown(str(file))} is a file, {shown(str(out))} cannot be created in it; choose another {arg('out')}"
            )
        if not resolved.name:
            raise WrongOutput(
                f"{shown(str(out))} cannot be the output, it is the root folder; choose another {arg('out')}"
            )
        return cls(resolved)

    @property
    def partial(self) -> Path:
        return self.out.parent / f".{self.out.name}.partial"

    @property
    def stages(self) -> Path:
        """Folder of intermediate results of a pipeline run."""
        return self.out.parent / f".{self.out.name}.stages"

    @property
    def gone(self) -> Path:
        """The name under which either is deleted."""
        return self.out.parent / f".{self.out.name}.gone"

    @property
    def growing(self) -> Path:
        return self.partial / "out"

    @property
    def old(self) -> Path:
        return self.partial / "old"


def completed_run(out: Path, *, index_file: str | None = None) -> str | None:
    """The run that wrote a complete output; None if there is no output, or no record of its run.

    index_file  the file whose "run_id" says it; None for a model, where the record does
    """
    index = read_json(Path(out) / (index_file or RECORD_FILE))
    run_id = index.get("run_id") if isinstance(index, dict) else None
    return run_id if isinstance(run_id, str) else None


def check_unfinished(out: Path, run_id: str, *, index_file: str | None = None) -> None:
    """Raises AlreadyComplete if this very run has produced ``out`` and nothing was begun beside it since."""
    paths = Paths.of(out)
    clear(paths)
    if not paths.growing.exists() and completed_run(paths.out, index_file=index_file) == run_id:
        with contextlib.suppress(OutputError):  # whoever is at it removes it
            abandon(paths)
        _refuse_complete(paths)


def _refuse_complete(paths: Paths) -> NoReturn:
    said = f"{shown(str(paths.out))} is already complete, by this very run; nothing is left to do"
    raise AlreadyComplete(said, paths.out)


def check_place(out: Path) -> None:
    """Raises OutputError where no folder ``out`` can be made, by making a file without a name where it will lie. A
    command asks before any work; `prepare` asks as well. WrongOutput for the working folder, or one that it lies in:
    the output takes its place, and what is there by a relative name is then no longer found."""
    with contextlib.suppress(FileNotFoundError):  # the working folder is already another one
        if Path.cwd().is_relative_to(Paths.of(out).out):
            raise WrongOutput(
                f"{shown(str(out))} is the working folder or holds it, and the output would replace it; choose another "
                f"{arg('out')}, a name in it or beside it"
            )
    place = next(parent for parent in Paths.of(out).out.parents if parent.is_dir())
    with output_errors(place):
        try:
            tempfile.TemporaryFile(dir=place).close()
        except FileNotFoundError:  # of a file system that is made by the kernel
            raise WrongOutput(
                f"{shown(str(place))} is not writable, {shown(str(out))} cannot be created in it; choose "
                f"another {arg('out')}"
            ) from None


def check_output(out: Path, *, mode: str) -> None:
    """Raises the OutputError of `prepare` for what lies at ``out`` or beside it. Changes nothing and takes no lock, so
    that a command can ask before it says what it will do.
    """
    check_place(out)
    paths = Paths.of(out)
    _refuse_running(paths)
    if mode == "overwrite":
        _refuse_replacing(paths, None)
    if mode == "new":
        _refuse_existing(paths)
        if has_begun(paths):
            _refuse_unfinished(paths)


def has_begun(paths: Paths) -> bool:
    """Whether an unfinished run has left something that it would go on from."""
    return paths.growing.exists() and read_journals(paths.partial).identity is not None


def _refuse_running(paths: Paths) -> None:
    """Before anything else is said: what holds of a run that was killed is no advice for one that is alive."""
    for folder in (paths.stages, paths.partial):
        refuse_held(folder)


def _refuse_unfinished(paths: Paths) -> NoReturn:
    raise OutputExists(
        f"{shown(str(paths.partial))} is left from an unfinished run; {arg('resume', True)} continues it, "
        f"{arg('overwrite', True)} discards it"
    )


def prepare(
    paths: Paths, identity: RunIdentity, *, mode: str, index_file: str | None = None
) -> tuple[RankLock, RunIdentity | None]:
    """Rank 0's first step: refuse or accept what exists at OUT and next to it, lock, and make the folders.

    index_file  the file that tells a complete output of this kind from other folders; None for a model

    Raises OutputError for an output or a leftover that ``mode`` does not allow, for another run's leftover, and while
    another process writes this output, or the stages before it.
    """
    _refuse_running(paths)
    clear(paths)
    if not paths.partial.is_dir():
        _refuse_out(paths, identity, mode=mode, index_file=index_file)
    elif mode == "overwrite":
        _refuse_replacing(paths, index_file)
    check_place(paths.out)
    with output_errors(paths.partial):
        lock = lock_folder(paths.partial)
    try:
        with output_errors(paths.partial):
            journals = _settle(paths, identity, lock, mode=mode, index_file=index_file)
            paths.growing.mkdir(exist_ok=True)
            fsync_folder(paths.partial)
            fsync_folder(paths.out.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            if not any(paths.partial.glob("journal-*")):  # nothing was begun
                discard(paths, paths.partial)
        lock.release()
        raise
    return lock, journals.identity


def _settle(
    paths: Paths, identity: RunIdentity, lock: RankLock, *, mode: str, index_file: str | None
) -> JournalContent:
    """While the lock is held: put a former output back, then continue or discard the contents of the partial folder."""
    _put_back(paths)
    journals = JournalContent() if mode == "overwrite" else read_journals(paths.partial)
    if journals.identity is None or not paths.growing.exists():  # nothing was begun, or all of it has its name
        empty(paths.partial, keep=lock.name)
        _refuse_out(paths, identity, mode=mode, index_file=index_file)
        return JournalContent()
    if mode == "new":
        _refuse_unfinished(paths)
    check_same_run(journals.identity, identity, partial=paths.partial)
    if not journals.identity.replaces:
        _refuse_existing(paths)
    return journals


def _put_back(paths: Paths) -> None:
    """A run that was killed between two renames of an output that is replaced has left no output under its name."""
    if paths.old.exists() and paths.growing.exists() and not paths.out.exists():
        paths.old.rename(paths.out)


def abandon(paths: Paths) -> None:
    """Discards what an unfinished run has left beside the output, which stays. OutputError while one writes it."""
    with output_errors(paths.partial):
        if paths.partial.is_dir():
            lock = lock_folder(paths.partial)
            try:
                _put_back(paths)
                discard(paths, paths.partial)
            finally:
                lock.release()


def discard(paths: Paths, folder: Path) -> None:
    """Removes a folder beside the output of which nothing is needed any more. Raises OSError."""
    clear(paths)
    folder.rename(paths.gone)
    fsync_folder(paths.out.parent)
    clear(paths)


def clear(paths: Paths) -> None:
    """Removes what a killed run, or one that is doing it at this moment, has renamed in order to remove it."""
    shutil.rmtree(paths.gone, ignore_errors=True)


def join(paths: Paths, identity: RunIdentity, rank: int) -> tuple[RankLock, RunIdentity]:
    """A further rank's part of the folder that rank 0 has prepared. Each rank looks for the source's files as it found
    them itself: those of several machines may be copies.
    """
    begun = (read_journals(paths.partial) if paths.partial.is_dir() else JournalContent()).identity
    if begun is None:
        raise OutputError(
            f"{shown(str(paths.partial))} was not started by rank 0; do all ranks see the same file system?"
        )
    own = paths.partial / journal_name(rank)
    former = read_journal(own).identity if own.exists() else None
    begun = replace(begun, files=identity.files if former is None else former.files)
    check_same_run(begun, identity, partial=paths.partial)
    with output_errors(paths.partial):
        return RankLock(paths.partial, rank), begun


def check_space(paths: Paths, needed: int) -> None:
    """Raises OutputError unless the bytes still to be allocated fit on the disk."""
    with output_errors(paths.partial):
        have = sum(p.stat().st_blocks * 512 for p in paths.growing.rglob("*") if p.is_file())
        free = shutil.disk_usage(paths.partial).free
    if needed - have > free:
        raise OutputError(
            f"{shown(str(paths.out.parent))} has {disk_size(free)} free, "
            f"the output needs {disk_size(needed - have)} more; free some space, or choose another {arg('out')}"
        )


def publish(paths: Paths, *, replace: bool, index_file: str | None = None) -> None:
    """Gives the complete output its name, the former one kept aside until then, and removes the partial folder.

    Raises OutputError if there is a former one and it may not be replaced.
    """
    if replace:
        _refuse_replacing(paths, index_file)
    else:
        _refuse_existing(paths)
    with output_errors(paths.out):
        if paths.out.exists() and any(paths.out.iterdir()):
            if paths.old.exists():
                shutil.rmtree(paths.old)
            paths.out.rename(paths.old)
        paths.growing.rename(paths.out)
        fsync_folder(paths.out.parent)
        fsync_folder(paths.partial)
        discard(paths, paths.partial)


def empty(folder: Path, *, keep: str) -> None:
    """Removes everything but the lock, files (the journals) before folders, so that no journal outlives its data."""
    for path in sorted(folder.iterdir(), key=lambda p: p.is_dir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != keep:
            path.unlink()


def _refuse_out(paths: Paths, identity: RunIdentity, *, mode: str, index_file: str | None) -> None:
    """Where no run was begun beside it: raises for what lies at OUT and ``mode`` does not allow."""
    if mode == "new":
        _refuse_existing(paths)
    elif mode == "overwrite":
        _refuse_replacing(paths, index_file)
    else:
        _refuse_resume(paths, identity, index_file)


def _refuse_existing(paths: Paths) -> None:
    out = paths.out
    with output_errors(out):
        if out.is_dir() and any(out.iterdir()):
            raise OutputExists(
                f"{shown(str(out))} exists and is not empty; {arg('overwrite', True)} replaces it, "
                f"or choose another {arg('out')}"
            )
    if out.exists() and not out.is_dir():
        raise OutputExists(f"{shown(str(out))} is a file, expected a folder or nothing; choose another {arg('out')}")


def _kind(names: Sequence[str]) -> str | None:
    """The kind of a folder by its file names; None for one that ptqpipe neither writes nor reads."""
    for index_file, kind in KINDS.items():
        if index_file in names:
            return kind
    weights = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    return "a model" if weights else None


def _refuse_replacing(paths: Paths, index_file: str | None) -> None:
    """Raises OutputError unless what lies at OUT is of the kind that replaces it: ``overwrite`` deletes it whole."""
    out = paths.out
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        _refuse_existing(paths)
    with output_errors(out):
        names = os.listdir(out)
    shown_out = shown(str(out))
    kind, wanted = _kind(names), "a model" if index_file is None else KINDS[index_file]
    if names and kind != wanted:
        what = f"is {kind}" if kind else f"has {shown(min(names))}"
        raise OutputExists(
            f"{shown_out} {what}, so it is no {wanted.removeprefix('a ')} that {arg('overwrite', True)} may replace; "
            f"choose another {arg('out')}, or move that folder away yourself"
        )
    for name, path in (("your home folder", Path.home()), ("the working folder", Path.cwd())):
        if out == path.resolve() or out in path.resolve().parents:
            raise OutputExists(
                f"{shown_out} is, or holds, {name}; {arg('overwrite', True)} does not delete that, "
                f"choose another {arg('out')}"
            )


def _refuse_resume(paths: Paths, identity: RunIdentity, index_file: str | None) -> None:
    """Raises where nothing is left to resume and something lies at OUT; else the run starts from its beginning."""
    if completed_run(paths.out, index_file=index_file) == identity.run_id:
        _refuse_complete(paths)
    if paths.out.exists() and (not paths.out.is_dir() or any(paths.out.iterdir())):
        raise WrongOutput(
            f"{shown(str(paths.out))} has no unfinished run next to it and is no output of this run; "
            f"{arg('overwrite', True)} replaces it, or choose another {arg('out')}"
        )
