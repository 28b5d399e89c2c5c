"""Reads the record, ptqpipe.json, and checks its types. Whether its claims are true is judged elsewhere."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint import RECORD_FILE, CheckpointReader, vouches_for_itself
from ptqpipe.checkpoint.layouts import quantization_config
from ptqpipe.checkpoint.regular_file import MAX_JSON_BYTES, read_regular
from ptqpipe.errors import CheckpointError, one_line
from ptqpipe.recipe.options import PROPAGATED

CACHE_REASON = "scale of the FP8 kv cache"
UNKNOWN = "unknown"  # the search of a weight whose numbers another tool made
TAKEN_OVER = "not quantized in the checkpoint whose layout was changed"  # why a tensor of such a checkpoint is kept

_NUMBERS = (
    *("squared_error", "energy", "relative_mse", "versus_absmax", "versus_plain_global", "bits_per_weight"),
    "versus_rtn",
)


@dataclass(frozen=True, slots=True)
class Claim:
    """The entry of one quantized weight in the record. Numbers that it leaves out are None."""

    shape: tuple[int, ...]
    format: str
    scheme: str
    search: str
    proven: bool
    global_scale: float | None
    numbers: Mapping[str, float]
    sha256: Mapping[str, str]
    entry: Mapping[str, Any]  # all that the record says of it
    algorithm: str = "rtn"
    weighting: str = "none"
    reverted: bool = False
    input_scale: float | None = None

    @property
    def enlarged(self) -> float:
        """What the weights were multiplied by before they were rounded."""
        factor = self.entry.get("enlarged")
        return float(factor) if isinstance(factor, float | int) and not isinstance(factor, bool) else 1.0

    @property
    def nearest(self) -> bool:
        """Whether every code must be the nearest to its weight."""
        return self.algorithm == "rtn" or self.reverted

    @property
    def provable(self) -> bool:
        """Whether what the scales minimize, as far as the search does, follows from the source alone."""
        return self.nearest and (self.weighting in ("none", PROPAGATED) or self.reverted)

    def follows(self, algorithm: str, objective: str) -> bool:
        """Whether it is what a rule gives, which weights nothing where an input is not known: the record says so."""
        unknown = objective == PROPAGATED and self.entry.get("weighting") == "none"
        return self.algorithm == algorithm and (self.weighting == objective or unknown)


@dataclass(frozen=True, slots=True)
class Record:
    """The content of ptqpipe.json, its types checked."""

    raw: Mapping[str, Any]
    container: str
    weights: Mapping[str, Claim]
    kept: Mapping[str, tuple[str, int]]  # (sha256, bytes)
    files: Mapping[str, str]  # sha256 of the files that were written with the weights
    rounded: frozenset[str]  # weights whose decode a relayout may have changed in the last place

    @property
    def plain(self) -> bool:
        """Whether it is the record of a float checkpoint, decoded or transformed: then ``weights`` is empty."""
        return "dequantized_from" in self.raw or "transformed_from" in self.raw

    @property
    def converted(self) -> bool:
        """Whether it is the record of a conversion, from which every byte follows."""
        return isinstance(self.raw.get("recipe"), Mapping)

    @property
    def conversion(self) -> Mapping[str, Any] | None:
        """Recipe and container of the conversion, also where a relayout followed; None where there was none of ours."""
        entry = self.raw if self.converted else self.raw.get("converted_as")
        return entry if isinstance(entry, Mapping) and isinstance(entry.get("recipe"), Mapping) else None


# What a record has. Of each kind: what it always has, beside `_ALWAYS`.
_ALWAYS = frozenset({"ptqpipe", "container", "run_id", "source", "weights", "kept", "files"})
_KINDS: dict[str, frozenset[str]] = {
    "recipe": frozenset({"torch", "consumed"}),
    "converted_as": frozenset({"torch", "consumed"}),
    "relayout_of": frozenset({"relayout_from", "decode_rounds_differently", "reciprocal_is_not_exact", "dropped"}),
    "dequantized_from": frozenset({"dtype", "dropped"}),
    "transformed_from": frozenset({"statistics", "transforms", "options", "exact", "dtype", "untied", "foldings"}),
}
_KNOWN = _ALWAYS.union(
    _KINDS, *_KINDS.values(), {"statistics", "rounding", "certificate", "pipeline", "transformed"},
    {"doubts", "learned", "sha256"},
)  # fmt: skip
_OF_CONVERTED = frozenset(
    (
        *("shape", "format", "scheme", "search", "proven", "global_scale", "versus_plain_global", "squared_error"),
        *("energy", "relative_mse", "versus_absmax", "bits_per_weight", "sha256"),
    )
)
_OF_WEIGHTS = _OF_CONVERTED.union(
    ("algorithm", "weighting", "damping", "reverted", "held_out", "weighted_error", "metric", "output_error"),
    ("versus_rtn", "rotation", "input_scale", "enlarged", "rechecked", "changed", "dtype"),
)
_OF_KEPT = frozenset({"reason", "sha256", "bytes", "not_finite"})


def self_faults(folder: Path, raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(where, message) of what the record of a folder, with the content ``raw``, contradicts of itself: its own sha256,
    keys that no record has, and, of records that have a sha256, keys that are missing. OSError where it cannot be
    read."""
    sealed = vouches_for_itself(read_regular(folder / RECORD_FILE, limit=MAX_JSON_BYTES))
    if "sha256" in raw and not sealed:
        yield RECORD_FILE, "was changed: its own sha256 is that of other bytes; take it from a copy, or convert again"
    for key in sorted(raw.keys() - _KNOWN):
        yield RECORD_FILE, f"has the key {one_line(repr(key), limit=80)}, which no record has: it was changed"
    wanted = _ALWAYS.union(*(keys for first, keys in _KINDS.items() if first in raw))
    if "transformed_from" in raw:
        wanted -= {"source"}
    for key in sorted(wanted - raw.keys()) if sealed else ():
        yield RECORD_FILE, f"has no {key}: it was changed"
    for key, allowed in (("weights", _OF_WEIGHTS), ("kept", _OF_KEPT)):
        entries = raw.get(key)
        for name, entry in entries.items() if isinstance(entries, Mapping) else ():
            keys = entry.keys() if isinstance(entry, Mapping) else set()
            more = [f"has the key {one_line(repr(k), limit=80)}, which no record has" for k in sorted(keys - allowed)]
            required = _OF_CONVERTED if sealed and key == "weights" and "recipe" in raw else frozenset()
            for message in [*more, *(f"has no {k} in {RECORD_FILE}" for k in sorted(required - keys))]:
                yield name, message


