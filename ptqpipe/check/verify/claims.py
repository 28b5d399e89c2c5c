"""Checks the record against the bytes and against itself: names, hashes, numbers, reasons, identity. Decodes no source.

The recipe names every weight's rule, the plan of the stored names every reason, and ``run_id`` binds the recipe, the
source, the layout and the version. The record of a float checkpoint (decoded by dequantize, changed by transform) says
less: beside the packed source every decoded weight is decoded again; the factors of a transform are not stored, so what
it changed is checked by its hash alone. Must not judge numbers that need the source's weights.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ptqpipe.check.verify.findings import Findings
from ptqpipe.check.verify.tensor_fates import compare_decoded
from ptqpipe.checkpoint import RECORD_FILE, CheckpointReader, run_id_of
from ptqpipe.checkpoint.dtypes import FLOATS
from ptqpipe.checkpoint.layouts import Part, get_container, is_kv_scale, quantization_config
from ptqpipe.conversion.bias_correction import corrected_biases, with_reasons
from ptqpipe.conversion.job import run_parts_of
from ptqpipe.conversion.measured import certificate
from ptqpipe.conversion.record import CACHE_REASON, TAKEN_OVER, UNKNOWN, Claim, Record, object_of, self_faults
from ptqpipe.errors import CheckpointError, PtqError, RecipeError
from ptqpipe.models.source import Source
from ptqpipe.numerics.search import get_search
from ptqpipe.quantization.learned_codes import relative_change, trained_of
from ptqpipe.recipe.plan import Plan, Unit, make_plan
from ptqpipe.recipe.recipe import Recipe

SUM_TOLERANCE = 1e-9  # float64 sums of up to 2^33 positive terms in another order differ by less

REWRITTEN = frozenset({"dtype", "torch_dtype", "tie_word_embeddings"})
"""Keys of config.json that a float checkpoint of another dtype, or with a head of its own, has otherwise."""


def check_itself(ckpt: Source, record: Record, findings: Findings) -> None:
    """The record's file is the one that was written: its own sha256, and its keys."""
    for where, message in self_faults(ckpt.reader.path, record.raw):
        findings.fault("record", where, message)
    if "sha256" not in record.raw:
        why = "has no sha256 of itself, as older versions wrote it: what in it contradicts nothing is believed"
        findings.note("record", RECORD_FILE, why)


def check_coverage(ckpt: Source, record: Record, findings: Findings) -> None:
    """The record lists exactly what is stored: quantized weights, kept tensors, the container."""
    stored = {weight.key(expert) for weight in ckpt.stored.values() for expert in weight.planes}
    plain = set(ckpt.plain)
    claims = set(record.weights)
    if record.plain:  # decoded weights, and those that a transform changed, are tensors like others
        claims = set(object_of(record.raw, "weights"))
        stored, plain = plain & claims, plain - claims
    for there, claimed, what in (
        (stored, claims, "a weight" if record.plain else "a quantized weight"),
        (plain, set(record.kept), "a kept tensor"),
    ):
        for name in sorted(there - claimed):
            findings.fault("record", name, f"is stored as {what}, but {RECORD_FILE} does not list it as such")
        for name in sorted(claimed - there):
            findings.fault("record", name, f"is {what} in {RECORD_FILE}, but not in the checkpoint")
    if record.container != ckpt.container_name:
        findings.fault(
            "record", "container", f"is {record.container!r} in {RECORD_FILE}, the layout is {ckpt.container_name}"
        )


def check_hashes(ckpt: Source, weight: str, expert: int | None, claim: Claim, findings: Findings) -> None:
    stored = ckpt.stored[weight]
    name = stored.key(expert)
    roles = {part.role.value for part in stored.parts}
    for role in sorted(roles ^ claim.sha256.keys()):
        findings.fault(
            "record", name, f"has {'no' if role not in claim.sha256 else 'a'} sha256 of {role!r} in {RECORD_FILE}"
        )
    for part in stored.parts:
        claimed = claim.sha256.get(part.role.value)
        if claimed is not None and part_sha256(ckpt.reader, part, expert, stored.experts) != claimed:
            findings.fault("record", part.name, f"is not what {RECORD_FILE} describes: its sha256 differs")


def part_sha256(reader: CheckpointReader, part: Part, expert: int | None, experts: int | None) -> str:
    """sha256 of a part, or of one expert's share of it."""
    total = reader.entries[part.name].nbytes
    start, stop = 0, total
    if part.stacked and expert is not None and experts:
        start, stop = total // experts * expert, total // experts * (expert + 1)
    return reader.sha256(part.name, start=start, stop=stop)


