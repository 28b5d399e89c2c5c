"""Rows of errors and times as tables for a terminal, and as dicts for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from labs.allreduce_simulator.compare import TimeRow
from labs.allreduce_simulator.error import ErrorRow
from labs.allreduce_simulator.request import BreakEven
from labs.allreduce_simulator.topologies import Topology
from ptqpipe.run.quantities import memory_size, number, table

_OF_BOTH = " / of its median block"
_COLUMNS = (1 << 20, 16 << 20, 64 << 20)  # bytes of the messages whose speed-up the table shows


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
