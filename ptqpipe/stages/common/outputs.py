"""What a recipe writes for a source: which tensors, where, and by which job. Decided before a weight is read.

convert writes it, verify compares a checkpoint with it, plan asks for its size. Must not know how units are quantized.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptqpipe.checkpoint import ShardLayout, TensorSpec
from ptqpipe.containers import HF_QUANT_CONFIG, ConfigRequest, Container, Part, Target, get_container, merged_config
from ptqpipe.errors import CheckpointError, UnfitFormat
from ptqpipe.plan import Kept, Member, Plan, Unit, make_plan
from ptqpipe.recipe import Recipe
from ptqpipe.source import Source
from ptqpipe.stages.common.extra_tensors import cache_specs, config_with_cache, corrected_biases, with_reasons
from ptqpipe.stages.common.jobs import Job
from ptqpipe.stages.common.rewrite import CopyTensor


@dataclass(frozen=True, slots=True)
class QuantizeUnit(Job):
    """Quantizes the weights of a unit and writes their parts.

    parts   of each member, in order
    biases  names of those that are corrected with the unit
    """

    unit: Unit
    parts: tuple[tuple[Part, ...], ...]
    biases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteCacheScales(Job):
    """Writes the scales of the keys and values that an attention module caches."""

    module: str
    specs: tuple[TensorSpec, TensorSpec]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Everything that a recipe writes for a source, except the numbers.

    targets  what the config files say of every quantized weight
    """

    recipe: Recipe
    plan: Plan
    container_name: str
    container: Container
    layout: ShardLayout
    jobs: tuple[QuantizeUnit | CopyTensor | WriteCacheScales, ...]
    targets: tuple[Target, ...]

    def configs(self, source: Source, *, version: object) -> dict[str, dict[str, Any]]:
        """The config files by name, as the container writes them. ``version``: of the ptqpipe that writes them."""
        base = config_with_cache(source.reader.config, self.recipe.kv_cache)
        provenance = {"producer": "ptqpipe", "version": version}
        return self.container.configs(ConfigRequest(base, self.targets, self.plan.kept_modules, provenance))


def container_of(recipe: Recipe, name: str) -> Container:
    """The container of this name; UnfitFormat, with its reason, for the first scheme of the recipe that it cannot
    store."""
    container = get_container(name)
    for scheme in recipe.schemes():
        reason = container.supports(scheme)
        if scheme.low_rank is not None and not container.ABILITIES.low_rank:
            reason = (
                f"no reader of {container.QUANT_METHOD} adds a low-rank part to a weight; use --container ptqpipe, or "
                "leave low_rank out"
            )
        if reason is not None:
            raise UnfitFormat(reason)
    return container


def outputs_of(source: Source, recipe: Recipe, *, container_name: str | None = None) -> Outputs:
    """What a recipe writes for a source: the fate of every tensor, and the parts, shards and jobs that it comes to.

    recipe          with what its keep rules say of this model (`Recipe.for_model`)
    container_name  None: the recipe's own

    Reads headers only. Raises UnfitFormat for a scheme that the container cannot store, and what `make_plan` raises.
    """
    name = container_name or recipe.container_name
    container = container_of(recipe, name)
    plan = make_plan(source.tensors, source.reader.config, recipe=recipe, abilities=container.ABILITIES)
    biases = corrected_biases(plan, source, recipe)
    plan = with_reasons(plan, biases)
    groups, jobs = _groups_and_jobs(plan, source, container, biases)
    for module, pair in cache_specs(source, recipe.kv_cache, container, container_name=name).items():
        groups.append(list(pair))
        jobs.append(WriteCacheScales(f"kv:{module}", len(groups) - 1, 0, module, pair))
    targets: dict[str, Target] = {}
    for unit in (job.unit for job in jobs if isinstance(job, QuantizeUnit)):
        for member in unit.members:
            target = Target(member.weight, unit.scheme, member.stack, transposed=_stored_transposed(member))
            targets.setdefault(member.weight, target)
    layout = ShardLayout.plan(groups, shard_bytes=recipe.shard_bytes)
    return Outputs(recipe, plan, name, container, layout, tuple(jobs), tuple(targets.values()))


