"""A checkpoint as a set of named weights, whatever its container: what convert, verify and eval read from.

A plain checkpoint's tensors are its weights. A quantized one's stored parts (codes, scales) stand for one logical
weight each, which is decoded when it is read. `Origins` says of a source which rows of which tensor each weight of a
checkpoint made from it stands for: decided from names and shapes of the source alone, for every weight that could be
quantized, so that a stored weight with any other name or shape has no origin.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ptqpipe.checkpoint import FOLDING_FILE, CheckpointReader, Memory
from ptqpipe.containers import (
    Container,
    Part,
    Role,
    StoredWeight,
    decode,
    detect_container,
    get_container,
    kv_scale,
    merged_config,
)
from ptqpipe.errors import NumericsError, UsageError
from ptqpipe.folded import folded, open_folded
from ptqpipe.formats import Format
from ptqpipe.plan import Member, Plan, Slice, make_plan
from ptqpipe.qtensor import QTensor
from ptqpipe.recipe import Recipe, Rule
from ptqpipe.rotation import rotated_weight
from ptqpipe.schemes import Abilities, get_scheme

RUN_ELEMENTS = 1 << 20
_ALIGN = 128  # rows: a multiple of every block that a source or a format has, whole columns aside


@dataclass(frozen=True, slots=True)
class Source:
    """An open checkpoint with its quantized weights found.

    stored    logical name -> where its parts lie; empty for a plain checkpoint
    consumed  names of tensors that are parts of a stored weight
    tensors   logical tensors: name -> (dtype, shape), stored weights as the BF16 tensors that they stand for
    """

    reader: CheckpointReader
    container: Container | None
    container_name: str
    stored: Mapping[str, StoredWeight]
    consumed: frozenset[str]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def open(cls, path: Path) -> "Source":
        """Headers and config only; a folder of factors is the model that it names, with them folded in.

        CheckpointError for a quantized checkpoint that no container of ours describes.
        """
        reader = open_folded(path) if (path / FOLDING_FILE).is_file() else CheckpointReader.open(path)
        try:
            return cls._detect(reader)
        except BaseException:
            reader.close()
            raise

    @classmethod
    def _detect(cls, reader: CheckpointReader) -> "Source":
        kinds = dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]()  # few: each is one object
        tensors = {}
        for tensor, entry in reader.entries.items():
            kind = (entry.dtype, entry.shape)
            tensors[tensor] = kinds.setdefault(kind, kind)
        config = merged_config(reader.config, reader.read_json("hf_quant_config.json"))
        name = detect_container(config, tensors)
        if name is None:
            return cls(reader, None, "plain", {}, frozenset(), tensors)
        container = get_container(name)
        stored = container.stored_weights(config, tensors)
        consumed = frozenset(part.name for weight in stored.values() for part in weight.parts)
        return cls(reader, container, name, stored, consumed, _logical(tensors, stored))

    def folded(self, foldings: object) -> "Source":
        """This plain checkpoint with the factors of a transform in its weights, as `folded.py` takes them; who closes
        it closes this one. CheckpointError for another model's."""
        return Source._detect(folded(self.reader, foldings))

    @property
    def plain(self) -> list[str]:
        """Stored tensors that are no part of a quantized weight, in the order of the files."""
        return [name for name in self.reader.entries if name not in self.consumed]

    def below_8_bits(self, tensor: str) -> Format | None:
        """The format of a stored weight with codes of fewer than 8 bits; None for any other tensor."""
        stored = self.stored.get(tensor)
        return stored.scheme.fmt if stored is not None and stored.scheme.fmt.element.bits < 8 else None

    def check_requantizable(self, plan: Plan | None = None) -> None:
        """UsageError where a weight that is stored below 8 bits would be quantized again to a format that cannot hold
        all of its numbers, which can only add error. Without a plan: to any format."""
        fates = {} if plan is None else {m.source.tensor: unit.scheme.fmt for unit in plan.units for m in unit.members}
        for tensor in self.stored if plan is None else fates:
            low, fmt = self.below_8_bits(tensor), fates.get(tensor)
            if low is not None and (fmt is None or not fmt.holds(low)):
                to, remedy = (" again", "") if fmt is None else (f" to {fmt.name}", "; convert --requantize does it")
                raise UsageError(
                    f"{self.reader.path} is already quantized ({low.name}, {self.container_name}); converting it{to} "
                    "can only add error: use `ptqpipe relayout` to change its layout, or convert the "
                    f"original{remedy}"
                )

    def quantized(self, weight: str, *, expert: int | None = None, rows: tuple[int, int] | None = None) -> QTensor:
        """A stored weight (one expert of a stack), or some of its rows, as a QTensor."""
        return decode(self.stored[weight], self.load, expert=expert, rows=rows)

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
        divisor = stored.part(Role.GLOBAL_DIVISOR)
        part = divisor or stored.part(Role.GLOBAL)
        values = torch.empty(0) if part is None else self.reader.read(part.name).float().flatten()
        return values if divisor is None else 1.0 / values

    def load(self, name: str, start: int | None, stop: int | None) -> torch.Tensor:
        """Rows [start, stop) of a stored tensor's first axis, all of it for None: what containers read with."""
        return self.reader.read(name, start=start or 0, stop=stop)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self.reader.close()


