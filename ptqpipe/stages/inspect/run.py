"""inspect: what is in a checkpoint, from its headers and one pass over its scales. Any layout, and plain ones.

Reads no codes, save those of the rows that have suspicious scales. Decides nothing about faults: that is verify.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ptqpipe.checkpoint.files import RECORD_FILE
from ptqpipe.containers import Role, StoredWeight, quantization_config
from ptqpipe.formats import Codec
from ptqpipe.qtensor import QTensor
from ptqpipe.source import Source
from ptqpipe.stages.common.text import name_pattern, role_of
from ptqpipe.stages.inspect.text import FileRow, InspectReport, KeptRow, RoleRow, ScaleCounts, render, to_json
from ptqpipe.stages.verify.structure import is_kv_scale, plain_tensors
from ptqpipe.stages.verify.weights import stored_runs

__all__ = ["InspectReport", "inspect", "render", "to_json"]

LEAST_SHARE = 0.01  # of blocks at the least or the largest scale: more is worth a line
GLOBAL_SPREAD = 1000.0  # largest over smallest global scale of a role
_SCALE_ROWS = 1 << 16


def inspect(ckpt: Path) -> InspectReport:
    """Reads a checkpoint's headers, config and scales. CheckpointError for a damaged one."""
    with Source.open(ckpt) as opened:
        record = opened.reader.read_json(RECORD_FILE) or {}
        weights = _weight_rows(opened)
        kept = _kept_rows(opened, record)
        kv = _kv_scales(opened)
        files = tuple(
            FileRow(
                path.relative_to(ckpt).as_posix(),
                path.stat().st_size,
                sum(entry.file == path for entry in opened.reader.entries.values()),
            )
            for path in opened.reader.files
        )
        producer = _producer(opened, record)
        suspicious = tuple(_suspicious(weights))
        return InspectReport(
            ckpt, opened.container_name, producer, _facts(record), weights, kept, kv, files, suspicious
        )


def _weight_rows(opened: Source) -> tuple[RoleRow, ...]:
    groups: dict[tuple[str, str, str], list[StoredWeight]] = defaultdict(list)
    for stored in opened.stored.values():
        scheme = stored.scheme
        groups[(role_of(stored.weight), scheme.fmt.name, scheme.label)].append(stored)
    rows = []
    for (role, fmt, name), members in groups.items():
        counts = sum((scale_counts(opened, member) for member in members), ScaleCounts())
        values = [value for member in members for value in _globals(opened, member)]
        rows.append(
            RoleRow(
                role,
                name,
                fmt,
                sum(member.experts or 1 for member in members),
                sum(math.prod(member.shape) * (member.experts or 1) for member in members),
                sum(opened.reader.entries[part.name].nbytes for member in members for part in member.parts),
                counts,
                min(values, default=None),
                max(values, default=None),
            )
        )
    return tuple(rows)


