"""The pictures of README.md and docs/results.md. Writes SVG into docs/images/.

    python scripts/readme_pictures.py [--results benchmarks/quality.jsonl] [--costs benchmarks/quality_cost.jsonl]
        [--out docs/images]

pipeline  what the tool does
kl        every bar is the lowest mean KL divergence of one tool on SmolLM2-135M-Instruct in NVFP4, over its methods,
          with and without calibration data
cost      processor seconds by the number of weights: `--quality good`, `best`, llm-compressor's GPTQ, and auto-round's
          tuning where it was measured; hollow: layers of a synthetic model with TinyLlama's widths

Each picture is written for light and for dark pages; its text stays text.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from quality_table import OWN, Cell, cells_of, comparable

ROOT = Path(__file__).resolve().parent.parent
MODEL, FORMAT, WIDE = "smollm2-135m", "nvfp4", "tinyllama-1.1b"
# Page background, text, quiet text, lines, ptqpipe's bars, other bars: both sets keep a contrast of 4.5 for text.
THEMES = {
    "light": ("#ffffff", "#1f2328", "#59636e", "#d1d9e0", "#0969da", "#b6bfc9"),
    "dark": ("#0d1117", "#f0f6fc", "#9198a1", "#3d444d", "#4493f8", "#59636e"),
}
STEPS = (
    ("safetensors", "any Hugging Face model\nfolder or hub name"),
    ("calibrate", "optional: your text, or\ntext the model writes"),
    ("convert", "optimal block scales;\n16 GB in 1 GiB of memory"),
    ("verify, eval", "against the source:\nKL, perplexity, tasks"),
    ("serve", "vLLM, SGLang, TRT-LLM,\ntransformers, ptqpipe"),
)


def lowest(cells: dict[str, Cell], *, calibrated: bool) -> list[tuple[str, float]]:
    """(tool, its lowest mean KL x 1000) over its methods with or without data, the lowest first."""
    found: dict[str, float] = {}
    for cell in cells.values():
        if cell.calibrated == calibrated:
            found[cell.tool] = min(found.get(cell.tool, cell.kl), cell.kl)
    return sorted(((tool, 1000 * kl) for tool, kl in found.items()), key=lambda pair: pair[1])


def draw_bars(axes: Axes, rows: list[tuple[str, float]], title: str, most: float, theme: tuple[str, ...]) -> None:
    """One panel: a bar a tool, its number at the end."""
    _, text, quiet, _, own, other = theme
    for y, (tool, kl) in enumerate(rows):
        axes.barh(y, kl, height=0.62, color=own if tool == OWN else other)
        axes.text(kl + most * 0.015, y, f"{kl:.3g}", va="center", color=text, fontsize=10)
    axes.set_yticks(range(len(rows)), [tool for tool, _ in rows], fontsize=10, color=text)
    axes.set_xlim(0, most * 1.12)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_title(title, loc="left", fontsize=10, color=quiet)
    for side in axes.spines.values():
        side.set_visible(False)


def kl_picture(lines: list[dict[str, Any]], theme: tuple[str, ...]) -> plt.Figure:
    """Two panels of bars, on one scale."""
    cells = comparable(cells_of(lines)[MODEL, FORMAT])
    panels = [("with calibration data", lowest(cells, calibrated=True)), ("without", lowest(cells, calibrated=False))]
    most = max(kl for _, rows in panels for _, kl in rows)
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.1), facecolor=theme[0])
    for ax, (title, rows) in zip(axes, panels, strict=True):
        ax.set_facecolor(theme[0])
        draw_bars(ax, rows, title, most, theme)
    figure.tight_layout(w_pad=2)
    return figure


def cost_picture(lines: list[dict[str, Any]], theme: tuple[str, ...]) -> plt.Figure:
    """A curve each: processor seconds over weights, the last line of each trained model and instruction set. Hollow:
    some layers of a synthetic model as wide as WIDE."""
    background, text, quiet, line, own, other = theme
    whole = [one for one in lines if "improved" in one and one.get("samples", 32) == 32]
    last = {(one["weights"], one["isa"]): one for one in whole if one.get("trained", True)}
    wide = {(one["weights"], one["isa"]): one for one in whole if one["model"] == WIDE}
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), facecolor=background, sharey=True)
    labels = {"best": "--quality best", "good": "--quality good", "llm-compressor": "llm-compressor's GPTQ"}
    labels |= {"auto-round": "auto-round, tuned"}
    curves = (("best", own, "-"), ("good", own, "--"), ("llm-compressor", other, "-"), ("auto-round", other, ":"))
    for ax, isa in zip(axes, ("avx512", "avx2"), strict=True):
        measured = sorted((one for key, one in last.items() if key[1] == isa), key=lambda one: one["weights"])
        layers = sorted((one for key, one in wide.items() if key[1] == isa), key=lambda one: one["weights"])
        weights = [one["weights"] / 1e6 for one in measured]
        for name, color, style in curves:
            known = [(one["weights"] / 1e6, one[name]["cpu_s"]) for one in measured if name in one]
            if known:
                ax.loglog(*zip(*known, strict=True), style, color=color, marker="o", markersize=4, label=labels[name])
            for one in (one for one in layers if name in one):
                place = one["weights"] / 1e6, one[name]["cpu_s"]
                ax.loglog(*place, color=color, marker="o", markersize=5, markerfacecolor="none")
        ax.set_facecolor(background)
        ax.set_title(f"CPU-seconds, {'AVX-512' if isa == 'avx512' else 'AVX2'}", loc="left", fontsize=10, color=quiet)
        ax.set_xlabel("million weights", fontsize=9, color=quiet)
        ticks = [*weights, *[one["weights"] / 1e6 for one in layers][-1:]]
        ax.set_xticks(ticks, [f"{count:.0f}" for count in ticks])
        ax.set_yticks([10, 100, 1000], ["10", "100", "1000"])
        ax.minorticks_off()
        ax.tick_params(colors=text, labelsize=9)
        for side in ax.spines.values():
            side.set_color(line)
    handles, names = axes[0].get_legend_handles_labels()  # the right panel has room
    axes[1].legend(handles, names, frameon=False, fontsize=9, labelcolor=text)
    figure.tight_layout(w_pad=2)
    return figure


def pipeline_picture(theme: tuple[str, ...]) -> plt.Figure:
    """The steps as boxes in a row."""
    background, text, quiet, line, own, _ = theme
    figure, ax = plt.subplots(figsize=(9, 1.35), facecolor=background)
    ax.set_xlim(0, 5)
    ax.set_ylim(0, 1)
    ax.axis("off")
    for i, (name, what) in enumerate(STEPS):
        edge = own if name == "convert" else line
        box = FancyBboxPatch((i + 0.06, 0.1), 0.82, 0.8, boxstyle="round,pad=0,rounding_size=0.06", fc="none", ec=edge)
        box.set_mutation_aspect(3)
        ax.add_patch(box)
        ax.text(i + 0.47, 0.68, name, ha="center", va="center", color=text, fontsize=11, weight="bold")
        ax.text(i + 0.47, 0.35, what, ha="center", va="center", color=quiet, fontsize=7.5)
        if i:
            ax.annotate("", (i + 0.05, 0.5), (i - 0.11, 0.5), arrowprops={"arrowstyle": "->", "color": quiet})
    figure.subplots_adjust(0, 0, 1, 1)
    return figure


def main() -> None:
    """Writes two files of each picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "quality.jsonl")
    parser.add_argument("--costs", type=Path, default=ROOT / "benchmarks" / "quality_cost.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    lines, costs = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in (args.results, args.costs)
    )
    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ptqpipe", "font.family": "sans-serif"})
    args.out.mkdir(parents=True, exist_ok=True)
    for name, theme in THEMES.items():
        drawn = (pipeline_picture(theme), kl_picture(lines, theme), cost_picture(costs, theme))
        for picture, figure in zip(("pipeline", "kl", "cost"), drawn, strict=True):
            figure.savefig(args.out / f"{picture}-{name}.svg", facecolor=theme[0], metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
