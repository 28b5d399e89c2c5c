"""diff: the differences of two checkpoints, weight by weight, whatever their layouts.

Compares logical weights: the same payload in two layouts is equal, an expert cut out of a stack is compared with its
rows of the stack, a packed weight with the float weight that it came from. Memory is a few runs of rows.
"""

import filecmp
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.checkpoint.json_values import finite, json_differences
from ptqpipe.checkpoint.layouts import HF_QUANT_CONFIG, PartKind, decode_input_global
from ptqpipe.checkpoint.tensor_names import name_pattern, role_of
from ptqpipe.conversion.card import CARD, is_ours
from ptqpipe.models.slices import Member, Slice
from ptqpipe.models.source import Source, SourceRows, row_runs
from ptqpipe.recipe.weight_map import WeightMap
from ptqpipe.run.quantities import number, sqnr_db, table

_ROUNDED = 1e-6  # a reciprocal's reciprocal may be the next float32
SHOWN = 8  # lines of one kind that the text lists
_STEP = 1 << 20  # elements of plain tensors that are compared in float64 at a time
_QUANTIZATION = ("quantization_config", "compression_config", "text_config.quantization_config", HF_QUANT_CONFIG)


class Same(StrEnum):
    """Degrees of equality of two tensors."""

    BYTES = "same bytes"  # codes and scales, or the plain tensor
    NUMBERS = "same numbers"  # other bytes, the same float32 decode
    INPUT = "other input scale"  # the same numbers, and another static scale of the activations
    NO = "different"


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One logical weight in both checkpoints. ``relative_mse`` is sum (a - b)^2 / sum a^2, None for what is no number.

    kind_a, kind_b  the format, or the dtype of a plain tensor
    """

    name: str
    same: Same
    kind_a: str
    kind_b: str
    relative_mse: float | None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The differences of two checkpoints.

    only_a, only_b  logical tensors of one of them
    reshaped        tensors of both with different shapes: (name, shape in a, shape in b)
    tensors         all others
    config          keys of the config files: (key, value in a, value in b)
    files           what lies beside the weights, the record aside: (name, what a has, what b has)
    """

    a: Path
    b: Path
    container_a: str
    container_b: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    tensors: tuple[TensorDiff, ...]
    config: tuple[tuple[str, str, str], ...]
    files: tuple[tuple[str, str, str], ...]

    @property
    def same_tensors(self) -> bool:
        numbers = all(tensor.same in (Same.BYTES, Same.NUMBERS) for tensor in self.tensors)
        return numbers and not (self.only_a or self.only_b or self.reshaped)

    @property
    def equal(self) -> bool:
        """The same model: the same tensors and files, and configs that differ in the quantization alone."""
        config = all(_about_quantization(key) for key, _, _ in self.config)
        return self.same_tensors and config and not self.files

    @property
    def identical(self) -> bool:
        """The same model in the same layout: the same bytes, configs and files."""
        return self.equal and not self.config and all(tensor.same is Same.BYTES for tensor in self.tensors)


def _about_quantization(where: str) -> bool:
    return any(where == key or where.startswith((f"{key}.", f"{key}:")) for key in _QUANTIZATION)


_Pair = tuple[str, Slice, Slice, tuple[int, int]]  # a weight, its rows in a and in b, their shape [out, in]


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
        for name, x, y, shape in pairs:
            kinds = _kind(left, x.tensor), _kind(right, y.tensor)
            tensors.append(_judged(name, kinds, *_distance(left, right, x, y, shape)))
        config, files = tuple(_config_diffs(left, right)), tuple(_file_diffs(left, right))
        names, parts = (left.container_name, right.container_name), (tuple(reshaped), tuple(tensors))
        return DiffReport(a, b, *names, tuple(only_a), tuple(only_b), *parts, config, files)


def _expanded(left: Source, right: Source) -> tuple[list[_Pair], list[str], list[str]]:
    """Experts that are weights of their own in one and rows of a stack in the other; then the names of one alone."""
    only_a = [name for name in left.tensors if name not in right.tensors]
    only_b = [name for name in right.tensors if name not in left.tensors]
    pairs: list[_Pair] = []
    for names, stacked, swap in ((only_b, left, False), (only_a, right, True)):
        members = _members_of(names, stacked, other=left if swap else right)
        for member in members:
            own = Slice(member.weight)
            first, second = (own, member.source) if swap else (member.source, own)
            pairs.append((member.weight, first, second, member.shape))
        whole = {member.source.tensor for member in members}
        used = {member.weight for member in members}
        only_a = [name for name in only_a if name not in (used if swap else whole)]
        only_b = [name for name in only_b if name not in (whole if swap else used)]
    return pairs, only_a, only_b