def check_kept_hash(ckpt: Source, name: str, record: Record, findings: Findings) -> None:
    claimed = record.kept.get(name)
    nbytes = ckpt.reader.entries[name].nbytes
    if claimed is not None and (ckpt.reader.sha256(name), nbytes) != claimed:
        findings.fault("record", name, f"is not what {RECORD_FILE} describes: its sha256 differs")


def check_trained(ckpt: Source, source: Source | None, name: str, record: Record, findings: Findings) -> None:
    """A tensor that was trained with the codes has the bytes that were trained, the source's dtype and shape, and is as
    far from the source's as the record says."""
    entry = trained_of(record.raw).get(name)
    if not isinstance(entry, Mapping):
        return  # that it is kept for another reason than the plan's is reported by `check_reasons`
    if ckpt.reader.sha256(name) != entry.get("sha256"):
        findings.fault("record", name, f"is not what was trained according to {RECORD_FILE}: its sha256 differs")
        return
    if source is None or name not in source.tensors:
        return
    stored = ckpt.reader.entries[name]
    if (stored.dtype, stored.shape) != source.tensors[name]:
        dtype, shape = source.tensors[name]
        findings.fault("kept", name, f"is {stored.dtype} {list(stored.shape)}, the source has {dtype} {list(shape)}")
        return
    change, claimed = relative_change(source.reader.read(name), ckpt.reader.read(name)), entry.get("change")
    if not isinstance(claimed, float | int) or not math.isclose(claimed, change, rel_tol=SUM_TOLERANCE):
        findings.fault("record", name, f"claims that training changed it by {claimed!r:.40}, recomputed {change:.12g}")


def check_numbers(
    name: str, claim: Claim, actual: Mapping[str, float], findings: Findings, *, tolerance: float = SUM_TOLERANCE
) -> None:
    """Recomputed numbers against the claimed ones, equal within the rounding of float64 sums."""
    for key, value in actual.items():
        claimed = claim.numbers.get(key)
        if claimed is None:
            findings.fault("record", name, f"has no {key} in {RECORD_FILE}")
        elif not math.isclose(claimed, value, rel_tol=tolerance, abs_tol=0.0) and claimed != value:
            findings.fault("record", name, f"claims {key} {claimed:.12g}, recomputed {value:.12g}")


# --- What the record says of itself


def recipe_of(described: Mapping[str, Any]) -> Recipe:
    """The recipe that a record describes. CheckpointError where it is none."""
    try:
        return Recipe.from_json(described)
    except RecipeError as error:
        raise CheckpointError(f"{RECORD_FILE}: {error}") from None


def layout_digest(reader: CheckpointReader) -> str:
    """``ShardLayout.digest`` of the files as they lie: names, sizes and headers."""
    digest = hashlib.sha256()
    for path in reader.files:
        with open(path, "rb") as file:
            length = file.read(8)
            header = length + file.read(int.from_bytes(length, "little"))
        digest.update(f"{path.relative_to(reader.path).as_posix()}\0{path.stat().st_size}\0".encode() + header)
    return digest.hexdigest()


def check_identity(ckpt: Source, record: Record, findings: Findings) -> None:
    """run_id binds what was asked for to the layout that is stored, and config.json names the same version."""
    raw = record.raw
    parts = run_parts_of(raw, layout=layout_digest(ckpt.reader))
    if parts is None:
        parts = conversion_parts(raw, recipe_of(object_of(raw, "recipe")), layout=layout_digest(ckpt.reader))
    if raw.get("run_id") != run_id_of(parts):
        findings.fault("record", RECORD_FILE, "its run_id is not that of its recipe, layout, version and source")
    described = quantization_config(ckpt.reader.config).get("ptqpipe")
    if isinstance(described, Mapping) and described.get("version") != raw.get("ptqpipe"):
        message = f"was written by version {raw.get('ptqpipe')!r}, config.json by {described.get('version')!r}"
        findings.fault("record", RECORD_FILE, message)


def conversion_parts(raw: Mapping[str, Any], recipe: Recipe, *, layout: str) -> dict[str, str]:
    """The parts of a run's identity that decide the bytes of a conversion, as in ``convert``."""
    parts = {
        "source": str(object_of(raw, "source").get("fingerprint")),
        "recipe": recipe.digest,
        "layout": layout,
        "version": str(raw.get("ptqpipe")),
    }
    for key in ("statistics", "rounding"):
        if isinstance(raw.get(key), Mapping):
            parts[key] = str(raw[key].get("digest"))
    return parts


