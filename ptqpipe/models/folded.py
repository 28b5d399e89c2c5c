"""A float checkpoint with factors and rotations folded into its weights while they are read, without a copy.

A folding is described by the factors of an edge, or by the matrices of a rotation (`encoded`). They lie in a folder of
their own (``ptqpipe-folding.json``, which names the model), and in the record of what was quantized behind them.
Tensors have the names and bytes of transform's float32 checkpoint, but for what a rotation changes of embeddings and
head: these are rarely quantized, so they keep their dtype and are rounded to it. A rotated head that was the embedding
is a tensor of its own, which the config says; else files and config are the model's. Knows readers and foldings; must
not know how factors and matrices are found.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.errors import CheckpointError
from ptqpipe.models.folding import (
    ROTATIONS,
    RUN,
    STREAM,
    Folding,
    Op,
    Rotate,
    Structure,
    apply,
    find_structure,
    get_rotation,
    grouped,
    move_factors,
    rotated_tensors,
)

RUN_ELEMENTS = 1 << 20  # a run is computed in float64
_DTYPE = "F32"  # of the tensors that change
_AGAIN = "make them again, or take the model that they were made of"
_ORTHOGONAL = 1e-9  # what a product of a matrix and its transpose may differ from 1


def encoded(factors: torch.Tensor) -> str:
    """Numbers of any shape as text: base64 of their little-endian bytes in float64."""
    return base64.b64encode(factors.to(torch.float64).numpy().astype("<f8").tobytes()).decode("ascii")


def decoded(text: object, count: int, what: str) -> torch.Tensor:
    """float64 [count] of what `encoded` wrote. CheckpointError, which names ``what`` is damaged, for anything else."""
    try:
        raw = bytearray(base64.b64decode(str(text), validate=True))
    except binascii.Error:
        raw = bytearray()
    if len(raw) != 8 * count:
        raise CheckpointError(f"the {what} are damaged, expected {count} numbers in base64; {_AGAIN}")
    numbers = torch.frombuffer(raw, dtype=torch.float64)
    if not bool(torch.isfinite(numbers).all()):
        raise CheckpointError(f"the {what} are not all finite numbers: they are damaged; {_AGAIN}")
    return numbers


def open_folded(folder: Path) -> tuple[CheckpointReader, "FoldedTensors"]:
    """The model that a folder of factors names, with them folded in, as `folded` gives it.

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


def folded(base: CheckpointReader, foldings: object) -> tuple[CheckpointReader, "FoldedTensors"]:
    """(a plain checkpoint with factors folded into it, its tensors before they are rounded); who closes it closes
    ``base``.

    foldings  a list with the edge and the factors (`encoded`) of each, without factors where nothing is changed; or
              with a rotation and its matrices, without them Hadamard's

    CheckpointError for foldings of another model.
    """
    tensors = {name: (entry.dtype, entry.shape) for name, entry in base.entries.items()}
    structure = find_structure(tensors, base.config)
    heads = [m.tensor for edge in structure.edges if edge.kind == "final" for m in edge.consumers]
    ops: dict[str, list[Op]] = {}
    used: list[Sequence[str]] = []
    for folding in foldings if isinstance(foldings, list) else [foldings]:
        if not isinstance(folding, Mapping):
            raise _of_another(base)
        rotates = folding.get("transform") in ROTATIONS
        pairs, sets = (_rotation if rotates else _scaling)(base, structure, folding, ops)
        used += sets
        for name in (name for names in sets for name in names):
            ops.setdefault(name, [])
        for name, op in pairs:
            ops[name].append(op)
    origins = {name: structure.embeddings[0] for name in heads if structure.tied and name in ops}
    tensors |= {name: tensors[origin] for name, origin in origins.items()}
    changed = ops.keys() - {*structure.embeddings, *heads}
    groups = [
        [TensorSpec(name, _DTYPE if name in changed else tensors[name][0], tensors[name][1]) for name in group]
        for group in grouped(tensors, used).values()
    ]
    headers = ShardLayout.plan(groups).headers(base.path)
    content = FolderContent(headers, base.index, base.extra_files, base.left_out)
    changes = {"tie_word_embeddings": False} if origins else {}
    view = FoldedTensors(base, origins, ops)
    return CheckpointReader(base.path, content, fill=view.fill, origin=base, changes=changes), view


Change = tuple[Sequence[Folding], Sequence[Sequence[str]]]
"""What happens to tensors, and the sets of those that change together."""


def _scaling(
    base: CheckpointReader, structure: Structure, folding: Mapping[str, object], _former: Mapping[str, Sequence[Op]]
) -> Change:
    edge = next((edge for edge in structure.edges if edge.id == str(folding.get("edge"))), None)
    if edge is None:
        raise _of_another(base)
    if "factors" not in folding:
        return [], [edge.tensors()]
    factors = decoded(folding["factors"], edge.channels, f"factors of '{edge.id}'")
    if not bool((factors > 0).all()):
        raise CheckpointError(f"the factors of '{edge.id}' are not all positive numbers: they are damaged; {_AGAIN}")
    return move_factors(edge, factors), [edge.tensors()]


