"""A checkpoint as a set of named weights, whatever its container: what convert, verify and eval read from.

A plain checkpoint's tensors are its weights. A quantized one's stored parts (codes, scales) stand for one logical
weight each, which is decoded when it is read.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ptqpipe.checkpoint import FOLDING_FILE, CheckpointReader, Memory
from ptqpipe.checkpoint.layouts import (
    FLOAT_MODEL,
    HF_QUANT_CONFIG,
    Container,
    Dangling,
    Part,
    PartKind,
    StoredWeight,
    dangling,
    decode,
    detect_container,
    get_container,
    merged_config,
)
from ptqpipe.errors import CheckpointError, NumericsError, UsageError, arg, one_line
from ptqpipe.models.folded import FoldedTensors, folded, open_folded
from ptqpipe.models.propagated import PropagatedInputs
from ptqpipe.models.slices import Slice
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.rotation import rotated_weight

RUN_ELEMENTS = 1 << 20
_ALIGN = 128  # rows: a multiple of every block that a source or a format has, whole columns aside


@dataclass(frozen=True, slots=True)
class Source:
    """An open checkpoint with its quantized weights found.

    stored    logical name -> where its parts lie; empty for a plain checkpoint
    consumed  names of tensors that are parts of a stored weight
    tensors   logical tensors: name -> (dtype, shape), stored weights as the BF16 tensors that they stand for
    config    config.json, with the description of hf_quant_config.json where it has none: what it was read by
    view      of a checkpoint with factors folded in, its tensors before they are rounded
    propagated  what the weights let expect of their inputs
    """

    reader: CheckpointReader
    container: Container | None
    container_name: str
    stored: Mapping[str, StoredWeight]
    consumed: frozenset[str]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    config: Mapping[str, Any]
    view: FoldedTensors | None = None
    propagated: PropagatedInputs = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        def rows(where: Slice, shape: tuple[int, int]) -> SourceRows:
            return SourceRows(self, where, shape=shape)

        propagated = PropagatedInputs(self.tensors, self.reader.config, rows=rows, read=self.reader.read)
        object.__setattr__(self, "propagated", propagated)

    @classmethod
    def open(cls, path: Path, *, dangling: bool = False) -> "Source":
        """Headers and config only; a folder of factors is the model that it names, with them folded in.

        CheckpointError for a quantized checkpoint that no container of ours describes, and for tensors that look like
        parts of a quantized weight and belong to none that is read, unless ``dangling`` lets them through.
        """
        view = None
        if (path / FOLDING_FILE).is_file():
            reader, view = open_folded(path)
        else:
            reader = CheckpointReader.open(path)
        try:
            source = cls._detect(reader, view)
            if not dangling and (unread := source.dangling):
                raise CheckpointError(_refused(source, unread))
            return source
        except BaseException:
            reader.close()
            raise

    @classmethod
    def _detect(cls, reader: CheckpointReader, view: FoldedTensors | None) -> "Source":
        kinds = dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]()  # few: each is one object
        tensors = {}
        for tensor, entry in reader.entries.items():
            kind = (entry.dtype, entry.shape)
            tensors[tensor] = kinds.setdefault(kind, kind)
        config = merged_config(reader.config, reader.read_json(HF_QUANT_CONFIG))
        name = detect_container(config, tensors)
        if name is None:
            return cls(reader, None, "plain", {}, frozenset(), tensors, config, view)
        container = get_container(name)
        stored = container.stored_weights(config, tensors)
        consumed = frozenset(part.name for weight in stored.values() for part in weight.parts)
        return cls(reader, container, name, stored, consumed, _logical(tensors, stored), config)

    def folded(self, foldings: object) -> "Source":
        """This plain checkpoint with the factors of a transform in its weights, as `folded.py` takes them; who closes
        it closes this one. CheckpointError for another model's."""
        return Source._detect(*folded(self.reader, foldings))

    @property
    def plain(self) -> list[str]:
        """Stored tensors that are no part of a quantized weight, in the order of the files."""
        return [name for name in self.reader.entries if name not in self.consumed]

    @property
    def dangling(self) -> list[Dangling]:
        """Tensors that look like parts of a quantized weight and belong to none that is read."""
        names = {name: (entry.dtype, entry.shape) for name, entry in self.reader.entries.items()}
        return dangling(names, self.consumed, described=self.container is not None)

    def below_8_bits(self, tensor: str) -> Format | None:
        """The format of a stored weight with codes of fewer than 8 bits; None for any other tensor."""
        stored = self.stored.get(tensor)
        return stored.scheme.fmt if stored is not None and stored.scheme.fmt.element.bits < 8 else None

    def check_requantizable(self, formats: Mapping[str, Format] | None = None) -> None:
        """UsageError where a weight that is stored below 8 bits would be quantized again to a format that cannot hold
        all of its numbers, which can only add error. ``formats``: what each tensor becomes; without it any format."""
        for tensor in self.stored if formats is None else formats:
            low, fmt = self.below_8_bits(tensor), (formats or {}).get(tensor)
            if low is not None and (fmt is None or not fmt.holds(low)):
                to = " again" if fmt is None else f" to {fmt.name}"
                remedy = "" if fmt is None else f"; {arg('requantize', True)} does it"
                raise UsageError(
                    f"{self.reader.path} is already quantized ({low.name}, {self.container_name}); converting it{to} "
                    "can only add error: use `ptqpipe relayout` to change its layout, or convert the "
                    f"original{remedy}"
                )

    def quantized(
        self,
        weight: str,
        *,
        expert: int | None = None,
        rows: tuple[int, int] | None = None,
        memory: Memory | None = None,
    ) -> QTensor:
        """A stored weight (one expert of a stack), or some of its rows, as a QTensor; in ``memory`` as
        `CheckpointReader.read` takes it."""
        load = self.load if memory is None else partial(self.load, memory=memory)
        return decode(self.stored[weight], load, expert=expert, rows=rows)

    def runs(
        self,
        weight: str,
        *,
        expert: int | None = None,
        elements: int = RUN_ELEMENTS,
        runs: Sequence[tuple[int, int]] | None = None,
    ) -> Iterator[tuple[int, QTensor]]:
        """(first row, rows) of a stored weight, or of one expert of a stack, which is read whole.

        By default all rows, in runs of about ``elements`` weights; else those of ``runs``, [start, stop) each.
        """
        stored = self.stored[weight]
        whole = None if expert is None and stored.whole is None else self.quantized(weight, expert=expert)
        for start, stop in row_runs(stored.shape, stored.scheme.fmt, elements) if runs is None else runs:
            if whole is None:
                yield start, self.quantized(weight, rows=(start, stop))
            else:
                yield start, whole.narrow(0, start, stop - start)

    def whole_bytes(self, tensors: Iterable[str]) -> int:
        """About what reading weights takes besides their rows where they have to be read whole (AWQ, GPTQ): the codes
        of all of them, and twice the stored bytes of one while its codes are put in order."""
        sizes = [self.nbytes(name) for name in tensors if name in self.stored and self.stored[name].whole is not None]
        return sum(sizes) + 2 * max(sizes) if sizes else 0

    def nbytes(self, tensor: str) -> int:
        """Bytes on disk of a logical tensor: of all parts of a stored weight."""
        stored, entries = self.stored.get(tensor), self.reader.entries
        return entries[tensor].nbytes if stored is None else sum([entries[part.name].nbytes for part in stored.parts])

    def number(self, part: Part, *, expert: int | None = None) -> torch.Tensor:
        """A part that holds one number (for each expert), as float32 0-d; NumericsError unless finite and positive."""
        stored = self.reader.read(part.name).reshape(-1)
        value = stored[expert if part.stacked and expert is not None else 0].float()
        if not (torch.isfinite(value) and value > 0):
            raise NumericsError(f"{part.name} is {value.item()}; a scale must be finite and positive")
        return value

    def global_scales(self, stored: StoredWeight) -> torch.Tensor:
        """float32 [n]: what multiplies the block scales of a stored weight, of each expert where they have their own;
        empty without a global scale. As stored: it may be no finite number."""
        divisor = stored.part(PartKind.GLOBAL_DIVISOR)
        part = divisor or stored.part(PartKind.GLOBAL)
        values = torch.empty(0) if part is None else self.reader.read(part.name).float().flatten()
        return values if divisor is None else 1.0 / values

    def load(self, name: str, start: int | None, stop: int | None, memory: Memory | None = None) -> torch.Tensor:
        """Rows [start, stop) of a stored tensor's first axis, all of it for None: what containers read with."""
        return self.reader.read(name, start=start or 0, stop=stop, memory=memory)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.reader.close()


