"""What a recipe writes for a source: which tensors, where, and by which job. Decided before a weight is read.

convert writes it, verify compares a checkpoint with it, plan asks for its size. Beside the quantized weights there are
tensors whose numbers come from statistics:

    bias correction    ``bias_correction.py``
    FP8 KV cache       scales of keys and values (``kv_cache.py``)
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptqpipe.checkpoint import ShardLayout, TensorSpec
from ptqpipe.checkpoint.layouts import (
    HF_QUANT_CONFIG,
    ConfigRequest,
    Container,
    Target,
    get_container,
    memoized_parts,
    merged_config,
)
from ptqpipe.checkpoint.tensor_names import experts_of
from ptqpipe.conversion.bias_correction import corrected_biases, with_reasons
from ptqpipe.conversion.job import CopyTensor
from ptqpipe.conversion.kv_cache import WriteCacheScales, cache_specs, config_with_cache
from ptqpipe.conversion.unit_job import QuantizeUnit
from ptqpipe.errors import CheckpointError, UnfitFormat, UsageError, arg
from ptqpipe.models.families import UNLIKE_EXPERTS, ReaderIssue, fails_either_way, family_of
from ptqpipe.models.reader_facts import check_experts, check_rotation
from ptqpipe.models.slices import Member
from ptqpipe.models.source import Source
from ptqpipe.recipe.plan import Kept, Plan, Unit, make_plan
from ptqpipe.recipe.recipe import Recipe, reader_issues

OutputJob = QuantizeUnit | CopyTensor | WriteCacheScales
"""What a conversion does: writes a unit, a tensor as it is, or the scales of a kv cache."""


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
    jobs: tuple[OutputJob, ...]
    targets: tuple[Target, ...]

    def configs(self, source: Source, *, version: object) -> dict[str, dict[str, Any]]:
        """The config files by name, as the container writes them. ``version``: of the ptqpipe that writes them."""
        base = config_with_cache(source.config, self.recipe.kv_cache)
        provenance = {"producer": "ptqpipe", "version": version}
        return self.container.configs(ConfigRequest(base, self.targets, self.plan.kept_modules, provenance))

    def failing(self, config: Mapping[str, Any]) -> list[tuple[ReaderIssue, list[str]]]:
        """What other programs get wrong about the model of this config.json as it is written, and the modules of it."""
        if self.container.CAPABILITIES.own_reader:
            return []
        schemes = {target.module: target.scheme for target in self.targets}
        unlike = self._unlike_experts()
        kept = self.plan.kept_modules
        issues = reader_issues(config, schemes, container=self.container_name, kept=kept)
        return [*issues, *([(UNLIKE_EXPERTS, unlike)] if unlike else [])]

    def _unlike_experts(self) -> list[str]:
        schemes: dict[str, set[str]] = {}
        for target in self.targets:
            layer = experts_of(target.module)
            if not layer and target.experts is not None:  # a stack under a name of its own
                layer = target.module.rpartition(".")[0]
            if layer:
                schemes.setdefault(layer, set()).add(target.scheme.name)
        for kept in self.plan.kept:
            layer = experts_of(kept.name) if kept.matrix and not kept.name.endswith("bias") else ""
            if layer in schemes:
                schemes[layer].add("")
        return [f"{layer}.*" for layer, formats in schemes.items() if len(formats) > 1]

    def check_reader(self, reader: str, config: Mapping[str, Any]) -> None:
        """UsageError, with module and remedy, where this program has no such model, or fails on a weight of it as it is
        written or kept."""
        if reader in family_of(config).missing:
            kind = config.get("model_type")
            raise UsageError(
                f"{arg('reader', reader)}: {reader} has no {kind!r} model; leave {arg('reader')} out, or name another"
            )
        for issue, modules in self.failing(config):
            if reader in issue.readers:
                if fails_either_way(config, issue):
                    remedy = "name another reader"
                elif issue.unless_quantized:
                    without = f"without {arg('ignore')} or a rule that keeps it, in a format that divides it"
                    of_mtp = "mtp" in modules[0].split(".")
                    remedy = f"quantize it ({arg('mtp', 'fp8') if of_mtp else without})"
                else:
                    remedy = f"keep it ({arg('ignore', [modules[0]])}, or a rule with format: keep)"
                raise UsageError(
                    f"{arg('reader', reader)}: {modules[0]} ({len(modules)} of this kind) would be "
                    f"{'kept' if issue.unless_quantized else 'quantized'}, and {issue.symptom}; {remedy}, "
                    f"or leave {arg('reader')} out"
                )
        experts = (target.scheme.name for target in self.targets if target.experts or experts_of(target.module))
        check_experts(reader, dict.fromkeys(experts), container=self.container_name)
        rotated = [target.module for target in self.targets if target.scheme.rotation]
        if rotated:
            biased = next((kept.name for kept in self.plan.kept if kept.name.removesuffix(".bias") in rotated), None)
            check_rotation(reader, biased)


def container_of(recipe: Recipe, name: str) -> Container:
    """The container of this name; UnfitFormat, with its reason, for the first scheme of the recipe that it cannot
    store."""
    container = get_container(name)
    for scheme in recipe.schemes():
        reason = container.supports(scheme)
        if reason is not None:
            raise UnfitFormat(reason)
    if recipe.rotations and not container.CAPABILITIES.rotation:
        raise UnfitFormat(
            f"no reader of {name} rotates inputs; use {arg('container', 'compressed_tensors')}, or no {arg('rotate')}"
        )
    return container


def outputs_of(
    source: Source, recipe: Recipe, *, container_name: str | None = None, trained: Collection[str] = ()
) -> Outputs:
    """What a recipe writes for a source: the fate of every tensor, and the parts, shards and jobs that it comes to.

    recipe          with what its keep rules say of this model (`Recipe.for_model`)
    container_name  None: the recipe's own
    trained         kept tensors that were trained with the codes

    Reads headers only. Raises UnfitFormat for a scheme that the container cannot store, and what `make_plan` raises.
    """
    name = container_name or recipe.container_name
    container = container_of(recipe, name)
    plan = make_plan(source.tensors, source.reader.config, recipe=recipe, capabilities=container.CAPABILITIES)
    biases = corrected_biases(plan, source, recipe)
    plan = with_reasons(plan, biases, trained=trained)
    groups, jobs = _groups_and_jobs(plan, source, container, biases)
    for module, pair in cache_specs(source, recipe.kv_cache, container, container_name=name).items():
        groups.append(list(pair))
        jobs.append(WriteCacheScales(f"kv:{module}", len(groups) - 1, 0, module, pair))
    targets: dict[str, Target] = {}
    for unit in (job.unit for job in jobs if isinstance(job, QuantizeUnit)):
        for member in unit.members:
            target = Target(member.weight, unit.scheme, member.stack, transposed=_stored_transposed(member))
            targets.setdefault(member.weight, target)
    layout = ShardLayout.plan(groups, shard_bytes=recipe.shard_size)
    return Outputs(recipe, plan, name, container, layout, tuple(jobs), tuple(targets.values()))


def _groups_and_jobs(
    plan: Plan, source: Source, container: Container, biases: Mapping[str, str]
) -> tuple[list[list[TensorSpec]], list[OutputJob]]:
    """Groups of tensors that are written together, and the jobs of units and kept tensors, in the source's order."""
    tensors = source.tensors
    order = {name: index for index, name in enumerate(tensors)}
    corrected, parts_of = set(biases.values()), memoized_parts(container.parts)
    todo: list[tuple[int, Unit | Kept]] = [(min(order[m.source.tensor] for m in u.members), u) for u in plan.units]
    todo += [(order[kept.name], kept) for kept in plan.kept if kept.name not in corrected]
    todo.sort(key=lambda item: item[0])
    groups: list[list[TensorSpec]] = []
    group_of: dict[str, int] = {}  # of a stack, which many units write together
    jobs: list[OutputJob] = []
    for _, item in todo:
        if isinstance(item, Kept):
            spec, read = TensorSpec(item.name, *tensors[item.name]), source.nbytes(item.name)
            groups.append([spec])
            jobs.append(CopyTensor(f"keep:{item.name}", len(groups) - 1, read, item.name, spec, item.reason))
            continue
        parts = tuple(
            parts_of(m.weight, m.shape, item.scheme, experts=m.stack, transposed=_stored_transposed(m))
            for m in item.members
        )
        first = parts[0][0].name
        if first not in group_of:
            groups.append([TensorSpec(part.name, part.dtype, part.shape) for of_member in parts for part in of_member])
            group_of[first] = len(groups) - 1
        own = tuple(biases[member.weight] for member in item.members if member.weight in biases)
        groups[group_of[first]] += [TensorSpec(name, *tensors[name]) for name in own]
        read = int(sum(member.elements * _stored_bytes(source, member) for member in item.members))
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
    """CheckpointError where the container finds other quantized weights than ``targets`` in what will be written: names
    of the model that this layout's lists cannot tell apart."""
    kinds = dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]()  # one object each, of few that there are
    names = {}
    for spec in (spec for shard in layout.shards for spec in shard.tensors):
        kind = (spec.dtype, spec.shape)
        names[spec.name] = kinds.setdefault(kind, kind)
    remedy = f"choose another {arg('container')} than {container_name}"
    try:
        config = merged_config(files["config.json"], files.get(HF_QUANT_CONFIG))
        stored = container.stored_weights(config, names)
    except CheckpointError as error:
        raise CheckpointError(f"the output could not be read back: {error}; {remedy}") from None
    unlike = stored.keys() ^ {target.weight for target in targets}
    if unlike:
        raise CheckpointError(f"the output could not be read back: {min(unlike)!r} is ambiguous in it; {remedy}")


def _stored_transposed(member: Member) -> bool:
    """Whether the stored weight stands for an [in, out] tensor; an expert cut out of a stack never does."""
    return member.source.transposed and (member.stack is not None or member.source.expert is None)


def _stored_bytes(source: Source, member: Member) -> float:
    name = member.source.tensor
    return source.nbytes(name) / max(1, math.prod(source.tensors[name][1]))
