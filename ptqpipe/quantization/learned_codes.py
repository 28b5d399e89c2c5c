"""Learned codes of a model's weights, as a folder: `ptqpipe tune` writes it and `ptqpipe convert` reads it.

ROUNDING/rounding.json             model, recipe, data, settings, and for every weight its format and file
ROUNDING/<layer>.safetensors       <weight>.data, .scales and, where the format has one, .global_scale
ROUNDING/trained.safetensors       tensors that stay floats and were trained with the codes, by their names
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ptqpipe.checkpoint import COUNT, OpenFolder, TensorSpec, nearest_path, read_versioned
from ptqpipe.errors import CheckpointError, FormatError, UsageError, arg, usage
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import QTensor

CODES_FILE = "rounding.json"
CODES_VERSION = 1
TRAINED_FILE = "trained.safetensors"
TRAINED_REASON = "trained with the codes"  # why such a tensor is not the source's
_FORMER = ("learned", "gptq+learned")  # methods of earlier versions
_GAIN = ("start_loss", "learned_loss", "kept", "held_out")  # of a block's entry: output errors, whose they are
_TOLD = ("digest", "method", "start", "data", "end_to_end")

_SCALAR = (1, torch.float32)
_FIELDS = {
    "digest": str,
    "model": {"fingerprint": str},
    "weights": {"*": {"format": str, "shape": [COUNT]}},
    "blocks?": {"*": {"file": str, "sha256": str}},
    "data?": dict,
    "method?": str,
    "end_to_end?": {"trained?": {"*": {"kind": str, "sha256": str, "change": (int, float)}}},
}


class LearnedCodes(OpenFolder):
    """An open folder of learned codes."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        """Use `open` or `of_files`."""
        blocks = (content.get("blocks") or {}).values()
        super().__init__(path, content, hashes={e["file"]: e["sha256"] for e in blocks}, remedy="tune again")

    @classmethod
    def open(cls, path: Path) -> "LearnedCodes":
        """UsageError for a folder that is no finished tuning; CheckpointError for a damaged one."""
        file, wrote = Path(path) / CODES_FILE, usage("tune", "MODEL", data="TEXT", out="FOLDER")
        if not file.is_file():
            remedy = nearest_path(Path(path)) or f"give the folder that this wrote: {wrote}"
            raise UsageError(f"{path} holds no {CODES_FILE}; {remedy}")
        content = read_versioned(file, _FIELDS, version=CODES_VERSION, remedy="tune again")
        if content.get("method") in _FORMER:
            raise UsageError(
                f"{path} has codes of the method {content['method']}, which this ptqpipe does not have; tune again: "
                f"{wrote}"
            )
        return cls(Path(path), content)

    @classmethod
    def of_files(cls, path: Path, content: Mapping[str, Any]) -> "LearnedCodes":
        """A folder whose index is still in the making: ``content`` has its "weights"."""
        return cls(path, content)

    def __repr__(self) -> str:
        return f"<LearnedCodes {self.path}: codes of {len(self.content['weights'])} weights>"

    def describe(self) -> dict[str, Any]:
        """What the record of a checkpoint made of them says: the digest, how they were found, on which data, and what
        each decoder layer gained by them."""
        facts = {key: self.content[key] for key in _TOLD if key in self.content}
        blocks = (self.content.get("blocks") or {}).items()
        gains = {name: {key: e[key] for key in _GAIN if key in e} for name, e in blocks}
        return facts | ({"blocks": gains} if gains else {})

    @property
    def trained(self) -> Mapping[str, Mapping[str, Any]]:
        """Name of a tensor that was trained with the codes -> its kind, its sha256, and its relative change."""
        tensors: Mapping[str, Mapping[str, Any]] = (self.content.get("end_to_end") or {}).get("trained") or {}
        return tensors

    def value(self, tensor: str, *, like: TensorSpec) -> torch.Tensor:
        """A tensor that was trained, of the dtype and the shape of ``like``. CheckpointError where it is not what was
        written."""
        entry = self._reader.entries.get(tensor)
        matches = entry is not None and (entry.dtype, entry.shape) == (like.dtype, like.shape)
        if not matches or self._reader.sha256(tensor) != self.trained[tensor]["sha256"]:
            raise CheckpointError(f"{self.path / TRAINED_FILE} lacks '{tensor}', or is damaged; tune again")
        return self._reader.read(tensor)

    def has(self, weight: str) -> bool:
        """Whether codes of a weight (with its expert in brackets, in a stack) were learned."""
        return weight in self.content["weights"]

    def file_of(self, weight: str) -> str | None:
        """The name of the file with the codes of a weight; None where that is gone."""
        entry = self._reader.entries.get(f"{weight}.data")
        return None if entry is None else entry.file.name

    def of(self, weight: str, fmt: Format, *, shape: tuple[int, int]) -> QTensor:
        """The learned QTensor [N, K].

        UsageError where there is none, or one of another format or shape; CheckpointError for a damaged file.
        """
        entry = self.content["weights"].get(weight)
        if entry is None:
            raise UsageError(f"{self.path} has no codes of '{weight}'; tune the model that holds it")
        if entry["format"] != fmt.name or tuple(entry["shape"]) != shape:
            raise UsageError(
                f"{self.path} has '{weight}' in {entry['format']} {entry['shape']}, the recipe wants {fmt.name} "
                f"{list(shape)}; tune with the same {arg('format')} or {arg('recipe')}"
            )
        data, scales = self._read(f"{weight}.data"), self._read(f"{weight}.scales")
        g = self._read(f"{weight}.global_scale") if fmt.has_global else None
        if scales.dtype != (fmt.scale.dtype or torch.uint8) or (g is not None and (g.numel(), g.dtype) != _SCALAR):
            raise CheckpointError(f"{self.path} has scales of '{weight}' that are none of {fmt.name}; tune again")
        try:
            return QTensor(fmt, shape, data, scales, None if g is None else g.reshape(()))
        except FormatError as error:
            raise CheckpointError(f"{self.path} has damaged codes of '{weight}': {error}; tune again") from None


def trained_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a checkpoint's record says of tensors that were trained with the codes, by name; empty for none."""
    entry: Any = record
    for key in ("rounding", "end_to_end", "trained"):
        entry = entry.get(key) if isinstance(entry, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def relative_change(before: torch.Tensor, after: torch.Tensor) -> float:
    """The root mean square of what changed, relative to that of ``before``; of zeros, to 1."""
    size = float(before.double().square().sum())
    return float(((after.double() - before.double()).square().sum() / (size or 1.0)).sqrt())


def sha256_of(tensor: torch.Tensor) -> str:
    """Of a tensor's bytes as safetensors stores them."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()
