"""Our own output made once more from its record and its source.

The record names the recipe, so the whole plan follows from it and the source's headers: every name, dtype, shape, place
and config key of the checkpoint is compared with it. Then the searches and kernels that wrote the checkpoint run again,
so repeating finds any change of the bytes but no error of the search itself; the torch reference (``weight_checks.py``)
and brute force (``search/proof.py``) find that.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.check.verify.claims import SUM_TOLERANCE, check_numbers, check_reasons, conversion_parts, recipe_of
from ptqpipe.check.verify.findings import Findings
from ptqpipe.checkpoint import RECORD_FILE, run_id_of
from ptqpipe.checkpoint.json_values import json_differences
from ptqpipe.checkpoint.layouts import PartKind
from ptqpipe.conversion.planned_outputs import Outputs, outputs_of
from ptqpipe.conversion.record import Claim, Record, object_of, text_of
from ptqpipe.conversion.units import quantize_unit
from ptqpipe.errors import CheckpointError
from ptqpipe.models.slices import Member
from ptqpipe.models.source import Source, SourceRows
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization.learned_codes import trained_of
from ptqpipe.recipe.plan import Unit


def repeat_unit(
    ckpt: Source,
    source: Source,
    unit: Unit,
    claims: Mapping[str, Claim],
    findings: Findings,
    *,
    cache_bytes: int,
    statistics: Statistics | None = None,
) -> None:
    """Quantizes a unit again and compares its rows with the stored ones, its numbers with the claimed ones.

    A unit that was made with statistics is repeated where they are at hand: matrix products give the same bits on the
    same kind of processor only.
    """
    if any(member.weight not in ckpt.stored or member.key not in claims for member in unit.members):
        return  # missing weights are reported by name elsewhere
    if _learned(unit, claims, findings) or (unit.rule.calibrated and statistics is None):
        return
    cache = sum(member.elements for member in unit.members) * 2 <= cache_bytes
    rows = [SourceRows(source, m.source, shape=m.shape, cache=cache) for m in unit.members]
    differing: dict[tuple[int, int], str] = {}

    def compare(member: int, row: int, q: QTensor) -> None:  # a second pass over a row replaces what the first found
        differing.pop((member, row), None)
        others = _unlike(ckpt, unit.members[member], row, q)
        if others:
            differing[(member, row)] = others

    result = quantize_unit(unit, rows, compare, statistics=statistics, recheck=False)
    _check_outcomes(unit, result.record_fields, claims, findings)
    for (index, row), others in sorted(differing.items()):
        message = f"from row {row}: re-quantizing with the recorded recipe gives {others}"
        findings.fault("repeat", unit.members[index].key, message)
    for member, error in zip(unit.members, result.errors, strict=True):
        claim = claims[member.key]
        actual = {"versus_absmax": error.versus_absmax, "versus_plain_global": result.versus_plain_global}
        check_numbers(member.key, claim, actual, findings)
        for what, recorded, expected in (
            ("format", claim.format, unit.scheme.fmt.name),
            ("scheme", claim.scheme, unit.scheme.name),
            ("search", claim.search, unit.search),
            ("proven", claim.proven, result.proven),
            ("global_scale", claim.global_scale, result.global_scale),
        ):
            if recorded != expected:
                message = f"says {what}={recorded} in {RECORD_FILE}; the recipe gives {expected}"
                findings.fault("record", member.key, message)


def _check_outcomes(
    unit: Unit, outcomes: Sequence[Mapping[str, Any]], claims: Mapping[str, Claim], findings: Findings
) -> None:
    for member, outcome in zip(unit.members, outcomes, strict=True):
        entry = claims[member.key].entry
        for key, wanted in outcome.items():
            number = isinstance(wanted, float) and isinstance(entry.get(key), float | int)
            if not (math.isclose(entry[key], wanted, rel_tol=SUM_TOLERANCE) if number else entry.get(key) == wanted):
                findings.fault("record", member.key, f"claims {key} {entry.get(key)!r:.40}, recomputed {wanted!r:.40}")


def _learned(unit: Unit, claims: Mapping[str, Claim], findings: Findings) -> bool:
    """Whether a unit has learned codes, which are not available; a fault where a record does not say what its rule
    does."""
    learned = False
    for member in unit.members:
        claim = claims[member.key]
        learned = learned or claim.algorithm == "learned"
        rule = unit.rule
        if claim.algorithm != "learned" and not claim.follows(rule.algorithm, rule.objective):
            findings.fault("record", member.key, f"claims {claim.algorithm}, the recipe says {rule.algorithm}")
    return learned


def _unlike(ckpt: Source, member: Member, row: int, q: QTensor) -> str:
    expert = member.source.expert if member.stack is not None else None
    stored = ckpt.quantized(member.weight, expert=expert, rows=(row, row + q.shape[0]))
    if stored.data.shape != q.data.shape or stored.scales.shape != q.scales.shape:
        return "other shapes"
    g, wanted = stored.multiplying().global_scale, q.global_scale
    if (g is None) != (wanted is None) or (g is not None and wanted is not None and not torch.equal(g, wanted)):
        return "another global scale"
    if not torch.equal(stored.scales.float(), q.scales.float()):
        return f"{int((stored.scales.float() != q.scales.float()).sum())} other block scales"
    if not torch.equal(stored.data, q.data):
        return f"{int((stored.data != q.data).sum())} other bytes of codes"
    return ""


def check_input_scales(ckpt: Source, planned: Outputs, record: Record, findings: Findings) -> None:
    """Every static input scale is the one that the record claims; without statistics that is the recipe's constant."""
    roles: Sequence[PartKind] = (PartKind.INPUT_GLOBAL, PartKind.INPUT_GLOBAL_DIVISOR)
    measured = isinstance(record.raw.get("statistics"), Mapping)
    for stored in ckpt.stored.values():
        largest = stored.scheme.activation.static_max
        if largest is None:
            continue
        amax = planned.recipe.largest_input(stored.scheme.activation)
        constant = torch.tensor(amax, dtype=torch.float32) / largest
        for part in stored.parts:
            if part.role not in roles:
                continue
            for expert, value in enumerate(ckpt.reader.read(part.name).float().reshape(-1)):
                claim = record.weights.get(stored.key(None if stored.experts is None else expert))
                own = claim.input_scale if claim is not None else None
                claimed = constant if not measured else torch.tensor(own or 0.0)
                wanted = 1.0 / claimed if part.role is PartKind.INPUT_GLOBAL_DIVISOR else claimed
                if not torch.equal(value, wanted):
                    mismatch = f"is {value.item():.9g}, {'the record' if measured else 'the recipe'} gives"
                    findings.fault("scales", part.name, f"{mismatch} {wanted.item():.9g}")


