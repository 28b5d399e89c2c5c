"""How the parameters of a decoder layer are built from a checkpoint's weights: from quantized matrices to a module's
parameters.

Most parameters are one weight. Experts are stacked: a checkpoint may hold a matrix for each, a transformers module one
3-D parameter, in either orientation, gate and up in one. Nothing is taken on trust: an assembly is only used when the
weights of the source, put together so, are the loaded parameter to the bit.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from ptqpipe.models.slices import Member

_EXPERT = re.compile(r"(?<=\.)\d+(?=\.[^.]*(\.weight)?$)")


@dataclass(frozen=True, slots=True)
class Assembly:
    """A parameter of a layer made of matrices ``[N, K]``.

    parameter   its name in the layer
    stacks      one tuple a stack, of one member key an expert (a plain weight: one stack of one)
    rows        for several members in one source tensor: where each row of the parameter comes from; else None
    transposed  the parameter holds ``[K, N]``
    stacked     the parameter is 3-D
    """

    parameter: str
    stacks: tuple[tuple[str, ...], ...]
    transposed: bool
    stacked: bool
    rows: torch.Tensor | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Every member of it."""
        return tuple(key for stack in self.stacks for key in stack)

    @property
    def module(self) -> str:
        """Whose parameter it is, by its name in the layer."""
        return self.parameter.rpartition(".")[0]

    def part(self, key: str) -> "Assembly":
        """Of a stacked parameter the part ``[1, ...]`` that is one expert's, that with the member ``key``; of another
        parameter the whole."""
        if not self.stacked:
            return self
        expert = next(stack.index(key) for stack in self.stacks if key in stack)
        return replace(self, stacks=tuple((stack[expert],) for stack in self.stacks))

    def rows_of(self, key: str, sizes: Mapping[str, int]) -> torch.Tensor:
        """int64: where the rows of the member ``key`` are in a parameter of one matrix.

        sizes  how many rows each member has
        """
        numbers = {k: torch.full((sizes[k], 1), -1.0) for k in self.keys}
        numbers[key] = torch.arange(sizes[key]).float().unsqueeze(1)
        order = self.build(numbers).flatten()  # of the member, by row of the parameter
        return torch.argsort(order, stable=True)[int((order < 0).sum()) :]

    def build(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The parameter, differentiable in ``weights``."""
        parts = [torch.stack([weights[key] for key in stack]) for stack in self.stacks]
        built = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.rows is not None:
            built = built[:, self.rows]
        built = built.transpose(1, 2) if self.transposed else built
        return built if self.stacked else built[0]


def assemble(
    parameters: Mapping[str, torch.Tensor],
    origins: Mapping[str, Sequence[str]],
    members: Mapping[str, Member],
    weights: Mapping[str, torch.Tensor],
) -> list[Assembly]:
    """The assemblies of the parameters that consist of ``members`` only.

    parameters  name in the layer -> the loaded tensor
    origins     name in the layer -> the checkpoint tensors that make it
    members     key -> member of the plan; ``weights`` its matrix [N, K] as the source has it
    """
    by_tensor: dict[str, list[str]] = defaultdict(list)
    for key, member in members.items():
        by_tensor[member.source.tensor].append(key)
    assemblies = []
    for name, parameter in parameters.items():
        tensors = list(origins.get(name, ()))
        if not tensors or any(tensor not in by_tensor for tensor in tensors):
            continue
        for candidate in _candidates(name, parameter, tensors, by_tensor, members):
            if _fits(candidate, parameter, weights):
                assemblies.append(candidate)
                break
    return assemblies


def _candidates(
    name: str,
    parameter: torch.Tensor,
    tensors: Sequence[str],
    by_tensor: Mapping[str, Sequence[str]],
    members: Mapping[str, Member],
) -> list[Assembly]:
    stacked = parameter.dim() == 3
    if len(tensors) == 1:
        keys = by_tensor[tensors[0]]
        slices: dict[tuple[int, int], list[str]] = defaultdict(list)
        for key in sorted(keys, key=lambda k: members[k].source.expert or 0):
            slices[members[key].source.start, members[key].source.step].append(key)
        stacks = tuple(tuple(stack) for stack in slices.values())
        rows = _rows([members[stack[0]] for stack in stacks]) if len(stacks) > 1 else None
        return [Assembly(name, stacks, transposed, stacked, rows) for transposed in (False, True)]
    if any(len(by_tensor[tensor]) != 1 for tensor in tensors):
        return []
    families: dict[str, list[str]] = defaultdict(list)
    for tensor in tensors:
        families[_EXPERT.sub("*", tensor)].append(by_tensor[tensor][0])
    return [
        Assembly(name, tuple(tuple(stack) for stack in order), transposed, stacked)
        for order in permutations(families.values())
        for transposed in (False, True)
    ]


def _rows(firsts: Sequence[Member]) -> torch.Tensor:
    places = torch.cat([m.source.start + m.source.step * torch.arange(m.shape[0]) for m in firsts])
    return torch.argsort(places)


def _fits(candidate: Assembly, parameter: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> bool:
    try:
        built = candidate.build(weights)
    except RuntimeError:  # shapes that do not go together
        return False
    return built.shape == parameter.shape and torch.equal(built.to(parameter.dtype), parameter.to(built.device))
