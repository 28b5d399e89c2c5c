"""dequantize: a packed checkpoint in, a plain float one out, which every tool loads; and how floats are written.

The numbers are the decode that every reported error is measured on, or those of a model with factors folded in, in
float64; they are rounded once, to the dtype that is written. Names, kept tensors and files are those of the checkpoint;
scales of activations and of the kv cache have no place in a float model and are left out, and listed. Weights stream
through in runs of rows; a stack that the model holds as [in, out] needs memory for one expert.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from ptqpipe._version import __version__
from ptqpipe.checkpoint import RECORD_FILE, CheckpointWriter, ShardLayout, TensorSpec, check_disjoint
from ptqpipe.checkpoint.dtypes import FLOAT_DTYPES, FLOATS
from ptqpipe.checkpoint.layouts import DECODED_ROLES, PartKind, StoredWeight, kv_scale, without_quantization
from ptqpipe.conversion.job import (
    CheckpointJob,
    CopyTensor,
    Run,
    WriteJob,
    WriteResult,
    merged,
    named_source,
    write_checkpoint,
)
from ptqpipe.errors import NumericsError, UsageError, arg
from ptqpipe.models.folded import FoldedTensors
from ptqpipe.models.source import Source
from ptqpipe.run.machine import WorkerBudget

RUN_ELEMENTS = 1 << 20  # weights that are decoded at a time: their float32 and its temporaries take some 20 bytes each


@dataclass(frozen=True, slots=True)
class WriteFloats(WriteJob):
    """Writes a tensor of a source, rounded once to the dtype of ``spec``; ``stored``: decodes it."""

    spec: TensorSpec
    stored: StoredWeight | None = None

    def run(self, work: "FloatCheckpoint", writer: CheckpointWriter, share: WorkerBudget) -> dict[str, Any]:
        """NumericsError for numbers that the written dtype cannot hold."""
        spec, squared, energy = self.spec, 0.0, 0.0
        written = writer.tensor(spec.name)
        facts: dict[str, Any] = {"shape": list(spec.shape)}
        if self.stored is not None:
            facts["format"] = self.stored.scheme.fmt.name
            for rows in _decoded(work.source, self.stored, spec):
                written.put(rows)
        else:
            for _, rows in work.view.runs(spec.name):
                rounded = round_to(rows, spec)
                squared += float(((rounded.double() - rows) ** 2).sum())
                energy += float((rows**2).sum())
                written.put(rounded)
            work.check_rounding(spec, squared)
            facts |= {"squared_error": squared, "energy": energy}
        return {"members": {spec.name: facts | {"sha256": written.sha256}}}


@dataclass(frozen=True)
class FloatCheckpoint(CheckpointJob[WriteFloats | CopyTensor]):
    @property
    def view(self) -> FoldedTensors:
        """The tensors that are not decoded, before they are rounded."""
        return self.source.view or FoldedTensors(self.source.reader, {})

    def check_rounding(self, spec: TensorSpec, squared: float) -> None:
        """Whether a tensor may be rounded at all: an error for one that may not. ``squared``: its squared error."""


def _decoded(source: Source, stored: StoredWeight, spec: TensorSpec) -> Iterator[torch.Tensor]:
    """A weight, or all experts of a stack, in the output's dtype and orientation, in runs in their order."""
    shared = stored.part(PartKind.GLOBAL_DIVISOR) or stored.part(PartKind.GLOBAL)
    for expert in stored.planes:
        if shared is not None:
            source.number(shared, expert=expert)  # raises for one that is no scale
        runs = source.runs(stored.weight, expert=expert, elements=RUN_ELEMENTS)
        decoded = ((first, round_to(stored.plain(q), spec)) for first, q in runs)
        if not stored.transposed:
            yield from (rows for _, rows in decoded)
            continue
        whole = torch.empty(stored.shape[1], stored.shape[0], dtype=FLOAT_DTYPES[spec.dtype])
        for first, rows in decoded:
            whole[:, first : first + rows.shape[0]] = rows.t()
        yield whole


