"""What the reverse pass predicts of single layers, beside what is measured.

    python scripts/predicted_kl.py MODEL --data FILE [--format nvfp4] [--samples 128] [--seqlen 256] [--scale 1.0]
        [--results benchmarks/predicted_kl.jsonl]

For each linear layer in turn the weight W becomes W + s (Q - W), Q its nearest codes at the exact scales, everything
else stays float. Predicted is what `plan` takes an error to cost (``stages/plan/metric.py``), by windows and by tokens;
measured is the mean KL divergence to the float model on the same samples. Prints a table, and writes a line of JSON for
each layer where asked to. Needs the hf extra.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import ptqpipe
from ptqpipe.calibration.activations import InMemory
from ptqpipe.calibration.collect import Collector
from ptqpipe.calibration.data import load_samples
from ptqpipe.calibration.gradients import Gradients
from ptqpipe.calibration.reverse import reverse
from ptqpipe.calibration.runner import Block, Runner
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.runtime.loading import load_model
from ptqpipe.source import Source
from ptqpipe.stages.plan.metric import ByTokens, ByWindows


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
        return dict(reverse(runner, seed=seed, store=InMemory, modules=linear, weights=True))


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
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    windows = load_samples(
        [str(args.data)], args.model, samples=args.samples, seqlen=args.seqlen, seed=args.seed
    ).windows
    moments = moments_of(args.model, windows)
    gradients = gradients_of(args.model, windows, args.seed)
    model = load_model(args.model).float()
    with torch.no_grad():
        floats = [model(ids).logits.float().log_softmax(-1) for ids in torch.split(windows, 8)]
    print("| layer | measured x 1000 | by windows | by tokens |\n|---|---|---|---|")
    sums = torch.zeros(3, dtype=torch.float64)
    for block, of_block in gradients.items():
        for name in of_block.weights:
            outputs = of_block.outputs[name]
            full = f"{block}.{name}"
            w = model.get_submodule(full).weight.detach()
            change = args.scale * (ptqpipe.quantize(w, args.format).dequantize() - w)
            diagonal = moments[full].diagonal()
            root = torch.cat([run.diagonal() for run in outputs]).sqrt().unsqueeze(1)
            tokens = ByTokens(moments[full], diagonal, root)
            by_windows = ByWindows.of(of_block.weights[name], tokens, diagonal=diagonal)
            totals = [m.total(m.sums(change, w, 0, 0.0)) for m in (by_windows, tokens)]
            found = [0.5 * total.beside(total.follows) for total in totals]
            row = [measured(model, full, change, windows, floats), *found]
            sums += torch.tensor(row, dtype=torch.float64)
            report(args, full, row)
    report(args, "all", sums.tolist())


def report(args: argparse.Namespace, layer: str, row: list[float]) -> None:
    """Prints and writes (measured, by windows, by tokens) of a layer."""
    kl, by_windows, by_tokens = row
    print(f"| {layer} | {1000 * kl:.4f} | {by_windows / kl:.3f} | {by_tokens / kl:.3f} |", flush=True)
    if args.results is not None:
        line = {"model": args.model.parent.name, "format": args.format, "samples": args.samples, "seqlen": args.seqlen}
        line |= {"seed": args.seed, "scale": args.scale, "layer": layer, "kl": round(kl, 8)}
        line |= {"by_windows": round(by_windows, 8), "by_tokens": round(by_tokens, 8)}
        with open(args.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
