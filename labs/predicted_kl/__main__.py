"""What the reverse pass predicts of single layers, beside what is measured.

    python -m labs.predicted_kl MODEL --data FILE [--format nvfp4] [--samples 128] [--seqlen 256] [--scale 1.0]
        [--draws 12] [--results FILE]

For each linear layer in turn the weight W becomes W + s (Q - W), Q its nearest codes at the exact scales, everything
else stays float. Measured is the mean KL divergence to the float model on the same samples. Predicted is

by windows, by tokens  what `plan` takes an error to cost (``budget/error_metric.py``), by one draw of labels, for
errors
                       of random sign
by this error          the second order itself: half of the mean of (d E)^2 per token, E the very error, d the gradient
                       of a window's loss as torch has it, over several draws of labels

Prints a table, and writes a line of JSON for each layer where asked to. Needs the hf extra.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import ptqpipe
from ptqpipe.calibration.activations import InMemory
from ptqpipe.calibration.backward import draw_labels, run_backward
from ptqpipe.calibration.collect import Collector
from ptqpipe.calibration.data import load_samples
from ptqpipe.calibration.gradients import Gradients
from ptqpipe.calibration.runner import Layer, Runner
from ptqpipe.models.source import Source
from ptqpipe.pipeline.budget.error_metric import ByTokens, ByWindows
from ptqpipe.runtime.loading import load_model
from ptqpipe.runtime.skeleton import Skeleton


def linear(block: Layer) -> list[str]:
    """Names in a block of its linear layers."""
    return [name for name, module in block.module.named_modules() if isinstance(module, torch.nn.Linear)]


def moments_of(path: Path, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Module -> H."""
    found: dict[str, torch.Tensor] = {}
    with Source.open(path) as source, Runner.open(Skeleton.of(source, dtype=torch.float32), windows) as runner:
        for block in runner.layers():
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
        return dict(run_backward(runner, seed=seed, store=InMemory, modules=linear, weights=True))


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


def by_this_error(
    model: Any, changes: dict[str, torch.Tensor], windows: torch.Tensor, *, draws: int, seed: int
) -> dict[str, float]:
    """Weight -> KL to second order of changing it alone, on windows int64 [windows, tokens]."""
    weights = [model.get_submodule(name).weight for name in changes]
    generator = torch.Generator().manual_seed(seed)
    squares = torch.zeros(len(changes), dtype=torch.float64)
    for ids in windows.repeat(draws, 1):
        logits = model(ids.unsqueeze(0)).logits[0].float()
        chances = logits.detach().softmax(-1)
        labels, counts = (part.unsqueeze(1) for part in draw_labels(chances, generator))
        slopes = (chances * counts).scatter_add_(1, labels, -counts)  # of counts times the labels' losses
        found = torch.autograd.grad(logits, weights, slopes)
        along = [(d * change).sum(dtype=torch.float64) for d, change in zip(found, changes.values(), strict=True)]
        squares += torch.stack(along).square()
    return dict(zip(changes, (squares / (2 * draws * windows.numel())).tolist(), strict=True))


def main() -> None:
    """Prints a row for each layer, and what all of them add up to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--scale", type=float, default=1.0, help="s above")
    parser.add_argument("--draws", type=int, default=12, help="of labels, for the prediction by this error")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    windows = load_samples(
        [str(args.data)], args.model, samples=args.samples, seqlen=args.seqlen, seed=args.seed
    ).windows
    moments = moments_of(args.model, windows)
    gradients = gradients_of(args.model, windows, args.seed)
    model = load_model(args.model).float()
    changes: dict[str, torch.Tensor] = {}
    for block, of_block in gradients.items():
        for full in (f"{block}.{name}" for name in of_block.weights):
            w = model.get_submodule(full).weight.detach()
            changes[full] = args.scale * (ptqpipe.quantize(w, args.format).dequantize() - w)
    by_error = by_this_error(model, changes, windows, draws=args.draws, seed=args.seed)
    with torch.no_grad():
        floats = [model(ids).logits.float().log_softmax(-1) for ids in torch.split(windows, 8)]
    print("| layer | measured x 1000 | by windows | by tokens | by this error |\n|---|---|---|---|---|")
    sums = torch.zeros(4, dtype=torch.float64)
    for block, of_block in gradients.items():
        for name in of_block.weights:
            outputs = of_block.outputs[name]
            full = f"{block}.{name}"
            w = model.get_submodule(full).weight.detach()
            diagonal = moments[full].diagonal()
            root = torch.cat([run.diagonal() for run in outputs]).sqrt().unsqueeze(1)
            tokens = ByTokens(moments[full], diagonal, root)
            by_windows = ByWindows.of(of_block.weights[name], tokens, diagonal=diagonal)
            totals = [m.total(m.sums(changes[full], w, 0, 0.0)) for m in (by_windows, tokens)]
            found = [0.5 * total.beside(total.follows) for total in totals]
            row = [measured(model, full, changes[full], windows, floats), *found, by_error[full]]
            sums += torch.tensor(row, dtype=torch.float64)
            report(args, full, row)
    report(args, "all", sums.tolist())


def report(args: argparse.Namespace, layer: str, row: list[float]) -> None:
    """Prints and writes (measured, by windows, by tokens, by this error) of a layer."""
    kl, *predicted = row
    print(f"| {layer} | {1000 * kl:.4f} | {' | '.join(f'{one / kl:.3f}' for one in predicted)} |", flush=True)
    if args.results is not None:
        line = {"model": args.model.parent.name, "format": args.format, "samples": args.samples, "seqlen": args.seqlen}
        line |= {"seed": args.seed, "scale": args.scale, "draws": args.draws, "layer": layer, "kl": round(kl, 10)}
        line |= zip(("by_windows", "by_tokens", "by_this_error"), (round(one, 10) for one in predicted), strict=True)
        with open(args.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
