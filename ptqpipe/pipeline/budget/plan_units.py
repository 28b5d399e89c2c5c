"""What a mixed-precision plan decides about: groups of weights that must share a scheme, and what each scheme costs on
disk, from headers alone.

A group is a fused unit (q, k and v; gate and up; a single weight), or all experts of one MLP, whose kernels take one
scheme.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.checkpoint.layouts import Container, Part
from ptqpipe.checkpoint.tensor_names import expert_of, experts_of
from ptqpipe.conversion.planned_outputs import Outputs, container_of, outputs_of
from ptqpipe.errors import FormatError, RecipeError, UsageError, arg
from ptqpipe.models.slices import Member
from ptqpipe.models.source import Source
from ptqpipe.numerics.schemes import Scheme, get_scheme
from ptqpipe.quantization import RowWriter, Task, UnitResult, Weight, rtn
from ptqpipe.recipe.file import exact_patterns, parse_recipe
from ptqpipe.recipe.plan import Unit, make_plan
from ptqpipe.recipe.recipe import Recipe, Rule

KEEP = "keep"
DEFAULT_FORMATS = ("nvfp4", "mxfp4a16", "mxfp8a16", "fp8_dynamic", KEEP)


@dataclass(frozen=True, slots=True)
class SchemeOption:
    """One scheme for a group (None: keep): the bytes of its tensors, how many these are, and the bytes of their header
    entries without the offsets."""

    scheme: Scheme | None
    nbytes: int
    header_bytes: int
    tensors: int

    @property
    def name(self) -> str:
        return KEEP if self.scheme is None else self.scheme.name


@dataclass(frozen=True, slots=True)
class Group:
    """Weights with one fate. ``options`` are those that fit their shapes, the smallest first."""

    id: str
    units: tuple[Unit, ...]
    options: tuple[SchemeOption, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(member for unit in self.units for member in unit.members)

    @property
    def elements(self) -> int:
        return sum(unit.elements for unit in self.units)

    def option(self, name: str) -> SchemeOption | None:
        return next((option for option in self.options if option.name == name), None)


def schemes_of(names: Sequence[str]) -> tuple[Scheme | None, ...]:
    """Schemes by name, None for keep. UsageError for fewer than two, FormatError for unknown ones."""
    schemes = tuple(dict.fromkeys(None if name.lower() == KEEP else get_scheme(name) for name in names))
    if len(schemes) < 2 or all(scheme is None for scheme in schemes):
        raise UsageError(f"{arg('formats', ','.join(names))}: a choice needs two or more, one of them a format")
    return schemes


def find_groups(source: Source, schemes: Sequence[Scheme | None], *, requantize: bool = False) -> list[Group]:
    """Every group of the weights that a recipe without exceptions would quantize, in the order of the source.

    requantize  whether weights that are stored below 8 bits may get a format that cannot hold their numbers

    UsageError where no scheme fits a group, none holds the numbers of one, or nothing could be quantized; FormatError
    for schemes without a layout in common.
    """
    recipe = Recipe(tuple(Rule("*", scheme) for scheme in schemes if scheme is not None))
    name = recipe.container_name
    container = container_of(recipe, name)
    widest = Recipe((Rule("*", get_scheme("fp8_dynamic")),)).for_model(source.reader.config)  # fits every matrix
    plan = make_plan(source.tensors, source.reader.config, recipe=widest, capabilities=container.CAPABILITIES)
    by_group: dict[str, list[Unit]] = defaultdict(list)
    for unit in plan.units:
        by_group[unit.id if expert_of(unit.id) is None else experts_of(unit.id)].append(unit)
    groups = []
    for key, units in by_group.items():
        candidates = _candidates(units, schemes, source)
        if not any(candidates):  # they are kept whatever the plan says
            continue
        if not requantize:
            candidates = [scheme for scheme in candidates if scheme is None or _holds(scheme, units, source)]
            if not any(candidates):
                source.check_requantizable()
        groups.append(_group(key, tuple(units), source, candidates, container))
    return groups


def _candidates(units: Sequence[Unit], schemes: Sequence[Scheme | None], source: Source) -> list[Scheme | None]:
    """Those of the schemes that a recipe gives these weights: some are kept unless a format has enough bits."""

    def gives(scheme: Scheme) -> bool:
        recipe = Recipe((Rule("*", scheme),)).for_model(source.reader.config)
        return all(recipe.rule_for(member.module)[0] is not None for unit in units for member in unit.members)

    return [scheme for scheme in schemes if scheme is None or gives(scheme)]


def _holds(scheme: Scheme, units: Sequence[Unit], source: Source) -> bool:
    """Whether a scheme holds the numbers of these weights where the source stores them below 8 bits: others only add
    error to them."""
    low = (source.below_8_bits(member.source.tensor) for unit in units for member in unit.members)
    return all(fmt is None or scheme.fmt.holds(fmt) for fmt in set(low))


def _group(
    key: str, units: tuple[Unit, ...], source: Source, schemes: Sequence[Scheme | None], container: Container
) -> Group:
    options = []
    for scheme in schemes:
        option = _keep(units, source) if scheme is None else _quantized(units, scheme, container)
        if option is not None:
            options.append(option)
    if not options:
        shape = units[0].members[0].shape
        raise UsageError(
            f"{key} ({shape[0]}x{shape[1]}) fits none of the formats; add keep or fp8_dynamic to {arg('formats')}"
        )
    return Group(key, units, tuple(sorted(options, key=lambda option: option.nbytes)))


def _keep(units: tuple[Unit, ...], source: Source) -> SchemeOption:
    """The source's tensors as they are; a quantized source's decoded, as they would be written."""
    names = dict.fromkeys(member.source.tensor for unit in units for member in unit.members)
    specs = [(name, *source.tensors[name]) for name in names]
    return SchemeOption(
        None, sum(_nbytes(dtype, shape) for _, dtype, shape in specs), sum(_entry(*spec) for spec in specs), len(specs)
    )


def _quantized(units: tuple[Unit, ...], scheme: Scheme, container: Container) -> SchemeOption | None:
    members = [member for unit in units for member in unit.members]
    if not all(scheme.fmt.fits(member.shape) for member in members):
        return None
    parts: list[Part] = []
    for member in members:
        try:
            parts += container.parts(member.weight, member.shape, scheme)
        except FormatError:
            return None
    size = sum(_nbytes(part.dtype, part.shape) for part in parts)
    return SchemeOption(scheme, size, sum(_entry(part.name, part.dtype, part.shape) for part in parts), len(parts))


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype][1]


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """About the bytes of a tensor's entry in a safetensors header: its name, dtype and shape; offsets aside."""
    place: list[int] = []
    return len(json.dumps({name: {"dtype": dtype, "shape": list(shape), "data_offsets": place}}))


