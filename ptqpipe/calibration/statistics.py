"""Statistics of the inputs of linear layers, as a folder: calibration writes it and algorithms read it.

    STATS/stats.json                model, data, and for every linear module where its numbers lie
    STATS/<layer>.safetensors       the tensors of one decoder layer, written when the layer is done

A linear's input x is [tokens, K]. Modules that share an input (q, k and v) share one entry, its ``key``. Moments are
means over tokens, so statistics of several processes merge by their counts.
"""

import itertools
import math
import re
from collections.abc import KeysView, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ptqpipe.calibration.inputs import (
    InputStatistics,
    Moments,
    WeightGradients,
    from_lower_half,
    is_finite,
    rows_of_half,
)
from ptqpipe.checkpoint import COUNT, NUMBER, OpenFolder, nearest_path, read_versioned
from ptqpipe.errors import CheckpointError, UsageError, arg, usage

STATS_FILE = "stats.json"
STATS_VERSION = 1
BLOCK = 16  # columns of a block moment
QUANTILES = (0.99, 0.999, 0.9999)

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)|(?<=\[)\d+(?=\]$)")

_MODULE = {"key": str, "tokens": COUNT, "measured": bool, "quantiles": {"*": NUMBER}, "held_tokens?": COUNT}
_FIELDS = {
    "digest": str,
    "model": {"name?": str, "fingerprint": str},
    "data?": dict,
    "modules": {"*": _MODULE},
    "attention?": {"*": dict},
    "files?": {"*": str},
}


def of_all_experts(module: str) -> str:
    """What names the same projection of all experts of a layer; the name itself of what is no expert."""
    return _EXPERT.sub("*", module)


class MomentSource(Protocol):
    """Statistics of the inputs of linear modules by name, as algorithms read them. See `Statistics`."""

    def key(self, module: str) -> str: ...

    def has(self, module: str, moment: str) -> bool: ...

    def of(
        self, module: str, *, block: bool = False, full: bool = False, held_out: bool = False
    ) -> InputStatistics: ...

    def output_moments(self, module: str, outputs: int) -> list[torch.Tensor] | None: ...


