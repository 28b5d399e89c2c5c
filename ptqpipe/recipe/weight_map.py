"""Where the weights of a checkpoint come from: which rows of which tensor of a source each of them stands for.

Decided from names and shapes of the source alone, for every weight that could be quantized, so that a stored weight
with any other name or shape has no origin.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ptqpipe.checkpoint.layouts import Container, StoredWeight, kv_scale
from ptqpipe.errors import UsageError
from ptqpipe.models.slices import Member, Slice
from ptqpipe.models.source import Source, SourceRows
from ptqpipe.numerics.schemes import Capabilities, get_scheme
from ptqpipe.recipe.plan import make_plan
from ptqpipe.recipe.recipe import Recipe, Rule


@dataclass(frozen=True, slots=True)
class WeightMap:
    """A source, and by weight name the members that could be made of it: ``experts`` one weight per expert, ``stacks``
    one weight per stack (expert number -> member). ``divided`` counts the weights that one source tensor becomes,
    ``kept`` has the source tensor by the name that it has in the checkpoint where it is kept."""

    source: Source
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    weights: Mapping[str, Member]
    stacks: Mapping[str, Mapping[int, Member]]
    divided: Mapping[str, int]
    kept: Mapping[str, str]

    @classmethod
    def of(cls, source: Source, *, container: Container | None = None) -> "WeightMap":
        """All weights that a source could give to a checkpoint with this layout; None for a plain one."""
        single = {member.weight: member for member in _members(source, stacks=False)}
        stacks: dict[str, dict[int, Member]] = {}
        for member in _members(source, stacks=True):
            if member.stack is not None and member.source.expert is not None:
                stacks.setdefault(member.weight, {})[member.source.expert] = member
        divided = Counter(member.source.tensor for member in single.values())
        kept = {name: name for name in source.tensors}
        for name, (dtype, shape) in source.tensors.items():
            spelled = kv_scale(name, dtype, shape, container=container)
            if spelled is not None:
                kept[spelled.name] = name
        return cls(source, source.tensors, single, stacks, divided, kept)

    def find(self, stored: StoredWeight) -> tuple[Slice, ...] | None:
        """The origin of each expert of a stored weight (one entry where it is no stack), None if there is none."""
        slices = self._origins(stored)
        if not slices or any(shape != stored.shape for _, shape in slices):
            return None
        return tuple(replace(part, rotation=stored.scheme.rotation) for part, _ in slices)

    def rows(self, part: Slice, shape: tuple[int, int], *, cache: bool = False) -> SourceRows:
        return SourceRows(self.source, part, shape=shape, cache=cache)

    def _origins(self, stored: StoredWeight) -> list[tuple[Slice, tuple[int, int]]]:
        """(origin, its shape as [out, in]) of every expert; empty where the source has none."""
        shape = self.tensors.get(stored.weight, ("", ()))[1]
        if stored.experts is not None:
            stack = self.stacks.get(stored.weight, {})
            members = [stack[e] for e in range(stored.experts) if e in stack]
            whole = len(shape) == 3 and shape[0] == stored.experts == len(members)
            oriented = all(member.source.transposed is stored.transposed for member in members)
            return [(member.source, member.shape) for member in members] if whole and oriented else []
        member = self.weights.get(stored.weight)
        if len(shape) == 2:
            if member is not None and member.source.transposed is not stored.transposed:
                return []
            rows, columns = (shape[1], shape[0]) if stored.transposed else (shape[0], shape[1])
            return [(Slice(stored.weight, transposed=stored.transposed), (rows, columns))]
        return [(member.source, member.shape)] if member is not None else []


def _members(source: Source, *, stacks: bool) -> list[Member]:
    """Every weight that a rule without exceptions would quantize."""
    everything = Recipe((Rule("*", get_scheme("fp8_dynamic")),), keep=())
    try:
        capabilities = Capabilities(stacks=stacks, transposed=True)
        plan = make_plan(source.tensors, source.reader.config, recipe=everything, capabilities=capabilities)
    except UsageError:  # nothing in it could be quantized
        return []
    return [member for unit in plan.units for member in unit.members]