def round_to(rows: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Rows in the dtype of a tensor. NumericsError for what is not finite in it."""
    rounded = rows.to(FLOAT_DTYPES[spec.dtype])
    if bool(torch.isfinite(rounded).all()):
        return rounded
    if not bool(torch.isfinite(rows).all()):
        raise NumericsError(f"'{spec.name}' has NaN or inf; the checkpoint is damaged, copy or make it again")
    remedy = f"use {arg('dtype', 'bf16')} or fp32" if spec.dtype == "F16" else "check the model's weights"
    raise NumericsError(f"'{spec.name}' has numbers that {spec.dtype} cannot hold; {remedy}")


@dataclass(frozen=True)
class Dequantization(FloatCheckpoint):
    """A decoding that is decided to the byte.

    dtype    of the weights, a key of ``dtypes.FLOATS``
    dropped  tensors of the source that a float model has no place for: scales of activations and of the KV cache
    made_by  the run that wrote the checkpoint, where its record names one
    """

    stage = "dequantize"

    dtype: str
    dropped: tuple[str, ...]
    made_by: str | None

    @property
    def head(self) -> dict[str, Any]:
        return {
            "ptqpipe": __version__,
            "dequantized_from": self.made_by,
            "source": named_source(self.source),
            "container": "plain",
            "dtype": self.dtype,
        }

    def configs(self) -> dict[str, dict[str, Any]]:
        return {"config.json": with_dtype(without_quantization(self.source.reader.config), self.dtype)}

    def record(self, done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            **self.head,
            "run_id": self.run_id,
            "weights": merged(done, "members"),
            "kept": merged(done, "kept"),
            "dropped": list(self.dropped),
        }


def dequantize(ckpt: Path, out: Path, *, dtype: str = "bf16", **run: Unpack[Run]) -> WriteResult | None:
    """Writes a packed checkpoint as floats (bf16, fp16 or fp32). The result on rank 0, None on the others.

    Raises UsageError for a plain checkpoint or an unknown dtype, NumericsError where fp16 would overflow.
    """
    if dtype not in FLOATS:
        raise UsageError(f"{arg('dtype', dtype)} is unknown; use {', '.join(FLOATS)}")
    with Source.open(Path(ckpt)) as source:
        check_disjoint(source.reader.path, Path(out))
        source.reader.check_links()
        return write_checkpoint(_prepare(source, Path(out), dtype), **run)


def _prepare(source: Source, out: Path, dtype: str) -> Dequantization:
    if source.container is None:
        raise UsageError(f"{source.reader.path} is not quantized; there is nothing to decode")
    jobs: list[WriteFloats | CopyTensor] = []
    dropped: list[str] = []
    for name, (stored_dtype, shape) in source.tensors.items():
        stored = source.stored.get(name)
        if stored is not None:
            parts = tuple(part.name for part in stored.parts if part.role in DECODED_ROLES)
            unused = (part for part in stored.parts if part.role not in DECODED_ROLES)
            dropped += [part.name for part in unused if part.role is not PartKind.SHAPE]
            size = sum(source.reader.entries[part].nbytes for part in parts)
            jobs.append(WriteFloats(name, len(jobs), size, TensorSpec(name, FLOATS[dtype][0], shape), stored))
        elif kv_scale(name, stored_dtype, shape) is not None:
            dropped.append(name)
        else:
            size, spec = source.reader.entries[name].nbytes, TensorSpec(name, stored_dtype, shape)
            jobs.append(CopyTensor(f"keep:{name}", len(jobs), size, name, spec))
    layout = ShardLayout.plan([[job.spec] for job in jobs])
    made_by = (source.reader.read_json(RECORD_FILE) or {}).get("run_id")
    return Dequantization(out, source, layout, tuple(jobs), dtype, tuple(dropped), made_by)


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config with the dtype wherever it states one, as transformers writes it."""
    name = str(FLOATS[dtype][1]).removeprefix("torch.")
    changed = {key: name if key in ("dtype", "torch_dtype") else value for key, value in config.items()}
    text = changed.get("text_config")
    if isinstance(text, Mapping):
        changed["text_config"] = {k: name if k in ("dtype", "torch_dtype") else v for k, v in text.items()}
    return changed


def render(done: WriteResult) -> str:
    dropped = done.record["dropped"]
    lines = [
        f"Done: {done.out}: {len(done.record['weights'])} weights decoded, {len(done.record['kept'])} tensors kept; "
        f"{done.cost}"
    ]
    if dropped:
        lines.append(f"left out, since a float model has no place for them: {len(dropped)} tensors like {dropped[0]}")
    return "\n".join(lines)


def to_json(done: WriteResult) -> dict[str, Any]:
    record = done.record
    return done.to_json(weights=len(record["weights"]), kept=len(record["kept"]), dropped=record["dropped"])
