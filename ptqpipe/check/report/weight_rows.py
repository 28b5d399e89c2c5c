"""The quantized weights of a report, row by row: from the bytes, the source where there is one, else the record.

What one weight says is ``scan.py``; this file runs it over a checkpoint and joins that with the record's claims.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ptqpipe.check.report import Codes, Histogram, KeptTensor, Proof, ReportedWeight, ScaleChoice, WorstBlock
from ptqpipe.check.report.scale_choices import STORED, compare_choices
from ptqpipe.check.scan import FLOAT_BINS, WeightFacts
from ptqpipe.check.verify.block_proofs import prove_weight
from ptqpipe.check.verify.shared_scales import fused_groups
from ptqpipe.checkpoint.layouts import StoredWeight, is_kv_scale
from ptqpipe.checkpoint.tensor_names import expert_of, layer_of, role_of
from ptqpipe.conversion.record import Record
from ptqpipe.errors import UsageError
from ptqpipe.models.source import Source, SourceRows
from ptqpipe.numerics.formats import Codec
from ptqpipe.numerics.qtensor import scale_values
from ptqpipe.recipe.weight_map import WeightMap
from ptqpipe.run.machine import Machine, counting_bar

WORST_SHOWN = 12
PROOF_WEIGHTS = 64  # at most, spread evenly over the checkpoint
PROOF_BLOCKS = 256  # of each
PROOF_LONG_BLOCKS = 24  # the same of formats whose scales are numbers: thousands of scales are scored for a block

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Item:
    """One row of the report: a stored weight, or one expert of a stack, and where it came from."""

    stored: StoredWeight
    expert: int | None
    rows: SourceRows | None

    @property
    def name(self) -> str:
        return self.stored.key(self.expert)


def find_items(opened: Source, original: Source | None) -> tuple[list[Item], list[str]]:
    """Every quantized weight with its rows of the source; notes on those that have none. UsageError where all do."""
    origins = None if original is None else WeightMap.of(original)
    items: list[Item] = []
    lost: list[str] = []
    for stored in opened.stored.values():
        where = None if origins is None else origins.find(stored)
        if origins is not None and where is None:
            lost.append(stored.weight)
        for expert in stored.planes:
            rows = None if origins is None or where is None else origins.rows(where[expert or 0], stored.shape)
            items.append(Item(stored, expert, rows))
    if original is not None and len(lost) == len(opened.stored):
        raise UsageError(
            f"{original.reader.path} has none of this checkpoint's weights; give the model that it was made from"
        )
    if not lost:
        return items, []
    return items, [f"{len(lost)} weights are not in the source, the first {lost[0]}; their errors are unknown"]


def on_threads(items: Sequence[T], work: Callable[[T], R], *, machine: Machine, title: str) -> list[R]:
    """``work`` of every item, in their order, below a bar with this title."""
    results: list[R] = []
    shown = machine.progress and len(items) > 0
    with (
        counting_bar(len(items), "weights", shown=shown, title=title) as advance,
        ThreadPoolExecutor(max_workers=machine.workers, thread_name_prefix="report") as pool,
    ):
        for one in pool.map(work, items):
            results.append(one)
            advance(1, "")
    return results


def describe_weight(opened: Source, item: Item, scan: WeightFacts, record: Record | None) -> ReportedWeight:
    """The row of a weight: from its bytes, its source where there is one, else its record."""
    stored, name = item.stored, item.name
    claim = record.weights.get(name) if record is not None else None
    numbers: Mapping[str, float] = {} if claim is None else claim.numbers
    squared, energy = scan.squared_error, scan.energy
    choices: tuple[ScaleChoice, ...] = ()
    if item.rows is None and scan.decodes:
        squared, energy = numbers.get("squared_error"), numbers.get("energy")
        choices = (ScaleChoice(STORED, numbers["versus_absmax"]),) if "versus_absmax" in numbers else ()
    nbytes = sum(opened.reader.entries[part.name].nbytes for part in stored.parts) // (stored.experts or 1)
    fmt = stored.scheme.fmt
    return ReportedWeight(
        name=name,
        role=role_of(name),
        layer=layer_of(name),
        expert=item.expert if item.expert is not None else expert_of(name),
        format=fmt.name,
        scheme=stored.scheme.label,
        search="" if claim is None else claim.search,
        proven=None if claim is None else claim.proven,
        shape=stored.shape,
        nbytes=nbytes,
        global_scale=_global_scale(opened, item),
        codes=_codes_of(scan, fmt.element, fmt.scale),
        squared_error=squared,
        energy=energy,
        choices=choices,
        versus_plain_global=numbers.get("versus_plain_global") if fmt.has_global else None,
        **_calibration(record, name),
    )


def _calibration(record: Record | None, name: str) -> dict[str, Any]:
    weights = record.raw.get("weights") if record is not None else None
    entry = weights.get(name) if isinstance(weights, Mapping) else None
    raw: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    versus = raw.get("versus_rtn")
    return {
        "algorithm": str(raw.get("algorithm") or ""),
        "weighting": str(raw.get("weighting") or ""),
        "versus_rtn": float(versus) if isinstance(versus, int | float) and math.isfinite(versus) else None,
        "reverted": raw.get("reverted") is True,
    }


def _global_scale(opened: Source, item: Item) -> float | None:
    values = opened.global_scales(item.stored).tolist()
    number = values[item.expert if item.expert is not None and len(values) > 1 else 0] if values else math.inf
    return number if math.isfinite(number) else None


def with_choices(
    opened: Source,
    items: list[Item],
    scans: list[WeightFacts],
    weights: list[ReportedWeight],
    *,
    machine: Machine,
    all_rows: bool,
) -> list[ReportedWeight]:
    """The weights with every way of choosing scales run on their source."""
    largest = {item.name: scan.amax or 0.0 for item, scan in zip(items, scans, strict=True)}
    for group in fused_groups(opened):
        joint = max(largest.get(name, 0.0) for name in group)
        largest.update(dict.fromkeys(group, joint))

    def compare(pair: tuple[Item, ReportedWeight]) -> ReportedWeight:
        item, weight = pair
        if item.rows is None or weight.energy is None:
            return weight
        choices = compare_choices(
            opened, item.stored.weight, expert=item.expert, rows=item.rows, amax=largest[item.name], all_rows=all_rows
        )
        item.rows.drop()
        return replace(weight, choices=choices)

    return on_threads(list(zip(items, weights, strict=True)), compare, machine=machine, title="choices of scales")


def histograms(items: Iterable[Item], scans: Iterable[WeightFacts]) -> tuple[Histogram, ...]:
    sums: dict[tuple[str, str], torch.Tensor] = {}
    formats = {}
    for item, scan in zip(items, scans, strict=True):
        fmt = item.stored.scheme.fmt
        key = (fmt.name, role_of(item.name))
        formats[fmt.name] = fmt
        sums[key] = sums[key] + scan.scale_counts if key in sums else scan.scale_counts.clone()
    rows = []
    for (name, role), counts in sums.items():
        scale = formats[name].scale
        values = _scale_axis(scale)
        codec = scale.name if scale.enumerable else "float"
        rows.append(Histogram(name, codec, role, tuple(counts[: len(values)].tolist()), values))
    return tuple(rows)


def worst_blocks(scans: Iterable[WeightFacts]) -> tuple[WorstBlock, ...]:
    """The blocks that are worst relative to the mean of their weight, one of each weight first."""
    ranked = sorted((b for scan in scans for b in scan.worst), key=lambda b: (-b.ratio, b.weight, b.row, b.column))
    return tuple(ranked[:WORST_SHOWN])


def prove_sample(
    opened: Source, items: list[Item], weights: list[ReportedWeight], record: Record | None, *, machine: Machine
) -> Proof:
    """Brute force on a sample of the weights that are claimed optimal, where there is a source.

    Scales that minimize a weighted error are optimal by another measure than the one that is checked here: left out.
    """
    claimed = None if record is None else sum(weight.proven is True for weight in weights)
    provable = [
        item
        for item, weight in zip(items, weights, strict=True)
        if item.rows is not None
        and weight.proven
        and (weight.plain or weight.propagated)
        and weight.energy
        and not item.stored.scheme.fmt.one_scale
    ]
    step = -(-len(provable) // PROOF_WEIGHTS) or 1
    chosen = provable[::step]

    def prove(item: Item) -> tuple[int, int]:
        assert item.rows is not None
        blocks = PROOF_BLOCKS if item.stored.scheme.fmt.scale.enumerable else PROOF_LONG_BLOCKS
        claim = None if record is None else record.weights.get(item.name)
        proof = prove_weight(
            opened, item.stored.weight, item.rows, expert=item.expert, sample_blocks=blocks, claim=claim)  # fmt: skip
        item.rows.drop()
        return proof.blocks, proof.worse + proof.tied

    counts = on_threads(chosen, prove, machine=machine, title="proof")
    return Proof(claimed, sum(blocks for blocks, _ in counts), sum(bad for _, bad in counts), len(counts))


def _codes_of(facts: WeightFacts, element: Codec, scale: Codec) -> Codes:
    size = torch.tensor(element.values).abs()
    elements = int(facts.code_counts.sum())
    largest, zero = (int(facts.code_counts[mask].sum()) for mask in (size >= element.max, size == 0))
    blocks = int(facts.scale_counts.sum())
    if not scale.enumerable:
        return Codes(elements, largest, zero, blocks, None, None, None, None)
    counts = facts.scale_counts
    has_zero = scale.magnitudes[0] == 0
    first = scale.first_scale_code
    return Codes(
        elements,
        largest,
        zero,
        blocks,
        saturated=int(counts[len(scale.magnitudes) - 1]),
        subnormal=int(counts[first : _first_normal(scale)].sum()),
        smallest=int(counts[first]),
        zero_scales=int(counts[0]) if has_zero else 0,
    )


def _first_normal(codec: Codec) -> int:
    """The code of the smallest normal number: subnormals and the first normal octave are evenly spaced from zero."""
    if codec.magnitudes[0] != 0:
        return codec.first_scale_code
    step = codec.min_positive
    even = next((code for code, value in enumerate(codec.magnitudes) if value != code * step), len(codec.magnitudes))
    return max(codec.first_scale_code, (even - 1) // 2)


def _scale_axis(codec: Codec) -> tuple[float, ...]:
    """The number that each code of a histogram stands for."""
    if codec.enumerable:
        return tuple(scale_values(torch.arange(len(codec.magnitudes), dtype=torch.uint8), codec).tolist())
    return tuple(math.ldexp(1.0 + (code & 3) / 4, max(code >> 2, 1) - 127) for code in range(FLOAT_BINS))


def kept_tensors(opened: Source, record: Record | None) -> tuple[KeptTensor, ...]:
    """Every tensor that is not quantized, with the reason where the record has one."""
    raw = record.raw.get("kept") if record is not None else None
    tensors = []
    for name in opened.plain:
        entry = opened.reader.entries[name]
        claim = raw.get(name) if isinstance(raw, Mapping) else None
        reason = str(claim.get("reason", "")) if isinstance(claim, Mapping) else ""
        reason = "scale of the kv cache" if not reason and is_kv_scale(name) else reason
        tensors.append(KeptTensor(name, role_of(name), layer_of(name), entry.dtype, entry.shape, entry.nbytes, reason))
    return tuple(tensors)


def headline(opened: Source) -> tuple[str, ...]:
    """Descriptions of the schemes, the one with most weights first."""
    counts: dict[str, int] = defaultdict(int)
    words: dict[str, str] = {}
    for stored in opened.stored.values():
        counts[stored.scheme.label] += math.prod(stored.shape) * (stored.experts or 1)
        words[stored.scheme.label] = stored.scheme.describe()
    return tuple(words[name] for name in sorted(counts, key=lambda name: (-counts[name], name)))