def _members_of(names: Iterable[str], stacked: Source, *, other: Source) -> list[Member]:
    """Members of the stacks of ``stacked`` that ``other`` has as weights of their own; of whole stacks only."""
    wanted = set(names)
    if not any(".experts." in name for name in wanted):
        return []
    origins = WeightMap.of(stacked)
    members = [
        member
        for name, member in origins.weights.items()
        if name in wanted and member.source.expert is not None and other.tensors[name][1] == member.shape
    ]
    counts = Counter(member.source.tensor for member in members)
    return [m for m in members if counts[m.source.tensor] == origins.divided[m.source.tensor]]


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
    for expert in stored.planes:
        where = Slice(name, expert=expert, transposed=stored.transposed)
        error, energy = _distance(left, right, _within(left, where), _within(right, where), stored.shape)
        numbers = [numbers[0] + error, numbers[1] + energy]
    result = _judged(name, kinds, *numbers)
    return result if inputs or result.same is Same.NO else replace(result, same=Same.INPUT)


def _same_inputs(left: Source, right: Source, name: str) -> bool:
    a, b = _input_scales(left, name), _input_scales(right, name)
    return len(a) == len(b) and all(
        x == y or (x is not None and y is not None and math.isclose(x, y, rel_tol=_ROUNDED))
        for x, y in zip(a, b, strict=True)
    )


def _input_scales(source: Source, name: str) -> list[float | None]:
    stored = source.stored[name]
    scales = [decode_input_global(stored, source.load, expert=expert) for expert in stored.planes]
    return [None if scale is None else float(scale) for scale in scales]


def _within(source: Source, where: Slice) -> Slice:
    """A stored weight is [out, in] in every layout; only a plain tensor is transposed."""
    return Slice(where.tensor, expert=where.expert) if where.tensor in source.stored else where


def _judged(name: str, kinds: tuple[str, str], error: float, energy: float) -> TensorDiff:
    return TensorDiff(name, Same.NO if error else Same.NUMBERS, *kinds, _relative(error, energy))


def _kind(source: Source, name: str) -> str:
    stored = source.stored.get(name)
    return source.tensors[name][0] if stored is None else stored.scheme.fmt.name


def _distance(left: Source, right: Source, a: Slice, b: Slice, shape: tuple[int, int]) -> tuple[float, float]:
    """(sum (a - b)^2, sum a^2) in float64; NaN in both at one place counts as equal, elsewhere as infinite."""
    first, second = SourceRows(left, a, shape=shape), SourceRows(right, b, shape=shape)
    formats = [s.stored[p.tensor].scheme.fmt for s, p in ((left, a), (right, b)) if p.tensor in s.stored]
    runs = row_runs(shape, formats[0]) if formats else [(0, shape[0])]
    return _sums((first.rows(start, stop), second.rows(start, stop)) for start, stop in runs)