def quantize_as(weights: Sequence[Weight], unit: Unit, scheme: Scheme, sink: RowWriter) -> UnitResult:
    """Quantizes the weights of a unit to another scheme than its rule's, by the searches that convert runs."""
    return rtn.quantize(Task(weights, scheme.fmt, [member.weight for member in unit.members], sink))


Assignment = Mapping[str, str]
"""Group id -> the name of its option."""


def recipe_content(
    groups: Sequence[Group], chosen: Assignment, *, description: str, options: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A recipe that gives every group its option: the most common format is the last rule, the others go before it.

    options  further keys of every rule that quantizes: which algorithm

    Names that differ in the number of a layer share one anchored pattern; numbers of experts are not listed, since a
    group has all of them.
    """
    sizes: dict[str, int] = defaultdict(int)
    for group in groups:
        sizes[chosen[group.id]] += group.elements
    quantized = [name for name in sizes if name != KEEP]
    if not quantized:
        raise UsageError("everything would be kept at this budget; there is nothing to convert; give a smaller budget")
    common = max(quantized, key=lambda name: sizes[name])
    rules = []
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        if name != common:
            modules = [m.module for group in groups if chosen[group.id] == name for m in group.members]
            more = {} if name == KEEP else dict(options or {})
            rules += [{"match": pattern, "format": name, **more} for pattern in exact_patterns(modules)]
    rules.append({"match": "*", "format": common, **(options or {})})
    return {"version": 1, "description": description, "rules": rules}


def forecast(source: Source, content: Mapping[str, Any], groups: Sequence[Group], chosen: Assignment) -> Outputs:
    """What converting with this recipe writes, with the bytes of weights and index in its layout.

    RecipeError where the recipe does not give every group its option: names that no pattern tells apart.
    """
    outputs = outputs_of(source, parse_recipe(dict(content)).for_model(source.reader.config))
    schemes_by_weight = {member.weight: unit.scheme.name for unit in outputs.plan.units for member in unit.members}
    for group in groups:
        for member in group.members:
            if schemes_by_weight.get(member.weight, KEEP) != chosen[group.id]:
                raise RecipeError(
                    f"the recipe would make {member.weight} {schemes_by_weight.get(member.weight, KEEP)}, the plan "
                    f"says {chosen[group.id]}; no pattern tells its name from others; plan it with "
                    "fewer formats"
                )
    return outputs
