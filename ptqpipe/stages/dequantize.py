"""dequantize: a packed checkpoint in, a plain float one out, which every tool loads.

The numbers are the decode that every reported error is measured on, rounded once to the asked dtype. Names, kept
tensors and files are those of the checkpoint; scales of activations and of the kv cache have no place in a float model
and are left out, and listed. Weights stream through in runs of rows; a stack that the model holds as [in, out] needs
memory for one expert.
"""

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.checkpoint.layout import ShardLayout, TensorSpec
from ptqpipe.checkpoint.source import check_disjoint
from ptqpipe.checkpoint.writer import CheckpointWriter, Mode
from ptqpipe.containers import DECODED_ROLES, StoredWeight, kv_scale, without_quantization
from ptqpipe.dtypes import FLOATS
from ptqpipe.errors import NumericsError, UsageError
from ptqpipe.source import Source
from ptqpipe.stages.common.jobs import (
    RECORD_FILE,
    copy_tensor,
    finish_checkpoint,
    named_source,
    run_id_of,
    run_parts_of,
    write_checkpoint,
)
from ptqpipe.stages.common.machine import Machine, Ranks, resident_bytes
from ptqpipe.stages.common.pieces import Piece, decoded_rows


@dataclass(frozen=True, slots=True)
class Dequantized:
    """What a finished decoding was. ``dropped`` lists the tensors that a float model has no place for."""

    out: Path
    record: Mapping[str, Any]
    weights: int
    kept: int
    dropped: tuple[str, ...]
    written_bytes: int
    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """A stored weight to decode, or the name of a tensor to copy."""

    id: str
    group: int
    source_bytes: int
    spec: TensorSpec
    stored: StoredWeight | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    source: Source
    dtype: str
    layout: ShardLayout
    jobs: tuple[Job, ...]
    dropped: tuple[str, ...]
    made_by: str | None  # the run that wrote the checkpoint, where it says so

    @property
    def run_parts(self) -> dict[str, str]:
        parts = run_parts_of(self.asked, layout=self.layout.digest)
        assert parts is not None  # it is a run of this stage
        return parts

    @property
    def asked(self) -> dict[str, Any]:
        return {
            "ptqpipe": __version__,
            "dequantized_from": self.made_by,
            "source": named_source(self.source.reader),
            "container": "plain",
            "dtype": self.dtype,
        }


def dequantize(
    ckpt: Path,
    out: Path,
    *,
    dtype: str = "bf16",
    mode: Mode = "new",
    machine: Machine | None = None,
    ranks: Ranks | None = None,
) -> Dequantized | None:
    """Writes a packed checkpoint as floats (bf16, fp16 or fp32). The result on rank 0, None on the others.

    Raises UsageError for a plain checkpoint or an unknown dtype, NumericsError where fp16 would overflow.
    """
    begun = time.monotonic()
    if dtype not in FLOATS:
        raise UsageError(f"--dtype {dtype!r} is unknown; use {', '.join(FLOATS)}")
    with Source.open(Path(ckpt)) as source:
        check_disjoint(source.reader.path, Path(out))
        source.reader.check_links()
        prepared = _prepare(source, dtype)
        record = write_checkpoint(
            Path(out),
            prepared.layout,
            jobs=prepared.jobs,
            source=source.reader,
            run_parts=prepared.run_parts,
            mode=mode,
            machine=machine or Machine(),
            ranks=ranks or Ranks(),
            work=lambda job, writer, _: _do(job, prepared, writer),
            finish=lambda writer: _finish(prepared, writer),
        )
    if record is None:
        return None
    return Dequantized(
        Path(out),
        record,
        weights=len(record["weights"]),
        kept=len(record["kept"]),
        dropped=prepared.dropped,
        written_bytes=prepared.layout.file_bytes,
        seconds=time.monotonic() - begun,
        peak_rss_bytes=resident_bytes().peak,
    )


def _prepare(source: Source, dtype: str) -> _Prepared:
    if source.container is None:
        raise UsageError(f"{source.reader.path} is not quantized; there is nothing to decode")
    jobs: list[Job] = []
    dropped: list[str] = []
    for name, (stored_dtype, shape) in source.tensors.items():
        stored = source.stored.get(name)
        if stored is not None:
            n, k = stored.shape
            matrix = (k, n) if stored.transposed else (n, k)
            shape = matrix if stored.experts is None else (stored.experts, *matrix)
            parts = tuple(part.name for part in stored.parts if part.role in DECODED_ROLES)
            dropped += [part.name for part in stored.parts if part.role not in DECODED_ROLES]
            size = sum(source.reader.entries[part].nbytes for part in parts)
            jobs.append(Job(name, len(jobs), size, TensorSpec(name, FLOATS[dtype][0], shape), stored))
        elif kv_scale(name, stored_dtype, shape, container="plain") is not None:
            dropped.append(name)
        else:
            size = source.reader.entries[name].nbytes
            jobs.append(Job(f"keep:{name}", len(jobs), size, TensorSpec(name, stored_dtype, shape)))
    layout = ShardLayout.plan([[job.spec] for job in jobs])
    made_by = (source.reader.read_json(RECORD_FILE) or {}).get("run_id")
    return _Prepared(source, dtype, layout, tuple(jobs), tuple(dropped), made_by)


