"""The record against the bytes: names, hashes and numbers that it claims."""

import hashlib
import math
from collections.abc import Mapping

from ptqpipe.checkpoint.digests import file_sha256
from ptqpipe.checkpoint.files import OWN_FILES, RECORD_FILE
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.containers import Part
from ptqpipe.source import Source
from ptqpipe.stages.verify.findings import Findings
from ptqpipe.stages.verify.record import Claim, Record, object_of
from ptqpipe.stages.verify.structure import READ_BYTES, plain_tensors

SUM_TOLERANCE = 1e-9  # float64 sums of up to 2^33 positive terms in another order differ by less

_PAGES = frozenset({"README.md", ".gitattributes", "LICENSE"})  # no program reads them


def check_coverage(ckpt: Source, record: Record, findings: Findings) -> None:
    """The record lists exactly what is stored: quantized weights, kept tensors, the container."""
    stored = {
        name if weight.experts is None else f"{name}[{expert}]"
        for name, weight in ckpt.stored.items()
        for expert in range(weight.experts or 1)
    }
    plain = set(plain_tensors(ckpt))
    claims = set(record.weights)
    if record.plain:  # decoded weights, and those that a transform changed, are tensors like others
        claims = set(object_of(record.raw, "weights"))
        stored, plain = plain & claims, plain - claims
    for found, claimed, what in (
        (stored, claims, "a weight" if record.plain else "a quantized weight"),
        (plain, set(record.kept), "a kept tensor"),
    ):
        for name in sorted(found - claimed):
            findings.fault("record", name, f"is stored as {what}, but {RECORD_FILE} does not list it as such")
        for name in sorted(claimed - found):
            findings.fault("record", name, f"is {what} in {RECORD_FILE}, but not in the checkpoint")
    if record.container != ckpt.container_name:
        findings.fault(
            "record", "container", f"is {record.container!r} in {RECORD_FILE}, the layout is {ckpt.container_name}"
        )


def check_written_files(ckpt: Source, record: Record, findings: Findings) -> None:
    """Every file that was written beside the weights is there, byte for byte. Others may lie there, too: a note.

    So is a changed page of the model: whoever publishes it writes a model card, and the hub its .gitattributes.
    """
    folder, index = ckpt.reader.path, ckpt.reader.index
    extra = {path.relative_to(folder).as_posix() for path in ckpt.reader.extra_files}
    described = {name for name in OWN_FILES - {RECORD_FILE} if (folder / name).is_file()}
    described |= {index.name} if index is not None else set()
    for name in sorted(described - record.files.keys()):
        findings.fault("files", name, f"is not among the files that {RECORD_FILE} lists as written")
    for name in sorted(extra - record.files.keys()):
        findings.note("files", name, "was added after conversion")
    for name, written in sorted(record.files.items()):
        wrong = findings.note if name in _PAGES else findings.fault
        if name not in extra | described:
            wrong("files", name, f"is missing, though {RECORD_FILE} lists it as written")
        elif (found := file_sha256(folder / name)) != written:
            hashes = f"sha256 {found[:12]}..., written {written[:12]}..."
            wrong("files", name, f"is not the file that was written ({hashes}): changed after conversion")


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
        digest.update(reader.read_bytes(name, start=position, stop=min(position + READ_BYTES, stop)))
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
