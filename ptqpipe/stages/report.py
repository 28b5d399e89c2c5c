"""report: the numbers of one checkpoint gathered for people: from its bytes, its record, its source, its eval file.

Works for checkpoints of any tool: what can be recomputed from bytes is, the rest is None. Memory is a few runs of rows
per worker. Rendering is ``ptqpipe.report``.
"""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ptqpipe._version import __version__
from ptqpipe.containers import Role, StoredWeight
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.report import check_kind, default_path, render
from ptqpipe.report.content import (
    Choice,
    FileRow,
    Histogram,
    Kept,
    Proof,
    Report,
    RuleRow,
    Weight,
    WorstBlock,
    decibels,
    pooled_mse,
)
from ptqpipe.report.write import check_target, write_report
from ptqpipe.source import Source, SourceRows
from ptqpipe.stages.inspect import inspect
from ptqpipe.stages.jobs import RECORD_FILE
from ptqpipe.stages.machine import default_workers
from ptqpipe.stages.report_choices import NAMES, SAMPLE, STORED, compare_choices
from ptqpipe.stages.report_eval import read_evaluation
from ptqpipe.stages.report_scan import Scan, codes_of, scale_axis, scan_weight
from ptqpipe.stages.tables import role_of
from ptqpipe.stages.verify import one_thread_each
from ptqpipe.stages.verify_groups import fused_groups
from ptqpipe.stages.verify_optimal import prove_weight
from ptqpipe.stages.verify_origin import Origins
from ptqpipe.stages.verify_record import Claim, Record, claims_ownership, read_record
from ptqpipe.stages.verify_structure import is_kv_scale, plain_tensors

WORST_SHOWN = 12
PROOF_WEIGHTS = 64  # at most, spread evenly over the checkpoint
PROOF_BLOCKS = 256  # of each
PROOF_LONG_BLOCKS = 24  # the same of formats whose scales are numbers: thousands of scales are scored for a block
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)(?:\.|$)")

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Item:
    """One row of the report: a stored weight, or one expert of a stack, and where it came from."""

    stored: StoredWeight
    expert: int | None
    rows: SourceRows | None

    @property
    def name(self) -> str:
        return self.stored.weight if self.expert is None else f"{self.stored.weight}[{self.expert}]"


def gather(
    ckpt: Path,
    *,
    source: Path | None = None,
    evaluation: Path | None = None,
    all_rows: bool = False,
    workers: int | None = None,
) -> Report:
    """Everything that the report says about ``ckpt``.

    source      the checkpoint that it was made from: errors, worst blocks and choices are then recomputed
    evaluation  what ``ptqpipe eval`` wrote
    all_rows    compare the choices on all rows instead of the sample

    Raises CheckpointError for a damaged or plain checkpoint, UsageError where source or eval file are of another one,
    NumericsError for NaN in the source.
    """
    with Source.open(ckpt) as opened:
        if opened.container is None:
            raise UsageError(f"{ckpt} is not quantized; a report is about a checkpoint that ptqpipe convert wrote")
        record, notes = _record(opened)
        run_id = record.raw.get("run_id") if record is not None else None
        found = read_evaluation(evaluation, run_id=run_id) if evaluation is not None else None
        threads = workers if workers is not None else default_workers()
        if source is None:
            with one_thread_each():
                report = _gather(ckpt, opened, None, record, threads=threads, all_rows=all_rows)
        else:
            with Source.open(source) as original, one_thread_each():
                report = _gather(ckpt, opened, original, record, threads=threads, all_rows=all_rows)
        return replace(report, evaluation=found, notes=(*notes, *report.notes))


def _record(opened: Source) -> tuple[Record | None, list[str]]:
    """The record of a checkpoint that has one; a note where it cannot be used."""
    if not claims_ownership(opened.reader):
        return None, []
    try:
        return read_record(opened.reader), []
    except CheckpointError as error:
        return None, [f"{error}; the record's numbers are left out"]


