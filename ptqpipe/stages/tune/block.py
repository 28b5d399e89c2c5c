"""One decoder block as tune sees it: the units of the plan in it, their weights, and what its quantized form computes.

Knows plans, assemblies and runners; must not know how codes are found or where they are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.algorithms.rtn import Matrix, joined
from ptqpipe.calibration.assembly import Assembly, assemble
from ptqpipe.calibration.paired import quantized_inputs
from ptqpipe.calibration.runner import Block, Runner
from ptqpipe.plan import Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.runtime.activations import InputQuantizer
from ptqpipe.schemes import Activation
from ptqpipe.source import SourceRows
from ptqpipe.stages.common.quantize_unit import quantize_unit
from ptqpipe.stages.convert.run import Conversion


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What is known of a block before its codes are.

    units       of the plan whose weights are the block's
    weights     key -> the matrix [N, K] as the source has it
    assemblies  of those parameters that are made of nothing but quantized matrices
    quantizers  module of the block (expert of a stack) -> what happens to its input, at the static scale that convert
                writes
    """

    block: Block
    prepared: Conversion
    units: tuple[Unit, ...]
    weights: Mapping[str, torch.Tensor]
    assemblies: tuple[Assembly, ...]
    quantizers: Mapping[str, InputQuantizer]

    @classmethod
    def of(cls, block: Block, prepared: Conversion, runner: Runner) -> "BlockWork":
        """Reads the weights of the block's units."""
        tensors = {tensor for found in block.origins.values() for tensor in found}
        units = tuple(u for u in prepared.outputs.plan.units if all(m.source.tensor in tensors for m in u.members))
        weights = {
            m.key: SourceRows(prepared.source, m.source, shape=m.shape).rows(0, m.shape[0])
            for unit in units
            for m in unit.members
        }
        members = {m.key: m for unit in units for m in unit.members}
        parameters = {name.removeprefix(f"{block.name}."): t for name, t in _parameters(block, runner).items()}
        origins = {name.removeprefix(f"{block.name}."): found for name, found in block.origins.items()}
        assemblies = tuple(assemble(parameters, origins, members, weights))
        return cls(block, prepared, units, weights, assemblies, _quantizers(assemblies, units, prepared))

    @property
    def modules(self) -> dict[str, str]:
        """Key -> the module of the block whose whole parameter it is (or is part of); none for stacked experts."""
        return {key: a.parameter.rpartition(".")[0] for a in self.assemblies if not a.stacked for key in a.keys}

    @property
    def held(self) -> frozenset[str]:
        """Keys of the weights that the block is known to run with."""
        return frozenset(key for a in self.assemblies for key in a.keys)

    def parameters(self, decoded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The block's quantized parameters, made of the decoded matrices."""
        return {a.parameter: a.build(decoded) for a in self.assemblies}

    def outputs(self, x: torch.Tensor, batch: int, decoded: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the quantized block makes of hidden states ``x``. Records gradients unless under ``torch.no_grad``."""
        with quantized_inputs(self.block.module, self.quantizers):
            return self.block.forward(x, batch, parameters=self.parameters(decoded))

    def start(self) -> dict[str, QTensor]:
        """Key -> the weight as convert would write it."""
        return {key: q for unit in self.units for key, q in self._start(unit).items()}

    def _start(self, unit: Unit) -> dict[str, QTensor]:
        runs: dict[tuple[int, int], QTensor] = {}
        quantize_unit(
            unit,
            [Matrix(self.weights[m.key]) for m in unit.members],
            statistics=self.prepared.statistics,
            sink=lambda member, row, q: runs.__setitem__((member, row), q),
        )
        return {m.key: joined(runs, i) for i, m in enumerate(unit.members)}


def _parameters(block: Block, runner: Runner) -> dict[str, torch.Tensor]:
    return {name: runner.skeleton.model.get_parameter(name) for name in block.origins if _is_parameter(runner, name)}


def _is_parameter(runner: Runner, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    return leaf in runner.skeleton.model.get_submodule(parent)._parameters


def _quantizers(
    assemblies: Sequence[Assembly], units: Sequence[Unit], prepared: Conversion
) -> dict[str, InputQuantizer]:
    """Module -> what happens to its input, as `quantized_inputs` names modules and stacked experts."""
    found: dict[str, InputQuantizer] = {}
    modules = {key: a.parameter.rpartition(".")[0] for a in assemblies if not a.stacked for key in a.keys}
    for a in assemblies:
        module, _, leaf = a.parameter.rpartition(".")
        side = "down" if leaf == "down_proj" else "up"
        stacks = a.stacks if a.stacked else ()
        modules |= {key: f"{module}[{expert}].{side}" for stack in stacks for expert, key in enumerate(stack)}
    for unit in units:
        activation = unit.scheme.activation
        if activation is Activation.NONE:
            continue
        scales = prepared.input_scales.of(unit)
        for member, scale in zip(unit.members, scales, strict=True):
            if member.key in modules:
                known = None if scale is None else float(scale)
                found.setdefault(modules[member.key], InputQuantizer(activation, known))
    return found
