"""What a record says that follows from itself and from the stored bytes: no source is needed.

The recipe names every weight's rule, the plan of the stored names every reason, and ``run_id`` binds the recipe, the
source, the layout and the version. Must not judge numbers that need the source's weights (``judge.py``, ``repeat.py``).
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ptqpipe.checkpoint.files import RECORD_FILE
from ptqpipe.checkpoint.journal import run_id_of
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.containers import quantization_config
from ptqpipe.errors import CheckpointError, PtqError, RecipeError
from ptqpipe.plan import Plan, Unit, make_plan
from ptqpipe.recipe import Recipe
from ptqpipe.search import get_search
from ptqpipe.source import Source
from ptqpipe.stages.common.extra_tensors import CACHE_REASON, corrected_biases, with_reasons
from ptqpipe.stages.common.outputs import abilities_of
from ptqpipe.stages.common.rewrite import run_parts_of
from ptqpipe.stages.verify.findings import Findings
from ptqpipe.stages.verify.record import TAKEN_OVER, UNKNOWN, Claim, Record, object_of
from ptqpipe.stages.verify.structure import is_kv_scale


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
    """What decides the bytes of a conversion, as ``convert`` binds it."""
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


def check_lists(ckpt: Source, source: Source | None, record: Record, findings: Findings) -> None:
    """What a change of layout lists as rounded is stored; what it lists as left out is not, and was in its source."""
    entries = ckpt.reader.entries.keys()
    for key, names in (("decode_rounds_differently", record.weights.keys()), ("reciprocal_is_not_exact", entries)):
        for name in sorted({str(name) for name in record.raw.get(key, ())} - names):
            findings.fault("record", name, f"is listed as {key} in {RECORD_FILE}, but not stored")
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
    abilities = abilities_of(str(conversion.get("container")))
    try:
        plan = make_plan(ckpt.tensors, ckpt.reader.config, recipe=recipe, abilities=abilities)
    except PtqError as error:
        findings.fault("record", "recipe", f"makes nothing of what is stored: {error}")
        return
    for unit in plan.units:
        claims = {member.key: record.weights[member.key] for member in unit.members if member.key in record.weights}
        _check_unit(unit, claims, findings, learned=isinstance(record.raw.get("rounding"), Mapping))
    plan = with_reasons(plan, corrected_biases(plan, ckpt, recipe))
    # Why a stack of experts is kept may depend on another one of the source, which has become weights of its own here.
    alone = tuple(kept for kept in plan.kept if len(ckpt.tensors[kept.name][1]) < 3)
    check_reasons(record, replace(plan, kept=alone), findings, recipe)


def _check_taken_over(ckpt: Source, record: Record, findings: Findings) -> None:
    """A change of layout claims nothing of how another tool found its numbers."""
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
        for what, found, wanted in _expected(unit, claim, learned=learned, reverted=reverted):
            if found != wanted:
                findings.fault("record", name, f"claims {what} {found!r:.40}, its rule gives {wanted!r:.40}")


def _expected(unit: Unit, claim: Claim, *, learned: bool, reverted: bool) -> Iterator[tuple[str, object, object]]:
    """(what, as claimed, as it must be)."""
    rule = unit.rule
    yield "scheme", claim.scheme, unit.scheme.name
    yield "search", claim.search, rule.search
    if learned and claim.algorithm == "learned":
        yield "proven", claim.proven, False
        return
    yield "algorithm", claim.algorithm, rule.algorithm
    yield "weighting", claim.weighting, rule.weighting
    plain = rule.algorithm == "rtn" and rule.weighting != "block" and not reverted
    yield "proven", claim.proven, plain and get_search(rule.search).PROVEN


def check_reasons(record: Record, plan: Plan, findings: Findings, recipe: Recipe) -> None:
    """Why each tensor is kept, against the plan."""
    kept = object_of(record.raw, "kept")
    for entry in plan.kept:
        claimed = kept.get(entry.name, {}).get("reason")
        added = recipe.kv_cache != "none" and is_kv_scale(entry.name)
        reason = CACHE_REASON if added else entry.reason
        if entry.name in kept and claimed != reason:
            findings.fault("record", entry.name, f"is kept for {claimed!r}, the plan's reason is {reason!r}")
