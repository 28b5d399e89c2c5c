"""The report of an inspection: what a checkpoint holds, as text for a terminal and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ptqpipe.stages.common.text import size_text, table


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
class RoleRow:
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
        """Stored bits, scales and all, a weight."""
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
class FileRow:
    """One weight file."""

    name: str
    nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class InspectReport:
    """What is in a checkpoint.

    producer     who says to have written it, "" if nobody does
    record       a few facts of ptqpipe.json: source, recipe, versions
    kv_scales    how many kv-cache scales there are, and the least and largest
    suspicious   one line for each thing worth a look
    """

    path: Path
    container: str
    producer: str
    record: Mapping[str, str]
    weights: tuple[RoleRow, ...]
    kept: tuple[KeptRow, ...]
    kv_scales: tuple[int, float, float] | None
    files: tuple[FileRow, ...]
    suspicious: tuple[str, ...]

    @property
    def params(self) -> int:
        """Numbers of the model: quantized weights and kept tensors."""
        return sum(row.params for row in self.weights) + sum(row.params for row in self.kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.nbytes for row in self.weights) + sum(row.nbytes for row in self.kept)

    @property
    def ratio(self) -> float:
        """Bytes beside those of the same numbers in bfloat16."""
        return self.nbytes / (2 * self.params) if self.params else 1.0


def render(report: InspectReport) -> str:
    """The report as text."""
    lines = [f"{report.path}  ({report.container})"]
    if report.producer:
        lines.append(f"  written by {report.producer}")
    lines += [f"  {key}: {value}" for key, value in report.record.items()]
    described = [f"{report.params:,} numbers in {size_text(report.nbytes)}"]
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
            [r.role, r.dtype, r.reason[:50] or "-", str(r.count), f"{r.params:,}", size_text(r.nbytes)]
            for r in report.kept
        ]
        lines += [table(header, cells, left=3), ""]
    if report.kv_scales is not None:
        count, low, high = report.kv_scales
        lines += [f"kv cache: {count} scales from {low:.4g} to {high:.4g}", ""]
    if report.suspicious:
        lines += ["suspicious:", *(f"  {line}" for line in report.suspicious), ""]
    files = [[row.name, size_text(row.nbytes), str(row.tensors)] for row in report.files]
    return "\n".join([*lines, table(["file", "size", "tensors"], files)])


def _weight_cells(row: RoleRow) -> list[str]:
    low, high = row.global_least, row.global_largest
    scales = "-" if low is None or high is None else f"{low:.2e} to {high:.2e}"
    scheme = row.scheme if row.scheme.startswith(row.format) else f"{row.scheme} ({row.format})"
    bits = f"{row.bits_per_weight:.3f}"
    return [row.role, scheme, str(row.count), f"{row.params:,}", size_text(row.nbytes), bits, scales]


def to_json(report: InspectReport) -> dict[str, Any]:
    """The whole report as JSON values."""
    return {
        "checkpoint": str(report.path),
        "container": report.container,
        "producer": report.producer,
        "record": dict(report.record),
        "params": report.params,
        "bytes": report.nbytes,
        "ratio_to_bf16": report.ratio,
        "weights": [
            {**_plain(row), "bits_per_weight": row.bits_per_weight, "scales": _plain(row.scales)}
            for row in report.weights
        ],
        "kept": [_plain(row) for row in report.kept],
        "kv_scales": None
        if report.kv_scales is None
        else dict(zip(("count", "least", "largest"), report.kv_scales, strict=True)),
        "files": [_plain(row) for row in report.files],
        "suspicious": list(report.suspicious),
    }


def _plain(row: RoleRow | KeptRow | FileRow | ScaleCounts) -> dict[str, Any]:
    return {f.name: getattr(row, f.name) for f in fields(row)}