def _refused(source: Source, unread: Sequence[Dangling]) -> str:
    first = unread[0]
    entry = source.reader.entries[first.name]
    more = f" ({len(unread)} such tensors)" if len(unread) > 1 else ""
    why = "config.json describes no quantization"
    remedy = f"put the quantization_config back that it was published with, or {FLOAT_MODEL}"
    if source.container is not None:
        why = f"no weight that config.json describes ({source.container_name}) uses it"
        remedy = f"{FLOAT_MODEL}, or decode this one with the library that wrote it"
    elif first.cast:
        remedy = (
            f"if they are weights that were only cast, save them as bfloat16 (w.to(torch.bfloat16)); else {FLOAT_MODEL}"
        )
    name, kind = one_line(repr(first.name), limit=200), f"{entry.dtype} {list(entry.shape)}"
    return f"{source.reader.path}: {name} ({kind}) looks like {first.looks}, but {why}{more}; {remedy}"


def row_runs(shape: tuple[int, int], fmt: Format, elements: int = RUN_ELEMENTS) -> list[tuple[int, int]]:
    """Runs of rows [start, stop) of about ``elements`` weights, on the edges of blocks of every format."""
    step = max(_ALIGN, elements // max(1, shape[1]) // _ALIGN * _ALIGN)
    step = math.lcm(step, fmt.step(0))
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _logical(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], stored: Mapping[str, StoredWeight]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """``tensors`` with each stored weight in the place of the first of its parts."""
    logical: dict[str, tuple[str, tuple[int, ...]]] = {}
    owner = {part.name: weight for weight in stored.values() for part in weight.parts}
    for name, kind in tensors.items():
        weight = owner.get(name)
        if weight is None:
            logical[name] = kind
        elif weight.weight not in logical:
            stack = () if weight.experts is None else (weight.experts,)
            matrix = weight.shape[::-1] if weight.transposed else weight.shape
            logical[weight.weight] = ("BF16", (*stack, *matrix))
    return logical


def _fresh(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class Scratch:
    """A worker's memory for the weights of one unit, used again for the next: see ``checkpoint/reader.py`` for why."""

    def __init__(self) -> None:
        self._block = _fresh(0)
        self._used = 0

    def begin(self, nbytes: int) -> None:
        """Makes room for a unit of ``nbytes``. Tensors handed out before are overwritten from now on."""
        self._used = 0
        if self._block.numel() < nbytes:
            self._block = _fresh(0)  # the old block goes before the new one comes
            self._block = _fresh(nbytes)

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], aligned to 64 bytes; fresh memory where the unit asks for more than it announced."""
        start = -(-self._used // 64) * 64
        if start + nbytes > self._block.numel():
            return _fresh(nbytes)
        self._used = start + nbytes
        return self._block[start : self._used]


class SourceRows:
    """The rows of one weight of a source, [out, in] whatever its orientation on disk; reads them when asked.

    cache   keeps what was read, codes below 8 bits beside the numbers: for units whose passes fit the memory limit, and
            for transposed weights, which have to be read whole; of weights that have to be read whole for their order
            (AWQ, GPTQ) the codes are kept in any case
    memory  where a cached weight is decoded to, or read to, past the page cache; fresh and through the cache without it
    """

    def __init__(
        self, source: Source, where: Slice, *, shape: tuple[int, int], cache: bool = False, memory: Memory | None = None
    ) -> None:
        self.shape, self.where = shape, where
        self._memory = memory if cache else None
        self.source = source
        self._cache = cache or where.transposed
        self._whole: torch.Tensor | None = None
        self._codes: tuple[int, QTensor] | None = None  # the first row, among those of the source's matrix, and codes

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) in the stored dtype; float32 where they are decoded or their columns rotated."""
        if self._whole is not None:
            return self._whole[start:stop]
        few = stop - start < min(self.shape[0], RUN_ELEMENTS // self.shape[1])
        if self._cache and not (few and self._codes is not None):  # a few rows of codes at hand are decoded alone
            self._whole = self._read(0, self.shape[0])
            return self._whole[start:stop]
        return self._read(start, stop)

    def quantized(self, start: int, stop: int) -> QTensor | None:
        """Rows [start, stop) as the source stores them below 8 bits; None where their numbers are not those of its
        codes one by one: of any other weight, of one that is rotated, and where rows share blocks."""
        where = self.where
        stored = self.source.stored.get(where.tensor)
        if stored is None or not self.below_8_bits or stored.scheme.fmt.block[0] != 1 or where.rotation:
            return None
        if stored.scheme.rotation:
            return None
        q, _ = self._stored_rows(start, stop)
        if where.step == 1:
            return q
        zeros = None if q.zeros is None else q.zeros[:: where.step]
        shape = (stop - start, self.shape[1])
        return replace(q, shape=shape, data=q.data[:: where.step], scales=q.scales[:: where.step], zeros=zeros)

    @property
    def below_8_bits(self) -> bool:
        """Whether the source stores this weight in fewer than 8 bits."""
        return self.source.below_8_bits(self.where.tensor) is not None

    @property
    def energies(self) -> torch.Tensor | None:
        """float32 [K]: the input energies that the source's weights let expect; None where nothing is known of them."""
        return self.source.propagated.of(self.where, self.shape[1])

    def drop(self) -> None:
        """Forgets what is cached."""
        self._whole = self._codes = None

    def _read(self, start: int, stop: int) -> torch.Tensor:
        return rotated_weight(self._plain(start, stop), self.where.rotation)

    def _plain(self, start: int, stop: int) -> torch.Tensor:
        where = self.where
        if where.tensor in self.source.stored:
            return self._decode(start, stop)
        reader = self.source.reader
        if where.expert is None:
            if where.transposed:
                return reader.read(where.tensor).t()[start:stop].contiguous()
            return reader.read(where.tensor, start=start, stop=stop, memory=self._memory)
        shape = reader.entries[where.tensor].shape
        if where.transposed:
            plane = reader.read(where.tensor, start=where.expert, stop=where.expert + 1)[0].t()
            return plane[where.start :: where.step][start:stop].contiguous()
        first = where.start + start * where.step
        span = (stop - start - 1) * where.step + 1
        memory = self._memory if where.step == 1 else None
        rows = self._read_plane_rows(where.tensor, where.expert * shape[1] + first, span, shape[2], memory)
        return rows[:: where.step].contiguous()

    def _decode(self, start: int, stop: int) -> torch.Tensor:
        """Rows of a stored weight, decoded. Its codes are [out, in] whatever the orientation of the float tensor."""
        q, first = self._stored_rows(start, stop)
        memory = self._memory if (start, stop) == (0, self.shape[0]) else None
        room = None if memory is None else memory(4 * q.shape[0] * q.shape[1]).view(torch.float32)
        rows = self.source.stored[self.where.tensor].plain(q, memory=room)
        return rows[first : first + (stop - start - 1) * self.where.step + 1 : self.where.step].contiguous()

    def _stored_rows(self, start: int, stop: int) -> tuple[QTensor, int]:
        """Whole blocks of rows of the source's matrix with all of these rows, and the number of the first of these."""
        where = self.where
        stored = self.source.stored[where.tensor]
        if self._codes is None and (stored.whole is not None or (self._cache and self.below_8_bits)):
            wanted = (0, stored.shape[0]) if stored.whole is not None else self._span(0, self.shape[0])
            self._codes = wanted[0], self._quantized(wanted)
        begin, end = self._span(start, stop)
        first = where.start + start * where.step - begin
        if self._codes is None:
            return self._quantized((begin, end)), first
        row, q = self._codes
        return (q if (begin, end) == (row, row + q.shape[0]) else q.narrow(0, begin - row, end - begin)), first

    def _span(self, start: int, stop: int) -> tuple[int, int]:
        """Rows [begin, end) of the source's matrix: whole blocks, with these rows in them."""
        where, stored = self.where, self.source.stored[self.where.tensor]
        block_rows = stored.scheme.fmt.step(0)
        begin = (where.start + start * where.step) // block_rows * block_rows
        last = where.start + (stop - 1) * where.step + 1
        return begin, min(-(-last // block_rows) * block_rows, stored.shape[0])

    def _quantized(self, rows: tuple[int, int]) -> QTensor:
        where, memory = self.where, self._memory
        return self.source.quantized(where.tensor, expert=where.expert, rows=rows, memory=memory)

    def _read_plane_rows(self, name: str, first: int, count: int, columns: int, memory: Memory | None) -> torch.Tensor:
        """``count`` rows from row ``first`` of the stack seen as one tall matrix."""
        entry = self.source.reader.entries[name]
        width = entry.nbytes // max(1, entry.shape[0] * entry.shape[1])
        dtype = self.source.reader.read(name, start=0, stop=0).dtype
        raw = self.source.reader.read_raw(name, start=first * width, stop=(first + count) * width, memory=memory)
        return raw.view(dtype).reshape(count, columns)