def replan(record: Record, source: Source) -> Outputs:
    """The outputs that the record's recipe plans for this source. PtqError where the recipe is invalid or does not fit
    the source."""
    conversion = record.conversion
    if conversion is None:
        raise CheckpointError(f"{RECORD_FILE} has no recipe")
    recipe, name = recipe_of(object_of(conversion, "recipe")), text_of(conversion, "container", RECORD_FILE)
    return outputs_of(source, recipe, container_name=name, trained=trained_of(record.raw))


def check_plan(ckpt: Source, source: Source, record: Record, planned: Outputs, findings: Findings) -> None:
    """Names, dtypes, shapes, places, config files and the run's identity follow from recipe and source."""
    reader, specs = ckpt.reader, planned.layout.entries
    for name in sorted(specs.keys() - reader.entries.keys()):
        findings.fault("plan", name, "should have been written by the recorded recipe, but is missing")
    for name, entry in reader.entries.items():
        spec = specs.get(name)
        if spec is None:
            findings.fault("plan", name, "would not have been written by the recorded recipe")
        elif (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            wanted = f"{spec.dtype} {list(spec.shape)}"
            findings.fault("plan", name, f"is {entry.dtype} {list(entry.shape)}, the recorded recipe writes {wanted}")
        elif (entry.file.relative_to(reader.path), entry.offset) != (spec.file, spec.offset):
            findings.fault("plan", name, "lies at another place than the recorded recipe puts it")
    check_reasons(record, planned.plan, findings, planned.recipe)
    _check_config_files(ckpt, source, record, planned, findings)


def _check_config_files(ckpt: Source, source: Source, record: Record, planned: Outputs, findings: Findings) -> None:
    for name, wanted in planned.configs(source, version=record.raw.get("ptqpipe")).items():
        content = ckpt.reader.read_json(name)
        if content is None:
            findings.fault("config", name, "is missing")
        elif differences := list(json_differences(content, json.loads(json.dumps(wanted)))):
            key, there, expected = differences[0]
            message = f"differs from what was written in {key} ({there}, expected {expected})"
            findings.fault("config", name, message)


def check_conversion(source: Source, record: Record, planned: Outputs, findings: Findings) -> None:
    """The run that converted binds recipe and source to the layout that the recipe makes of it."""
    conversion = record.conversion
    assert conversion is not None  # it was planned again
    raw = {**record.raw, "ptqpipe": conversion.get("ptqpipe", record.raw.get("ptqpipe"))}
    parts = conversion_parts(raw, planned.recipe, layout=planned.layout.digest)
    if conversion.get("run_id") != run_id_of(parts):
        findings.fault("record", RECORD_FILE, "its run_id is not that of its recipe, layout, version and source")
    claimed = record.raw.get("consumed")
    if claimed != sorted(source.consumed):
        findings.fault("record", "consumed", "does not list the parts of the source's own quantized weights")
