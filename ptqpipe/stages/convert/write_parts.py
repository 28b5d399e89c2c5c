"""What a job of convert writes: the parts of quantized rows at their places, and tensors that are kept.

Knows containers, jobs and the writer; must not know how rows were quantized.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ptqpipe.checkpoint.writer import CheckpointWriter
from ptqpipe.containers import WHOLE_ROLES, Part, Role, encode_part, part_offset
from ptqpipe.qtensor import QTensor
from ptqpipe.source import Source
from ptqpipe.stages.common.jobs import NotFinite, copy_tensor
from ptqpipe.stages.common.outputs import Job


class PartWriter:
    """Takes a unit's quantized rows and writes their parts at their places, with a running hash of each part."""

    def __init__(self, job: Job, writer: CheckpointWriter, *, input_scales: Sequence[torch.Tensor | None]) -> None:
        self._job = job
        self._writer = writer
        self._last: dict[int, QTensor] = {}
        self._hashes: dict[str, Any] = {}
        self._input_scales = input_scales

    def take(self, member: int, row: int, q: QTensor) -> None:
        """Rows from ``row`` on of member number ``member``; row 0 begins (again)."""
        self._last[member] = q
        for part in self._job.parts[member]:
            if part.role not in WHOLE_ROLES:
                if part.role is Role.SCALES and row > 0 and q.fmt.shares_rows:
                    continue  # one scale for all rows, written with the first run
                self._put(member, part, q, row)

    def finish(self) -> list[dict[str, str]]:
        """Writes the parts that are not rows (global scales, right factors); the hashes of every part, by member."""
        for member, q in self._last.items():
            for part in self._job.parts[member]:
                if part.role in WHOLE_ROLES:
                    self._put(member, part, q, 0)
        return [
            {part.role.value: self._hashes[f"{member}/{part.name}"].hexdigest() for part in parts}
            for member, parts in enumerate(self._job.parts)
        ]

    def _put(self, member: int, part: Part, q: QTensor, row: int) -> None:
        unit = self._job.unit
        assert unit is not None
        where = unit.members[member]
        expert = where.source.expert if where.stack is not None else None
        tensor = encode_part(part, q, input_global_scale=self._input_scales[member]).contiguous()
        offset = part_offset(part, q.fmt, where.shape, row, expert=expert)
        raw = tensor.reshape(-1).view(torch.uint8)
        self._writer.write(part.name, raw, byte_offset=offset)
        key = f"{member}/{part.name}"
        if row == 0:
            self._hashes[key] = hashlib.sha256()
        self._hashes[key].update(raw.numpy())


def keep_tensor(job: Job, source: Source, writer: CheckpointWriter) -> dict[str, Any]:
    """Copies a kept tensor byte for byte; one that the source stores quantized is written decoded, as bfloat16.

    NaN and infinities, which make a model useless wherever they are, are copied, too, and the record counts them.
    """
    assert job.kept is not None
    name = job.kept.name
    if name in source.stored:
        found = NotFinite("BF16")
        sha256, nbytes = _write_decoded(source, name, writer, look=found.look)
    else:
        found = NotFinite(source.reader.entries[name].dtype)
        sha256, nbytes = copy_tensor(source.reader, name, writer, name, look=found.look)
    bad = {"not_finite": found.text} if found.count else {}
    return {"kept": {name: {"reason": job.kept.reason, "sha256": sha256, "bytes": nbytes, **bad}}}


def _write_decoded(
    source: Source, name: str, writer: CheckpointWriter, *, look: Callable[[torch.Tensor], None]
) -> tuple[str, int]:
    """Writes a stored quantized weight as bfloat16; (sha256, bytes). ``look`` sees every chunk."""
    stored = source.stored[name]
    digest, offset = hashlib.sha256(), 0
    for expert in range(stored.experts or 1):
        q = source.quantized(name, expert=None if stored.experts is None else expert)
        w = q.dequantize().bfloat16()
        raw = (w.t() if stored.transposed else w).contiguous().reshape(-1).view(torch.uint8)
        writer.write(name, raw, byte_offset=offset)
        look(raw)
        digest.update(raw.numpy().data)
        offset += raw.nbytes
    return digest.hexdigest(), offset
