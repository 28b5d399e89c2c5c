"""Which modules of a model get packed layers, and how: linear layers, and stacks of experts.

A quantized weight stays packed where all of a parameter comes from quantized weights: the one of a linear layer, or the
matrices of all experts of a stack. What a model keeps in another shape (transposed, convolutions, parts that are
rearranged) is decoded to floats instead, like everything that is not quantized.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.models.source import Source
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.runtime.creating import other_shape
from ptqpipe.runtime.input_quantizers import InputQuantizer
from ptqpipe.runtime.linear import PackedLinear, Stacked, side_by_side
from ptqpipe.runtime.parameter_names import Home
from ptqpipe.runtime.shard_read import read_part
from ptqpipe.runtime.stacked_experts import first_stack, is_experts, is_turned, use_layers
from ptqpipe.runtime.state import Region

Quantizers = Mapping[str, tuple[InputQuantizer, ...]]


@dataclass(frozen=True, slots=True)
class PackedLinearPlace:
    """A linear layer whose weight stays packed."""

    module: str
    weight: str

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.weight,)

    def install(self, model: Any, source: Source, regions: Mapping[str, Region], quantizers: Quantizers) -> None:
        old = model.get_submodule(self.module)
        q = _read(source, self.weight, regions, None)
        new = PackedLinear(q, bias=old.bias, quantizer=quantizers[self.weight][0], dtype=old.weight.dtype)
        new.train(old.training)
        model.set_submodule(self.module, new)


@dataclass(frozen=True, slots=True)
class PackedExpertsPlace:
    """A module of stacked experts. For each stack and expert: the weights whose rows make up its matrix."""

    module: str
    stacks: Mapping[str, tuple[tuple[str, ...], ...]]

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for stack in self.stacks.values() for parts in stack for name in parts))

    def install(self, model: Any, source: Source, regions: Mapping[str, Region], quantizers: Quantizers) -> None:
        module = model.get_submodule(self.module)
        built = {
            stack: [self._layer(source, parts, expert, regions, quantizers) for expert, parts in enumerate(by_expert)]
            for stack, by_expert in self.stacks.items()
        }
        use_layers(module, built[first_stack(module)], built["down_proj"])

    @staticmethod
    def _layer(
        source: Source, parts: tuple[str, ...], expert: int, regions: Mapping[str, Region], quantizers: Quantizers
    ) -> torch.nn.Module:
        stacked = source.stored[parts[0]].experts is not None
        chosen = [quantizers[name][expert if stacked else 0] for name in parts]
        q = [_read(source, name, regions, expert if stacked else None) for name in parts]
        one = side_by_side(q) if all(quantizer == chosen[0] for quantizer in chosen) else None
        if one is not None:
            return PackedLinear(one, quantizer=chosen[0])
        return Stacked([PackedLinear(part, quantizer=c) for part, c in zip(q, chosen, strict=True)])


def _read(source: Source, name: str, regions: Mapping[str, Region], expert: int | None) -> QTensor:
    region = regions[name]
    return read_part(source, source.stored[name], expert=expert, rows=region.rows, columns=region.columns)


PackedPlace = PackedLinearPlace | PackedExpertsPlace


def packed_places(model: Any, source: Source, homes: Mapping[str, Sequence[Home]]) -> list[PackedPlace]:
    """Where packed layers go in a model on the meta device, which has its whole shapes.

    Weights that are parameters by themselves have their shapes. CheckpointError for matrices that are not the parts of
    a stack that config.json makes of them.
    """
    fed: dict[str, list[tuple[str, Home]]] = {}
    for name, homes_of_one in homes.items():
        for home in homes_of_one:
            fed.setdefault(home.parameter, []).append((name, home))
    stacks: dict[str, dict[str, list[tuple[str, Home]]]] = {}
    places: list[PackedPlace] = []
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*ties, *ties.values()}  # transformers ties parameters: Zamba's shared blocks to each other
    for parameter, parts in fed.items():
        if parameter in tied or not all(
            name in source.stored and (home.plain or home.transposed) for name, home in parts
        ):
            continue
        if any(source.stored[name].scheme.fmt.has_zeros for name, _ in parts):
            continue  # no product takes zero points
        module, leaf = parts[0][1].module, parts[0][1].leaf
        owner = model.get_submodule(module)
        if is_experts(owner) and leaf in (first_stack(owner), "down_proj"):
            stacks.setdefault(module, {})[leaf] = parts
        elif leaf == "weight" and _is_matrix(source, parts) and multiplies_only(owner):
            places.append(PackedLinearPlace(module, parts[0][0]))
    for module, fed_by in stacks.items():
        by_stack = {leaf: _by_expert(model.get_submodule(module), source, parts) for leaf, parts in fed_by.items()}
        if len(fed_by) == 2 and all(by_stack.values()):
            whole = {leaf: x for leaf, x in by_stack.items() if x}
            for leaf, by_expert in whole.items():
                _check_experts(model.get_submodule(module), leaf, source, by_expert)
            places.append(PackedExpertsPlace(module, whole))
    return places


def _check_experts(module: Any, leaf: str, source: Source, by_expert: Sequence[Sequence[str]]) -> None:
    """CheckpointError where the matrices of a stack's experts are not the slices of its parameter."""
    shape = tuple(getattr(module, leaf).shape[1:])
    rows, columns = reversed(shape) if is_turned(module) else shape
    for parts in by_expert:
        expected = (rows // len(parts), columns)  # a gate's and an up part's have equal shares of the rows
        for name in parts:
            if source.stored[name].shape != expected:
                raise other_shape(source.reader.path, name, source.stored[name].shape, expected)


def multiplies_only(module: torch.nn.Module) -> bool:
    """Whether a module does what torch's linear layer does: one itself, or a kind of its own (Falcon's) that agrees.

    A kind of its own is asked with a small weight of random numbers; a router, or a layer in groups, says otherwise.
    """
    if type(module) is torch.nn.Linear or not isinstance(module, torch.nn.Linear):
        return isinstance(module, torch.nn.Linear)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((1, 3, 8), (6, 8), (6,)))
    small = copy.copy(module)
    small.in_features, small.out_features = 8, 6
    small._parameters = {"weight": weight, "bias": None if module.bias is None else bias}  # type: ignore[dict-item]
    expected = torch.nn.functional.linear(x, weight, small._parameters["bias"])
    try:
        output = small(x)
    except Exception:  # of what kind depends on the layer's code
        return False
    return isinstance(output, torch.Tensor) and output.shape == expected.shape and torch.allclose(output, expected)


def _is_matrix(source: Source, parts: Sequence[tuple[str, Home]]) -> bool:
    stored = source.stored[parts[0][0]]
    return (
        len(parts) == 1
        and parts[0][1].plain
        and not parts[0][1].merged
        and stored.experts is None
        and not stored.transposed
    )


def _by_expert(module: Any, source: Source, parts: Sequence[tuple[str, Home]]) -> tuple[tuple[str, ...], ...] | None:
    """The weights of each expert of a stack, in the order of their rows; None where some are missing or unlike."""
    count = int(module.num_experts)
    if len(parts) == 1 and not parts[0][1].merged:
        name, _ = parts[0]
        fits = source.stored[name].experts == count and source.stored[name].transposed == is_turned(module)
        return ((name,),) * count if fits else None
    by_place = {(home.expert, home.piece): name for name, home in parts if source.stored[name].experts is None}
    pieces = parts[0][1].pieces
    wanted = [[(expert, piece) for piece in range(pieces)] for expert in range(count)]
    if any(home.transposed != is_turned(module) for _, home in parts):
        return None
    if len(by_place) != len(parts) or any(key not in by_place for keys in wanted for key in keys):
        return None
    return tuple(tuple(by_place[key] for key in keys) for keys in wanted)
