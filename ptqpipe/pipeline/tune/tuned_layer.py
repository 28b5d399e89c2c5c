"""One decoder layer as tune sees it: units of the plan, their weights, and what its quantized form computes."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ptqpipe.calibration.assembly import Assembly, assemble
from ptqpipe.calibration.cross_moments import ActivationCache, quantized_inputs
from ptqpipe.calibration.experts import is_product, product_name, stack_of
from ptqpipe.calibration.runner import Layer, Runner
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.models.slices import Member, Slice
from ptqpipe.models.source import SourceRows
from ptqpipe.numerics.schemes import Activation
from ptqpipe.recipe.plan import Unit
from ptqpipe.runtime.input_quantizers import InputQuantizer


@dataclass(frozen=True, slots=True)
class TunedLayer:
    """A decoder layer before its codes are chosen.

    units       of the plan whose weights are the layer's
    weights     key -> the matrix [N, K] whose codes are chosen: the source's, rotated where its inputs are; on the
                layer's device, where its codes are, too
    assemblies  of those parameters that are made of nothing but quantized matrices
    quantizers  module of the layer (expert of a stack) -> what happens to its input, at the static scale that convert
                writes
    dtype       that the layer runs in
    """

    layer: Layer
    prepared: Conversion
    units: tuple[Unit, ...]
    weights: Mapping[str, torch.Tensor]
    assemblies: tuple[Assembly, ...]
    quantizers: Mapping[str, InputQuantizer]
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: Layer, prepared: Conversion, runner: Runner) -> "TunedLayer":
        tensors = {tensor for tensors_there in layer.origins.values() for tensor in tensors_there}
        units = tuple(u for u in prepared.outputs.plan.units if all(m.source.tensor in tensors for m in u.members))
        members = {m.key: m for unit in units for m in unit.members}
        weights = {key: _read(prepared, m, m.source, layer.device) for key, m in members.items()}
        # The parameters of the float model are not rotated.
        rotated = {key: replace(m.source, rotation=0) for key, m in members.items() if m.source.rotation}
        plain = weights | {key: _read(prepared, members[key], where, layer.device) for key, where in rotated.items()}
        parameters = {name.removeprefix(f"{layer.name}."): t for name, t in _parameters(layer, runner).items()}
        origins = {name.removeprefix(f"{layer.name}."): tensors_there for name, tensors_there in layer.origins.items()}
        assemblies = tuple(assemble(parameters, origins, members, plain))
        quantizers = _quantizers(assemblies, units, prepared)
        return cls(layer, prepared, units, weights, assemblies, quantizers, runner.skeleton.dtype)

    @property
    def places(self) -> dict[str, str]:
        """Key -> the module of the layer whose whole parameter it is (or is part of), or the product of
        a stacked expert."""
        return _places(self.assemblies)

    @property
    def watched(self) -> list[str]:
        """The modules of the places: linear layers, and stacks of experts."""
        return list(dict.fromkeys(map(stack_of, self.places.values())))

    @property
    def followed(self) -> tuple[Unit, ...]:
        """Units that GPTQ in order finds codes of: those of whole modules, and those of one product of an expert."""
        units, places = [], self.places
        for unit in self.units:
            names = {places.get(m.key, "") for m in unit.members}
            if "" not in names and (len(names) == 1 or not any(map(is_product, names))):
                units.append(unit)
        return tuple(units)

    @property
    def usable(self) -> frozenset[str]:
        """Keys of the weights whose place in the layer is understood, so that it can run with other values of them."""
        return frozenset(key for a in self.assemblies for key in a.keys)

    def parameters(self, decoded: Mapping[str, torch.Tensor], without: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """The layer's quantized parameters, made of the decoded matrices; but for those of modules ``without``."""
        return {a.parameter: a.build(decoded).to(self.dtype) for a in self.assemblies if a.module not in without}

    def outputs(
        self, x: torch.Tensor, batch: int, parameters: Mapping[str, torch.Tensor], cache: ActivationCache | None = None
    ) -> torch.Tensor:
        """The layer's output for hidden states ``x`` with quantized ``parameters``, by the ``cache`` of earlier
        passes with these. Records gradients unless under ``torch.no_grad``."""
        left = self.quantizers if cache is None else cache.left(batch, self.quantizers)
        reusing = contextlib.nullcontext() if cache is None else cache.reusing(self.layer, batch)
        with reusing, quantized_inputs(self.layer.module, left):
            return self.layer.forward(x, batch, parameters=parameters)


def _read(prepared: Conversion, member: Member, where: Slice, device: torch.device) -> torch.Tensor:
    return SourceRows(prepared.source, where, shape=member.shape).rows(0, member.shape[0]).to(device)


def _parameters(layer: Layer, runner: Runner) -> dict[str, torch.Tensor]:
    return {name: runner.skeleton.model.get_parameter(name) for name in layer.origins if _is_parameter(runner, name)}


def _is_parameter(runner: Runner, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    return leaf in runner.skeleton.model.get_submodule(parent)._parameters


def _places(assemblies: Sequence[Assembly]) -> dict[str, str]:
    places = {key: a.module for a in assemblies if not a.stacked for key in a.keys}
    for a in assemblies:
        side = "down" if a.parameter.endswith(".down_proj") else "up"
        stacks = a.stacks if a.stacked else ()
        places |= {key: product_name(a.module, expert, side) for stack in stacks for expert, key in enumerate(stack)}
    return places


def _quantizers(
    assemblies: Sequence[Assembly], units: Sequence[Unit], prepared: Conversion
) -> dict[str, InputQuantizer]:
    """Module -> what happens to its input, as `quantized_inputs` names modules and stacked experts."""
    quantizers: dict[str, InputQuantizer] = {}
    places = _places(assemblies)
    for unit in units:
        activation, rotation = unit.scheme.activation, unit.scheme.rotation
        if activation is Activation.NONE and not rotation:
            continue
        scales = prepared.input_scales.of(unit)
        for member, scale in zip(unit.members, scales, strict=True):
            if member.key in places:
                fixed = None if scale is None else float(scale)
                quantizers.setdefault(places[member.key], InputQuantizer(activation, fixed, rotation=rotation))
    return quantizers
