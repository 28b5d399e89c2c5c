"""The report of a comparison of two checkpoints, as text for a terminal and as JSON."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ptqpipe.stages.common.text import decibels, name_pattern, role_of, table

SHOWN = 8  # lines of one kind that the text lists
_QUANTIZATION = ("quantization_config", "compression_config", "text_config.quantization_config", "hf_quant_config.json")


class Same(StrEnum):
    """How equal two tensors are."""

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
class ValueDiff:
    """A key of a config file, or a file, with its values (a hash or "missing" for files)."""

    where: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What two checkpoints say differently.

    only_a, only_b  logical tensors of one of them
    reshaped        tensors of both with different shapes: (name, shape in a, shape in b)
    tensors         all others
    config          keys of the config files; files: what lies beside the weights, the record aside
    """

    a: Path
    b: Path
    container_a: str
    container_b: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    tensors: tuple[TensorDiff, ...]
    config: tuple[ValueDiff, ...]
    files: tuple[ValueDiff, ...]

    @property
    def same_tensors(self) -> bool:
        """The same numbers under the same names."""
        numbers = all(tensor.same in (Same.BYTES, Same.NUMBERS) for tensor in self.tensors)
        return numbers and not (self.only_a or self.only_b or self.reshaped)

    @property
    def equal(self) -> bool:
        """The same model: the same tensors and files, and configs that differ in the quantization alone."""
        config = all(_about_quantization(value.where) for value in self.config)
        return self.same_tensors and config and not self.files

    @property
    def identical(self) -> bool:
        """The same model in the same layout: the same bytes, configs and files."""
        return self.equal and not self.config and all(tensor.same is Same.BYTES for tensor in self.tensors)


def _about_quantization(where: str) -> bool:
    """Whether a config key says how the model is stored, not what it is."""
    return any(where == key or where.startswith((f"{key}.", f"{key}:")) for key in _QUANTIZATION)


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
            lines += [f"{title}:", *_some([f"{v.where}: {v.a} | {v.b}" for v in values], limit=40), ""]
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
        shown = mean is not None and same is Same.NO
        rows.append(
            [
                role,
                kind_a,
                kind_b,
                str(same),
                str(len(members)),
                f"{mean:.3e}" if shown else "-",
                f"{decibels(mean or 0.0):.2f}" if shown else "-",
            ]
        )
    return table(["role", "a", "b", "", "tensors", "rel. MSE", "dB"], rows, left=4)


def to_json(report: DiffReport) -> dict[str, Any]:
    """The whole report as JSON values."""
    return {
        "a": {"checkpoint": str(report.a), "container": report.container_a, "only": list(report.only_a)},
        "b": {"checkpoint": str(report.b), "container": report.container_b, "only": list(report.only_b)},
        "equal": report.equal,
        "identical": report.identical,
        "reshaped": [{"name": name, "a": list(x), "b": list(y)} for name, x, y in report.reshaped],
        "tensors": {
            t.name: {"same": str(t.same), "a": t.kind_a, "b": t.kind_b, "relative_mse": _finite(t.relative_mse)}
            for t in report.tensors
        },
        "config": [{"key": v.where, "a": v.a, "b": v.b} for v in report.config],
        "files": [{"file": v.where, "a": v.a, "b": v.b} for v in report.files],
    }


def _finite(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return str(value) if value is not None and not math.isfinite(value) else value
