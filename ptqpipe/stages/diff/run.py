"""diff: what two checkpoints say differently, weight by weight, whatever their layouts.

Compares logical weights: the same payload in two layouts is equal, an expert cut out of a stack is compared with its
rows of the stack, a packed weight with the float weight that it came from. Memory is a few runs of rows.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ptqpipe.containers import Role, StoredWeight, decode_input_global
from ptqpipe.dtypes import DTYPES
from ptqpipe.plan import Member, Slice
from ptqpipe.source import Source, SourceRows
from ptqpipe.stages.common.text import same_json
from ptqpipe.stages.diff.text import DiffReport, Same, TensorDiff, ValueDiff, render, to_json
from ptqpipe.stages.verify.origin import Origins
from ptqpipe.stages.verify.structure import READ_BYTES
from ptqpipe.stages.verify.weights import row_runs, stored_runs

__all__ = ["DiffReport", "Same", "TensorDiff", "ValueDiff", "diff", "render", "to_json"]

_JSON_FILES = ("config.json", "hf_quant_config.json")
_ROUNDED = 1e-6  # a reciprocal's reciprocal may be the next float32


@dataclass(frozen=True, slots=True)
class _Pair:
    """Rows of a beside rows of b."""

    name: str
    a: Slice
    b: Slice
    shape: tuple[int, int]


def diff(a: Path, b: Path) -> DiffReport:
    """Compares two checkpoints. CheckpointError where one cannot be read."""
    with Source.open(a) as left, Source.open(b) as right:
        pairs, only_a, only_b = _expanded(left, right)
        tensors, reshaped = [], []
        for name in (name for name in left.tensors if name in right.tensors):
            shape_a, shape_b = left.tensors[name][1], right.tensors[name][1]
            if shape_a != shape_b:
                reshaped.append((name, shape_a, shape_b))
            else:
                tensors.append(_compare(left, right, name))
        tensors += [_compare_pair(left, right, pair) for pair in pairs]
        return DiffReport(
            a,
            b,
            left.container_name,
            right.container_name,
            tuple(only_a),
            tuple(only_b),
            tuple(reshaped),
            tuple(tensors),
            tuple(_config_diffs(left, right)),
            tuple(_file_diffs(left, right)),
        )


def _expanded(left: Source, right: Source) -> tuple[list[_Pair], list[str], list[str]]:
    """Experts that are weights of their own in one and rows of a stack in the other; then the names of one alone."""
    only_a = [name for name in left.tensors if name not in right.tensors]
    only_b = [name for name in right.tensors if name not in left.tensors]
    pairs: list[_Pair] = []
    for names, stacked, swap in ((only_b, left, False), (only_a, right, True)):
        found = _members_of(names, stacked, other=right if swap is False else left)
        for member in found:
            own = Slice(member.weight)
            first, second = (own, member.source) if swap else (member.source, own)
            pairs.append(_Pair(member.weight, first, second, member.shape))
        whole = {member.source.tensor for member in found}
        used = {member.weight for member in found}
        only_a = [name for name in only_a if name not in (used if swap else whole)]
        only_b = [name for name in only_b if name not in (whole if swap else used)]
    return pairs, only_a, only_b


def _members_of(names: Iterable[str], stacked: Source, *, other: Source) -> list[Member]:
    """Members of the stacks of ``stacked`` that ``other`` has as weights of their own; of whole stacks only."""
    wanted = set(names)
    if not any(".experts." in name for name in wanted):
        return []
    origins = Origins.of(stacked)
    by_stack: dict[str, list[Member]] = defaultdict(list)
    for name in wanted & origins.weights.keys():
        member = origins.weights[name]
        if member.source.expert is not None and other.tensors[name][1] == member.shape:
            by_stack[member.source.tensor].append(member)
    order = {name: index for index, name in enumerate(origins.weights)}
    whole = [m for tensor, members in by_stack.items() if len(members) == origins.divided[tensor] for m in members]
    return sorted(whole, key=lambda member: order[member.weight])


def _compare(left: Source, right: Source, name: str) -> TensorDiff:
    """A tensor of one name and shape in both."""
    kinds = _kind(left, name), _kind(right, name)
    stored = left.stored.get(name) or right.stored.get(name)
    if stored is None:
        same, error = _compare_plain(left, right, name)
        return TensorDiff(name, same, *kinds, error)
    both = name in left.stored and name in right.stored
    inputs = not both or _same_inputs(left, right, name)
    if both and inputs and _same_payload(left, right, name):
        return TensorDiff(name, Same.BYTES, *kinds, 0.0)
    numbers = [0.0, 0.0]
    for expert in range(stored.experts or 1):
        where = Slice(name, expert=None if stored.experts is None else expert, transposed=stored.transposed)
        error, energy = _distance(left, right, _Pair(name, _within(left, where), _within(right, where), stored.shape))
        numbers = [numbers[0] + error, numbers[1] + energy]
    found = _judged(name, kinds, *numbers)
    return found if inputs or found.same is Same.NO else replace(found, same=Same.INPUT)


def _same_inputs(left: Source, right: Source, name: str) -> bool:
    """Whether two stored weights have the same static input scale, or neither has one."""

    def values(source: Source, stored: StoredWeight) -> list[float | None]:
        def load(part: str, start: int | None, stop: int | None) -> torch.Tensor:
            return source.reader.read(part, start=start or 0, stop=stop)

        experts = [None] if stored.experts is None else list(range(stored.experts))
        scales = [decode_input_global(stored, load, expert=expert) for expert in experts]
        return [None if scale is None else float(scale) for scale in scales]

    a, b = values(left, left.stored[name]), values(right, right.stored[name])
    return len(a) == len(b) and all(
        x == y or (x is not None and y is not None and math.isclose(x, y, rel_tol=_ROUNDED))
        for x, y in zip(a, b, strict=True)
    )


def _within(source: Source, where: Slice) -> Slice:
    """A stored weight is [out, in] in every layout; only a plain tensor is transposed."""
    return Slice(where.tensor, expert=where.expert) if where.tensor in source.stored else where


def _compare_pair(left: Source, right: Source, pair: _Pair) -> TensorDiff:
    kinds = _kind(left, pair.a.tensor), _kind(right, pair.b.tensor)
    return _judged(pair.name, kinds, *_distance(left, right, pair))


def _judged(name: str, kinds: tuple[str, str], error: float, energy: float) -> TensorDiff:
    relative = error / energy if energy else (math.inf if error else 0.0)
    return TensorDiff(name, Same.NO if error else Same.NUMBERS, *kinds, relative)


def _kind(source: Source, name: str) -> str:
    stored = source.stored.get(name)
    return source.tensors[name][0] if stored is None else stored.scheme.fmt.name


def _distance(left: Source, right: Source, pair: _Pair) -> tuple[float, float]:
    """(sum (a - b)^2, sum a^2) in float64; NaN in both at one place counts as equal, elsewhere as infinite."""
    first = SourceRows(left, pair.a, shape=pair.shape)
    second = SourceRows(right, pair.b, shape=pair.shape)
    block_rows = [s.stored[p.tensor].scheme.fmt for s, p in ((left, pair.a), (right, pair.b)) if p.tensor in s.stored]
    runs = row_runs(pair.shape, block_rows[0]) if block_rows else [(0, pair.shape[0])]
    if any(fmt.block[0] == 0 for fmt in block_rows):
        runs = [(0, pair.shape[0])]
    error = energy = 0.0
    for start, stop in runs:
        x, y = first.rows(start, stop).double(), second.rows(start, stop).double()
        step, power = _sums(x, y)
        error, energy = error + step, energy + power
    return error, energy


def _sums(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    unlike = (x != y) & ~(torch.isnan(x) & torch.isnan(y))
    delta = torch.where(unlike, x - y, 0.0)
    error = float(torch.nan_to_num(delta, nan=math.inf, posinf=math.inf, neginf=math.inf).square().sum())
    return error, float(torch.nan_to_num(x, nan=0.0).square().sum())


def _compare_plain(left: Source, right: Source, name: str) -> tuple[Same, float | None]:
    """Plain tensors of one shape: their bytes, else their numbers."""
    (dtype_a, shape), (dtype_b, _) = left.tensors[name], right.tensors[name]
    count = math.prod(shape)
    if dtype_a == dtype_b and _same_bytes(left, right, name):
        return Same.BYTES, 0.0
    if dtype_a not in DTYPES or dtype_b not in DTYPES or "C64" in (dtype_a, dtype_b):
        return Same.NO, None
    error = energy = 0.0
    step = READ_BYTES // 8
    for start in range(0, count, step):
        x, y = (_flat(source, name, start, min(start + step, count)).double() for source in (left, right))
        more, power = _sums(x, y)
        error, energy = error + more, energy + power
    return (Same.NO if error else Same.NUMBERS), error / energy if energy else (math.inf if error else 0.0)


def _same_bytes(left: Source, right: Source, name: str) -> bool:
    total = left.reader.entries[name].nbytes
    for start in range(0, total, READ_BYTES):
        stop = min(start + READ_BYTES, total)
        a, b = (s.reader.read_bytes(name, start_byte=start, stop_byte=stop) for s in (left, right))
        if a != b:
            return False
    return True


def _flat(source: Source, name: str, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a plain tensor."""
    dtype, width = DTYPES[source.reader.entries[name].dtype]
    raw = source.reader.read_bytes(name, start_byte=start * width, stop_byte=stop * width)
    return torch.frombuffer(raw, dtype=dtype)