class Statistics(OpenFolder):
    """An open statistics folder."""

    @classmethod
    def open(cls, path: Path) -> "Statistics":
        """UsageError for a folder that is no finished calibration; CheckpointError for a damaged one."""
        file, wrote = Path(path) / STATS_FILE, usage("calibrate", "MODEL", data="TEXT", out="FOLDER")
        if not Path(path).is_dir():
            remedy = nearest_path(Path(path)) or f"give what this wrote: {wrote}"
            raise UsageError(f"the statistics {path} are no folder that exists; {remedy}")
        if not file.is_file():
            raise UsageError(f"{path} holds no {STATS_FILE}; give the folder that this wrote: {wrote}")
        remedy = "calibrate again"
        content = read_versioned(file, _FIELDS, version=STATS_VERSION, remedy=remedy)
        hashes = content.get("files") or {}
        for name in hashes:
            if not (Path(path) / name).is_file():
                raise CheckpointError(f"{Path(path) / name} is missing; copy the whole folder, or {remedy}")
        return cls(Path(path), content, hashes=hashes, remedy=remedy)

    def __repr__(self) -> str:
        return f"<Statistics {self.path}: {len(self._modules)} modules>"

    @property
    def _modules(self) -> dict[str, Any]:
        modules: dict[str, Any] = self.content["modules"]
        return modules

    @property
    def modules(self) -> KeysView[str]:
        """Linear modules with statistics, by their names in the checkpoint (without ``.weight``), in its order."""
        return self._modules.keys()

    def of(self, module: str, *, block: bool = False, full: bool = False, held_out: bool = False) -> InputStatistics:
        """The statistics of one module, with the moments that are asked for.

        held_out  those of held-out samples too, where there are any

        UsageError where the module has none, or calibration did not collect these moments.
        """
        entry = self._entry(module)
        return InputStatistics(
            tokens=int(entry["tokens"]),
            measured=bool(entry["measured"]),
            amax=self._moment(entry, module, "amax"),
            mean=self._moment(entry, module, "mean"),
            second_moment=self._moment(entry, module, "second_moment"),
            quantiles=self._quantiles(entry["quantiles"]),
            block_moment=self._moment(entry, module, "block_moment") if block else None,
            full_moment=self._moment(entry, module, "full_moment") if full else None,
            held_out=self._held_out(entry, module, block=block, full=full)
            if held_out and "held_tokens" in entry
            else None,
        )

    def _quantiles(self, entry: Mapping[str, float]) -> dict[float, float]:
        try:
            return {float(p): float(value) for p, value in entry.items()}
        except ValueError as error:
            raise CheckpointError(f"{self.path / STATS_FILE} has a quantile whose {error}; calibrate again") from None

    def _held_out(self, entry: Mapping[str, Any], module: str, *, block: bool, full: bool) -> Moments:
        return Moments(
            self._moment(entry, module, "held_second_moment"),
            self._moment(entry, module, "held_block_moment") if block else None,
            self._moment(entry, module, "held_full_moment") if full else None,
            tokens=int(entry["held_tokens"]),
        )

    def has_any(self, moment: str) -> bool:
        """Whether any module has this moment."""
        return any(self.has(module, moment) for module in self.modules)

    def key(self, module: str) -> str:
        """What names the input of a module: modules with one input have one. UsageError where it has no statistics."""
        return str(self._entry(module)["key"])

    def _entry(self, module: str) -> Mapping[str, Any]:
        entry: Mapping[str, Any] | None = self._modules.get(module)
        if entry is None:
            raise UsageError(f"{self.path} has no statistics of '{module}'; calibrate the model that holds it")
        return entry

    def columns(self, module: str) -> int:
        """K of a module's input: as many numbers as its second moment has, 0 where that is not there."""
        header = self._reader.entries.get(f"{self._entry(module)['key']}.second_moment")
        return 0 if header is None else math.prod(header.shape)

    def has(self, module: str, moment: str) -> bool:
        """Whether ``moment`` ("amax", ..., "block_moment", "full_moment") of a module was collected."""
        entry = self._modules.get(module)
        return entry is not None and f"{entry['key']}.{moment}" in self._reader.entries

    def output_moment(self, module: str, outputs: int) -> torch.Tensor | None:
        """float32 [outputs] E[g^2] of the gradients of the model's loss at a module's outputs: how much the model minds
        an error there. None where that was not collected, or of a module of another size."""
        name = f"{module}.output_moment"
        header = self._reader.entries.get(name)
        if header is None or header.dtype != "F32" or header.shape != (outputs,):
            return None
        return self._read(name)

    def knows_outputs(self, module: str) -> bool:
        """Whether there are `output_moments` of a module."""
        return f"{module}.output_moments.0" in self._reader.entries

    def output_moments(self, module: str, outputs: int) -> list[torch.Tensor] | None:
        """float32 [b, b] E[g g^T] of the same gradients, of every run of so many outputs. None where they were not
        collected, or of a module of another size."""
        names = (f"{module}.output_moments.{i}" for i in range(outputs))
        stored = list(itertools.takewhile(lambda name: name in self._reader.entries, names))
        headers = [self._reader.entries[name] for name in stored]
        sizes = [rows_of_half(math.prod(header.shape)) for header in headers]
        if any(header.dtype != "F32" for header in headers) or sum(sizes) != outputs or 0 in sizes:
            return None
        return [from_lower_half(self._finite(name, f"an output moment of '{module}'")) for name in stored]

    def weight_gradients(self, module: str, shape: tuple[int, int]) -> WeightGradients | None:
        """Of a module's weight of this shape. None where they were not collected, or of another shape."""
        names = [f"{module}.gradient_{part}" for part in ("rows", "columns", "along")]
        headers = [self._reader.entries.get(name) for name in names]
        windows = 0 if headers[2] is None else math.prod(headers[2].shape)
        wanted = [shape[:1], shape[1:], (max(1, windows),)]
        if any(e is None or (e.dtype, e.shape) != ("F32", size) for e, size in zip(headers, wanted, strict=True)):
            return None
        return WeightGradients(*map(self._read, names))

    def pairs(self, module: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Inputs and gradients of the model's loss at them, both bfloat16 [tokens, K], of some tokens at the input of a
        module, summed over the modules that share it; experts of a layer have those of all of them. None where they
        were not collected."""
        if self.pair_shape(module) is None:
            return None
        x, h = map(self._read, self._pair_names(module))
        return x, h

    def pair_shape(self, module: str) -> tuple[int, int] | None:
        """(tokens, K) of `pairs`, from the header. None where they were not collected."""
        first, second = (self._reader.entries.get(name) for name in self._pair_names(module))
        if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
            return None
        return (first.shape[0], first.shape[1]) if first.dtype == "BF16" and len(first.shape) == 2 else None

    def _pair_names(self, module: str) -> tuple[str, str]:
        key = of_all_experts(self.key(module))
        return f"{key}.pair_inputs", f"{key}.pair_gradients"

    def held_out(self, module: str) -> bool:
        """Whether there are moments of held-out samples of a module."""
        return "held_tokens" in self._modules.get(module, {})

    @property
    def attentions(self) -> tuple[str, ...]:
        """Attention modules with key and value statistics."""
        return tuple(self.content.get("attention") or ())

    def attention(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest keys and values of one attention module. UsageError where there are none."""
        if module not in self.attentions:
            raise UsageError(f"{self.path} has no key and value statistics of '{module}'; calibrate again")
        return self._read(f"{module}.k_amax"), self._read(f"{module}.v_amax")

    def _moment(self, entry: Mapping[str, Any], module: str, moment: str) -> torch.Tensor:
        name = f"{entry['key']}.{moment}"
        if name not in self._reader.entries:
            kind = next((kind for kind in ("full", "block") if f"{kind}_moment" in moment), "")
            remedy = f" with {arg('moments', kind)}" if kind else ""
            raise UsageError(f"{self.path} has no {moment} of '{module}'; calibrate again{remedy}")
        header = self._reader.entries[name]
        wanted = _shape(moment, self.columns(module))
        if header.dtype != "F32" or header.shape != wanted:
            raise CheckpointError(
                f"{header.file} has {moment} of '{module}' as {header.dtype} {list(header.shape)}, expected F32 "
                f"{list(wanted)}; calibrate again"
            )
        return self._finite(name, f"{moment} of '{module}'")

    def _finite(self, name: str, what: str) -> torch.Tensor:
        """A tensor. CheckpointError, which says ``what`` it is, unless its numbers are finite."""
        tensor = self._read(name)
        if not is_finite(tensor):
            raise CheckpointError(f"{self._reader.entries[name].file} has {what} that is not finite; calibrate again")
        return tensor


def _shape(moment: str, columns: int) -> tuple[int, ...]:
    kind = moment.removeprefix("held_")
    if kind == "full_moment":
        return columns, columns
    return (columns // BLOCK, BLOCK, BLOCK) if kind == "block_moment" else (columns,)
