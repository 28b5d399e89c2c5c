"""Simulates AllReduces: errors of schemes over worlds, times over machines, where quantizing pays.

Numbers are those of ``ptqpipe.collectives``; this stage reads requests, and partials from a file.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ptqpipe.checkpoint import TensorEntry, check_file, parse_file, pread_exactly
from ptqpipe.collectives.simulator.compare import TimeRow
from ptqpipe.collectives.simulator.error import ErrorRow
from ptqpipe.collectives.simulator.inputs import Inputs, given, row_parallel
from ptqpipe.collectives.simulator.request import (
    BreakEven,
    SimulationRequest,
    codecs_of,
    error_rows as rows_of,
    request_of,
    sources_of,
    time_rows,
)
from ptqpipe.collectives.simulator.topologies import Topology
from ptqpipe.dtypes import DTYPES
from ptqpipe.errors import UsageError
from ptqpipe.machine import threads
from ptqpipe.quantities import memory_size, number, table
from ptqpipe.report import simulation

__all__ = [
    "as_dict", "check_plots", "codecs_of", "error_rows", "error_text", "read_partials", "request_of", "sources_of",
    "time_rows", "time_text", "write_plots",
]  # fmt: skip

_OF_BOTH = " / of its median block"
_COLUMNS = (1 << 20, 16 << 20, 64 << 20)  # bytes of the messages whose speed-up the table shows


def read_partials(path: Path, *, tensor: str | None, weight: str | None) -> Inputs:
    """Partials of a .safetensors file: a tensor ``[ranks, ...]``, or inputs and the weight that multiplies them.

    UsageError for names and shapes that do not fit, CheckpointError for a damaged file.
    """
    entries = {entry.name: entry for entry in parse_file(path).entries}
    if tensor is None:
        if not entries:
            raise UsageError(f"{path} holds no tensors; give a file with partials")
        if len(entries) != 1:
            raise UsageError(f"{path} holds {len(entries)} tensors; name one with --tensor")
        tensor = next(iter(entries))
    values = _read(path, entries, tensor)
    if weight is None:
        if values.ndim < 2 or values.shape[0] < 2 or not values.numel():
            raise UsageError(
                f"{tensor} is {list(values.shape)}, expected [ranks, ...] of 2 ranks or more; give inputs "
                "together with --weight"
            )
        return given(tensor, values.reshape(values.shape[0], -1))
    matrix = _read(path, entries, weight)
    if matrix.ndim != 2 or values.shape[-1:] != matrix.shape[1:] or not values.numel() or not matrix.numel():
        raise UsageError(
            f"inputs {tensor} {list(values.shape)} and weight {weight} {list(matrix.shape)} do not multiply; "
            "expected [..., inner] and [outer, inner]"
        )
    return row_parallel(tensor, values.reshape(-1, values.shape[-1]), matrix)


def _read(path: Path, entries: dict[str, TensorEntry], name: str) -> torch.Tensor:
    """One tensor. UsageError for an unknown name, or numbers that are not finite floats."""
    if name not in entries:
        raise UsageError(f"{path} has no tensor {name!r}; it has {', '.join(list(entries)[:8])}")
    entry = entries[name]
    dtype = DTYPES[entry.dtype][0] if entry.dtype in DTYPES else None
    if dtype is None or not dtype.is_floating_point:
        raise UsageError(f"tensor {name!r} is {entry.dtype}, expected floating point; choose another")
    fd = os.open(path, os.O_RDONLY)
    try:
        raw = bytearray(pread_exactly(fd, entry.nbytes, entry.offset))
    finally:
        os.close(fd)
    found = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    if not bool(torch.isfinite(found.float()).all()):
        raise UsageError(f"tensor {name!r} has NaN or inf; an error against them says nothing")
    return found.reshape(entry.shape)


def error_rows(request: SimulationRequest) -> Iterator[ErrorRow]:
    """The rows of errors as they are measured, in one thread: the tensors are small."""
    with threads(1):
        yield from rows_of(request)


def as_dict(row: ErrorRow | TimeRow | BreakEven) -> dict[str, Any]:
    """For JSON, with what is derived."""
    if isinstance(row, ErrorRow):
        return {"kind": "error"} | asdict(row)
    if isinstance(row, TimeRow):
        return {"kind": "time"} | asdict(row) | {"speedup": row.speedup, "percent_of_ideal": row.percent_of_ideal}
    return {"kind": "break_even"} | asdict(row)


def error_text(rows: Sequence[ErrorRow]) -> str:
    """One table a source: relative L2 in thousandths by scheme and codec (down) and world (across), the closed form
    beneath it.

    Sources with outliers: of all elements / of the median block.
    """
    worlds = list(dict.fromkeys(row.ranks for row in rows))
    parts = []
    for data in dict.fromkeys(row.data for row in rows):
        lines = []
        here = [row for row in rows if row.data == data]
        for key in dict.fromkeys((row.scheme, row.codec, row.bits) for row in here):
            cells = {row.ranks: _cell(row) for row in here if (row.scheme, row.codec, row.bits) == key}
            lines.append((key[0], key[1], number(key[2]), *(cells.get(k, "") for k in worlds)))
        head = ("scheme", "codec", "bits", *(f"k={k}" for k in worlds))
        of = f"{_OF_BOTH * _uneven(data)}, {data}, {here[0].elements:,} elements per rank"
        title = f"Relative L2 x 1000 of the result{of}"
        parts.append(f"{title}\n\n{table(head, lines, left=2)}")
        modelled = [row for row in here if row.model is not None]
        if modelled:
            worst = max(modelled, key=_deviation)
            where = f"{worst.scheme} {worst.codec} k={worst.ranks}"
            parts[-1] += f"\n\nclosed form: within {_deviation(worst):.1%} everywhere, worst at {where}"
    return "\n\n".join(parts)


def _cell(row: ErrorRow) -> str:
    """The error of all elements; of the median block as well, where few blocks may make most of it."""
    of_all, of_block = (f"{1000 * error:.1f}" for error in (row.rel_l2, row.rel_l2_block))
    return f"{of_all}/{of_block}" if _uneven(row.data) else of_all


def _uneven(data: str) -> bool:
    return data not in ("gaussian", "cancelling")


def _deviation(row: ErrorRow) -> float:
    return abs(row.rel_l2 / row.model - 1) if row.model else 0.0


def time_text(rows: Sequence[TimeRow], evens: Sequence[BreakEven], topologies: Sequence[Topology]) -> str:
    """Break-even sizes and speed-ups by world, the machine above those of each; then where its numbers come from."""
    sizes = [size for size in _COLUMNS if any(row.nbytes == size for row in rows)] or sorted({r.nbytes for r in rows})[
        -3:
    ]
    lines = []
    for even in evens:
        here = {row.nbytes: row for row in rows if (row.topology, row.ranks) == (even.topology, even.ranks)}
        largest = here[max(here)]
        lines.append(
            (
                str(even.ranks),
                largest.plain.removesuffix("-bf16"),
                largest.quantized,
                "never" if even.nbytes is None else memory_size(even.nbytes),
                *(f"{here[size].speedup:.2f}x" for size in sizes),
                f"{here[sizes[-1]].percent_of_ideal:.0f} %",
            )
        )
    head = ("ranks", "best plain", "quantized", "pays from", *map(memory_size, sizes), "of ideal")
    *shown, body = table(head, lines).split("\n", 2)
    machines = {t.name: t for t in topologies if any(even.topology == t.name for even in evens)}
    left = dict(machines)
    for even, line in zip(evens, body.split("\n"), strict=True):
        machine = left.pop(even.topology, None)
        shown += [line] if machine is None else ["", f"{machine.name}: {machine.title}", line]
    notes = [f"  {machine.name}: {machine.source}." for machine in machines.values()]
    title = f"Speed-up over the best plain AllReduce in bf16, by size of the message, {evens[0].bits:g} bits; a model"
    return "\n".join([title, "", *shown, "", "Where the numbers of each machine come from:", *notes])


def check_plots(folder: Path) -> None:
    """UsageError without matplotlib, OutputError where no file can be written to ``folder``."""
    simulation.check_plots()
    check_file(folder / "error.png")


def write_plots(folder: Path, errors: Sequence[ErrorRow], times: Sequence[TimeRow]) -> list[Path]:
    """error-<data>.png: error by world; speedup-<k>.png: speed-up by size. UsageError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for data in dict.fromkeys(row.data for row in errors):
        keys = dict.fromkeys((r.scheme, r.codec) for r in errors if r.data == data)
        curves = [
            (
                f"{scheme} {codec}",
                [(r.ranks, r.rel_l2) for r in errors if (r.data, r.scheme, r.codec) == (data, scheme, codec)],
            )
            for scheme, codec in keys
        ]
        path = folder / f"error-{''.join(c if c.isalnum() else '_' for c in data)}.png"
        simulation.draw(
            path, curves, title=f"Error of an AllReduce, {data} partials", x="ranks", y="relative L2", log_y=True
        )
        paths.append(path)
    for ranks in dict.fromkeys(row.ranks for row in times):
        here = [row for row in times if row.ranks == ranks]
        curves = [
            (name, [(row.nbytes, row.speedup) for row in here if row.topology == name])
            for name in dict.fromkeys(row.topology for row in here)
        ]
        path = folder / f"speedup-{ranks}.png"
        title = f"{here[0].bits:g} bits against the best plain AllReduce, {ranks} ranks (model)"
        simulation.draw(
            path, curves, title=title, x="bytes of the bfloat16 message", y="speed-up", level=16 / here[0].bits
        )
        paths.append(path)
    return paths
