"""inspect: what is in a checkpoint, from its headers and one pass over its scales. Any layout, and plain ones.

Reads no codes, save those of the weights that have suspicious scales. Decides nothing about faults: that is verify.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ptqpipe.checkpoint import RECORD_FILE
from ptqpipe.checkpoint.layouts import (
    HF_QUANT_CONFIG,
    PartKind,
    StoredWeight,
    is_kv_scale,
    quantization_config,
    scale_codes,
)
from ptqpipe.checkpoint.tensor_names import name_pattern, role_of
from ptqpipe.errors import CheckpointError
from ptqpipe.models.families import check_config, doubts
from ptqpipe.models.source import Source
from ptqpipe.numerics.formats import Codec
from ptqpipe.numerics.qtensor import scale_faults, used_blocks
from ptqpipe.recipe.options import AUTO
from ptqpipe.run.quantities import disk_size, number, scientific, table
from ptqpipe.runtime.expected import unlike_model

LEAST_SHARE = 0.01  # of blocks at the least or the largest scale: more is worth a line
GLOBAL_SPREAD = 1000.0  # largest over smallest global scale of a role
_SCALE_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class ScaleCounts:
    """Block scales: how many, and how many are zero, illegal (NaN, infinite, negative), the least or the largest code.

    ``least`` and ``largest`` stay 0 for scales that are plain floats. ``empty`` counts blocks whose codes are all zero,
    among those at a zero or the least scale.
    """

    blocks: int = 0
    zero: int = 0
    bad: int = 0
    least: int = 0
    largest: int = 0
    empty: int = 0

    def __add__(self, other: "ScaleCounts") -> "ScaleCounts":
        return ScaleCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class RoleSummary:
    """The quantized weights of one role, format and activation scheme; experts together.

    global_least, global_largest  what multiplies the block scales; None without global scales
    """

    role: str
    scheme: str
    format: str
    count: int
    params: int
    nbytes: int
    scales: ScaleCounts
    global_least: float | None
    global_largest: float | None

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.params if self.params else 0.0


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The tensors that are not quantized, by role and dtype; ``reason`` where a record gives it."""

    role: str
    dtype: str
    reason: str
    count: int
    params: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class InspectReport:
    """The content of a checkpoint.

    producer     who says to have written it, "" if nobody does
    record       a few facts of ptqpipe.json: source, recipe, versions
    kv_scales    how many kv-cache scales there are, and the least and largest
    suspicious   one line for each thing that looks wrong
    """

    path: Path
    container: str
    producer: str
    record: Mapping[str, str]
    weights: tuple[RoleSummary, ...]
    kept: tuple[KeptRow, ...]
    kv_scales: tuple[int, float, float] | None
    files: tuple[tuple[str, int, int], ...]
    suspicious: tuple[str, ...]

    @property
    def params(self) -> int:
        """Numbers of the model: quantized weights and kept tensors."""
        return sum(row.params for row in self.weights) + sum(row.params for row in self.kept)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.weights) + sum(row.nbytes for row in self.kept)

    @property
    def ratio(self) -> float:
        """Bytes, as a fraction of the same numbers in bfloat16."""
        return self.nbytes / (2 * self.params) if self.params else 1.0


def inspect(ckpt: Path) -> InspectReport:
    """Reads a checkpoint's headers, config and scales. CheckpointError for a damaged one."""
    with Source.open(ckpt, dangling=True) as opened:
        record = opened.reader.read_json(RECORD_FILE) or {}
        weights = _weight_rows(opened)
        kept = _kept_rows(opened, record)
        kv = _kv_scales(opened)
        files = tuple(
            (
                path.relative_to(ckpt).as_posix(),
                path.stat().st_size,
                sum(entry.file == path for entry in opened.reader.entries.values()),
            )
            for path in opened.reader.files
        )
        producer = _producer(opened, record)
        suspicious = (*_contradictions(opened), *_unused(opened), *_suspicious(weights))
        return InspectReport(
            ckpt, opened.container_name, producer, _facts(record), weights, kept, kv, files, suspicious
        )


def _weight_rows(opened: Source) -> tuple[RoleSummary, ...]:
    groups: dict[tuple[str, str, str], list[StoredWeight]] = defaultdict(list)
    for stored in opened.stored.values():
        scheme = stored.scheme
        groups[(role_of(stored.weight), scheme.fmt.name, scheme.label)].append(stored)
    rows = []
    for (role, fmt, name), members in groups.items():
        counts = sum((_scale_counts(opened, member) for member in members), ScaleCounts())
        values = [value for member in members for value in opened.global_scales(member).tolist()]
        rows.append(
            RoleSummary(
                role,
                name,
                fmt,
                sum(member.experts or 1 for member in members),
                sum(math.prod(member.shape) * (member.experts or 1) for member in members),
                sum(opened.reader.entries[part.name].nbytes for member in members for part in member.parts),
                counts,
                min(values, default=None),
                max(values, default=None),
            )
        )
    return tuple(rows)