def scale_counts(opened: Source, stored: StoredWeight) -> ScaleCounts:
    """Counts over the block scales of one stored weight."""
    part, codec = stored.part(Role.SCALES), stored.scheme.fmt.scale
    if part is None:
        return ScaleCounts()
    total = ScaleCounts()
    rows = part.shape[0] if part.shape else 1
    step = max(1, _SCALE_ROWS // max(1, math.prod(part.shape[2:] if part.stacked else part.shape[1:])))
    suspects = False
    for start in range(0, rows, step):
        scales = opened.reader.read(part.name, start=start if part.shape else 0, stop=min(start + step, rows))
        counts = _count(scales.flatten(), codec)
        suspects = suspects or bool(counts.zero or counts.least)
        total += counts
    return total + ScaleCounts(empty=_empty_blocks(opened, stored)) if suspects else total


def _count(scales: torch.Tensor, codec: Codec) -> ScaleCounts:
    if not codec.enumerable:
        values = scales.float()
        bad = ~torch.isfinite(values) | (values < 0)
        return ScaleCounts(len(values), int((values == 0).sum()), int(bad.sum()))
    codes = scales.view(torch.uint8).int()
    magnitude = codes & ((1 << (codec.bits - 1)) - 1) if codec.signed else codes
    zero = magnitude == 0 if codec.magnitudes[0] == 0 else torch.zeros_like(codes, dtype=torch.bool)
    bad = (magnitude >= len(codec.magnitudes)) | ((magnitude != codes) & ~zero)
    least, largest = codes == codec.first_scale_code, codes == len(codec.magnitudes) - 1
    return ScaleCounts(len(codes), int(zero.sum()), int(bad.sum()), int(least.sum()), int(largest.sum()))


def _empty_blocks(opened: Source, stored: StoredWeight) -> int:
    """Blocks of nothing but zero codes."""
    count = 0
    for expert in range(stored.experts or 1):
        for _, q in stored_runs(opened, stored.weight, None if stored.experts is None else expert):
            count += empty_blocks(q)
    return count


def empty_blocks(q: QTensor) -> int:
    """How many blocks of ``q`` have zero codes only."""
    mask = (1 << (q.fmt.element.bits - 1)) - 1
    rows, columns = q.fmt.block_extent(q.shape)
    used = ((q.codes & mask) != 0).nonzero()
    hit = torch.zeros(q.scales.shape, dtype=torch.bool)
    hit[used[:, 0] // rows, used[:, 1] // columns] = True
    return int((~hit).sum())


def _globals(opened: Source, stored: StoredWeight) -> list[float]:
    """The global scales of a stored weight, as factors."""
    divisor = stored.part(Role.GLOBAL_DIVISOR)
    part = divisor or stored.part(Role.GLOBAL)
    if part is None:
        return []
    values = opened.reader.read(part.name).float().flatten()
    found: list[float] = (values if divisor is None else 1.0 / values).tolist()
    return found


def _kept_rows(opened: Source, record: Mapping[str, Any]) -> tuple[KeptRow, ...]:
    kept = record.get("kept")
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in plain_tensors(opened):
        if is_kv_scale(name):  # reported by themselves
            continue
        claim = kept.get(name) if isinstance(kept, Mapping) else None
        reason = str(claim.get("reason", "")) if isinstance(claim, Mapping) else ""
        groups[(_kept_role(name), opened.reader.entries[name].dtype, name_pattern(reason))].append(name)
    return tuple(
        KeptRow(
            role,
            dtype,
            reason,
            len(names),
            sum(math.prod(opened.reader.entries[name].shape) for name in names),
            sum(opened.reader.entries[name].nbytes for name in names),
        )
        for (role, dtype, reason), names in groups.items()
    )


def _kept_role(name: str) -> str:
    """The role of a kept tensor: its module's last name; for other parameters than weights with the parameter's."""
    parent, _, leaf = name.rpartition(".")
    return f"{role_of(parent)}.{leaf}" if leaf == "bias" and parent else role_of(name)


def _kv_scales(opened: Source) -> tuple[int, float, float] | None:
    names = [name for name in plain_tensors(opened) if is_kv_scale(name)]
    if not names:
        return None
    values = torch.cat([opened.reader.read(name).float().flatten() for name in names])
    return len(names), float(values.min()), float(values.max())


def _producer(opened: Source, record: Mapping[str, Any]) -> str:
    described = quantization_config(opened.reader.config)
    if record.get("ptqpipe"):
        return f"ptqpipe {record['ptqpipe']}"
    for key in ("ptqpipe", "producer"):
        found = described.get(key)
        if isinstance(found, Mapping):
            return f"{found.get('producer') or found.get('name')} {found.get('version')}"
    extra = opened.reader.read_json("hf_quant_config.json") or {}
    found = extra.get("producer")
    if isinstance(found, Mapping):
        return f"{found.get('name')} {found.get('version')}"
    return f"{opened.container_name} {described['version']}" if "version" in described else ""


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    """A few facts of a record, those that are there."""
    facts: dict[str, str] = {}
    source, conversion = record.get("source"), record.get("converted_as", record)
    if isinstance(source, Mapping):
        facts["source"] = str(source.get("name"))
    recipe = conversion.get("recipe") if isinstance(conversion, Mapping) else None
    if isinstance(recipe, Mapping) and isinstance(recipe.get("rules"), list):
        rules = [rule for rule in recipe["rules"] if isinstance(rule, Mapping)]
        facts["recipe"] = ", ".join(
            f"{rule.get('match')} {rule.get('scheme')} ({rule.get('search')}{_low_rank(rule)})" for rule in rules
        )
    for key in ("torch", "relayout_of"):
        if record.get(key):
            facts[key] = str(record[key])
    return facts


def _low_rank(rule: Mapping[str, Any]) -> str:
    return f", rank {rule['low_rank']} in {rule.get('low_rank_dtype')}" if rule.get("low_rank") else ""


def _suspicious(rows: Iterable[RoleRow]) -> Iterable[str]:
    for row in rows:
        counts, of = row.scales, f"of {row.scales.blocks} block scales of {row.role} ({row.format})"
        if counts.bad:
            yield f"{counts.bad} {of} are NaN, infinite or negative"
        if counts.zero:
            yield f"{counts.zero} {of} are zero"
        if counts.largest > LEAST_SHARE * counts.blocks:
            yield f"{counts.largest / counts.blocks:.1%} {of} are the largest code: the global scale is too small"
        if counts.least - counts.empty > LEAST_SHARE * counts.blocks:
            share = (counts.least - counts.empty) / counts.blocks
            yield f"{share:.1%} {of} are the least code over codes that are not zero: the global scale is too large"
        if counts.empty > LEAST_SHARE * counts.blocks:
            yield f"{counts.empty / counts.blocks:.1%} {of} belong to blocks of zeros"
        low, high = row.global_least, row.global_largest
        if low is not None and high is not None:
            if not (math.isfinite(high) and low > 0):
                yield f"a global scale of {row.role} is {low if not low > 0 else high:g}"
            elif high > GLOBAL_SPREAD * low:
                yield f"the global scales of {row.role} range from {low:.3g} to {high:.3g}"
