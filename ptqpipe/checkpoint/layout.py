"""Decides where every byte of the output will lie, from names, dtypes and shapes, before anything is written.

The layout depends on the plan alone, not on what writes the bytes, nor on how many machines: one process or sixteen
write the same files. Tensors keep the order given; only where that order would put an element off its natural
alignment, that shard is sorted by element size, largest first (the order of the safetensors library, without its sort
by name).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.checkpoint.files import INDEX_NAME, SINGLE_NAME
from ptqpipe.checkpoint.header import FileHeader, TensorEntry, header_bytes, header_of, quoted, shown, tensor_bytes
from ptqpipe.errors import OutputError, UsageError, arg

MIN_SHARD_BYTES: Final = 256 * 2**20
MAX_SHARD_BYTES: Final = 4 * 2**30
_DEFAULT_SHARDS: Final = 32
#: Loaders look for this to tell PyTorch's layout from Flax's.
METADATA: Final[Mapping[str, str]] = MappingProxyType({"format": "pt"})


class TensorSpec(NamedTuple):
    """A tensor that will be written: its name, safetensors dtype string and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the output: its tensors in the order of their bytes, and its exact header."""

    file: str
    tensors: tuple[TensorSpec, ...]
    header: bytes
    file_bytes: int


def default_shard_bytes(total_bytes: int) -> int:
    """About 32 shards, each of 256 MiB to 4 GiB: enough to divide among machines, however many there are."""
    return min(max(-(-total_bytes // _DEFAULT_SHARDS), MIN_SHARD_BYTES), MAX_SHARD_BYTES)


@dataclass(frozen=True)
class ShardLayout:
    """The files of a checkpoint, to the byte. ``group_shards[i]`` are the shards that hold group i."""

    shards: tuple[Shard, ...]
    group_shards: tuple[tuple[int, ...], ...]
    total_bytes: int

    @classmethod
    def plan(cls, groups: Sequence[Sequence[TensorSpec]], *, shard_bytes: int | None = None) -> ShardLayout:
        """Fills shards of at most ``shard_bytes`` of weights with whole groups, in order.

        A group larger than that gets shards of its own; a tensor is never split. None means `default_shard_bytes`.
        Raises OutputError for no tensors, a name that is written twice, or a spec that no reader would take.
        """
        sizes = _checked_sizes(groups)
        total = sum(sizes.values())
        limit = default_shard_bytes(total) if shard_bytes is None else shard_bytes
        if limit < 1:
            raise UsageError(f"{arg('shard_size', limit)} cannot hold anything; write a size such as 2GB")
        contents, group_shards = _fill(groups, sizes, limit)
        return cls._of(contents, group_shards, sizes)

    @classmethod
    def with_borders(cls, groups: Sequence[Sequence[TensorSpec]], *, shard_of: Sequence[int]) -> ShardLayout:
        """Group i goes to shard ``shard_of[i]`` (ascending from 0, without gaps), whatever their sizes.

        Raises OutputError as `plan` does.
        """
        sizes = _checked_sizes(groups)
        contents: list[list[TensorSpec]] = [[] for _ in range(max(shard_of) + 1)]
        for group, shard in zip(groups, shard_of, strict=True):
            contents[shard].extend(group)
        return cls._of(contents, tuple((shard,) for shard in shard_of), sizes)

    @classmethod
    def _of(
        cls,
        contents: Sequence[Sequence[TensorSpec]],
        group_shards: tuple[tuple[int, ...], ...],
        sizes: Mapping[str, int],
    ) -> ShardLayout:
        count = len(contents)
        shards = []
        for i, tensors in enumerate(contents):
            name = SINGLE_NAME if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            shards.append(_make_shard(name, tensors, sizes))
        return cls(tuple(shards), group_shards, sum(sizes.values()))

    @cached_property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Place of each tensor's bytes, in the folder of the output. Computed on first use: a dry run of 100,000
        tensors needs none."""
        entries: dict[str, TensorEntry] = {}
        for shard in self.shards:
            file, offset = Path(shard.file), len(shard.header)
            for name, dtype, shape in shard.tensors:
                entries[name] = TensorEntry(name, dtype, shape, file, offset, tensor_bytes(dtype, shape))
                offset += entries[name].nbytes
        return MappingProxyType(entries)

    @cached_property
    def file_bytes(self) -> int:
        """Bytes of all weight files with their headers, and of the index."""
        return sum(s.file_bytes for s in self.shards) + len(self._index_text(self._index_lines().values()).encode())

    @cached_property
    def digest(self) -> str:
        """sha256 of every header and file name: equal layouts write equal bytes at equal places."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(f"{shard.file}\0{shard.file_bytes}\0".encode() + shard.header)
        return digest.hexdigest()

    def index_json(self) -> str | None:
        """The text of ``model.safetensors.index.json``; None for a single file, which needs none."""
        lines = self._index_lines()
        return self._index_text(lines[name] for name in sorted(lines)) or None

    def _index_lines(self) -> dict[str, str]:
        files = [(quoted(shard.file), shard.tensors) for shard in self.shards if len(self.shards) > 1]
        return {spec.name: f"    {quoted(spec.name)}: {file}" for file, tensors in files for spec in tensors}

    def _index_text(self, lines: Iterable[str]) -> str:
        if len(self.shards) == 1:
            return ""
        # `json.dumps` with an indent takes a second for 90,000 names.
        text = json.dumps({"metadata": {"total_size": self.total_bytes}, "weight_map": {}}, indent=2)
        return text.replace("{}", "{\n" + ",\n".join(lines) + "\n  }") + "\n"

    def headers(self, folder: Path) -> tuple[FileHeader, ...]:
        """The headers of the files, as they would be found in ``folder``."""
        return tuple(header_of(folder / shard.file, shard.tensors, METADATA) for shard in self.shards)

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Names of the weight files, and of the index if there is one."""
        return (*(s.file for s in self.shards), *([INDEX_NAME] if len(self.shards) > 1 else []))

    def assign(self, world: int) -> list[list[int]]:
        """Whole shards for each of ``world`` ranks, the largest first to the least loaded (LPT).

        The shards that one group shares go to one rank. Deterministic: ties go to the earlier shard and the lower rank.
        Each list is ascending.
        """
        if world < 1:
            raise ValueError(f"{len(self.shards)} shards among {world} ranks")
        cost = [shard.file_bytes for shard in self.shards]
        bundles = self._bundles()
        load = [0] * world
        ranks: list[list[int]] = [[] for _ in range(world)]
        for bundle in sorted(bundles, key=lambda b: (-sum(cost[i] for i in b), b)):
            rank = min(range(world), key=lambda r: (load[r], r))
            ranks[rank].extend(bundle)
            load[rank] += sum(cost[i] for i in bundle)
        return [sorted(shards) for shards in ranks]

    def group_ranks(self, world: int) -> list[int]:
        """The rank that writes each group, by `assign`; a group without tensors belongs to rank 0."""
        owner = {shard: rank for rank, shards in enumerate(self.assign(world)) for shard in shards}
        return [owner[shards[0]] if shards else 0 for shards in self.group_shards]

    def _bundles(self) -> list[tuple[int, ...]]:
        """Sets of shards that must stay together: a split group's are its own, so no sets overlap."""
        split = [shards for shards in self.group_shards if len(shards) > 1]
        together = {shard for shards in split for shard in shards}
        return split + [(i,) for i in range(len(self.shards)) if i not in together]


