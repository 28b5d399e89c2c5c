"""Reads a safetensors checkpoint: headers when opened, then any bytes of any tensor into memory of our own.

No mmap: mapped pages count as resident memory and a truncated file becomes SIGBUS instead of an error. Reads are
``pread``, so they may run in many threads at once and memory is what the caller holds. A fresh buffer costs several
times what reading into it does (the system clears and accounts every page), and so does the page cache for bytes that
are read once: who streams passes memory of its own, and gets direct I/O (``direct.py``).
This file knows names, dtypes, shapes and bytes; what they stand for is the containers' business.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, NoReturn

import torch

from ptqpipe.checkpoint import direct
from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.checkpoint.files import OWN_FILES, FolderContent, read_json_object, refuse_foreign_links, scan_folder
from ptqpipe.checkpoint.fingerprint import OF_WEIGHTS, fingerprint_of
from ptqpipe.checkpoint.header import FileHeader, TensorEntry, shown
from ptqpipe.checkpoint.hub import check_folder
from ptqpipe.checkpoint.in_memory import held_in
from ptqpipe.checkpoint.open_files import OpenFiles
from ptqpipe.errors import CheckpointError, read_failure

_CHUNK_BYTES: Final = 8 * 2**20

#: Writes the bytes of a tensor, from one on, into the whole of a buffer; called on many threads.
Fill = Callable[[TensorEntry, memoryview, int], None]

#: Given a number of bytes, a contiguous uint8 CPU tensor of that size, aligned for every dtype.
Memory = Callable[[int], torch.Tensor]


class CheckpointReader:
    """One checkpoint folder, its headers validated; use as a context manager, or `close` it.

    ``entries`` is in the order of files (natural sort) and offsets. ``config`` is config.json, empty when absent
    (``has_config``), with ``changes``. ``extra_files`` are to be carried over; ``left_out`` says what is not, and why.
    """

    def __init__(
        self,
        path: Path,
        content: FolderContent,
        *,
        fill: Fill | None = None,
        origin: CheckpointReader | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Use `open`, but for a checkpoint whose tensors lie in no file.

        fill     gives the bytes of such tensors
        origin   the checkpoint that they are made of, if there is one; is closed with this one
        changes  keys of config.json that they need otherwise
        """
        self.path: Final = path
        self._fill: Final = fill
        self._origin: Final = origin
        self.index: Final = content.index
        self.extra_files: Final = content.extra_files
        self.left_out: Final = MappingProxyType(dict(content.left_out))
        self.files: Final = tuple(h.path for h in content.headers)
        self.entries: Final[Mapping[str, TensorEntry]] = MappingProxyType(
            {entry.name: entry for header in content.headers for entry in header.entries}
        )
        self.metadata: Final[Mapping[Path, Mapping[str, str]]] = MappingProxyType(
            {header.path: header.metadata for header in content.headers}
        )
        config = self.read_json("config.json")
        self.has_config: Final = config is not None
        self.changes: Final[Mapping[str, Any]] = MappingProxyType(dict(changes or {}))
        self.config: Final[Mapping[str, Any]] = MappingProxyType({**(config or {}), **self.changes})
        self._headers: Final = {header.path: header for header in content.headers}
        self._opened: Final = OpenFiles(lambda path: direct.DirectFile(path, _open_same(path, self._headers[path])))
        self._fingerprint: str | None = None

    @property
    def nbytes(self) -> int:
        if self._origin is not None:
            return self._origin.nbytes
        return sum(entry.nbytes for entry in self.entries.values())

    @classmethod
    def open(cls, path: Path) -> CheckpointReader:
        """Reads and checks every header, the index and config.json; no weights.

        Raises CheckpointError for anything damaged or inconsistent, and for a folder without tensors.
        """
        path = Path(path)
        if not path.is_dir():
            kind = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{shown(str(path))} {kind}, expected a folder with safetensors files")
        held = held_in(path)
        if held is not None:
            return cls(path, replace(scan_folder(path), headers=held.headers), fill=held.fill)
        reader = cls(path, scan_folder(path))
        if not reader.entries:
            check_folder(path)  # which says what lies there instead
            raise CheckpointError(f"{shown(str(path))} holds no tensors in safetensors files; nothing to read")
        return reader

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, name: str, *, start: int = 0, stop: int | None = None, memory: Memory | None = None) -> torch.Tensor:
        """Rows ``[start, stop)`` of the first dimension as a CPU tensor of the stored dtype.

        Allocates, or fills ``memory`` with direct I/O when given.

        A scalar gives a 0-d tensor. Raises CheckpointError for an absent name, for a sub-byte dtype (use
        `read_bytes`), and for a file that has changed or cannot be read; ValueError for rows out of range.
        """
        entry = self._entry(name)
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"tensor {shown(name)} is {entry.dtype}, which has no torch dtype; keep it as bytes")
        rows = entry.shape[0] if entry.shape else 1
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows [{start}, {stop}) of {shown(name)} with {rows} rows")
        row_bytes = entry.nbytes // rows if rows else 0
        buffer = self.read_raw(name, start=start * row_bytes, stop=stop * row_bytes, memory=memory)
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        return buffer.view(DTYPES[entry.dtype][0]).reshape(shape)

    def read_raw(self, name: str, *, start: int, stop: int, memory: Memory | None = None) -> torch.Tensor:
        """Bytes ``[start, stop)`` of a tensor as uint8: allocated, or in ``memory`` by direct I/O."""
        entry, nbytes = self._entry(name), stop - start
        if not 0 <= start <= stop <= entry.nbytes:
            raise ValueError(f"bytes [{start}, {stop}) of {shown(name)}, {entry.nbytes} long")
        offset = entry.offset + start
        if memory is None or self._fill is not None or nbytes < direct.LEAST_BYTES or offset % 8:
            buffer = torch.empty(nbytes, dtype=torch.uint8) if memory is None else memory(nbytes)
            self._read(entry, direct.bytes_of(buffer), start)
            return buffer
        try:
            with self._opened.use(entry.file) as file:
                raw = file.read(memory(nbytes + direct.margin()), offset, nbytes)
        except OSError as error:
            _raise_unreadable(entry.file, error)
        if raw is None:
            _raise_changed(entry.file)
        return raw

    def read_into(self, name: str, buffer: memoryview | bytearray | torch.Tensor, *, start: int, stop: int) -> None:
        """Bytes ``[start, stop)`` of a tensor into the caller's contiguous buffer of exactly that size."""
        entry = self._entry(name)
        view = direct.bytes_of(buffer) if isinstance(buffer, torch.Tensor) else memoryview(buffer).cast("B")
        if not 0 <= start <= stop <= entry.nbytes or len(view) != stop - start:
            raise ValueError(f"bytes [{start}, {stop}) of {entry.nbytes} into a buffer of {len(view)}")
        self._read(entry, view, start)

    def chunks(self, name: str, *, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytearray]]:
        """(first byte, bytes) of bytes [start, stop) of a tensor, some megabytes at a time; all of it by default."""
        end = self._entry(name).nbytes if stop is None else stop
        for first in range(start, end, _CHUNK_BYTES):
            yield first, self.read_bytes(name, start=first, stop=min(first + _CHUNK_BYTES, end))

    def sha256(self, name: str, *, start: int = 0, stop: int | None = None) -> str:
        """sha256 in hex of bytes [start, stop) of a tensor, of all of it by default."""
        digest = hashlib.sha256()
        for _, raw in self.chunks(name, start=start, stop=stop):
            digest.update(raw)
        return digest.hexdigest()

    def read_bytes(self, name: str, *, start: int = 0, stop: int | None = None) -> bytearray:
        """Bytes ``[start, stop)`` of a tensor of any dtype, as they lie in the file."""
        stop = self._entry(name).nbytes if stop is None else stop
        buffer = bytearray(max(stop - start, 0))
        self.read_into(name, buffer, start=start, stop=stop)
        return buffer

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file next to the weights, such as hf_quant_config.json; None when there is no such file."""
        path = self.path / name
        return read_json_object(path, strict=False) if os.path.lexists(path) else None

    def fingerprint(self) -> str:
        """64 hex digits that are the same for every copy of this checkpoint: see ``fingerprint.py`` for what is read.

        Found once. Raises CheckpointError for a file that has changed or cannot be read.
        """
        if self._fingerprint is None:
            self._fingerprint = self._find_fingerprint()
        return self._fingerprint

    def has_weights_of(self, fingerprint: str) -> bool:
        """Whether a fingerprint is of a checkpoint with the weights of this one, whatever its config.json is."""
        return fingerprint[:OF_WEIGHTS] == self.fingerprint()[:OF_WEIGHTS]

    def check_links(self) -> None:
        """CheckpointError if a file that would be carried over, or a config, is a link out of the model's folder."""
        configs = [path for name in sorted(OWN_FILES) if (path := self.path / name).exists()]
        refuse_foreign_links(self.path, [*self.extra_files, *configs], weights=self.files)

    def _find_fingerprint(self) -> str:
        headers = list(self._headers.values())
        try:
            return fingerprint_of(
                self.path, headers, lambda e, start, stop: self.read_bytes(e.name, start=start, stop=stop)
            )
        except OSError as error:
            _raise_unreadable(Path(error.filename or self.path), error)

    def file_states(self) -> dict[str, str]:
        """By each weight file's name: its size and times as it was opened, which differ once it is written to or
        replaced.

        The time of the inode's change (ctime) is among them: no program can set it, as it can set the other. Numbers
        of inodes and devices are not: they differ from machine to machine, and some file systems give new ones with
        every mount.
        """
        if self._origin is not None:
            return self._origin.file_states()
        return {
            path.relative_to(self.path).as_posix(): f"{h.file_bytes} bytes, mtime {h.mtime_ns}, ctime {h.ctime_ns}"
            for path, h in self._headers.items()
        }

    def check_unchanged(self) -> None:
        """Raises CheckpointError if a weight file's size or modification time differs from when it was opened.

        Where only its inode was touched (chmod, a hard link, a time put back), what the fingerprint reads decides.
        """
        if self._origin is not None:
            self._origin.check_unchanged()
        if self._fill is not None:
            return
        touched = False
        for path, header in self._headers.items():
            try:
                status = os.stat(path)
            except OSError as error:
                _raise_unreadable(path, error)
            if (status.st_size, status.st_mtime_ns) != (header.file_bytes, header.mtime_ns):
                _raise_changed(path)
            touched |= status.st_ctime_ns != header.ctime_ns
        if touched and self._fingerprint is not None:
            self.close()  # what is open may be a file that another one has taken the name of
            if self._find_fingerprint() != self._fingerprint:
                _raise_changed(self.path)

    def close(self) -> None:
        """Closes the files. Reading again opens them again."""
        if self._origin is not None:
            self._origin.close()
        self._opened.close()

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.entries[name]
        except KeyError:
            raise CheckpointError(f"{shown(str(self.path))} has no tensor {shown(name)}") from None

    def _read(self, entry: TensorEntry, view: memoryview, start: int) -> None:
        """Fills ``view`` from byte ``start`` of the tensor; reads by many threads do not meet."""
        if not len(view):
            return
        if self._fill is not None:
            self._fill(entry, view, start)
            return
        try:
            with self._opened.use(entry.file) as file:
                whole = file.read_cached(view, entry.offset + start)
        except OSError as error:
            _raise_unreadable(entry.file, error)
        if not whole:
            _raise_changed(entry.file)


def _open_same(path: Path, header: FileHeader) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _raise_unreadable(path, error)
    status = os.fstat(fd)
    if (status.st_size, status.st_mtime_ns) != (header.file_bytes, header.mtime_ns):
        os.close(fd)
        _raise_changed(path)
    return fd


def _raise_unreadable(path: Path, error: OSError) -> NoReturn:
    raise CheckpointError(f"{shown(str(path))} cannot be read: {read_failure(error)}") from None


def _raise_changed(path: Path) -> NoReturn:
    raise CheckpointError(f"{shown(str(path))} has changed since it was opened; leave the source alone and start again")