def _groups_and_jobs(
    plan: Plan, source: Source, container: Container, biases: Mapping[str, str]
) -> tuple[list[list[TensorSpec]], list[QuantizeUnit | CopyTensor | WriteCacheScales]]:
    """Groups of tensors that are written together, and the jobs of units and kept tensors, in the source's order."""
    tensors = source.tensors
    order = {name: index for index, name in enumerate(tensors)}
    corrected = set(biases.values())
    todo: list[tuple[int, Unit | Kept]] = [(min(order[m.source.tensor] for m in u.members), u) for u in plan.units]
    todo += [(order[kept.name], kept) for kept in plan.kept if kept.name not in corrected]
    todo.sort(key=lambda item: item[0])
    groups: list[list[TensorSpec]] = []
    group_of: dict[str, int] = {}  # of a stack, which many units write together
    jobs: list[QuantizeUnit | CopyTensor | WriteCacheScales] = []
    for _, item in todo:
        if isinstance(item, Kept):
            spec, read = TensorSpec(item.name, *tensors[item.name]), _stored_bytes(source, item.name)
            groups.append([spec])
            jobs.append(CopyTensor(f"keep:{item.name}", len(groups) - 1, read, item.name, spec, item.reason))
            continue
        parts = tuple(_parts(container, member, item) for member in item.members)
        first = parts[0][0].name
        if first not in group_of:
            groups.append([TensorSpec(part.name, part.dtype, part.shape) for of_member in parts for part in of_member])
            group_of[first] = len(groups) - 1
        own = tuple(biases[member.weight] for member in item.members if member.weight in biases)
        groups[group_of[first]] += [TensorSpec(name, *tensors[name]) for name in own]
        read = int(sum(member.elements * _element_bytes(source, member) for member in item.members))
        jobs.append(QuantizeUnit(item.id, group_of[first], read, item, parts, own))
    return groups, jobs


def check_read_back(
    container: Container,
    files: Mapping[str, Mapping[str, Any]],
    layout: ShardLayout,
    targets: Sequence[Target],
    *,
    container_name: str,
) -> None:
    """CheckpointError where the container finds other quantized weights than ``targets`` in what will be written: a
    tensor that is kept would be taken for a part of one."""
    names = {spec.name: (spec.dtype, spec.shape) for shard in layout.shards for spec in shard.tensors}
    remedy = f"rename that tensor of the source, or choose another --container than {container_name}"
    try:
        config = merged_config(files["config.json"], files.get(HF_QUANT_CONFIG))
        found = container.stored_weights(config, names)
    except CheckpointError as error:
        raise CheckpointError(f"the output could not be read back: {error}; {remedy}") from None
    unlike = found.keys() ^ {target.weight for target in targets}
    if unlike:
        raise CheckpointError(f"the output could not be read back: {min(unlike)!r} is ambiguous in it; {remedy}")


def _parts(container: Container, member: Member, unit: Unit) -> tuple[Part, ...]:
    return container.parts(
        member.weight, member.shape, unit.scheme, experts=member.stack, transposed=_stored_transposed(member)
    )


def _stored_transposed(member: Member) -> bool:
    """Whether the stored weight stands for an [in, out] tensor; an expert cut out of a stack never does."""
    return member.source.transposed and (member.stack is not None or member.source.expert is None)


def _stored_bytes(source: Source, name: str) -> int:
    stored = source.stored.get(name)
    names = [name] if stored is None else [part.name for part in stored.parts]
    return sum(source.reader.entries[part].nbytes for part in names)


def _element_bytes(source: Source, member: Member) -> float:
    name = member.source.tensor
    return _stored_bytes(source, name) / max(1, math.prod(source.tensors[name][1]))