def _checked_sizes(groups: Iterable[Iterable[TensorSpec]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for group in groups:
        for spec in group:
            if spec.name in sizes:
                raise OutputError(f"tensor {shown(spec.name)} would be written twice; two sources map to one name")
            try:
                sizes[spec.name] = tensor_bytes(spec.dtype, spec.shape)
            except ValueError as error:
                raise OutputError(f"tensor {shown(spec.name)} cannot be written: {error}") from None
    if not sizes:
        raise OutputError("there are no tensors to write; check the source and the recipe")
    return sizes


def _fill(
    groups: Sequence[Sequence[TensorSpec]], sizes: Mapping[str, int], limit: int
) -> tuple[list[list[TensorSpec]], tuple[tuple[int, ...], ...]]:
    """The tensors of each shard, and the shards of each group."""
    contents: list[list[TensorSpec]] = []
    group_shards: list[tuple[int, ...]] = []
    room = 0  # bytes left in the last shard; -1 after a split group, whose shards take nothing else, however small
    for group in groups:
        size = sum(sizes[spec.name] for spec in group)
        if not group:
            group_shards.append(())
            continue
        if size <= limit:
            if size > room or not contents:
                contents.append([])
                room = limit
            contents[-1].extend(group)
            group_shards.append((len(contents) - 1,))
            room -= size
            continue
        first = len(contents)
        for spec in group:
            if len(contents) == first or sizes[spec.name] > room:
                contents.append([])
                room = limit
            contents[-1].append(spec)
            room = max(room - sizes[spec.name], 0)
        group_shards.append(tuple(range(first, len(contents))))
        room = -1
    return contents, tuple(group_shards)


def _element_bytes(spec: TensorSpec) -> int:
    return DTYPES[spec.dtype][1] if spec.dtype in DTYPES else 1


def _make_shard(name: str, tensors: Sequence[TensorSpec], sizes: Mapping[str, int]) -> Shard:
    position, aligned = 0, True
    for spec in tensors:
        aligned = aligned and position % _element_bytes(spec) == 0
        position += sizes[spec.name]
    ordered = tuple(tensors) if aligned else tuple(sorted(tensors, key=_element_bytes, reverse=True))  # stable
    try:
        header = header_bytes(ordered, METADATA)
    except (ValueError, UnicodeEncodeError) as error:
        raise OutputError(f"{name} cannot be written: {shown(str(error))[1:-1]}") from None
    return Shard(name, ordered, header, len(header) + position)
