"""What a searched global scale buys: squared error of NVFP4 weights beside that at the plain amax/2688.

For every linear weight of the given models (and one synthetic matrix) the blocks are searched exactly at each
candidate, on the whole weight; a second column ranks on the sample that ``convert`` uses. One JSON line a set: the
number of weights and, for each number of candidates, the error of all weights together divided by the plain one.

    python -m labs.global_scale_gain [MODEL_DIR ...] [--points 8 16 32] [--elements 4194304]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from ptqpipe.numerics.formats import Format, get_format
from ptqpipe.numerics.global_scale import absmax_global, pick, sample_rows
from ptqpipe.numerics.qtensor import encode, squared_error
from ptqpipe.numerics.search import exact


def error_at(g: torch.Tensor, w: torch.Tensor, fmt: Format) -> float:
    """The squared error that exact block scales leave at this global scale."""
    return squared_error(encode(w, exact.search(w, fmt, global_scale=g), fmt=fmt, global_scale=g), w)


def errors_at(scales: Sequence[torch.Tensor], w: torch.Tensor, fmt: Format) -> list[float]:
    """The same at each of several."""
    return [error_at(g, w, fmt) for g in scales]


def gain(weights: list[torch.Tensor], fmt: Format, *, points: int, sampled: bool) -> float:
    """Error with searched global scales, each weight its own, divided by the error with plain ones."""
    before = after = 0.0
    for w in weights:
        plain = absmax_global(float(w.abs().max()), fmt)
        rows = [w[a:b] for a, b in sample_rows((w.shape[0], w.shape[1]), fmt)] if sampled else [w]
        sample = torch.cat(rows)
        best = pick(plain, fmt, totals=partial(errors_at, w=sample, fmt=fmt), points=points)
        error = error_at(plain, w, fmt)
        before, after = before + error, after + min(error, error_at(best, w, fmt))
    return after / before if before else 1.0


def linear_weights(folder: Path, fmt: Format) -> list[torch.Tensor]:
    """The matrices of a safetensors folder that fit the format, embeddings left out."""
    from safetensors import safe_open

    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                shape = tuple(file.get_slice(name).get_shape())
                skipped = any(part in name for part in ("embed", "lm_head", "wte", "wpe"))
                if len(shape) == 2 and not skipped and fmt.fits(shape):
                    found.append(file.get_tensor(name))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="What a searched global scale buys over amax/2688.")
    parser.add_argument("models", type=Path, nargs="*", help="safetensors folders")
    parser.add_argument("--points", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--elements", type=int, default=1 << 22, help="of the synthetic normal matrix")
    options = parser.parse_args()
    fmt = get_format("nvfp4")
    shape = (max(1, options.elements // 2048), 2048)
    normal = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    sets = {f"normal {shape[0]}x{shape[1]}": [normal]}
    sets |= {"/".join(folder.resolve().parts[-2:]): linear_weights(folder, fmt) for folder in options.models}
    for name, weights in sets.items():
        whole, sampled = (
            {str(points): round(gain(weights, fmt, points=points, sampled=on), 6) for points in options.points}
            for on in (False, True)
        )
        elements = sum(w.numel() for w in weights)
        row = {"weights": name, "matrices": len(weights), "elements": elements, "whole": whole, "sampled": sampled}
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
