"""Tables and plots of the simulator."""

from collections.abc import Sequence
from pathlib import Path

from ptqpipe.checkpoint.single_file import check_file
from ptqpipe.collectives.simulator.compare import TimeRow
from ptqpipe.collectives.simulator.error import ErrorRow
from ptqpipe.collectives.simulator.topologies import Topology
from ptqpipe.report import simulation
from ptqpipe.report.simulation import draw
from ptqpipe.stages.common.text import table
from ptqpipe.stages.simulate.run import BreakEven

_OF_BOTH = " / of its median block"
_COLUMNS = (1 << 20, 16 << 20, 64 << 20)  # bytes of the messages whose speed-up the table shows


def binary_size(nbytes: int) -> str:
    """Bytes in powers of two: 64 KiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


def error_text(rows: Sequence[ErrorRow]) -> str:
    """One table a source: relative L2 by scheme and codec (down) and world (across), the closed form beneath it.

    Sources with outliers: of all elements / of the median block.
    """
    worlds = list(dict.fromkeys(row.ranks for row in rows))
    parts = []
    for data in dict.fromkeys(row.data for row in rows):
        lines = []
        here = [row for row in rows if row.data == data]
        for key in dict.fromkeys((row.scheme, row.codec, row.bits) for row in here):
            cells = {row.ranks: _cell(row) for row in here if (row.scheme, row.codec, row.bits) == key}
            lines.append((key[0], key[1], f"{key[2]:.4g}", *(cells.get(k, "") for k in worlds)))
        head = ("scheme", "codec", "bits", *(f"k={k}" for k in worlds))
        title = f"Relative L2 of the result{_OF_BOTH * _uneven(data)}, {data}, {here[0].elements:,} elements a rank"
        parts.append(f"{title}\n\n{table(head, lines, left=2)}")
        modelled = [row for row in here if row.model is not None]
        if modelled:
            worst = max(modelled, key=_deviation)
            where = f"{worst.scheme} {worst.codec} k={worst.ranks}"
            parts[-1] += f"\n\nclosed form: within {_deviation(worst):.1%} everywhere, worst at {where}"
    return "\n\n".join(parts)


def _cell(row: ErrorRow) -> str:
    """The error of all elements; of the median block as well, where few blocks may make most of it."""
    return f"{row.rel_l2:.4f}/{row.rel_l2_block:.4f}" if _uneven(row.data) else f"{row.rel_l2:.4f}"


def _uneven(data: str) -> bool:
    return data not in ("gaussian", "cancelling")


def _deviation(row: ErrorRow) -> float:
    return abs(row.rel_l2 / row.model - 1) if row.model else 0.0


def time_text(rows: Sequence[TimeRow], evens: Sequence[BreakEven], topologies: Sequence[Topology]) -> str:
    """Break-even sizes and speed-ups by machine and world, then where the machines' numbers come from."""
    sizes = [size for size in _COLUMNS if any(row.nbytes == size for row in rows)] or sorted({r.nbytes for r in rows})[
        -3:
    ]
    lines = []
    for even in evens:
        here = {row.nbytes: row for row in rows if (row.topology, row.ranks) == (even.topology, even.ranks)}
        largest = here[max(here)]
        lines.append(
            (
                even.topology,
                str(even.ranks),
                largest.plain,
                largest.quantized,
                "never" if even.nbytes is None else binary_size(even.nbytes),
                *(f"{here[size].speedup:.2f}x" for size in sizes),
                f"{here[sizes[-1]].percent_of_ideal:.0f} %",
            )
        )
    heads = [f"at {binary_size(size)}" for size in sizes]
    head = ("topology", "ranks", "best plain", "best quantized", "pays from", *heads, "of ideal")
    notes = [f"  {t.name}: {t.title}. {t.source}." for t in topologies if any(e.topology == t.name for e in evens)]
    return (
        f"Speed-up over the best plain AllReduce, {evens[0].bits:g} bits; a model\n\n{table(head, lines)}\n\n"
        + "\n".join(notes)
    )


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
        draw(path, curves, title=f"Error of an AllReduce, {data} partials", x="ranks", y="relative L2", log_y=True)
        paths.append(path)
    for ranks in dict.fromkeys(row.ranks for row in times):
        here = [row for row in times if row.ranks == ranks]
        curves = [
            (name, [(row.nbytes, row.speedup) for row in here if row.topology == name])
            for name in dict.fromkeys(row.topology for row in here)
        ]
        path = folder / f"speedup-{ranks}.png"
        title = f"{here[0].bits:g} bits against the best plain AllReduce, {ranks} ranks (model)"
        draw(path, curves, title=title, x="bytes of the bfloat16 message", y="speed-up", level=16 / here[0].bits)
        paths.append(path)
    return paths