def row_runs(shape: tuple[int, int], fmt: Format, elements: int = RUN_ELEMENTS) -> list[tuple[int, int]]:
    """Runs of rows [start, stop) of about ``elements`` weights, on the edges of blocks of every format."""
    step = max(_ALIGN, elements // max(1, shape[1]) // _ALIGN * _ALIGN)
    step = math.lcm(step, fmt.step(0))
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _logical(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], stored: Mapping[str, StoredWeight]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """``tensors`` with each stored weight in the place of the first of its parts."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    owner = {part.name: weight for weight in stored.values() for part in weight.parts}
    for name, kind in tensors.items():
        weight = owner.get(name)
        if weight is None:
            found[name] = kind
        elif weight.weight not in found:
            stack = () if weight.experts is None else (weight.experts,)
            matrix = weight.shape[::-1] if weight.transposed else weight.shape
            found[weight.weight] = ("BF16", (*stack, *matrix))
    return found


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

    cache   keeps what was read: for units whose passes fit the memory limit, and for transposed weights, which have
            to be read whole; of other weights of that kind (AWQ, GPTQ) the codes are kept
    memory  where a cached weight is decoded to, or read to, past the page cache; fresh and through the cache without it
    """

    def __init__(
        self,
        source: Source,
        where: Slice,
        *,
        shape: tuple[int, int],
        cache: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self.shape = shape
        self._memory = memory if cache else None
        self._source = source
        self._where = where
        self._cache = cache or where.transposed
        self._whole: torch.Tensor | None = None
        self._codes: QTensor | None = None  # of a weight that has to be read whole, decoded by runs of rows

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) in the stored dtype; float32 where they are decoded or their columns rotated."""
        if self._whole is not None:
            return self._whole[start:stop]
        if self._cache:
            self._whole = self._read(0, self.shape[0])
            return self._whole[start:stop]
        return self._read(start, stop)

    @property
    def below_8_bits(self) -> bool:
        """Whether the source stores this weight in fewer than 8 bits."""
        return self._source.below_8_bits(self._where.tensor) is not None

    def drop(self) -> None:
        """Forgets what is cached."""
        self._whole = self._codes = None

    def _read(self, start: int, stop: int) -> torch.Tensor:
        return rotated_weight(self._plain(start, stop), self._where.rotation)

    def _plain(self, start: int, stop: int) -> torch.Tensor:
        """Rows as the source has them."""
        where = self._where
        if where.tensor in self._source.stored:
            return self._decode(start, stop)
        reader = self._source.reader
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
        where = self._where
        stored = self._source.stored[where.tensor]
        block_rows = stored.scheme.fmt.step(0)
        first = where.start + start * where.step
        last = where.start + (stop - 1) * where.step + 1
        begin = first // block_rows * block_rows  # whole blocks only
        end = min(-(-last // block_rows) * block_rows, stored.shape[0])
        if stored.whole is None:
            q = self._source.quantized(where.tensor, expert=where.expert, rows=(begin, end))
        else:
            if self._codes is None:
                self._codes = self._source.quantized(where.tensor, expert=where.expert)
            q = self._codes.narrow(0, begin, end - begin)
        memory = None if self._memory is None else self._memory(4 * q.shape[0] * q.shape[1]).view(torch.float32)
        return stored.plain(q, memory=memory)[first - begin : last - begin : where.step].contiguous()

    def _read_plane_rows(self, name: str, first: int, count: int, columns: int, memory: Memory | None) -> torch.Tensor:
        """``count`` rows from row ``first`` of the stack seen as one tall matrix."""
        entry = self._source.reader.entries[name]
        width = entry.nbytes // max(1, entry.shape[0] * entry.shape[1])
        dtype = self._source.reader.read(name, start=0, stop=0).dtype
        raw = self._source.reader.read_raw(name, start=first * width, stop=(first + count) * width, memory=memory)
        return raw.view(dtype).reshape(count, columns)


@dataclass(frozen=True, slots=True)
class Origins:
    """A source, and by weight name the members that could be made of it: ``experts`` one weight per expert, ``stacks``
    one weight per stack (expert number -> member). ``divided`` counts the weights that one source tensor becomes,
    ``kept`` has the source tensor by the name that it has in the checkpoint where it is kept."""

    source: Source
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    weights: Mapping[str, Member]
    stacks: Mapping[str, Mapping[int, Member]]
    divided: Mapping[str, int]
    kept: Mapping[str, str]

    @classmethod
    def of(cls, source: Source, *, container: Container | None = None) -> "Origins":
        """All weights that a source could give to a checkpoint with this layout; None for a plain one."""
        single = {member.weight: member for member in _members(source, stacks=False)}
        stacks: dict[str, dict[int, Member]] = {}
        for member in _members(source, stacks=True):
            if member.stack is not None and member.source.expert is not None:
                stacks.setdefault(member.weight, {})[member.source.expert] = member
        divided = Counter(member.source.tensor for member in single.values())
        kept = {name: name for name in source.tensors}
        for name, (dtype, shape) in source.tensors.items():
            spelled = kv_scale(name, dtype, shape, container=container)
            if spelled is not None:
                kept[spelled.name] = name
        return cls(source, source.tensors, single, stacks, divided, kept)

    def find(self, stored: StoredWeight) -> tuple[Slice, ...] | None:
        """The origin of each expert of a stored weight (one entry where it is no stack), None if there is none."""
        found = self._origins(stored)
        if not found or any(shape != stored.shape for _, shape in found):
            return None
        return tuple(replace(part, rotation=stored.scheme.rotation) for part, _ in found)

    def rows(self, part: Slice, shape: tuple[int, int], *, cache: bool = False) -> SourceRows:
        """The rows of one origin."""
        return SourceRows(self.source, part, shape=shape, cache=cache)

    def _origins(self, stored: StoredWeight) -> list[tuple[Slice, tuple[int, int]]]:
        """(origin, its shape as [out, in]) of every expert; empty where the source has none."""
        shape = self.tensors.get(stored.weight, ("", ()))[1]
        if stored.experts is not None:
            stack = self.stacks.get(stored.weight, {})
            members = [stack[e] for e in range(stored.experts) if e in stack]
            whole = len(shape) == 3 and shape[0] == stored.experts == len(members)
            oriented = all(member.source.transposed is stored.transposed for member in members)
            return [(member.source, member.shape) for member in members] if whole and oriented else []
        member = self.weights.get(stored.weight)
        if len(shape) == 2:
            if member is not None and member.source.transposed is not stored.transposed:
                return []
            rows, columns = (shape[1], shape[0]) if stored.transposed else (shape[0], shape[1])
            return [(Slice(stored.weight, transposed=stored.transposed), (rows, columns))]
        return [(member.source, member.shape)] if member is not None else []


def _members(source: Source, *, stacks: bool) -> list[Member]:
    """Every weight that a rule without exceptions would quantize."""
    everything = Recipe((Rule("*", get_scheme("fp8_dynamic")),), keep=())
    try:
        abilities = Abilities(stacks=stacks, transposed=True)
        plan = make_plan(source.tensors, source.reader.config, recipe=everything, abilities=abilities)
    except UsageError:  # nothing in it could be quantized
        return []
    return [member for unit in plan.units for member in unit.members]
