"""The last steps of writing a checkpoint: nothing may be missing, the other files are added, everything is synced to
disk.

Reads the journals and the shards' headers, never weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from ptqpipe.checkpoint.files import INDEX_NAME
from ptqpipe.checkpoint.header import pread_exactly, shown
from ptqpipe.checkpoint.journal import read_journals
from ptqpipe.checkpoint.layout import ShardLayout
from ptqpipe.checkpoint.partial import Paths, fsync_folder, output_errors
from ptqpipe.errors import CheckpointError, OutputError, arg, first_line, read_failure

_COPY_BYTES: Final = 4 * 2**20


def check_units(paths: Paths, layout: ShardLayout, expected_units: Iterable[str]) -> None:
    """Raises OutputError unless every unit is journalled and every planned tensor is on disk in full."""
    content = read_journals(paths.partial)
    missing = [unit for unit in expected_units if unit not in content.units]
    if missing:
        raise OutputError(
            f"{shown(str(paths.partial))} lacks {len(missing)} units, the first {shown(missing[0])}; "
            f"{arg('resume', True)} does them"
        )
    names = (spec.name for shard in layout.shards for spec in shard.tensors)
    for number, name in enumerate(names):
        if number not in content.tensors and layout.entries[name].nbytes:
            raise OutputError(f"tensor {shown(name)} was planned but never written in full; this is a bug, report it")


def check_shards(paths: Paths, layout: ShardLayout) -> None:
    """Every shard has its size and its header. One that holds empty tensors alone is made here."""
    for shard in layout.shards:
        path = paths.growing / shard.file
        with output_errors(path):
            if len(shard.header) == shard.file_bytes:
                _write_file(path, [shard.header])
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = pread_exactly(file.fileno(), len(shard.header), 0)
        if size != shard.file_bytes or head != shard.header:
            raise OutputError(
                f"{shown(str(path))} has been changed from outside ({size} bytes, expected {shard.file_bytes}); "
                f"{arg('overwrite', True)} starts over"
            )
        _open_as_readers_do(path)


def _open_as_readers_do(path: Path) -> None:
    """Opens a finished weight file by the safetensors library, which checks header and offsets and reads no weight."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise OutputError(
            f"{shown(str(path))} is not what the safetensors library can open ({first_line(error)}); this is a bug, "
            "report it"
        ) from None


def add_files(
    paths: Paths,
    layout: ShardLayout,
    *,
    contents: Mapping[str, bytes],
    copy: Sequence[tuple[Path, str]],
    names: Sequence[str],
) -> None:
    """Writes the index and the other files next to the shards, and syncs them and their folders."""
    folder = paths.growing
    with output_errors(folder):
        _remove_others(folder, keep=frozenset(shard.file for shard in layout.shards))
        if (index := layout.index_json()) is not None:
            _write_file(folder / INDEX_NAME, [index.encode()])
        for name, content in contents.items():
            _write_file(folder / name, [content])
        for source, name in copy:
            _write_file(folder / name, _chunks(source))
        parents = {parent for name in names for parent in PurePosixPath(name).parents}
        for parent in parents | {PurePosixPath(".")}:
            fsync_folder(folder / parent)


def checked_names(layout: ShardLayout, wanted: Iterable[str]) -> list[str]:
    """The names of the further files, each inside the folder, no two alike and none a weight file's."""
    names: list[str] = []
    taken = set(layout.weight_files)
    for name in wanted:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
            raise OutputError(f"{shown(name)} cannot be a file of the output, expected a path inside it")
        if str(path) in taken:
            raise OutputError(f"{shown(name)} would be written twice; rename the one in the source folder")
        taken.add(str(path))
        names.append(str(path))
    return names


def _remove_others(folder: Path, *, keep: frozenset[str]) -> None:
    """Removes files that an interrupted `finish` left, possibly of another layout."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()


def _chunks(source: Path) -> Iterable[bytes]:
    """A source file in pieces; failing to read it is the source's fault, not the output's."""
    try:
        with open(source, "rb") as file:
            while chunk := file.read(_COPY_BYTES):
                yield chunk
    except OSError as error:
        raise CheckpointError(f"{shown(str(source))} cannot be read: {read_failure(error)}") from None


def _write_file(path: Path, chunks: Iterable[bytes]) -> None:
    """A whole small file, on disk when this returns. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