def _gather(
    ckpt: Path, opened: Source, original: Source | None, record: Record | None, *, threads: int, all_rows: bool
) -> Report:
    items, lost = _items(opened, original)
    scans = _on_threads(
        items, lambda i: scan_weight(opened, i.stored.weight, expert=i.expert, rows=i.rows), threads=threads
    )
    weights = [_weight(opened, item, scan, record) for item, scan in zip(items, scans, strict=True)]
    choice_names: tuple[str, ...] = (STORED,) if any(w.choices for w in weights) else ()
    if original is not None:
        weights = _with_choices(opened, items, scans, weights, threads=threads, all_rows=all_rows)
        choice_names = tuple(n for n in NAMES if any(c.name == n for w in weights for c in w.choices))
    overview = inspect(ckpt)
    illegal = [item.name for item, scan in zip(items, scans, strict=True) if scan.illegal]
    notes = list(overview.suspicious)
    if illegal:
        notes.append(
            f"{len(illegal)} weights hold numbers that no quantizer may write, the first {illegal[0]}; ptqpipe verify"
        )
    notes += lost
    before = 2 * overview.params
    if original is not None:
        before = sum(entry.nbytes for entry in original.reader.entries.values())
    return Report(
        name=ckpt.resolve().name,
        version=__version__,
        producer=overview.producer,
        container=overview.container,
        headline=_headline(opened),
        before_bytes=before,
        before_measured=original is not None,
        after_bytes=overview.nbytes,
        params=overview.params,
        weights=tuple(weights),
        kept=_kept(opened, record),
        histograms=_histograms(items, scans),
        worst=_worst(scans),
        proof=_prove(opened, items, weights, record, threads=threads),
        errors_from="source" if original is not None else "record" if any(w.energy for w in weights) else "",
        choice_names=choice_names,
        choice_sample="" if original is None else "all rows" if all_rows else SAMPLE,
        notes=tuple(notes),
        rules=_rules(record),
        provenance=_provenance(opened, original, record, overview.producer),
        files=tuple(FileRow(row.name, row.nbytes, row.tensors) for row in overview.files),
    )


def _items(opened: Source, original: Source | None) -> tuple[list[_Item], list[str]]:
    """Every quantized weight with its rows of the source; notes on those that have none. UsageError where all do."""
    origins = None if original is None else Origins.of(original)
    items: list[_Item] = []
    lost: list[str] = []
    for stored in opened.stored.values():
        where = None if origins is None else origins.find(stored)
        if origins is not None and where is None:
            lost.append(stored.weight)
        for expert in range(stored.experts or 1):
            rows = None if origins is None or where is None else origins.rows(where[expert], stored.shape)
            items.append(_Item(stored, None if stored.experts is None else expert, rows))
    if original is not None and len(lost) == len(opened.stored):
        raise UsageError(f"{original.reader.path} has none of this checkpoint's weights; give the model it was made of")
    if not lost:
        return items, []
    return items, [f"{len(lost)} weights are not in the source, the first {lost[0]}; their errors are unknown"]


def _on_threads(items: Sequence[T], work: Callable[[T], R], *, threads: int) -> list[R]:
    """``work`` of every item, in their order."""
    with ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="report") as pool:
        return list(pool.map(work, items))


def _weight(opened: Source, item: _Item, scan: Scan, record: Record | None) -> Weight:
    """The row of a weight: from its bytes, its source where there is one, else its record."""
    stored, name = item.stored, item.name
    claim = record.weights.get(name) if record is not None else None
    numbers: Mapping[str, float] = {} if claim is None else claim.numbers
    squared, energy = scan.squared_error, scan.energy
    choices: tuple[Choice, ...] = ()
    if item.rows is None and not scan.illegal:
        squared, energy = numbers.get("squared_error"), numbers.get("energy")
        choices = (Choice(STORED, numbers["versus_absmax"]),) if "versus_absmax" in numbers else ()
    nbytes = sum(opened.reader.entries[part.name].nbytes for part in stored.parts) // (stored.experts or 1)
    fmt = stored.scheme.fmt
    return Weight(
        name=name,
        role=role_of(name),
        layer=layer_of(name),
        expert=item.expert if item.expert is not None else _number(_EXPERT, name),
        format=fmt.name,
        scheme=stored.scheme.name,
        search=_search(claim),
        proven=None if claim is None else claim.proven,
        shape=stored.shape,
        nbytes=nbytes,
        global_scale=_global_scale(opened, item),
        codes=codes_of(scan, fmt.element, fmt.scale),
        squared_error=squared,
        energy=energy,
        choices=choices,
        versus_plain_global=numbers.get("versus_plain_global") if fmt.has_global else None,
    )


def _search(claim: Claim | None) -> str:
    return "" if claim is None else claim.search


