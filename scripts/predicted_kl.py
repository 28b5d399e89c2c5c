"""What the reverse pass predicts of single layers, beside what is measured.

    python scripts/predicted_kl.py MODEL --data FILE [--format nvfp4] [--samples 128] [--seqlen 256] [--scale 1.0]

For each linear layer in turn the weight W becomes W + s (Q - W), Q its nearest codes at the exact scales, everything
else stays float. Predicted is 1/2 tr(G E H E^T), E the change, G and H of the samples (``calibration/reverse.py``);
measured is the mean KL divergence to the float model on the same samples. Needs the hf extra.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import ptqpipe
from ptqpipe.algorithms.metric import expected_error
from ptqpipe.calibration.activations import InMemory
from ptqpipe.calibration.collect import Collector
from ptqpipe.calibration.data import load_samples
from ptqpipe.calibration.reverse import Gradients, reverse
from ptqpipe.calibration.runner import Block, Runner
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.inputs import Moments
from ptqpipe.runtime.loading import load_model
from ptqpipe.source import Source


def linear(block: Block) -> list[str]:
    """Names in a block of its linear layers."""
    return [name for name, module in block.module.named_modules() if isinstance(module, torch.nn.Linear)]


def moments_of(path: Path, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Module -> H."""
    found: dict[str, torch.Tensor] = {}
    with Source.open(path) as source, Runner.open(Skeleton.of(source, dtype=torch.float32), windows) as runner:
        for block in runner.blocks():
            collector = Collector(block.name, block.module, block.origins, block=False, full=True, device=runner.device)
            with collector:
                block.advance()
            means = {i: m.tensors(block=False)["full_moment"] for i, m in collector.moments.items()}
            for name in linear(block):
                full = f"{block.name}.{name}"
                found[full] = means[collector.leaders.get(full, full)]
    return found


def gradients_of(path: Path, windows: torch.Tensor, seed: int) -> dict[str, Gradients]:
    """Block -> its gradients."""
    with Source.open(path) as source, Runner.open(Skeleton.of(source, dtype=torch.float32), windows) as runner:
        return dict(reverse(runner, seed=seed, store=InMemory, modules=linear))


@torch.no_grad()
def measured(model: Any, name: str, change: torch.Tensor, windows: torch.Tensor, floats: list[torch.Tensor]) -> float:
    """Mean KL of the model with one weight changed to itself."""
    weight = model.get_submodule(name).weight
    before = weight.clone()
    weight += change
    total = 0.0
    for ids, p in zip(torch.split(windows, 8), floats, strict=True):
        q = model(ids).logits.float().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(-1).double().sum())
    weight.copy_(before)
    return total / windows.numel()


def main() -> None:
    """Prints a row for each layer, and what all of them add up to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--scale", type=float, default=1.0, help="s above")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    windows = load_samples(
        [str(args.data)], args.model, samples=args.samples, seqlen=args.seqlen, seed=args.seed
    ).windows
    moments = moments_of(args.model, windows)
    gradients = gradients_of(args.model, windows, args.seed)
    model = load_model(args.model).float()
    with torch.no_grad():
        floats = [model(ids).logits.float().log_softmax(-1) for ids in torch.split(windows, 8)]
    print("| layer | predicted x 1000 | measured x 1000 | ratio |\n|---|---|---|---|")
    sums = [0.0, 0.0]
    for block, of_block in gradients.items():
        for name, outputs in of_block.outputs.items():
            full = f"{block}.{name}"
            w = model.get_submodule(full).weight.detach()
            change = args.scale * (ptqpipe.quantize(w, args.format).dequantize() - w)
            h = Moments(moments[full].diagonal(), full_moment=moments[full])
            pair = 0.5 * expected_error(change, h, outputs), measured(model, full, change, windows, floats)
            sums = [total + value for total, value in zip(sums, pair, strict=True)]
            print(f"| {full} | {1000 * pair[0]:.4f} | {1000 * pair[1]:.4f} | {pair[0] / pair[1]:.3f} |", flush=True)
    print(f"| all | {1000 * sums[0]:.4f} | {1000 * sums[1]:.4f} | {sums[0] / sums[1]:.3f} |")


if __name__ == "__main__":
    main()