def claims_ownership(reader: CheckpointReader) -> bool:
    """Whether the checkpoint claims that ptqpipe wrote it, in its config or by a record."""
    if (reader.path / RECORD_FILE).exists():
        return True
    provenance = quantization_config(reader.config).get("ptqpipe")
    return provenance is not None


def read_record(reader: CheckpointReader) -> Record:
    """The record of a checkpoint. CheckpointError where it is missing or malformed."""
    raw = reader.read_json(RECORD_FILE)
    if raw is None:
        raise CheckpointError(
            f"{RECORD_FILE} is missing, though config.json names ptqpipe as its producer; copy the whole folder"
        )
    others = ("relayout_of", "dequantized_from", "transformed_from")
    if not isinstance(raw.get("recipe"), Mapping) and ("recipe" in raw or raw.keys().isdisjoint(others)):
        raise CheckpointError(
            f"{RECORD_FILE} has neither a recipe nor the checkpoint that it was made from; it is damaged"
        )
    weights = {}
    try:
        if raw.keys().isdisjoint(others[1:]):
            weights = {name: _claim(name, entry) for name, entry in object_of(raw, "weights").items()}
    except OverflowError:
        raise CheckpointError(f"{RECORD_FILE} has a number beyond 1e308; it is damaged") from None
    kept = {name: _kept(name, entry) for name, entry in object_of(raw, "kept").items()}
    rounded = raw.get("decode_rounds_differently", [])
    if not isinstance(rounded, list):
        raise CheckpointError(f"{RECORD_FILE}: decode_rounds_differently must be a list of names")
    return Record(raw, text_of(raw, "container", RECORD_FILE), weights, kept, _files(raw), frozenset(map(str, rounded)))


def _files(raw: Mapping[str, Any]) -> dict[str, str]:
    listed = object_of(raw, "files")
    return {name: text_of(listed, name, f"{RECORD_FILE}, files") for name in listed}


def object_of(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key of the record. CheckpointError where there is none."""
    value = raw.get(key)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{RECORD_FILE}: {key} is {type(value).__name__}, expected an object")
    return value


def text_of(raw: Mapping[str, Any], key: str, where: str) -> str:
    """The text under a key of what lies at ``where``. CheckpointError where there is none."""
    value = raw.get(key)
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: {key} is {value!r:.60}, expected text")
    return value


def _claim(name: str, entry: Any) -> Claim:
    where = f"{RECORD_FILE}, {name}"
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{where}: expected an object")
    shape, proven, g = entry.get("shape"), entry.get("proven"), entry.get("global_scale")
    if not isinstance(shape, list) or not isinstance(proven, bool) or not (g is None or isinstance(g, float | int)):
        raise CheckpointError(f"{where}: shape, proven or global_scale has the wrong type")
    numbers = {key: float(entry[key]) for key in _NUMBERS if isinstance(entry.get(key), float | int)}
    hashes = object_of(entry, "sha256")
    fmt, scheme, search = (text_of(entry, key, where) for key in ("format", "scheme", "search"))
    algorithm, weighting = entry.get("algorithm", "rtn"), entry.get("weighting", "none")
    reverted, input_scale = entry.get("reverted"), entry.get("input_scale")
    if not isinstance(algorithm, str) or not isinstance(weighting, str) or not isinstance(reverted, bool | None):
        raise CheckpointError(f"{where}: algorithm, weighting or reverted has the wrong type")
    if not isinstance(input_scale, float | int | None):
        raise CheckpointError(f"{where}: input_scale is {input_scale!r:.60}, expected a number")
    return Claim(
        tuple(shape), fmt, scheme, search, proven, None if g is None else float(g), numbers, dict(hashes), entry,
        algorithm, weighting, bool(reverted), None if input_scale is None else float(input_scale),
    )  # fmt: skip


def _kept(name: str, entry: Any) -> tuple[str, int]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("bytes"), int):
        raise CheckpointError(f"{RECORD_FILE}, {name}: expected sha256 and bytes")
    return text_of(entry, "sha256", f"{RECORD_FILE}, {name}"), entry["bytes"]


def text_data(raw: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """What a record says of the text of its "statistics" or of its learned codes ("rounding"); None for nothing."""
    entry = raw.get(key)
    data = entry.get("data") if isinstance(entry, Mapping) else None
    return data if isinstance(data, Mapping) else None