def _scale_counts(opened: Source, stored: StoredWeight) -> ScaleCounts:
    part, codec = stored.part(PartKind.SCALES), stored.scheme.fmt.scale
    if part is None:
        return ScaleCounts()
    rows, inner = (part.shape[0], part.shape[1:]) if part.shape else (1, ())
    step = max(1, _SCALE_ROWS // max(1, math.prod(inner[part.stacked :])))
    total = ScaleCounts()
    for start in range(0, rows, step):
        scales = opened.reader.read(part.name, start=start, stop=min(start + step, rows)).flatten()
        total += _count(scale_codes(scales, stored.scheme.fmt, part.name) if codec.enumerable else scales, codec)
    suspicious = total.zero or total.least
    return total + ScaleCounts(empty=_empty_blocks(opened, stored)) if suspicious else total


def _count(scales: torch.Tensor, codec: Codec) -> ScaleCounts:
    zero, bad = (int(mask.sum()) for mask in scale_faults(scales, codec))
    if not codec.enumerable:
        return ScaleCounts(len(scales), zero, bad)
    least, largest = scales == codec.first_scale_code, scales == len(codec.magnitudes) - 1
    return ScaleCounts(len(scales), zero, bad, int(least.sum()), int(largest.sum()))


def _empty_blocks(opened: Source, stored: StoredWeight) -> int:
    return sum(int((~used_blocks(q)).sum()) for e in stored.planes for _, q in opened.runs(stored.weight, expert=e))


def _kept_rows(opened: Source, record: Mapping[str, Any]) -> tuple[KeptRow, ...]:
    kept = record.get("kept")
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in opened.plain:
        if is_kv_scale(name):  # reported by themselves
            continue
        claim = kept.get(name) if isinstance(kept, Mapping) else None
        reason = str(claim.get("reason", "")) if isinstance(claim, Mapping) else ""
        groups[(_kept_role(name), opened.reader.entries[name].dtype, name_pattern(reason))].append(name)
    return tuple(
        KeptRow(
            role,
            dtype,
            reason,
            len(names),
            sum(math.prod(opened.reader.entries[name].shape) for name in names),
            sum(opened.reader.entries[name].nbytes for name in names),
        )
        for (role, dtype, reason), names in groups.items()
    )


def _kept_role(name: str) -> str:
    """The role of a kept tensor: its module's last name; for other parameters than weights with the parameter's."""
    parent, _, leaf = name.rpartition(".")
    return f"{role_of(parent)}.{leaf}" if leaf == "bias" and parent else role_of(name)


def _kv_scales(opened: Source) -> tuple[int, float, float] | None:
    names = [name for name in opened.plain if is_kv_scale(name)]
    if not names:
        return None
    values = torch.cat([opened.reader.read(name).float().flatten() for name in names])
    return len(names), float(values.min()), float(values.max())


def _producer(opened: Source, record: Mapping[str, Any]) -> str:
    described = quantization_config(opened.config)
    if record.get("ptqpipe"):
        return f"ptqpipe {record['ptqpipe']}"
    for key in ("ptqpipe", "producer"):
        tool = described.get(key)
        if isinstance(tool, Mapping):
            return f"{tool.get('producer') or tool.get('name')} {tool.get('version')}"
    extra = opened.reader.read_json(HF_QUANT_CONFIG) or {}
    tool = extra.get("producer")
    if isinstance(tool, Mapping):
        return f"{tool.get('name')} {tool.get('version')}"
    return f"{opened.container_name} {described['version']}" if "version" in described else ""


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    facts: dict[str, str] = {}
    source, conversion = record.get("source"), record.get("converted_as", record)
    if isinstance(source, Mapping):
        facts["source"] = str(source.get("name"))
    recipe = conversion.get("recipe") if isinstance(conversion, Mapping) else None
    if isinstance(recipe, Mapping) and isinstance(recipe.get("rules"), list):
        rules = [rule for rule in recipe["rules"] if isinstance(rule, Mapping)]
        facts["recipe"] = ", ".join(map(_rule, rules))
    for key in ("torch", "relayout_of"):
        if record.get(key):
            facts[key] = str(record[key])
    return facts


def _rule(rule: Mapping[str, Any]) -> str:
    """What a rule says, its search where that is not left to the format."""
    search = rule.get("search")
    return f"{rule.get('match')} {rule.get('scheme')}" + ("" if search in (None, AUTO) else f" ({search})")


def _contradictions(opened: Source) -> list[str]:
    config, lines = opened.reader.config, [*unlike_model(opened), *doubts(opened.reader.config, opened.tensors)]
    try:
        check_config(config, opened.tensors)
    except CheckpointError as error:
        lines.append(str(error))
    return lines


def _unused(opened: Source) -> list[str]:
    """Parts of quantized weights that are not read, one line of each kind."""
    kinds = defaultdict[tuple[str, str], list[str]](list)
    for name, looks, _ in opened.dangling:
        kinds[name_pattern(name), looks].append(name)
    return [
        f"{name} ({len(names)}) looks like {looks}, but no weight uses it" for (name, looks), names in kinds.items()
    ]


def _suspicious(rows: Iterable[RoleSummary]) -> Iterable[str]:
    for row in rows:
        counts, which = row.scales, f"of {row.scales.blocks} block scales of {row.role} ({row.format})"
        if counts.bad:
            yield f"{counts.bad} {which} are NaN, infinite or negative"
        if counts.zero:
            yield f"{counts.zero} {which} are zero"
        if counts.largest > LEAST_SHARE * counts.blocks:
            yield f"{counts.largest / counts.blocks:.1%} {which} are the largest code; the global scale is too small"
        if counts.least - counts.empty > LEAST_SHARE * counts.blocks:
            share = (counts.least - counts.empty) / counts.blocks
            under = f"underflow to the smallest code although their blocks are not zero; the global scale of {row.role}"
            yield f"{share:.1%} {which} {under} is too large"
        if counts.empty > LEAST_SHARE * counts.blocks:
            yield f"{counts.empty / counts.blocks:.1%} {which} belong to blocks of zeros"
        low, high = row.global_least, row.global_largest
        if low is not None and high is not None:
            if not (math.isfinite(high) and low > 0):
                yield f"a global scale of {row.role} is {low if not low > 0 else number(high)}"
            elif high > GLOBAL_SPREAD * low:
                yield f"the global scales of {row.role} range from {number(low, 3)} to {number(high, 3)}"


def render(report: InspectReport) -> str:
    lines = [f"{report.path}  ({report.container})"]
    if report.producer:
        lines.append(f"  written by {report.producer}")
    lines += [f"  {key}: {value}" for key, value in report.record.items()]
    described = [f"{report.params:,} numbers in {disk_size(report.nbytes)}"]
    described.append(f"{8 * report.nbytes / max(1, report.params):.3f} bits each, {report.ratio:.3f} of bfloat16")
    lines += [f"  {', '.join(described)}", ""]
    if report.weights:
        params, nbytes = sum(r.params for r in report.weights), sum(r.nbytes for r in report.weights)
        text = f"  {params:,} of them ({params / report.params:.1%}) quantized, to {8 * nbytes / params:.3f} bits each"
        lines.insert(-1, text)
        header = ["quantized", "scheme", "weights", "params", "size", "bits", "global scales"]
        lines += [table(header, [_weight_cells(row) for row in report.weights], left=2), ""]
    if report.kept:
        header = ["kept" if report.weights else "tensors", "dtype", "reason", "count", "params", "size"]
        cells = [
            [r.role, r.dtype, r.reason[:50] or "-", str(r.count), f"{r.params:,}", disk_size(r.nbytes)]
            for r in report.kept
        ]
        lines += [table(header, cells, left=3), ""]
    if report.kv_scales is not None:
        count, low, high = report.kv_scales
        lines += [f"kv cache: {count} scales from {number(low)} to {number(high)}", ""]
    if report.suspicious:
        lines += ["suspicious:", *(f"  {line}" for line in report.suspicious), ""]
    files = [[name, disk_size(nbytes), str(tensors)] for name, nbytes, tensors in report.files]
    return "\n".join([*lines, table(["file", "size", "tensors"], files)])


def _weight_cells(row: RoleSummary) -> list[str]:
    low, high = row.global_least, row.global_largest
    scales = "-" if low is None or high is None else f"{scientific(low)} to {scientific(high)}"
    scheme = row.scheme if row.scheme.startswith(row.format) else f"{row.scheme} ({row.format})"
    bits = f"{row.bits_per_weight:.3f}"
    return [row.role, scheme, str(row.count), f"{row.params:,}", disk_size(row.nbytes), bits, scales]


def to_json(report: InspectReport) -> dict[str, Any]:
    return {
        "checkpoint": str(report.path),
        "container": report.container,
        "producer": report.producer,
        "record": dict(report.record),
        "params": report.params,
        "bytes": report.nbytes,
        "ratio_to_bf16": report.ratio,
        "weights": [{**asdict(row), "bits_per_weight": row.bits_per_weight} for row in report.weights],
        "kept": [asdict(row) for row in report.kept],
        "kv_scales": None
        if report.kv_scales is None
        else dict(zip(("count", "least", "largest"), report.kv_scales, strict=True)),
        "files": [{"name": name, "nbytes": nbytes, "tensors": tensors} for name, nbytes, tensors in report.files],
        "suspicious": list(report.suspicious),
    }
