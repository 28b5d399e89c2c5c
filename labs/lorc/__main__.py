"""What a low-rank part beside the codes gains: KL divergence and bits per weight of a checkpoint, by the part's rank.

The part of a weight is the product of two thin matrices that lowers the error of its codes most, E = W - What: by
Eckart and Young the largest singular directions of E H^1/2, where H is the damped second moment of the layer's input
(with --stats of ``ptqpipe calibrate --moments full``) or the identity (LoRC, arXiv 2303.08302; QERA, arXiv 2410.06040).
It is added to the weights that the checkpoint decodes to: for formats that quantize weights alone.

    python -m labs.lorc MODEL CHECKPOINT TEXT [--stats DIR] [--ranks 0 8 16 32] [--dtype fp8] [--results FILE]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

import ptqpipe
from ptqpipe.calibration.statistics import Statistics

FP8_MAX = 448.0


def root_of(stats: Statistics | None, module: str, columns: int, *, damping: float) -> torch.Tensor:
    """float64 [K, K]: C with H = C C^T."""
    if stats is None:
        return torch.eye(columns, dtype=torch.float64)
    h = stats.of(module, full=True).full_moment
    assert h is not None  # asked for
    h = h.double()
    root: torch.Tensor = torch.linalg.cholesky(
        h + damping * h.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    )
    return root


def rounded(factor: torch.Tensor, dtype: str, dim: int) -> torch.Tensor:
    """A factor as it would be stored, float64: bfloat16, or E4M3 with a scale for each component."""
    if dtype == "bf16":
        return factor.bfloat16().double()
    scale = factor.abs().amax(dim=dim, keepdim=True).clamp(min=1e-30) / FP8_MAX
    return (factor / scale).float().to(torch.float8_e4m3fn).double() * scale


def correction(error: torch.Tensor, root: torch.Tensor, rank: int, dtype: str) -> torch.Tensor:
    """float64 [N, K] of this rank: the best of all for || (error - it) root ||, but for its rounding."""
    left, sizes, right = torch.linalg.svd(error @ root, full_matrices=False)
    back = torch.linalg.solve_triangular(root, right[:rank], upper=False, left=False)
    even = sizes[:rank].sqrt()
    return rounded(left[:, :rank] * even, dtype, 0) @ rounded(even.unsqueeze(1) * back, dtype, 1)


def log_probabilities(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [windows, tokens, vocabulary]."""
    with torch.no_grad():
        return torch.stack([model(row[None]).logits[0].double().log_softmax(-1) for row in tokens])


def main(argv: Sequence[str]) -> int:
    """Prints and notes one JSON line for each rank."""
    parser = argparse.ArgumentParser(prog="python -m labs.lorc", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--stats", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 8, 16, 32])
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="fp8")
    parser.add_argument("--damping", type=float, default=0.01)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args(argv)
    ids = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(), return_tensors="pt").input_ids[0]
    tokens = ids[: args.windows * args.seqlen].reshape(-1, args.seqlen)
    wanted = log_probabilities(ptqpipe.load_model(args.model), tokens)
    stats = None if args.stats is None else Statistics.open(args.stats)
    for rank in args.ranks:
        model, bits, count = ptqpipe.load_model(args.checkpoint), 0.0, 0
        with ptqpipe.load_tensors(args.model) as floats, ptqpipe.load_tensors(args.checkpoint) as stored:
            for name, q in stored.items():
                if isinstance(q, torch.Tensor):
                    continue
                decoded, (n, k) = q.dequantize(), q.shape
                w = floats[name]
                assert isinstance(w, torch.Tensor)  # MODEL is not quantized
                root = root_of(stats, name.removesuffix(".weight"), k, damping=args.damping)
                part = correction(w.double() - decoded.double(), root, rank, args.dtype)
                model.get_parameter(name).data.copy_(decoded.double() + part)
                bits += 8 * q.nbytes + min(rank, n, k) * (16 * (n + k) if args.dtype == "bf16" else 8 * (n + k) + 32)
                count += n * k
        kl = (wanted.exp() * (wanted - log_probabilities(model, tokens))).sum(-1).mean()
        row = {"model": args.model.name, "checkpoint": args.checkpoint.name, "rank": rank, "dtype": args.dtype}
        row |= {"moment": "none" if stats is None else "full", "bits": round(bits / count, 4), "kl": float(kl)}
        print(json.dumps(row))
        if args.results is not None:
            with open(args.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