def layer_of(name: str) -> int | None:
    """The number of the decoder layer in a tensor's name: its first one."""
    return _number(_LAYER, name)


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.search(name)
    return int(match[1]) if match is not None and len(match[1]) <= 6 else None


def _global_scale(opened: Source, item: _Item) -> float | None:
    divisor = item.stored.part(Role.GLOBAL_DIVISOR)
    part = divisor or item.stored.part(Role.GLOBAL)
    if part is None:
        return None
    values = opened.reader.read(part.name).float().flatten()
    value = values[item.expert if item.expert is not None and len(values) > 1 else 0]
    number = float(value if divisor is None else 1.0 / value)
    return number if math.isfinite(number) else None


def _with_choices(
    opened: Source, items: list[_Item], scans: list[Scan], weights: list[Weight], *, threads: int, all_rows: bool
) -> list[Weight]:
    """The weights with every way of choosing scales run on their source."""
    largest = {item.name: scan.amax or 0.0 for item, scan in zip(items, scans, strict=True)}
    for group in fused_groups(opened):
        joint = max(largest.get(name, 0.0) for name in group)
        largest.update(dict.fromkeys(group, joint))

    def compare(pair: tuple[_Item, Weight]) -> Weight:
        item, weight = pair
        if item.rows is None or weight.energy is None:
            return weight
        choices = compare_choices(
            opened,
            item.stored.weight,
            expert=item.expert,
            rows=item.rows,
            amax=largest[item.name],
            all_rows=all_rows,
        )
        item.rows.drop()
        return replace(weight, choices=choices)

    return _on_threads(list(zip(items, weights, strict=True)), compare, threads=threads)


def _histograms(items: Iterable[_Item], scans: Iterable[Scan]) -> tuple[Histogram, ...]:
    """Scale codes by format and role."""
    sums: dict[tuple[str, str], torch.Tensor] = {}
    formats = {}
    for item, scan in zip(items, scans, strict=True):
        fmt = item.stored.scheme.fmt
        key = (fmt.name, role_of(item.name))
        formats[fmt.name] = fmt
        sums[key] = sums[key] + scan.scale_counts if key in sums else scan.scale_counts.clone()
    found = []
    for (name, role), counts in sums.items():
        scale = formats[name].scale
        values = scale_axis(scale)
        codec = scale.name if scale.enumerable else "float"
        found.append(Histogram(name, codec, role, tuple(counts[: len(values)].tolist()), values))
    return tuple(found)


def _worst(scans: Iterable[Scan]) -> tuple[WorstBlock, ...]:
    """The blocks that are worst beside the mean of their weight, one of each weight first."""
    ranked = sorted((b for scan in scans for b in scan.worst), key=lambda b: (-b.ratio, b.weight, b.row, b.column))
    return tuple(ranked[:WORST_SHOWN])


def _kept(opened: Source, record: Record | None) -> tuple[Kept, ...]:
    raw = record.raw.get("kept") if record is not None else None
    found = []
    for name in plain_tensors(opened):
        entry = opened.reader.entries[name]
        claim = raw.get(name) if isinstance(raw, Mapping) else None
        reason = str(claim.get("reason", "")) if isinstance(claim, Mapping) else ""
        reason = "scale of the kv cache" if not reason and is_kv_scale(name) else reason
        found.append(Kept(name, role_of(name), layer_of(name), entry.dtype, entry.shape, entry.nbytes, reason))
    return tuple(found)