def _sums(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """(sum (x - y)^2, sum x^2) of all pairs."""
    error = energy = 0.0
    for x, y in ((x.double(), y.double()) for x, y in pairs):
        unlike = (x != y) & ~(torch.isnan(x) & torch.isnan(y))
        delta = torch.where(unlike, x - y, 0.0)
        error += float(torch.nan_to_num(delta, nan=math.inf, posinf=math.inf, neginf=math.inf).square().sum())
        energy += float(torch.nan_to_num(x, nan=0.0).square().sum())
    return error, energy


def _compare_plain(left: Source, right: Source, name: str) -> tuple[Same, float | None]:
    (dtype_a, shape), (dtype_b, _) = left.tensors[name], right.tensors[name]
    if dtype_a == dtype_b:
        pairs = zip(left.reader.chunks(name), right.reader.chunks(name), strict=True)
        if all(a == b for (_, a), (_, b) in pairs):
            return Same.BYTES, 0.0
    if dtype_a not in DTYPES or dtype_b not in DTYPES or "C64" in (dtype_a, dtype_b):
        return Same.NO, None
    count = math.prod(shape)
    error, energy = _sums(
        (_flat(left, name, start, min(start + _STEP, count)), _flat(right, name, start, min(start + _STEP, count)))
        for start in range(0, count, _STEP)
    )
    return (Same.NO if error else Same.NUMBERS), _relative(error, energy)


def _relative(error: float, energy: float) -> float:
    return error / energy if energy else (math.inf if error else 0.0)


def _flat(source: Source, name: str, start: int, stop: int) -> torch.Tensor:
    dtype, width = DTYPES[source.reader.entries[name].dtype]
    raw = source.reader.read_bytes(name, start=start * width, stop=stop * width)
    return torch.frombuffer(raw, dtype=dtype)


def _same_payload(left: Source, right: Source, name: str) -> bool:
    """Whether two stored weights have the same codes and scales, however their layouts call and shape them.

    A global scale may be a factor here and a divisor there: then the decode decides, not the bytes.
    """
    a, b = left.stored[name], right.stored[name]
    if (a.scheme.fmt, a.shape, a.experts, a.transposed) != (b.scheme.fmt, b.shape, b.experts, b.transposed):
        return False
    if a.scheme.rotation != b.scheme.rotation:
        return False
    if (a.part(PartKind.GLOBAL_DIVISOR) is None) != (b.part(PartKind.GLOBAL_DIVISOR) is None):
        return False
    for expert in a.planes:
        for (_, p), (_, q) in zip(left.runs(name, expert=expert), right.runs(name, expert=expert), strict=True):
            same = torch.equal(p.data, q.data) and torch.equal(p.scales, q.scales)
            if p.global_scale is not None and q.global_scale is not None:
                same = same and torch.equal(p.global_scale, q.global_scale)
            if not same:
                return False
    return True


def _config_diffs(left: Source, right: Source) -> Iterator[tuple[str, str, str]]:
    for name in ("config.json", HF_QUANT_CONFIG):
        a, b = left.reader.read_json(name), right.reader.read_json(name)
        prefix = "" if name == "config.json" else f"{name}: "
        if a is None or b is None:
            if a is not b:
                yield name, _presence(a), _presence(b)
            continue
        yield from ((prefix + key, x, y) for key, x, y in json_differences(a, b))


def _presence(value: Any) -> str:
    return "missing" if value is None else "present"


def _file_diffs(left: Source, right: Source) -> Iterator[tuple[str, str, str]]:
    """Differences of the other files: all but weights, configs and the record."""
    a, b = ({path.relative_to(s.reader.path).as_posix(): path for path in s.reader.extra_files} for s in (left, right))
    if all(is_ours(files.get(CARD, Path())) for files in (a, b)):  # they tell of the difference, and are none
        del a[CARD], b[CARD]
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            yield name, _presence(a.get(name)), _presence(b.get(name))
        elif not filecmp.cmp(a[name], b[name], shallow=False):
            yield name, f"{a[name].stat().st_size} bytes", f"{b[name].stat().st_size} bytes"


def render(report: DiffReport) -> str:
    """The report as text: what only one has, weights by role, configs, files, and the verdict."""
    lines = [f"a: {report.a}  ({report.container_a})", f"b: {report.b}  ({report.container_b})", ""]
    for names, side in ((report.only_a, "a"), (report.only_b, "b")):
        if names:
            lines += [f"only in {side}: {len(names)} tensors", *_some(sorted({name_pattern(n) for n in names})), ""]
    if report.reshaped:
        lines += ["other shapes:", *_some([f"{n}: {list(x)} and {list(y)}" for n, x, y in report.reshaped]), ""]
    if report.tensors:
        lines += [_tensors_table(report.tensors), ""]
    for values, title in ((report.config, "config"), (report.files, "files")):
        if values:
            lines += [f"{title}:", *_some([f"{where}: {x} | {y}" for where, x, y in values], limit=40), ""]
    return "\n".join([*lines, _verdict(report)])


def _verdict(report: DiffReport) -> str:
    if report.identical:
        return "identical"
    if report.equal:
        return "equal: the same numbers in another layout"
    return "different: the tensors are the same, config or files are not" if report.same_tensors else "different"


def _some(items: list[str], *, limit: int = SHOWN) -> list[str]:
    rest = [f"  ... and {len(items) - limit} more"] if len(items) > limit else []
    return [f"  {item}" for item in items[:limit]] + rest


def _tensors_table(tensors: Iterable[TensorDiff]) -> str:
    groups: dict[tuple[str, str, str, Same], list[TensorDiff]] = defaultdict(list)
    for tensor in tensors:
        groups[(role_of(tensor.name), tensor.kind_a, tensor.kind_b, tensor.same)].append(tensor)
    rows = []
    for (role, kind_a, kind_b, same), members in groups.items():
        errors = [m.relative_mse for m in members if m.relative_mse is not None]
        mean = sum(errors) / len(errors) if errors else None
        numbers = [number(mean), f"{sqnr_db(mean):.2f}"] if mean is not None and same is Same.NO else ["-", "-"]
        rows.append([role, kind_a, kind_b, str(same), str(len(members)), *numbers])
    return table(["role", "a", "b", "", "tensors", "rel. MSE", "dB"], rows, left=4)


def to_json(report: DiffReport) -> dict[str, Any]:
    return {
        "a": {"checkpoint": str(report.a), "container": report.container_a, "only": list(report.only_a)},
        "b": {"checkpoint": str(report.b), "container": report.container_b, "only": list(report.only_b)},
        "equal": report.equal,
        "identical": report.identical,
        "reshaped": [{"name": name, "a": list(x), "b": list(y)} for name, x, y in report.reshaped],
        "tensors": {
            t.name: {"same": str(t.same), "a": t.kind_a, "b": t.kind_b, "relative_mse": finite(t.relative_mse)}
            for t in report.tensors
        },
        "config": [{"key": key, "a": x, "b": y} for key, x, y in report.config],
        "files": [{"file": name, "a": x, "b": y} for name, x, y in report.files],
    }
