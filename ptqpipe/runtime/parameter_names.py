"""From the names of a checkpoint's tensors to those of a model's parameters, by transformers' own conversions.

A tensor mostly becomes one parameter. The experts' matrices of a checkpoint are merged into stacks: each is one piece
(the gate's or the up part's rows) of one expert of a stack. Must not know formats, files or ranks.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ptqpipe.models.language_model import left_out_of

_FIRST_EXPERT = re.compile(r"\.experts\.0\.((gate|up|down)_proj|w[123])\.weight$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_MERGING = {"MergeModulelist", "Concatenate"}
"""Operations of transformers that put whole tensors side by side, so that a slice of a part is a part of a slice."""


@dataclass(frozen=True, slots=True)
class Home:
    """The parameter that a tensor of a checkpoint fills.

    parameter      the model's name of it
    merged         whether other tensors go there, too
    expert, piece  its place in a stack that it is merged into: stack[expert], the piece-th of ``pieces`` runs of rows
    plain          False where transformers changes the numbers' places on the way (transposes, splits, interleaves)
    transposed     whether a matrix is merged into a stack that holds its transpose, and nothing else is done to it
    """

    parameter: str
    merged: bool = False
    expert: int | None = None
    piece: int = 0
    pieces: int = 1
    plain: bool = True
    transposed: bool = False

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
        self._left_out = tuple(f"{name}." for name in left_out_of(model))
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]

    def left_out(self, name: str) -> bool:
        """Whether the checkpoint's tensor ``name`` belongs to a part that was taken out of the model."""
        from transformers.core_model_loading import rename_source_key

        renamed, _ = rename_source_key(name, self._renamings, self._converters)
        return any(x.startswith(self._left_out) for x in (name, renamed, f"{self._prefix}.{renamed}"))

    def of(self, name: str) -> list[Home]:
        """Where the checkpoint's tensor ``name`` goes; empty where the model has no place for it."""
        from transformers.core_model_loading import rename_source_key

        parameter, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._shapes)
        if parameter not in self._state and name in self._state:
            parameter, pattern = name, None
        converter = next((c for c in self._converters if pattern is not None and pattern in c.source_patterns), None)
        if converter is None:
            return [Home(parameter)] if parameter in self._state else []
        operations = {type(operation).__name__ for operation in converter.operations}
        expert = _EXPERT.search(name)
        names = (parameter.replace(converter.target_patterns[0], part) for part in converter.target_patterns)
        one = len(converter.target_patterns) == 1
        merged = "MergeModulelist" in operations
        shards = "*" in pattern and "Concatenate" in operations  # of one table, as many as there are
        return [
            Home(
                target,
                merged=merged or shards or len(converter.source_patterns) > 1,
                expert=None if expert is None else int(expert[1]),
                piece=converter.source_patterns.index(pattern),
                pieces=len(converter.source_patterns),
                plain=one and operations <= _MERGING,
                transposed=one and merged and "Transpose" in operations and operations <= _MERGING | {"Transpose"},
            )
            for target in names
            if target in self._state
        ]


def with_expert_names(model: Any, conversions: Sequence[Any], shapes: Mapping[str, Sequence[int]]) -> list[Any]:
    """The conversions, and ours for experts that transformers knows by their stacks alone (Llama 4), or by other names.

    Quantized, such experts have a matrix each, by the names that vLLM reads; llm-compressor 0.14 writes Mixtral's so
    (its issue 3069). The stacks are [E, out, in] or [E, in, out]; the shapes say which.

    shapes  of the checkpoint's tensors
    """
    names = [name for name in shapes if _FIRST_EXPERT.search(name)]
    find = Homes(model, conversions) if names else None
    homeless = {name: shapes[name] for name in names if find is not None and not find.of(name)}
    for transposed, spelling in product((False, True), _SPELLINGS) if homeless else ():
        extended = [*conversions, *_expert_converters(*spelling, transposed=transposed)]
        if _fits(Homes(model, extended), model, homeless, transposed=transposed):
            return extended
    return list(conversions)


# What holds the experts in a checkpoint and in the model, and what gate, up and down are called; Step-3's, Granite's.
_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_SPELLINGS = (
    ("experts", "experts", _GATE_UP_DOWN),
    ("moe.experts", "mlp.experts", _GATE_UP_DOWN),
    ("experts", "experts", ("w1", "w3", "w2")),
)


def _expert_converters(stored: str, owner: str, names: Sequence[str], *, transposed: bool) -> list[Any]:
    """From ``experts.N.gate_proj.weight`` and its siblings to stacks of a gate's and an up part's rows."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

    last = [Transpose(1, 2)] if transposed else []
    gate, up, down = (f"{stored}.*.{name}.weight" for name in names)
    return [
        WeightConverter(
            [gate, up], f"{owner}.gate_up_proj", operations=[MergeModulelist(dim=0), Concatenate(dim=1), *last]
        ),
        WeightConverter(down, f"{owner}.down_proj", operations=[MergeModulelist(dim=0), *last]),
    ]


def _fits(find: Homes, model: Any, shapes: Mapping[str, Sequence[int]], *, transposed: bool) -> bool:
    """Whether these first experts' matrices are slices of the stacks that they go to."""
    for name, shape in shapes.items():
        homes = find.of(name)
        if not homes:
            return False
        rows, columns = shape[0] * homes[0].pieces, shape[1]
        stack = tuple(model.get_parameter(homes[0].parameter).shape[1:])
        if stack != ((columns, rows) if transposed else (rows, columns)):
            return False
    return True
