"""The journal of an unfinished output: one append-only file per rank; each line is a batch that was synced before it.

A line is JSON with the CRC-32 of its own content. Since a batch is one line, and the next is written only after
the last one is on disk, a crash can damage the last line alone: a damaged tail is forgotten (its units are done
again, with the same bytes), damage before it is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ptqpipe.checkpoint.header import shown
from ptqpipe.errors import OutputError, arg, read_failure

VERSION: Final = 3  # of 3: the sha256 of what a unit has written
_IDENTITY: Final = ("run_id", "layout", "parts", "files", "replaces")
_NAME: Final = re.compile(r"journal-(\d+)\.jsonl")
fdatasync = getattr(os, "fdatasync", os.fsync)  # macOS has none


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The run that a journal belongs to. ``parts``: its inputs by name, so that a message names the one that changed.

    ``files`` are the source's as one rank sees them (``CheckpointReader.file_states``): not in ``run_id``, since copies
    of a source give the same bytes, but what an unfinished run must find again.
    ``replaces`` says that the run was begun with ``overwrite``, so an output that is there may be replaced.
    """

    run_id: str
    layout: str
    parts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    replaces: bool = False


Piece = tuple[int, int, int, str]
"""A part of a tensor that was written: the tensor's number, the first byte, how many, and their sha256 in hex."""


@dataclass(slots=True)
class JournalContent:
    """One or many journals as read: records by unit, those of them that are to be done again, what each has written,
    the tensors known complete, the bytes that are sound."""

    identity: RunIdentity | None = None
    units: dict[str, dict[str, Any]] = field(default_factory=dict)
    withdrawn: set[str] = field(default_factory=set)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    tensors: set[int] = field(default_factory=set)
    sound_bytes: int = 0


def run_id_of(parts: Mapping[str, str]) -> str:
    """Identifies what decides the bytes of a run, by the sha256 of all of it: a run resumes only itself."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()


def journal_name(rank: int) -> str:
    return f"journal-{rank}.jsonl"


def read_journal(path: Path) -> JournalContent:
    """One journal, up to its last sound line. Raises OutputError for damage before that."""
    content = JournalContent()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise OutputError(f"{shown(str(path))} cannot be read: {read_failure(error)}") from None
    lines = raw.splitlines(keepends=True)
    position, damaged = 0, 0
    for number, line in enumerate(lines, start=1):
        payload = _parse_line(line)
        if payload is None:
            damaged = damaged or number
        elif damaged:
            raise OutputError(
                f"{shown(str(path))} is damaged at line {damaged} of {len(lines)}; {arg('overwrite', True)} starts over"
            )
        else:
            _apply(path, content, payload, number=number)
            content.sound_bytes = position + len(line)
        position += len(line)
    return content


def read_journals(folder: Path) -> JournalContent:
    """The union of every rank's journal in a folder, the identity from the first of them; ``sound_bytes`` is
    meaningless here.

    Raises OutputError if two of them belong to different runs.
    """
    union = JournalContent()
    try:
        names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except OSError as error:
        raise OutputError(f"{shown(str(folder))} cannot be listed: {read_failure(error)}") from None
    for path in (folder / name for name in names):
        content = read_journal(path)
        if content.identity is None:
            continue
        if union.identity is not None and content.identity.run_id != union.identity.run_id:
            raise OutputError(f"{shown(str(path))} belongs to another run; {arg('overwrite', True)} starts over")
        union.identity = union.identity or content.identity
        union.units.update(content.units)
        union.withdrawn.update(content.withdrawn)
        union.pieces.update(content.pieces)
        union.tensors.update(content.tensors)
    return union


def check_same_run(former: RunIdentity, wanted: RunIdentity, *, partial: Path) -> None:
    """Raises OutputError, naming what changed, unless both describe the same run, of the very same files."""
    if former.run_id == wanted.run_id and former.layout == wanted.layout:
        _check_same_files(former, wanted, partial=partial)
        return
    keys = sorted(former.parts.keys() | wanted.parts.keys())
    changed = [key for key in keys if former.parts.get(key) != wanted.parts.get(key)]
    what = " and ".join(changed) or ("the plan" if former.run_id != wanted.run_id else "the layout of the shards")
    raise OutputError(
        f"{shown(str(partial))} was started by another run: {what} changed since; "
        f"restore it and give {arg('resume', True)}, or {arg('overwrite', True)} to start over"
    )


def _check_same_files(former: RunIdentity, wanted: RunIdentity, *, partial: Path) -> None:
    before, now = former.files, wanted.files
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if names:
        name = shown(names[0]) + (f" (one of {len(names)} files)" if len(names) > 1 else "")
        raise OutputError(
            f"{shown(str(partial))} was started before the source's {name} was written to, replaced or copied; what is "
            "finished may come from other bytes, though its size and what the fingerprint reads are the same: "
            f"{arg('overwrite', True)} starts over"
        )


class Journal:
    """A rank's journal, open for appending. Not thread-safe: the writer holds its lock."""

    def __init__(self, path: Path, identity: RunIdentity) -> None:
        """Opens or creates the file, cuts a damaged tail off; the caller has checked the identity."""
        self._path: Final = path
        existing = read_journal(path) if path.exists() else JournalContent()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(self._fd, existing.sound_bytes)
            self._size = existing.sound_bytes
            if existing.identity is None:
                self._append({"version": VERSION, **asdict(identity)})
            os.fsync(self._fd)
        except OSError:
            os.close(self._fd)
            raise

    def append(
        self,
        units: Sequence[tuple[str, Mapping[str, Any] | None]],
        tensors: Sequence[int],
        pieces: Mapping[str, Sequence[Piece]] = MappingProxyType({}),
    ) -> None:
        """One batch, on disk when this returns. A unit whose record is None is withdrawn. Raises OSError."""
        self._append({"units": list(units), "tensors": list(tensors), "pieces": dict(pieces)})
        fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, payload: Mapping[str, Any]) -> None:
        text = json.dumps(payload, ensure_ascii=True, separators=(",", ":"))
        line = memoryview(f'{{"crc32":"{zlib.crc32(text.encode()):08x}","batch":{text}}}\n'.encode())
        size = len(line)
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError:
            os.ftruncate(self._fd, self._size)  # half a line would damage the journal for what follows it
            raise
        self._size += size


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """The batch of one line; None if the line is torn or damaged."""
    match = re.fullmatch(rb'\{"crc32":"([0-9a-f]{8})","batch":(\{.*\})\}\n', line, re.DOTALL)
    if match is None or int(match[1], 16) != zlib.crc32(match[2]):
        return None
    try:
        payload = json.loads(match[2])
    except (ValueError, RecursionError):
        return None
    return payload if isinstance(payload, dict) else None


def _apply(path: Path, content: JournalContent, payload: dict[str, Any], *, number: int) -> None:
    if number == 1:
        if payload.get("version") != VERSION:
            raise OutputError(
                f"{shown(str(path))} has version {shown(payload.get('version'))}, expected {VERSION}; "
                f"resume with the ptqpipe that began the run, or {arg('overwrite', True)} to start over"
            )
        content.identity = RunIdentity(**{key: payload[key] for key in _IDENTITY})
    else:
        for unit, record in payload["units"]:
            if record is None:
                content.withdrawn.add(unit)
            else:
                content.units[unit] = record
                content.withdrawn.discard(unit)
        content.pieces.update({unit: [tuple(one) for one in pieces] for unit, pieces in payload["pieces"].items()})
        content.tensors.update(payload["tensors"])
