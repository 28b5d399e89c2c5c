"""The record of a float checkpoint of our own: what dequantize decoded, what transform folded factors into.

Names, shapes, dtypes and hashes need no source. Beside the packed checkpoint, every decoded weight is decoded again;
the factors of a transform are not stored, so what it changed is known by its hash alone.
"""

import math
from typing import Any

import torch

from ptqpipe.dtypes import FLOATS
from ptqpipe.source import Source
from ptqpipe.stages.common.jobs import RECORD_FILE
from ptqpipe.stages.verify.claims import SUM_TOLERANCE, range_sha256
from ptqpipe.stages.verify.findings import Findings
from ptqpipe.stages.verify.record import Record, object_of

REWRITTEN = frozenset({"dtype", "torch_dtype", "tie_word_embeddings"})
"""Keys of config.json that a float checkpoint of another dtype, or with a head of its own, has otherwise."""


def check_float(ckpt: Source, record: Record, findings: Findings) -> None:
    """What the record of a float checkpoint says of all of it."""
    raw = record.raw
    dtype = raw.get("dtype")
    if dtype is not None:
        torch_dtype = str(FLOATS[dtype][1] if dtype in FLOATS else dtype).removeprefix("torch.")
        for key in ("dtype", "torch_dtype"):
            found = ckpt.reader.config.get(key, torch_dtype)
            if found != torch_dtype:
                findings.fault("record", "dtype", f"is {dtype} in {RECORD_FILE}, but config.json says {key} {found!r}")
    for name in sorted({str(name) for name in raw.get("untied", ())} - ckpt.reader.entries.keys()):
        findings.fault("record", name, f"is a tensor of its own in {RECORD_FILE}, but not stored")
    if "transformed_from" in raw:
        entries = object_of(raw, "weights").values()
        squared, energy = (sum(float(entry[key]) for entry in entries) for key in ("squared_error", "energy"))
        wanted = squared / energy if energy else 0.0
        if not math.isclose(float(raw.get("rounding", math.nan)), wanted, rel_tol=SUM_TOLERANCE):
            findings.fault("record", "rounding", f"is {raw.get('rounding')!r}, that of its weights is {wanted!r}")
        touched = {str(name) for folding in raw.get("foldings", ()) for name in folding.get("tensors", ())}
        asked = set(map(str, raw.get("transforms", ())))
        for name in sorted({str(folding.get("transform")) for folding in raw.get("foldings", ())} - asked):
            findings.fault("record", "foldings", f"are of {name}, which is none of the transforms {sorted(asked)}")
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
            findings.fault("record", name, "is quantized in one of the source and the record, and not in the other")


def check_float_tensor(ckpt: Source, source: Source | None, name: str, record: Record, findings: Findings) -> None:
    """One weight: its shape, dtype and hash; beside the packed source its numbers."""
    claim, entry = object_of(record.raw, "weights").get(name), ckpt.reader.entries[name]
    if not isinstance(claim, dict):
        return  # reported by name elsewhere
    dtype = FLOATS.get(str(record.raw.get("dtype")), (entry.dtype,))[0]
    if (claim.get("shape"), dtype) != (list(entry.shape), entry.dtype):
        message = f"is {dtype} {claim.get('shape')} in {RECORD_FILE}, stored is {entry.dtype} {list(entry.shape)}"
        findings.fault("record", name, message)
    if claim.get("sha256") != range_sha256(ckpt.reader, name, 0, entry.nbytes):
        findings.fault("record", name, f"is not what {RECORD_FILE} describes: its sha256 differs")
    if source is not None and name in source.stored:
        _check_decoded(ckpt, source, name, claim, findings)


def _check_decoded(ckpt: Source, source: Source, name: str, claim: dict[str, Any], findings: Findings) -> None:
    stored = source.stored[name]
    if claim.get("format") != stored.scheme.fmt.name:
        message = f"was {claim.get('format')!r} in {RECORD_FILE}, the source has {stored.scheme.fmt.name}"
        findings.fault("record", name, message)
    for expert in range(stored.experts or 1):
        decoded = source.quantized(name, expert=None if stored.experts is None else expert).dequantize()
        wanted = decoded.t() if stored.transposed else decoded
        one = stored.experts is None
        found = ckpt.reader.read(name) if one else ckpt.reader.read(name, start=expert, stop=expert + 1)[0]
        if found.shape != wanted.shape or not torch.equal(found, wanted.to(found.dtype)):
            findings.fault("kept", name, f"is not the {found.dtype} decode of the source's weight")
            return
