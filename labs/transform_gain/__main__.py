"""What each transform buys: KL divergence to the float model of quantized models, with and without it.

    python -m labs.transform_gain MODEL --stats STATS --text FILE [--tokens 8192] [--formats nvfp4 mxfp4 ...]

Prints one JSON line per transform and format: mean KL (nats per token), its difference to the same format without a
transform with a 95 % interval (paired bootstrap over windows), and how many factors changed. Every transformed model is
written as float32, so what is seen is the transform, not its rounding; "same" is its own KL to the source. Weights are
quantized without data (exact scales); activations as the format says. Needs the hf extra.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_measure import Remembered, kl_of

import ptqpipe
from ptqpipe.check.evaluate.bootstrap import cluster_sums, interval, standard_error
from ptqpipe.check.evaluate.scores import Scores, model_logits
from ptqpipe.check.evaluate.tokenized_text import read_text
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.command import transform
from ptqpipe.errors import PtqError
from ptqpipe.numerics.schemes import Activation, get_scheme
from ptqpipe.runtime.loading import load_model, load_tokenizer

SAME_TOKENS = 1024  # on which a transformed float model is compared with its source
FORMATS = ("nvfp4", "nvfp4_w4a4", "mxfp4a16", "mxfp4")


def variants(scheme: str, asked: Sequence[str]) -> dict[str, TransformOptions]:
    """The transforms that are tried for a format, by name; searches use the format itself."""

    def make(apply: str, **options: Any) -> TransformOptions:
        return TransformOptions(apply, dtype="fp32", untie=True, format=scheme, **options)

    every = {
        "smoothquant": make("smoothquant"),
        "smoothquant 2^k": make("smoothquant", power_of_two=True),
        "smooth_swiglu": make("smooth_swiglu"),
        "awq": make("awq"),
        "awq 2^k": make("awq", power_of_two=True),
        "aqas": make("aqas"),
        "rotate_residual 16": make("rotate_residual", rotation_size=16),
        "rotate_residual 32": make("rotate_residual", rotation_size=32),
        "rotate_residual 128": make("rotate_residual", rotation_size=128),
        "rotate_values 32": make("rotate_values", rotation_size=32),
        "aqas,rotate 32": make("aqas,rotate", rotation_size=32),
    }
    if get_scheme(scheme).activation is Activation.NONE:
        del every["aqas"]  # it is awq then
    return {name: options for name, options in every.items() if not asked or any(name.startswith(a) for a in asked)}


def row_of(scores: Scores, plain: Scores | None) -> dict[str, Any]:
    """Mean KL, its standard error, and the difference to ``plain`` with its interval."""
    assert scores.kl is not None
    sums, counts = cluster_sums(scores.kl, scores.cluster)
    row: dict[str, Any] = {"kl": float(sums.sum() / counts.sum()), "standard_error": standard_error(sums, counts)}
    if plain is not None and plain.kl is not None:
        others, _ = cluster_sums(plain.kl, plain.cluster)
        row["difference"] = row["kl"] - float(others.sum() / counts.sum())
        row["interval"] = interval((sums, others), counts, of=np.subtract)
        row["ratio"] = row["kl"] / (float(others.sum() / counts.sum()) or 1.0)
    return row


def main() -> None:
    """Prints the table as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--stats", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--only", nargs="+", default=[], help="transforms whose names begin so")
    args = parser.parse_args()
    source = load_model(args.model)
    tokens = read_text(args.text, lambda: load_tokenizer(args.model), max_tokens=args.tokens).tokens
    reference = Remembered(partial(model_logits, source))
    name = args.model.parent.name if args.model.name == "hf" else args.model.name
    with tempfile.TemporaryDirectory() as folder:
        for scheme in args.formats:
            measure(args, scheme, name, tokens, reference, Path(folder) / scheme)


def measure(
    args: argparse.Namespace, scheme: str, name: str, tokens: torch.Tensor, reference: Remembered, folder: Path
) -> None:
    """The lines of one format."""
    few = Remembered(reference.give)
    ptqpipe.convert(args.model, format=scheme, out=folder / "plain")
    plain = kl_of(load_model(folder / "plain"), tokens, reference)
    first = {"model": name, "format": scheme, "tokens": len(tokens)}
    print(json.dumps({**first, "transform": "none", **row_of(plain, None)}), flush=True)
    for number, (variant, options) in enumerate(variants(scheme, args.only).items()):
        row = {**first, "transform": variant}
        floats, quantized = folder / f"float-{number}", folder / f"quantized-{number}"
        try:
            done = transform(args.model, floats, stats=args.stats, options=options)
        except PtqError as error:
            print(json.dumps({**row, "refused": str(error)}), flush=True)
            continue
        assert done is not None
        same = kl_of(load_model(floats), tokens[:SAME_TOKENS], few)
        assert same.kl is not None
        ptqpipe.convert(floats, format=scheme, out=quantized)
        row |= row_of(kl_of(load_model(quantized), tokens, reference), plain)
        row["same"] = float(same.kl.mean())
        row["changed"] = sum(folding.get("changed", 0) for folding in done.record["foldings"])
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
