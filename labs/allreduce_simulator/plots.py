"""Errors and speed-ups as PNG files, by matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot

from labs.allreduce_simulator.compare import TimeRow
from labs.allreduce_simulator.error import ErrorRow

mpl.use("Agg")
_BINARY = ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki"))
_MARKERS = "osD^vPX*<>hp"


Curve = tuple[str, Sequence[tuple[float, float]]]
"""One line: its name, and points of (x, y)."""


def draw(
    path: Path, curves: Sequence[Curve], *, title: str, x: str, y: str, log_y: bool = False, level: float | None = None
) -> None:
    """Writes one plot with a logarithmic x axis in powers of two.

    level  what the bytes alone allow: a dashed line, with another at 1
    """
    figure, axis = pyplot.subplots(figsize=(9, 4.8))
    colours = pyplot.get_cmap("tab20" if len(curves) > 10 else "tab10")
    for index, (name, points) in enumerate(curves):
        xs, ys = zip(*points, strict=True)
        marker = _MARKERS[index % len(_MARKERS)]
        axis.plot(xs, ys, color=colours(index), marker=marker, markersize=4, linewidth=1.4, label=name)
    if level is not None:
        axis.axhline(1, color="0.4", linewidth=1)
        axis.axhline(level, color="0.4", linewidth=1, linestyle="--")
        axis.annotate(f"ideal {level:.2f}", (0.01, level), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    ticks = sorted({point[0] for _, points in curves for point in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [_tick(value) for value in ticks])
    axis.minorticks_off()
    if log_y:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.set(xlabel=x, ylabel=y)
    axis.set_title(title, fontsize=11)
    axis.grid(alpha=0.25, which="both")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _tick(value: float) -> str:
    for factor, unit in _BINARY:
        if value >= factor and value % factor == 0:
            return f"{value / factor:g} {unit}B"
    return f"{value:g}"


def write_plots(folder: Path, errors: Sequence[ErrorRow], times: Sequence[TimeRow]) -> list[Path]:
    """error-<data>.png: error by world; speedup-<k>.png: speed-up by size."""
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