def _do(job: Job, prepared: _Prepared, writer: CheckpointWriter) -> dict[str, Any]:
    name = job.spec.name
    if job.stored is None:
        sha256, nbytes = copy_tensor(prepared.source.reader, name, writer, name)
        return {"kept": {name: {"sha256": sha256, "bytes": nbytes}}}
    digest = hashlib.sha256()
    offset = 0
    for expert in range(job.stored.experts or 1):
        where = None if job.stored.experts is None else expert
        piece = Piece(name, job.stored.shape, job.stored.scheme, (), job.stored, expert=where)
        for rows in _rows(piece, prepared):
            raw = rows.reshape(-1).view(torch.uint8)
            writer.write(name, raw, byte_offset=offset)
            digest.update(raw.numpy().data)
            offset += raw.nbytes
    facts = {"shape": list(job.spec.shape), "format": job.stored.scheme.fmt.name, "sha256": digest.hexdigest()}
    return {"members": {name: facts}}


def _rows(piece: Piece, prepared: _Prepared) -> Iterable[torch.Tensor]:
    """The piece in the output's dtype and orientation, in runs that follow each other."""
    dtype = FLOATS[prepared.dtype][1]
    reader = prepared.source.reader
    if not piece.source.transposed:
        return (_rounded(rows, dtype, piece) for _, rows in decoded_rows(piece, reader))
    whole = torch.empty(piece.shape[1], piece.shape[0], dtype=dtype)
    for first, rows in decoded_rows(piece, reader):
        whole[:, first : first + rows.shape[0]] = _rounded(rows, dtype, piece).t()
    return [whole]


def _rounded(rows: torch.Tensor, dtype: torch.dtype, piece: Piece) -> torch.Tensor:
    rounded = rows.to(dtype)
    if dtype is torch.float16 and not bool(torch.isfinite(rounded).all()):
        raise NumericsError(f"{piece.weight} has numbers beyond 65504, which fp16 cannot hold; use --dtype bf16")
    return rounded


def _finish(prepared: _Prepared, writer: CheckpointWriter) -> dict[str, Any]:
    reader = prepared.source.reader
    config = with_dtype(without_quantization(reader.config), prepared.dtype)
    return finish_checkpoint(
        writer,
        prepared.jobs,
        reader,
        record=lambda records: _record(prepared, records),
        configs={"config.json": config},
    )


def _record(prepared: _Prepared, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        **prepared.asked,
        "run_id": run_id_of(prepared.run_parts),
        "weights": {name: facts for entry in records for name, facts in entry.get("members", {}).items()},
        "kept": {name: facts for entry in records for name, facts in entry.get("kept", {}).items()},
        "dropped": list(prepared.dropped),
    }


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config with the dtype wherever it states one, as transformers spells it."""
    name = str(FLOATS[dtype][1]).removeprefix("torch.")
    changed = {key: name if key in ("dtype", "torch_dtype") else value for key, value in config.items()}
    text = changed.get("text_config")
    if isinstance(text, Mapping):
        changed["text_config"] = {k: name if k in ("dtype", "torch_dtype") else v for k, v in text.items()}
    return changed


def render(done: Dequantized) -> str:
    """What was done, for a terminal."""
    lines = [
        f"{done.out}: {done.weights} weights decoded, {done.kept} tensors kept; {done.written_bytes} bytes "
        f"in {done.seconds:.1f} s, peak memory {done.peak_rss_bytes >> 20} MiB"
    ]
    if done.dropped:
        lines.append(f"{len(done.dropped)} scales of activations or kv cache left out, the first: {done.dropped[0]}")
    return "\n".join(lines)


def to_json(done: Dequantized) -> dict[str, Any]:
    """The outcome as data."""
    return {
        "out": str(done.out),
        "weights": done.weights,
        "kept": done.kept,
        "dropped": list(done.dropped),
        "written_bytes": done.written_bytes,
        "seconds": done.seconds,
        "peak_rss_bytes": done.peak_rss_bytes,
    }