def _prove(opened: Source, items: list[_Item], weights: list[Weight], record: Record | None, *, threads: int) -> Proof:
    """Brute force on a sample of the weights that are claimed optimal, where there is a source."""
    claimed = None if record is None else sum(weight.proven is True for weight in weights)
    provable = [
        item
        for item, weight in zip(items, weights, strict=True)
        if item.rows is not None and weight.proven and weight.energy and item.stored.scheme.fmt.block != (0, 0)
    ]
    step = -(-len(provable) // PROOF_WEIGHTS) or 1
    chosen = provable[::step]

    def prove(item: _Item) -> tuple[int, int]:
        assert item.rows is not None
        blocks = PROOF_BLOCKS if item.stored.scheme.fmt.scale.enumerable else PROOF_LONG_BLOCKS
        proof = prove_weight(opened, item.stored.weight, item.rows, expert=item.expert, sample_blocks=blocks)
        item.rows.drop()
        return proof.blocks, proof.worse + proof.tied

    counts = _on_threads(chosen, prove, threads=threads)
    return Proof(claimed, sum(blocks for blocks, _ in counts), sum(bad for _, bad in counts), len(counts))


def _headline(opened: Source) -> tuple[str, ...]:
    """The schemes in words, the one with most weights first."""
    counts: dict[str, int] = defaultdict(int)
    words: dict[str, str] = {}
    for stored in opened.stored.values():
        counts[stored.scheme.name] += math.prod(stored.shape) * (stored.experts or 1)
        words[stored.scheme.name] = stored.scheme.describe()
    return tuple(words[name] for name in sorted(counts, key=lambda name: (-counts[name], name)))


def _rules(record: Record | None) -> tuple[RuleRow, ...]:
    conversion = record.conversion if record is not None else None
    recipe = conversion.get("recipe") if conversion is not None else None
    rules = recipe.get("rules") if isinstance(recipe, Mapping) else None
    found = []
    for rule in rules if isinstance(rules, list) else []:
        if isinstance(rule, Mapping):
            how = [f"{key.replace('_', ' ')} {value}" for key, value in rule.items() if key not in ("match", "scheme")]
            found.append(RuleRow(str(rule.get("match")), str(rule.get("scheme")), ", ".join(how)))
    return tuple(found)


def _provenance(
    opened: Source, original: Source | None, record: Record | None, producer: str
) -> tuple[tuple[str, str], ...]:
    """(what, value), the known ones."""
    raw: Mapping[str, Any] = record.raw if record is not None else {}
    made_from = raw.get("source")
    source: Mapping[str, Any] = made_from if isinstance(made_from, Mapping) else {}
    recipe = record.conversion.get("recipe") if record is not None and record.conversion is not None else None
    rows: list[tuple[str, Any]] = [
        ("written by", producer or "unknown"),
        ("layout", opened.container_name),
        ("source", source.get("name") or (original.reader.path.name if original is not None else None)),
        ("source fingerprint", source.get("fingerprint")),
        ("recipe", recipe.get("description") if isinstance(recipe, Mapping) else None),
        ("run id", raw.get("run_id")),
        ("torch", raw.get("torch")),
        ("laid out anew from", raw.get("relayout_of")),
        ("statistics", _statistics(raw)),
        ("fingerprint of this checkpoint", opened.reader.fingerprint()),
    ]
    rows += [(f"sha256 of {name}", _sha256(opened.reader.path / name)) for name in ("config.json", RECORD_FILE)]
    return tuple((what, str(value)) for what, value in rows if value)


def _statistics(raw: Mapping[str, Any]) -> str | None:
    """The digest of the statistics that a record names."""
    found = raw.get("statistics")
    if isinstance(found, Mapping):
        return str(found.get("digest") or "") or None
    return str(found) if found else None


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


@dataclass(frozen=True, slots=True)
class Written:
    """A report on disk: where, and one line about it."""

    path: Path
    summary: str


def make_report(
    ckpt: Path,
    *,
    source: Path | None = None,
    evaluation: Path | None = None,
    out: Path | None = None,
    kind: str | None = None,
    all_rows: bool = False,
) -> Written:
    """Gathers, renders, writes. ``kind`` is "html" or "md": by the ending of ``out`` where it is not given.

    Raises what :func:`gather` raises, and OutputError where ``out`` exists and is no report: before anything is read.
    """
    if kind is None:
        kind = "md" if out is not None and out.suffix.lower() in (".md", ".markdown") else "html"
    target = out if out is not None else default_path(ckpt.resolve().name, kind=kind)
    check_kind(kind)
    check_target(target)
    if all_rows and source is None:
        raise UsageError("--all says on how many rows of the source searches are compared; add --source")
    report = gather(ckpt, source=source, evaluation=evaluation, all_rows=all_rows)
    write_report(target, render(report, kind=kind))
    error = decibels(pooled_mse(report.weights))
    parts = [f"{len(report.weights)} weights at {report.bits_per_weight:.3f} bits", f"{len(report.kept)} tensors kept"]
    parts += [f"{error:.2f} dB"] if error is not None else ["errors unknown (give --source)"]
    parts += [f"{len(report.notes)} notes"] if report.notes else []
    return Written(target, ", ".join(parts))
