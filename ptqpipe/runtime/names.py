"""From the names of a checkpoint's tensors to those of a model's parameters, by transformers' own conversions.

A tensor mostly becomes one parameter. The experts' matrices of a checkpoint are merged into stacks: each is one piece
(the gate's or the up part's rows) of one expert of a stack. Must not know formats, files or ranks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_MERGING = {"MergeModulelist", "Concatenate"}
"""Operations of transformers that put whole tensors side by side, so that a slice of a part is a part of a slice."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where one tensor of a checkpoint goes.

    parameter      the model's name of it
    merged         whether other tensors go there, too
    expert, piece  its place in a stack that it is merged into: stack[expert], the piece-th of ``pieces`` runs of rows
    plain          False where transformers changes the numbers' places on the way (transposes, splits, interleaves)
    """

    parameter: str
    merged: bool = False
    expert: int | None = None
    piece: int = 0
    pieces: int = 1
    plain: bool = True

    @property
    def module(self) -> str:
        """The module that owns the parameter."""
        return self.parameter.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        """The parameter's name in its module."""
        return self.parameter.rpartition(".")[2]


class Homes:
    """The homes of checkpoint names in a model that has not been filled.

    conversions  transformers' own for this model (``get_model_conversion_mapping``)
    """

    def __init__(self, model: Any, conversions: Sequence[Any]) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._state = set(model.state_dict())
        self._shapes = dict.fromkeys(self._state, True)  # transformers asks with ``get`` and compares with None
        self._prefix = model.base_model_prefix
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]

    def of(self, name: str) -> list[Home]:
        """Where the checkpoint's tensor ``name`` goes; empty where the model has no place for it."""
        from transformers.core_model_loading import rename_source_key

        found, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._shapes)
        if found not in self._state and name in self._state:
            found, pattern = name, None
        converter = next((c for c in self._converters if pattern is not None and pattern in c.source_patterns), None)
        if converter is None:
            return [Home(found)] if found in self._state else []
        operations = {type(operation).__name__ for operation in converter.operations}
        expert = _EXPERT.search(name)
        names = (found.replace(converter.target_patterns[0], part) for part in converter.target_patterns)
        plain = operations <= _MERGING and len(converter.target_patterns) == 1
        return [
            Home(
                target,
                merged="MergeModulelist" in operations or len(converter.source_patterns) > 1,
                expert=None if expert is None else int(expert[1]),
                piece=converter.source_patterns.index(pattern),
                pieces=len(converter.source_patterns),
                plain=plain,
            )
            for target in names
            if target in self._state
        ]