def _rotation(
    base: CheckpointReader, structure: Structure, folding: Mapping[str, object], former: Mapping[str, Sequence[Op]]
) -> Change:
    """Rotates the residual stream, or the values of the edge that a folding names."""
    name, key, block = str(folding["transform"]), str(folding.get("edge", STREAM)), folding.get("block")
    stream = name == "rotate_residual" and key == STREAM
    edges = [edge for edge in structure.edges if edge.kind == "value" and key in (edge.id, STREAM)]
    channels = structure.hidden if stream else sum(edge.channels for edge in edges)
    if not isinstance(block, int) or block < 1 or RUN % block or not channels or channels % block:
        raise _of_another(base)
    matrices = {}
    if "matrices" in folding:
        what = "matrices of the residual stream" if key == STREAM else f"matrices of '{key}'"
        turn = decoded(folding["matrices"], channels * block, what).reshape(-1, block, block)
        if not bool(((turn @ turn.mT - torch.eye(block, dtype=torch.float64)).abs() < _ORTHOGONAL).all()):
            raise CheckpointError(f"the {what} are not orthogonal: they are damaged; {_AGAIN}")
        matrices = {key: turn}
    if stream:
        edges = [edge for edge in structure.edges if edge.kind in ("norm", "final")]
    writers, embeddings = (structure.writers, structure.embeddings) if stream else ((), ())

    def read(tensor: str) -> torch.Tensor:
        return apply(base.read(tensor), former.get(tensor, ()))

    changes = get_rotation(name).fold(
        structure, edges, writers=writers, embeddings=embeddings, block=block, read=read, matrices=matrices
    )
    return changes, rotated_tensors(edges, writers, embeddings)


def _of_another(base: CheckpointReader) -> CheckpointError:
    return CheckpointError(
        f"the factors are of a place that {base.path} does not have; they are another model's; {_AGAIN}"
    )


@dataclass(frozen=True, slots=True)
class FoldedTensors:
    """The tensors of ``base`` with factors and rotations folded in, float64.

    origins  name -> that in ``base`` where they differ (a head that was the embedding)
    ops      what is folded in, by name, for every tensor that changes
    """

    base: CheckpointReader
    origins: Mapping[str, str]
    ops: dict[str, list[Op]] = field(default_factory=dict)

    def add(self, foldings: Iterable[Folding]) -> None:
        """Appends to what happens to each tensor."""
        for name, op in foldings:
            self.ops.setdefault(name, []).append(op)

    def runs(
        self, name: str, *, expert: int | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, float64 rows) of a tensor or of one plane of a stack, as stored, in order: [start, stop).

        Where blocks of rows are rotated the first run may begin before ``start`` and the last end behind ``stop``.
        Without ``expert`` and ``stop`` the rows are those of all planes of a stack, one after another.
        """
        entry = self.base.entries[self.origins.get(name, name)]
        before = 0 if expert is None else expert * entry.shape[1]
        end = _tall(entry) if expert is None else before + entry.shape[1]
        end = end if stop is None else before + stop
        for first, last in self._runs(entry, name, before + start, end):
            yield first - before, self._rows(entry, name, first, last)

    def fill(self, entry: TensorEntry, view: memoryview, start: int) -> None:
        """Writes the tensor's bytes from ``start`` on into the whole of a buffer."""
        stop = start + len(view)
        if entry.name not in self.ops:
            self.base.read_into(entry.name, view, start=start, stop=stop)
            return
        out = torch.frombuffer(view, dtype=torch.uint8)
        source, width = self.base.entries[self.origins.get(entry.name, entry.name)], entry.nbytes // _tall(entry)
        for first, last in self._runs(source, entry.name, start // width, -(-stop // width)):
            rows = self._rows(source, entry.name, first, last).to(DTYPES[entry.dtype][0])
            content = torch.frombuffer(bytes_of(rows), dtype=torch.uint8)
            low, high = max(first * width, start), min(last * width, stop)
            out[low - start : high - start].copy_(content[low - first * width : high - first * width])

    def _rows(self, entry: TensorEntry, name: str, first: int, last: int) -> torch.Tensor:
        """float64 rows [first, last) of a tensor seen as one tall matrix, all of them of one plane of a stack.
        ``entry``: its own in ``base``."""
        width = entry.nbytes // _tall(entry)
        raw = self.base.read_raw(entry.name, start=first * width, stop=last * width).view(DTYPES[entry.dtype][0])
        rows = raw if len(entry.shape) == 1 else raw.reshape(last - first, entry.shape[-1])
        expert, row = divmod(first, entry.shape[1]) if len(entry.shape) == 3 else (None, first)
        return apply(rows, self.ops.get(name, ()), first=row, expert=expert)

    def _runs(self, entry: TensorEntry, name: str, row: int, end: int) -> Iterator[tuple[int, int]]:
        """[first, last) of rows of the tall matrix that hold [row, end), none of them across two planes of a stack.

        Where blocks of rows and columns are rotated the runs are always the same ones, of RUN rows, so that neither the
        blocks nor the sums depend on what is read beside them.
        """
        turns = any(isinstance(op, Rotate) for op in self.ops.get(name, ()))
        columns = entry.shape[-1] if len(entry.shape) > 1 else 1
        plane = entry.shape[-2] if len(entry.shape) == 3 else entry.shape[0]
        step = RUN if turns else max(1, RUN_ELEMENTS // max(1, columns))
        row -= row % plane % RUN if turns else 0
        while row < end:
            whole = (row // plane + 1) * plane
            last = min(row + step, whole, whole if turns else end)
            yield row, last
            row = last


def _tall(entry: TensorEntry) -> int:
    """The rows of a tensor seen as one tall matrix; the numbers of a vector."""
    return entry.shape[0] * entry.shape[1] if len(entry.shape) == 3 else entry.shape[0]