def _same_payload(left: Source, right: Source, name: str) -> bool:
    """Whether two stored weights have the same codes and scales, however their layouts call and shape them.

    A global scale may be a factor here and a divisor there: then the decode decides, not the bytes.
    """
    a, b = left.stored[name], right.stored[name]
    if (a.scheme.fmt, a.shape, a.experts, a.transposed) != (b.scheme.fmt, b.shape, b.experts, b.transposed):
        return False
    if (a.part(Role.GLOBAL_DIVISOR) is None) != (b.part(Role.GLOBAL_DIVISOR) is None):
        return False
    for expert in range(a.experts or 1):
        number = None if a.experts is None else expert
        for (_, p), (_, q) in zip(stored_runs(left, name, number), stored_runs(right, name, number), strict=True):
            same = torch.equal(p.data, q.data) and torch.equal(p.scales, q.scales)
            if p.global_scale is not None and q.global_scale is not None:
                same = same and torch.equal(p.global_scale, q.global_scale)
            if p.low_rank is not None or q.low_rank is not None:
                same = same and torch.equal(p.dequantize(), q.dequantize())
            if not same:
                return False
    return True


def _config_diffs(left: Source, right: Source) -> list[ValueDiff]:
    found = []
    for name in _JSON_FILES:
        a, b = left.reader.read_json(name), right.reader.read_json(name)
        prefix = "" if name == "config.json" else f"{name}: "
        if a is None or b is None:
            if a is not b:
                found.append(ValueDiff(name, _presence(a), _presence(b)))
            continue
        found += [ValueDiff(prefix + key, x, y) for key, x, y in _differences(a, b)]
    return found


def _presence(value: Any) -> str:
    return "missing" if value is None else "present"


def _differences(a: Any, b: Any, path: str = "") -> Iterable[tuple[str, str, str]]:
    """(key path, value in a, value in b) of everything that differs in two JSON values."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in a:
                yield path + key, "missing", _short(b[key])
            elif key not in b:
                yield path + key, _short(a[key]), "missing"
            elif not same_json(a[key], b[key]):
                yield from _differences(a[key], b[key], f"{path}{key}.")
    elif not same_json(a, b):
        yield path.removesuffix("."), _short(a), _short(b)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 48 else text[:45] + "..."


def _file_diffs(left: Source, right: Source) -> list[ValueDiff]:
    """Files beside the weights, configs and the record aside."""
    a, b = ({path.relative_to(s.reader.path).as_posix(): path for path in s.reader.extra_files} for s in (left, right))
    found = []
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            found.append(ValueDiff(name, _presence(a.get(name)), _presence(b.get(name))))
        elif a[name].read_bytes() != b[name].read_bytes():
            found.append(ValueDiff(name, f"{a[name].stat().st_size} bytes", f"{b[name].stat().st_size} bytes"))
    return found
