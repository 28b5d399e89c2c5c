"""From a plan to files: which tensors are written, where, and by which job. Decided before a weight is read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptqpipe.checkpoint.layout import ShardLayout, TensorSpec
from ptqpipe.containers import HF_QUANT_CONFIG, ConfigRequest, Container, Part, Target, merged_config
from ptqpipe.errors import CheckpointError, UnfitFormat
from ptqpipe.plan import Kept, Member, Plan, Unit
from ptqpipe.recipe import Recipe
from ptqpipe.source import Source
from ptqpipe.stages.common.biases import corrected_biases
from ptqpipe.stages.common.kv_cache import cache_specs, config_with_cache


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker does in one go: quantize a unit, or copy a kept tensor. ``group`` places it among the shards."""

    id: str
    group: int
    source_bytes: int
    unit: Unit | None = None
    parts: tuple[tuple[Part, ...], ...] = ()  # of each member
    kept: Kept | None = None
    biases: tuple[str, ...] = ()  # that are corrected with the unit
    cache: tuple[str, tuple[TensorSpec, TensorSpec]] | None = None  # an attention module and its kv-cache scales


@dataclass(frozen=True, slots=True)
class Outputs:
    """Everything that will be written, except the numbers."""

    container_name: str
    layout: ShardLayout
    jobs: tuple[Job, ...]
    targets: tuple[Target, ...]
    kv_cache: str = "none"


def check_supported(container: Container, recipe: Recipe) -> None:
    """UnfitFormat with the container's own words for the first scheme that it cannot spell."""
    for scheme in recipe.schemes():
        reason = container.supports(scheme)
        if scheme.low_rank is not None and not container.ABILITIES.low_rank:
            reason = (
                f"no reader of {container.QUANT_METHOD} adds a low-rank part to a weight; use --container ptqpipe, or "
                "leave low_rank out"
            )
        if reason is not None:
            raise UnfitFormat(reason)


def make_outputs(plan: Plan, source: Source, container: Container, *, container_name: str, recipe: Recipe) -> Outputs:
    """Parts, shards and jobs of a plan, in the order of the source's tensors."""
    order = {name: index for index, name in enumerate(source.tensors)}
    todo: list[tuple[int, Unit | Kept]] = [(min(order[m.source.tensor] for m in u.members), u) for u in plan.units]
    biases = corrected_biases(plan, source, recipe)
    corrected = set(biases.values())
    todo += [(order[kept.name], kept) for kept in plan.kept if kept.name not in corrected]
    todo.sort(key=lambda item: item[0])
    groups: list[list[TensorSpec]] = []
    group_of: dict[str, int] = {}  # of a stack, which many units write together
    jobs: list[Job] = []
    targets: dict[str, Target] = {}
    tensors = source.tensors
    for _, item in todo:
        if isinstance(item, Kept):
            dtype, shape = tensors[item.name]
            groups.append([TensorSpec(item.name, dtype, shape)])
            jobs.append(Job(f"keep:{item.name}", len(groups) - 1, _stored_bytes(source, item.name), kept=item))
            continue
        parts = tuple(_parts(container, member, item) for member in item.members)
        first = parts[0][0].name
        if first not in group_of:
            groups.append([TensorSpec(part.name, part.dtype, part.shape) for of_member in parts for part in of_member])
            group_of[first] = len(groups) - 1
        own = tuple(biases[member.weight] for member in item.members if member.weight in biases)
        groups[group_of[first]] += [TensorSpec(name, *tensors[name]) for name in own]
        for member in item.members:
            target = Target(member.weight, item.scheme, member.stack, transposed=_stored_transposed(member))
            targets.setdefault(member.weight, target)
        read = sum(member.elements * _element_bytes(source, member) for member in item.members)
        jobs.append(Job(item.id, group_of[first], int(read), unit=item, parts=parts, biases=own))
    specs = cache_specs(source, recipe.kv_cache, container, container_name=container_name)
    for module, pair in specs.items():
        groups.append(list(pair))
        jobs.append(Job(f"kv:{module}", len(groups) - 1, 0, cache=(module, pair)))
    layout = ShardLayout.plan(groups, shard_bytes=recipe.shard_bytes)
    return Outputs(container_name, layout, tuple(jobs), tuple(targets.values()), recipe.kv_cache)


def config_files(
    outputs: Outputs, plan: Plan, source: Source, container: Container, *, provenance: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The config files by name, from the container."""
    base = config_with_cache(source.reader.config, outputs.kv_cache)
    return container.configs(ConfigRequest(base, outputs.targets, plan.kept_modules, provenance))


def check_readable(outputs: Outputs, plan: Plan, source: Source, container: Container) -> None:
    """Reads the output back from its names and config before any of it is written; CheckpointError as below."""
    files = config_files(outputs, plan, source, container, provenance={})
    check_read_back(container, files, outputs.layout, outputs.targets, container_name=outputs.container_name)


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