def check_lists(ckpt: Source, record: Record, findings: Findings, *, source: Source | None) -> None:
    """What a change of layout lists as rounded is stored; what it lists as left out is not, and was in its source."""
    entries = ckpt.reader.entries.keys()
    for key, names in (("decode_rounds_differently", record.weights.keys()), ("reciprocal_is_not_exact", entries)):
        for name in sorted({str(name) for name in record.raw.get(key, ())} - names):
            findings.fault("record", name, f"is listed as {key} in {RECORD_FILE}, but not stored")
    claimed, counted = record.raw.get("certificate", ""), certificate({n: c.entry for n, c in record.weights.items()})
    if record.converted and claimed != counted:
        findings.fault("record", "certificate", f"is {claimed!r:.120}; the weights' own entries give {counted!r}")
    dropped = {str(name) for name in record.raw.get("dropped", ())}
    for name in sorted(dropped & entries):
        findings.fault("record", name, f"is dropped in {RECORD_FILE}, but stored")
    if source is not None and source.container is not None:
        for name in sorted(dropped - source.reader.entries.keys()):
            findings.fault("record", name, f"is dropped in {RECORD_FILE}, but the source has no such tensor")


def check_rules(ckpt: Source, record: Record, findings: Findings) -> None:
    """Scheme, search, algorithm, weighting and proof of every weight are those of its rule, the reason of every kept
    tensor that of the plan. The plan is made of the stored names: what is quantized here could be there."""
    conversion = record.conversion
    if conversion is None:
        _check_taken_over(ckpt, record, findings)
        return
    recipe = recipe_of(object_of(conversion, "recipe"))
    capabilities = get_container(str(conversion.get("container"))).CAPABILITIES
    try:
        plan = make_plan(ckpt.tensors, ckpt.reader.config, recipe=recipe, capabilities=capabilities)
    except PtqError as error:
        findings.fault("record", "recipe", f"does not fit the tensors that are stored: {error}")
        return
    for unit in plan.units:
        claims = {member.key: record.weights[member.key] for member in unit.members if member.key in record.weights}
        _check_unit(unit, claims, findings, learned=isinstance(record.raw.get("rounding"), Mapping))
    trained = trained_of(record.raw)
    if trained:
        kinds = ", ".join(sorted({str(object_of(trained, name).get("kind")) for name in trained}))
        findings.note(
            "kept",
            f"{len(trained)} tensors",
            f"were trained with the codes ({kinds}): their values are not the source's",
        )
    plan = with_reasons(plan, corrected_biases(plan, ckpt, recipe), trained=trained)
    # Why a stack of experts is kept may depend on another one of the source, which has become weights of its own here.
    alone = tuple(kept for kept in plan.kept if len(ckpt.tensors[kept.name][1]) < 3)
    check_reasons(record, replace(plan, kept=alone), findings, recipe)


def _check_taken_over(ckpt: Source, record: Record, findings: Findings) -> None:
    """After a change of layout the record says nothing of how another tool chose its numbers."""
    for name, claim in record.weights.items():
        stored = ckpt.stored.get(name.partition("[")[0])
        if stored is not None and claim.scheme != stored.scheme.name:
            findings.fault("record", name, f"claims scheme {claim.scheme}, stored is {stored.scheme.name}")
        if (claim.search, claim.proven, claim.algorithm, claim.weighting) != (UNKNOWN, False, "rtn", "none"):
            findings.fault("record", name, f"claims search {claim.search}, but another tool chose its numbers")
    for name, entry in object_of(record.raw, "kept").items():
        if entry.get("reason") != TAKEN_OVER:
            findings.fault("record", name, f"is kept for {entry.get('reason')!r}, expected {TAKEN_OVER!r}")


def _check_unit(unit: Unit, claims: Mapping[str, Claim], findings: Findings, *, learned: bool) -> None:
    reverted = any(claim.reverted for claim in claims.values())
    for name, claim in claims.items():
        for what, claimed, wanted in _expected(unit, claim, learned=learned, reverted=reverted):
            if claimed != wanted:
                findings.fault("record", name, f"claims {what} {claimed!r:.40}, its rule gives {wanted!r:.40}")


def _expected(unit: Unit, claim: Claim, *, learned: bool, reverted: bool) -> Iterator[tuple[str, object, object]]:
    rule = unit.rule
    yield "scheme", claim.scheme, unit.scheme.name
    yield "search", claim.search, unit.search
    if learned and claim.algorithm == "learned":
        yield "proven", claim.proven, False
        return
    yield "algorithm", claim.algorithm, rule.algorithm
    same = claim.follows(claim.algorithm, rule.objective)
    yield "weighting", claim.weighting, claim.weighting if same else rule.objective
    yield "enlarged", "enlarged" in claim.entry, unit.search == "enlarged"
    plain = rule.algorithm == "rtn" and rule.objective != "block" and not reverted
    yield "proven", claim.proven, plain and get_search(unit.search).proven


