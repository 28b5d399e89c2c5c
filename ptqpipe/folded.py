"""A float checkpoint with factors folded into its weights while they are read: what `transform` writes, without a copy.

A folding is described by the factors of each edge (`encoded`), a few numbers for every channel of the model. They lie
in a folder of their own (``ptqpipe-folding.json``, which names the model), and in the record of what was quantized
behind them. Tensors have the names, dtypes, order and bytes of transform's float32 checkpoint; files and config are the
model's own. Knows readers and foldings; must not know how factors are found.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ptqpipe.checkpoint import (
    FOLDING_FILE,
    CheckpointReader,
    FolderContent,
    ShardLayout,
    TensorEntry,
    TensorSpec,
    bytes_of,
    read_json_object,
)
from ptqpipe.dtypes import DTYPES
from ptqpipe.errors import CheckpointError
from ptqpipe.transforms import Edge, Op, apply, find_structure, grouped, move_factors

RUN_ELEMENTS = 1 << 20  # a run is computed in float64
_DTYPE = "F32"  # of the tensors that change


def encoded(factors: torch.Tensor) -> str:
    """Factors float64 [channels] as text: base64 of their little-endian bytes."""
    return base64.b64encode(factors.to(torch.float64).numpy().astype("<f8").tobytes()).decode("ascii")


def _decoded(text: object, edge: Edge) -> torch.Tensor:
    """float64 [channels]. CheckpointError for what `encoded` did not write for this edge."""
    try:
        raw = bytearray(base64.b64decode(str(text), validate=True))
    except binascii.Error:
        raw = bytearray()
    if len(raw) != 8 * edge.channels:
        raise CheckpointError(f"the factors of '{edge.id}' are damaged, expected {edge.channels} numbers in base64")
    factors = torch.frombuffer(raw, dtype=torch.float64)
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise CheckpointError(f"the factors of '{edge.id}' are not all positive numbers; they are damaged")
    return factors


def open_folded(folder: Path) -> CheckpointReader:
    """The model that a folder of factors names, with them folded in.

    CheckpointError where it cannot be read, or is another one by now.
    """
    described = read_json_object(folder / FOLDING_FILE)
    model = described.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("path"), str):
        raise CheckpointError(f"{folder / FOLDING_FILE} names no model; it is damaged, make it again")
    base = CheckpointReader.open(Path(model["path"]))
    try:
        if base.fingerprint() != model.get("fingerprint"):
            raise CheckpointError(f"{base.path} is not the model that {folder} has factors of; make them again")
        return folded(base, described.get("foldings"))
    except BaseException:
        base.close()
        raise


def folded(base: CheckpointReader, foldings: object) -> CheckpointReader:
    """A plain checkpoint with factors folded into it; who closes it closes ``base``.

    foldings  a list with the edge and the factors (`encoded`) of each; without factors where nothing is changed

    CheckpointError for foldings of another model.
    """
    tensors = {name: (entry.dtype, entry.shape) for name, entry in base.entries.items()}
    edges = {edge.id: edge for edge in find_structure(tensors, base.config).edges}
    ops: dict[str, list[Op]] = {}
    used: list[list[str]] = []
    for folding in foldings if isinstance(foldings, list) else [foldings]:
        if not isinstance(folding, Mapping) or str(folding.get("edge")) not in edges:
            raise CheckpointError(
                f"the factors are of a place that {base.path} does not have; they are another model's"
            )
        edge = edges[str(folding["edge"])]
        used.append(edge.tensors())
        for name in used[-1]:
            ops.setdefault(name, [])
        if "factors" in folding:
            for name, op in move_factors(edge, _decoded(folding["factors"], edge)):
                ops[name].append(op)
    groups = [
        [TensorSpec(name, _DTYPE if name in ops else tensors[name][0], tensors[name][1]) for name in group]
        for group in grouped(tensors, used).values()
    ]
    headers = ShardLayout.plan(groups).headers(base.path)
    content = FolderContent(headers, base.index, base.extra_files, base.left_out)
    return CheckpointReader(base.path, content, fill=_Folding(base, ops).fill, origin=base)


@dataclass(frozen=True, slots=True)
class _Folding:
    """What is folded into the tensors of ``base``: by name, for every tensor that is float32 now."""

    base: CheckpointReader
    ops: Mapping[str, Sequence[Op]]

    def fill(self, entry: TensorEntry, view: memoryview, start: int) -> None:
        """Writes the tensor's bytes from ``start`` on into the whole of a buffer."""
        stop = start + len(view)
        if entry.name not in self.ops:
            self.base.read_into(entry.name, view, start=start, stop=stop)
            return
        out = torch.frombuffer(view, dtype=torch.uint8)
        width = entry.nbytes // _tall(entry)
        for first, last in _runs(entry, start // width, -(-stop // width)):
            made = torch.frombuffer(bytes_of(self._rows(entry, first, last)), dtype=torch.uint8)
            low, high = max(first * width, start), min(last * width, stop)
            out[low - start : high - start].copy_(made[low - first * width : high - first * width])

    def _rows(self, entry: TensorEntry, first: int, last: int) -> torch.Tensor:
        """float32 rows [first, last) of the tensor seen as one tall matrix, all of them of one plane of a stack."""
        source, tall = self.base.entries[entry.name], _tall(entry)
        width = source.nbytes // tall
        raw = self.base.read_raw(entry.name, start=first * width, stop=last * width).view(DTYPES[source.dtype][0])
        rows = raw if len(entry.shape) == 1 else raw.reshape(last - first, entry.shape[-1])
        plane = tall // entry.shape[0] if len(entry.shape) == 3 else None
        expert, row = (None, first) if plane is None else divmod(first, plane)
        return apply(rows, self.ops[entry.name], first=row, expert=expert).float()


def _tall(entry: TensorEntry) -> int:
    """The rows of a tensor seen as one tall matrix; the numbers of a vector."""
    return entry.shape[0] * entry.shape[1] if len(entry.shape) == 3 else entry.shape[0]


def _runs(entry: TensorEntry, row: int, end: int) -> Iterator[tuple[int, int]]:
    """[first, last) of rows of the tall matrix, none of them across two planes of a stack."""
    columns = entry.shape[-1] if len(entry.shape) > 1 else 1
    plane = entry.shape[-2] if len(entry.shape) == 3 else entry.shape[0]
    step = max(1, RUN_ELEMENTS // columns)
    while row < end:
        last = min(row + step, (row // plane + 1) * plane, end)
        yield row, last
        row = last
