"""The block-size paradox: relative error by block size, for abs-max scales and for exact ones.

With coarse scales and abs-max, smaller blocks can be *worse* (arXiv 2601.19026, 2605.08565). This prints the relative
MSE of E2M1 weights by block size for every rule and scale codec, one JSON line a row, and plots them. Smaller blocks
can always do what larger ones do, so the exact search must never lose by them: exit 1 if it does in any row (beyond
1e-6, the float32 rounding of scores).

    python -m labs.block_size_paradox [--model DIR] [--sigma 0.02 --sigma 0.005] [--elements 1048576] [--plot PNG]
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.global_scale import absmax_global
from ptqpipe.numerics.qtensor import encode, squared_error
from ptqpipe.numerics.search import get_search

BLOCKS = (4, 8, 16, 32, 64, 128)
SIGMAS = (0.02, 0.01, 0.005, 0.002)
SCALES = ("e4m3", "e4m3/global", "ue5m3", "ue5m3/global", "e8m0", "fp32")
COLUMNS = 2048  # of synthetic matrices
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Row:
    """Relative MSE of one rule by block size, smallest block first."""

    weights: str
    scales: str
    rule: str
    blocks: tuple[int, ...]
    relative_mse: tuple[float, ...]

    @property
    def monotone(self) -> bool:
        """Whether no smaller block is worse than a larger one."""
        return all(small <= large * (1 + ROUNDING) for small, large in pairwise(self.relative_mse))


def rules(scales: str) -> tuple[str, ...]:
    """The rules that make sense for these scales; the last one is the best that can be had."""
    if scales == "e8m0":
        return ("ocp_floor", "absmax", "exact")
    if scales == "fp32":
        return ("absmax", "four_over_six", "refit")
    return ("absmax", "absmax_pz", "four_over_six", "exact")


def relative_mse(matrices: list[torch.Tensor], *, scales: str, rule: str, block: int) -> float:
    """sum (decode - w)^2 / sum w^2 over the matrices, each with its own global scale if there is one."""
    fmt = get_format(f"e2m1/{block}/{scales}")
    error = energy = 0.0
    for w in matrices:
        g = absmax_global(float(w.abs().max()), fmt) if fmt.has_global else None
        chosen = get_search(rule).search(w, fmt, global_scale=g)
        error += squared_error(encode(w, chosen, fmt=fmt, global_scale=g), w)
        energy += float(w.double().square().sum())
    return error / energy


def study(name: str, matrices: list[torch.Tensor], blocks: tuple[int, ...]) -> Iterator[Row]:
    """Every row of one set of weights."""
    for scales in SCALES:
        for rule in rules(scales):
            mse = tuple(relative_mse(matrices, scales=scales, rule=rule, block=block) for block in blocks)
            yield Row(name, scales, rule, blocks, mse)


def synthetic(elements: int, draw: Callable[[tuple[int, int], torch.Generator], torch.Tensor]) -> list[torch.Tensor]:
    """One seeded bfloat16 matrix."""
    shape = (max(1, elements // COLUMNS), COLUMNS)
    return [draw(shape, torch.Generator().manual_seed(0)).bfloat16()]


def normal(sigma: float, shape: tuple[int, int], g: torch.Generator) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=g) * sigma


def outlier_columns(shape: tuple[int, int], g: torch.Generator) -> torch.Tensor:
    """Student t with 5 degrees of freedom, times 0.02, and 16 columns ten times larger."""
    w = torch.randn(shape, generator=g) / torch.randn((5, *shape), generator=g).square().mean(dim=0).sqrt() * 0.02
    w[:, torch.randperm(shape[1], generator=g)[:16]] *= 10
    return w


def model_matrices(folder: Path, largest_block: int) -> list[torch.Tensor]:
    """The linear weights of a safetensors folder whose columns every block size divides."""
    from safetensors import safe_open

    matrices = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                shape = file.get_slice(name).get_shape()
                linear = len(shape) == 2 and not any(part in name for part in ("embed", "lm_head", "wte", "wpe"))
                if linear and shape[1] % largest_block == 0:
                    matrices.append(file.get_tensor(name))
    if not matrices:
        sys.exit(f"no linear weights with columns in multiples of {largest_block} in {folder}")
    return matrices


def plot(rows: list[Row], path: Path) -> None:
    """A panel for every set of weights and every kind of scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.weights for row in rows))
    figure, axes = pyplot.subplots(
        len(names), len(SCALES), figsize=(3 * len(SCALES), 2.6 * len(names)), sharex=True, squeeze=False
    )
    looks = {
        "absmax": ("tab:red", "o-"),
        "absmax_pz": ("tab:orange", "s--"),
        "ocp_floor": ("tab:orange", "s--"),
        "four_over_six": ("tab:blue", "^-"),
        "exact": ("tab:green", "D-"),
        "refit": ("tab:green", "D-"),
    }
    for row in rows:
        axis = axes[names.index(row.weights)][SCALES.index(row.scales)]
        color, style = looks[row.rule]
        axis.plot(row.blocks, row.relative_mse, style, color=color, label=row.rule, markersize=4, linewidth=1.2)
    for line, name in enumerate(names):
        axes[line][0].set_ylabel(name)
        for column, scales in enumerate(SCALES):
            axis = axes[line][column]
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(rows[0].blocks, [str(block) for block in rows[0].blocks])
            axis.grid(alpha=0.3, which="both")
            if line == 0:
                axis.set_title(scales.replace("/", " + ") + " scales")
                axis.legend(fontsize=7)
            if line == len(names) - 1:
                axis.set_xlabel("block size")
    figure.suptitle("Relative MSE of E2M1: with exact scales a smaller block is never worse")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Relative error of E2M1 by block size, abs-max against exact scales.")
    parser.add_argument("--sigma", type=float, action="append", help="of normal weights; repeatable")
    parser.add_argument("--model", type=Path, action="append", default=[], help="a safetensors folder; repeatable")
    parser.add_argument("--elements", type=int, default=1 << 20, help="of each synthetic set")
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS))
    parser.add_argument("--plot", type=Path, help="write the plot here (needs matplotlib)")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    blocks = tuple(sorted(options.blocks))
    sets = {
        f"normal, sigma {sigma:g}": synthetic(options.elements, partial(normal, sigma))
        for sigma in options.sigma or SIGMAS
    }
    sets["t5, outlier columns"] = synthetic(options.elements, outlier_columns)
    for folder in options.model:
        sets["/".join(folder.resolve().parts[-2:])] = model_matrices(folder, max(blocks))
    rows: list[Row] = []
    for name, matrices in sets.items():
        for row in study(name, matrices, blocks):
            print(json.dumps(asdict(row) | {"monotone": row.monotone}), flush=True)
            rows.append(row)
    if options.plot:
        plot(rows, options.plot)
    broken = [row for row in rows if row.rule == "exact" and not row.monotone]
    for row in broken:
        print(f"exact is worse for a smaller block: {row.weights}, {row.scales}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
