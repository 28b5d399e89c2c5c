"""ptqpipe.json against the bytes: what the record of our own output claims, and what it must lead to.

The record names the recipe, so the whole plan follows from it and the source's headers: every name, dtype, shape, place
and config key of the checkpoint is compared with it. Errors and hashes are recomputed elsewhere and compared here.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.containers import Part, get_container
from ptqpipe.errors import CheckpointError, RecipeError
from ptqpipe.plan import Plan, make_plan
from ptqpipe.recipe import Recipe
from ptqpipe.source import Source
from ptqpipe.stages.common.biases import corrected_biases, with_reasons
from ptqpipe.stages.common.jobs import RECORD_FILE, run_id_of
from ptqpipe.stages.common.outputs import Outputs, abilities_of, check_supported, config_files, make_outputs
from ptqpipe.stages.verify.config import quantization_of
from ptqpipe.stages.verify.findings import Findings
from ptqpipe.stages.verify.structure import READ_BYTES, plain_tensors

SUM_TOLERANCE = 1e-9  # float64 sums of up to 2^33 positive terms in another order differ by less
_NUMBERS = ("squared_error", "energy", "relative_mse", "versus_absmax", "versus_plain_global", "bits_per_weight")


@dataclass(frozen=True, slots=True)
class Claim:
    """What the record says of one quantized weight. Numbers that it leaves out are None."""

    shape: tuple[int, ...]
    format: str
    scheme: str
    search: str
    proven: bool
    global_scale: float | None
    numbers: Mapping[str, float]
    sha256: Mapping[str, str]
    algorithm: str = "rtn"
    weighting: str = "none"
    reverted: bool = False
    input_scale: float = 0.0

    @property
    def nearest(self) -> bool:
        """Whether every code must be the nearest to its weight."""
        return self.algorithm == "rtn" or self.reverted

    @property
    def unweighted(self) -> bool:
        """Whether the scales minimize the plain squared error, as far as the search does."""
        return self.nearest and (self.weighting == "none" or self.reverted)


@dataclass(frozen=True, slots=True)
class Record:
    """The content of ptqpipe.json, its types checked."""

    raw: Mapping[str, Any]
    container: str
    weights: Mapping[str, Claim]
    kept: Mapping[str, tuple[str, int]]  # (sha256, bytes)
    carried: tuple[str, ...]
    rounded: frozenset[str]  # weights whose decode a relayout may have changed in the last place

    @property
    def converted(self) -> bool:
        """Whether it is the record of a conversion, from which every byte follows."""
        return isinstance(self.raw.get("recipe"), Mapping)

    @property
    def conversion(self) -> Mapping[str, Any] | None:
        """Recipe and container of the conversion, also where a relayout followed; None where there was none of ours."""
        found = self.raw if self.converted else self.raw.get("converted_as")
        return found if isinstance(found, Mapping) and isinstance(found.get("recipe"), Mapping) else None


def claims_ownership(reader: CheckpointReader) -> bool:
    """Whether the checkpoint says that ptqpipe wrote it, in its config or by a record."""
    if (reader.path / RECORD_FILE).exists():
        return True
    provenance = quantization_of(reader.config).get("ptqpipe")
    return provenance is not None


def read_record(reader: CheckpointReader) -> Record:
    """The record of a checkpoint. CheckpointError where it is missing or malformed."""
    raw = reader.read_json(RECORD_FILE)
    if raw is None:
        raise CheckpointError(f"{RECORD_FILE} is missing, though config.json names ptqpipe as its producer")
    if not isinstance(raw.get("recipe"), Mapping) and ("recipe" in raw or "relayout_of" not in raw):
        raise CheckpointError(f"{RECORD_FILE} has neither a recipe nor the run that was laid out anew; it is damaged")
    weights = {name: _claim(name, entry) for name, entry in _object(raw, "weights").items()}
    kept = {name: _kept(name, entry) for name, entry in _object(raw, "kept").items()}
    carried = raw.get("carried_files", [])
    if not isinstance(carried, list) or not all(isinstance(name, str) for name in carried):
        raise CheckpointError(f"{RECORD_FILE}: carried_files must be a list of names")
    rounded = raw.get("decode_rounds_differently", [])
    if not isinstance(rounded, list):
        raise CheckpointError(f"{RECORD_FILE}: decode_rounds_differently must be a list of names")
    return Record(
        raw, _text(raw, "container", RECORD_FILE), weights, kept, tuple(carried), frozenset(map(str, rounded))
    )


def _object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = raw.get(key)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{RECORD_FILE}: {key} is {type(found).__name__}, expected an object")
    return found


def _text(raw: Mapping[str, Any], key: str, where: str) -> str:
    found = raw.get(key)
    if not isinstance(found, str):
        raise CheckpointError(f"{where}: {key} is {found!r:.60}, expected text")
    return found


def _claim(name: str, entry: Any) -> Claim:
    where = f"{RECORD_FILE}, {name}"
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{where}: expected an object")
    shape, proven, g = entry.get("shape"), entry.get("proven"), entry.get("global_scale")
    if not isinstance(shape, list) or not isinstance(proven, bool) or not (g is None or isinstance(g, float | int)):
        raise CheckpointError(f"{where}: shape, proven or global_scale has the wrong type")
    numbers = {key: float(entry[key]) for key in _NUMBERS if isinstance(entry.get(key), float | int)}
    hashes = _object(entry, "sha256")
    fmt, scheme, search = (_text(entry, key, where) for key in ("format", "scheme", "search"))
    algorithm, weighting = entry.get("algorithm", "rtn"), entry.get("weighting", "none")
    reverted, input_scale = entry.get("reverted"), entry.get("input_scale", 0.0)
    if not isinstance(algorithm, str) or not isinstance(weighting, str) or not isinstance(reverted, bool | None):
        raise CheckpointError(f"{where}: algorithm, weighting or reverted has the wrong type")
    if not isinstance(input_scale, float | int):
        raise CheckpointError(f"{where}: input_scale is {input_scale!r:.60}, expected a number")
    return Claim(
        tuple(shape), fmt, scheme, search, proven, None if g is None else float(g), numbers, dict(hashes),
        algorithm, weighting, bool(reverted), float(input_scale),
    )  # fmt: skip


def _kept(name: str, entry: Any) -> tuple[str, int]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("bytes"), int):
        raise CheckpointError(f"{RECORD_FILE}, {name}: expected sha256 and bytes")
    return _text(entry, "sha256", f"{RECORD_FILE}, {name}"), entry["bytes"]


def check_coverage(ckpt: Source, record: Record, findings: Findings) -> None:
    """The record lists exactly what is stored: quantized weights, kept tensors, the container, the carried files."""
    stored = {
        name if weight.experts is None else f"{name}[{expert}]"
        for name, weight in ckpt.stored.items()
        for expert in range(weight.experts or 1)
    }
    plain = set(plain_tensors(ckpt))
    carried = {path.relative_to(ckpt.reader.path).as_posix() for path in ckpt.reader.extra_files}
    for found, claimed, what in (
        (stored, set(record.weights), "a quantized weight"),
        (plain, set(record.kept), "a kept tensor"),
        (carried, set(record.carried), "a carried file"),
    ):
        for name in sorted(found - claimed):
            findings.fault("record", name, f"is stored as {what}, but {RECORD_FILE} does not list it as such")
        for name in sorted(claimed - found):
            findings.fault("record", name, f"is {what} in {RECORD_FILE}, but not in the checkpoint")
    if record.container != ckpt.container_name:
        findings.fault(
            "record", "container", f"is {record.container!r} in {RECORD_FILE}, the layout is {ckpt.container_name}"
        )


def check_hashes(ckpt: Source, weight: str, expert: int | None, claim: Claim, findings: Findings) -> None:
    """The sha256 of every part of a stored weight."""
    name = weight if expert is None else f"{weight}[{expert}]"
    stored = ckpt.stored[weight]
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
    return range_sha256(reader, part.name, start, stop)


def range_sha256(reader: CheckpointReader, name: str, start: int, stop: int) -> str:
    """sha256 of bytes [start, stop) of a tensor."""
    digest = hashlib.sha256()
    for position in range(start, stop, READ_BYTES):
        digest.update(reader.read_bytes(name, start_byte=position, stop_byte=min(position + READ_BYTES, stop)))
    return digest.hexdigest()


def check_kept_hash(ckpt: Source, name: str, record: Record, findings: Findings) -> None:
    """The sha256 of a kept tensor."""
    claimed = record.kept.get(name)
    nbytes = ckpt.reader.entries[name].nbytes
    if claimed is not None and (range_sha256(ckpt.reader, name, 0, nbytes), nbytes) != claimed:
        findings.fault("record", name, f"is not what {RECORD_FILE} describes: its sha256 differs")


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


@dataclass(frozen=True, slots=True)
class Replanned:
    """What the recorded recipe makes of the source: the plan, and everything that must have been written."""

    recipe: Recipe
    plan: Plan
    outputs: Outputs


def replan(record: Record, source: Source) -> Replanned:
    """The plan again. Raises a PtqError where the recorded recipe is none, or makes nothing of this source."""
    conversion = record.conversion
    if conversion is None:
        raise CheckpointError(f"{RECORD_FILE} has no recipe")
    recipe, name = _recipe_of(_object(conversion, "recipe")), _text(conversion, "container", RECORD_FILE)
    container = get_container(name)
    check_supported(container, recipe)
    plan = make_plan(source.tensors, source.reader.config, recipe=recipe, abilities=abilities_of(name))
    plan = with_reasons(plan, corrected_biases(plan, source, recipe))
    return Replanned(recipe, plan, make_outputs(plan, source, container, container_name=name, recipe=recipe))


def _recipe_of(described: Mapping[str, Any]) -> Recipe:
    """The recipe that a record describes."""
    try:
        return Recipe.from_json(described)
    except RecipeError as error:
        raise CheckpointError(f"{RECORD_FILE}: {error}") from None


def check_plan(ckpt: Source, source: Source, record: Record, planned: Replanned, findings: Findings) -> None:
    """Names, dtypes, shapes, places, config files and the run's identity follow from recipe and source."""
    reader, layout = ckpt.reader, planned.outputs.layout
    specs = {spec.name: spec for shard in layout.shards for spec in shard.tensors}
    for name in sorted(specs.keys() - reader.entries.keys()):
        findings.fault("plan", name, "should have been written by the recorded recipe, but is missing")
    for name, entry in reader.entries.items():
        spec = specs.get(name)
        if spec is None:
            findings.fault("plan", name, "would not have been written by the recorded recipe")
        elif (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            wanted = f"{spec.dtype} {list(spec.shape)}"
            findings.fault("plan", name, f"is {entry.dtype} {list(entry.shape)}, the recorded recipe writes {wanted}")
        elif (entry.file.relative_to(reader.path).as_posix(), entry.offset) != (
            layout.placements[name].file,
            layout.placements[name].offset,
        ):
            findings.fault("plan", name, "lies at another place than the recorded recipe puts it")
    _check_reasons(record, planned.plan, findings)
    _check_config_files(ckpt, source, record, planned, findings)
    _check_identity(record, planned, findings)


def _check_reasons(record: Record, plan: Plan, findings: Findings) -> None:
    kept = record.raw.get("kept", {})
    for entry in plan.kept:
        claimed = kept.get(entry.name, {}).get("reason")
        if entry.name in kept and claimed != entry.reason:
            findings.fault("record", entry.name, f"is kept for {claimed!r}, the plan's reason is {entry.reason!r}")


def _check_config_files(ckpt: Source, source: Source, record: Record, planned: Replanned, findings: Findings) -> None:
    assert ckpt.container is not None
    provenance = {"producer": "ptqpipe", "version": record.raw.get("ptqpipe")}
    files = config_files(planned.outputs, planned.plan, source, ckpt.container, provenance=provenance)
    for name, wanted in files.items():
        found = ckpt.reader.read_json(name)
        if found is None:
            findings.fault("config", name, "is missing")
        elif found != json.loads(json.dumps(wanted)):
            findings.fault("config", name, f"differs from what was written in {_where(found, wanted)}")


def _where(found: Any, wanted: Any, path: str = "") -> str:
    """The path of the first difference of two JSON values, with what was found there."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in [*wanted, *(k for k in found if k not in wanted)]:
            if key not in found or key not in wanted:
                return f"{path}{key} ({'missing' if key not in found else 'added'})"
            if found[key] != wanted[key]:
                return _where(found[key], wanted[key], f"{path}{key}.")
    return f"{path.rstrip('.')} ({found!r:.60}, expected {wanted!r:.60})"


def _check_identity(record: Record, planned: Replanned, findings: Findings) -> None:
    """run_id binds recipe, layout, version and the source's fingerprint."""
    fingerprint = record.raw.get("source", {}).get("fingerprint")
    parts = {
        "source": str(fingerprint),
        "recipe": planned.recipe.digest,
        "layout": planned.outputs.layout.digest,
        "version": str(record.raw.get("ptqpipe")),
    }
    for key in ("statistics", "rounding"):
        if isinstance(record.raw.get(key), Mapping):
            parts[key] = str(record.raw[key].get("digest"))
    if record.raw.get("run_id") != run_id_of(parts):
        findings.fault("record", RECORD_FILE, "its run_id is not that of its recipe, layout, version and source")
