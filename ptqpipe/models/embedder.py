"""Sentence embedders, in the folder layout of sentence-transformers: modules.json names a transformer, how the hidden
states of a text's tokens become one vector (1_Pooling/config.json), and whether that gets length 1."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe.checkpoint.regular_file import read_json
from ptqpipe.errors import CheckpointError, one_line

MODULES = "modules.json"
_LENGTHS = ("sentence_bert_config.json", "sentence_xlnet_config.json")
_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}
_TINY = 1e-12


def is_embedder(folder: Path) -> bool:
    """Whether the folder is a sentence-transformers model: its modules.json lists a transformer first."""
    kinds = _kinds(folder)
    return bool(kinds) and kinds[0][0] == "Transformer"


@dataclass(frozen=True, slots=True)
class Pooling:
    """How an embedder makes one vector of a text.

    mode       mean, cls (the first token), max or lasttoken
    normalize  whether the vector is divided by its length
    longest    tokens of a text that are read, its special ones included; None: as many as the model has positions
    """

    mode: str
    normalize: bool
    longest: int | None = None

    @classmethod
    def of(cls, folder: Path) -> "Pooling":
        """CheckpointError for a folder without a pooling, and for one that is not computed here."""
        kinds = _kinds(folder)
        place = next((path for kind, path in kinds if kind == "Pooling"), None)
        if place is None:
            raise CheckpointError(
                f"{folder} has no {MODULES} that lists a Pooling, so how it makes an embedding of a text is not said; "
                "copy the sentence-transformers files of the model's publisher"
            )
        other = next((kind for kind, _ in kinds if kind not in ("Transformer", "Pooling", "Normalize")), None)
        if other is not None:
            raise CheckpointError(
                f"{folder / MODULES} has a module {one_line(other, limit=80)!r}, which ptqpipe does not compute; "
                "embeddings are made by Transformer, Pooling and Normalize alone"
            )
        file = folder / place / "config.json"
        raw = read_json(file)
        if not isinstance(raw, Mapping):
            raise CheckpointError(f"{file} is not there or no JSON object; copy it from the model's publisher")
        modes = [key for key, value in raw.items() if key.startswith("pooling_mode_") and value is True]
        if len(modes) != 1 or modes[0] not in _MODES:
            said = ", ".join(modes) or "none"
            raise CheckpointError(f"{file} sets {one_line(said)}, expected one of {', '.join(_MODES)}")
        lengths = [read_json(folder / name) for name in _LENGTHS]
        longest = next((raw.get("max_seq_length") for raw in lengths if isinstance(raw, Mapping)), None)
        longest = longest if type(longest) is int and longest > 0 else None
        return cls(_MODES[modes[0]], any(kind == "Normalize" for kind, _ in kinds), longest)

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Embeddings float32 [texts, hidden] of the last hidden states [texts, tokens, hidden]; ``mask`` [texts,
        tokens] is 1 on tokens and 0 on padding, which may lie on either side. None: there is no padding."""
        hidden = hidden.float()
        seen = torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask.to(hidden)
        texts = torch.arange(len(hidden), device=hidden.device)
        if self.mode == "mean":
            pooled = (hidden * seen.unsqueeze(2)).sum(1) / seen.sum(1, keepdim=True).clamp(min=1)
        elif self.mode == "max":
            pooled = hidden.masked_fill(seen.unsqueeze(2) == 0, float("-inf")).amax(1)
        else:
            places = torch.arange(seen.shape[1], device=hidden.device) * seen
            # argmax gives the first of equals: of the mask itself that is the first token.
            pooled = hidden[texts, (seen if self.mode == "cls" else places).argmax(1)]
        return pooled / pooled.norm(dim=1, keepdim=True).clamp(min=_TINY) if self.normalize else pooled


def _kinds(folder: Path) -> list[tuple[str, str]]:
    """(last part of the type, path) of every module that modules.json lists; none without the file."""
    raw = read_json(folder / MODULES)
    rows: list[Any] = raw if isinstance(raw, list) else []
    return [
        (str(row.get("type", "")).rpartition(".")[2], str(row.get("path", "")))
        for row in sorted((row for row in rows if isinstance(row, Mapping)), key=lambda row: _number(row.get("idx")))
    ]


def _number(value: Any) -> int:
    return value if type(value) is int else 0