def check_reasons(record: Record, plan: Plan, findings: Findings, recipe: Recipe) -> None:
    kept = object_of(record.raw, "kept")
    for entry in plan.kept:
        claimed = kept.get(entry.name, {}).get("reason")
        added = recipe.kv_cache != "none" and is_kv_scale(entry.name)
        reason = CACHE_REASON if added else entry.reason
        if entry.name in kept and claimed != reason:
            findings.fault("record", entry.name, f"is kept for {claimed!r}, the plan's reason is {reason!r}")


# --- Float checkpoints


def check_float(ckpt: Source, record: Record, findings: Findings) -> None:
    """Checks the fields of a float checkpoint's record that concern all of it."""
    raw = record.raw
    dtype = raw.get("dtype")
    if dtype is not None:
        torch_dtype = str(FLOATS[dtype][1] if dtype in FLOATS else dtype).removeprefix("torch.")
        for key in ("dtype", "torch_dtype"):
            dtype_there = ckpt.reader.config.get(key, torch_dtype)
            if dtype_there != torch_dtype:
                findings.fault(
                    "record", "dtype", f"is {dtype} in {RECORD_FILE}, but config.json says {key} {dtype_there!r}"
                )
    for name in sorted({str(name) for name in raw.get("untied", ())} - ckpt.reader.entries.keys()):
        findings.fault("record", name, f"is a tensor of its own in {RECORD_FILE}, but not stored")
    if "transformed_from" in raw:
        entries = object_of(raw, "weights").values()
        squared, energy = (sum(float(entry[key]) for entry in entries) for key in ("squared_error", "energy"))
        wanted = squared / energy if energy else 0.0
        if not math.isclose(float(raw.get("rounding", math.nan)), wanted, rel_tol=SUM_TOLERANCE):
            findings.fault(
                "record", "rounding", f"is {raw.get('rounding')!r}, the errors of its weights give {wanted!r}"
            )
        touched = {str(name) for folding in raw.get("foldings", ()) for name in folding.get("tensors", ())}
        transforms = set(map(str, raw.get("transforms", ())))
        for name in sorted({str(folding.get("transform")) for folding in raw.get("foldings", ())} - transforms):
            findings.fault("record", "foldings", f"are of {name}, which is none of the transforms {sorted(transforms)}")
        for name in sorted(touched - object_of(raw, "weights").keys()):
            findings.fault(
                "record", name, f"has factors by the foldings of {RECORD_FILE}, but is not among its weights"
            )


def check_float_fates(ckpt: Source, source: Source, record: Record, findings: Findings) -> None:
    """Every tensor of the source is stored or dropped, and nothing else is stored but heads that were untied."""
    if "dequantized_from" in record.raw and source.container is None:
        findings.fault("names", "the source", "is a float checkpoint, expected the quantized one that was decoded")
        return
    dropped, untied = ({str(name) for name in record.raw.get(key, ())} for key in ("dropped", "untied"))
    entries = ckpt.reader.entries
    for name in sorted(source.tensors.keys() - entries.keys() - dropped):
        findings.fault("names", name, "is in the source, but the checkpoint has no such tensor")
    for name in sorted(entries.keys() - source.tensors.keys() - untied):
        findings.fault("names", name, "is in the checkpoint, but the source has no such tensor")
    if "dequantized_from" in record.raw:
        for name in sorted(object_of(record.raw, "weights").keys() ^ source.stored.keys()):
            findings.fault("record", name, "is quantized in the source or in the record, but not in both")


def check_float_tensor(ckpt: Source, source: Source | None, name: str, record: Record, findings: Findings) -> None:
    """One weight: its shape, dtype and hash, and with the packed source its numbers."""
    claim, entry = object_of(record.raw, "weights").get(name), ckpt.reader.entries[name]
    if not isinstance(claim, dict):
        return  # reported by name elsewhere
    dtype = FLOATS.get(str(record.raw.get("dtype")), (entry.dtype,))[0]
    if (claim.get("shape"), dtype) != (list(entry.shape), entry.dtype):
        message = f"is {dtype} {claim.get('shape')} in {RECORD_FILE}, stored is {entry.dtype} {list(entry.shape)}"
        findings.fault("record", name, message)
    if claim.get("sha256") != ckpt.reader.sha256(name):
        findings.fault("record", name, f"is not what {RECORD_FILE} describes: its sha256 differs")
    if source is None or name not in source.stored:
        return
    fmt = source.stored[name].scheme.fmt.name
    if claim.get("format") != fmt:
        findings.fault("record", name, f"was {claim.get('format')!r} in {RECORD_FILE}, the source has {fmt}")
    compare_decoded(ckpt, source, name, findings)
