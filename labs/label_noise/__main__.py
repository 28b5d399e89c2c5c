"""How far moments of gradients are off for the labels that were drawn: ptqpipe's way to draw them, and the plain one.

    python -m labs.label_noise MODEL TEXT [--samples 32] [--seqlen 128] [--draws 6]
        [--results FILE]

E[g g^T] at the output of every linear layer but the head, summed over the tokens, with labels drawn several times: once
as likely as the model says ("plain"), once as `draw_labels` of ptqpipe/calibration/backward.py does ("drawn"). One line
of JSON: for both the mean over layers of the root mean square distance from one draw to the mean of all, relative to
that mean ("noise"), and the traces, which agree.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ptqpipe.calibration.backward import draw_labels
from ptqpipe.check.evaluate.tokenized_text import read_text
from ptqpipe.runtime.loading import load_model, load_tokenizer

Draw = Callable[[torch.Tensor, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
AT_ONCE = 1024  # tokens


def plain(chances: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """As likely as the model says, and each counts once."""
    return torch.multinomial(chances, 1, generator=generator).squeeze(1), torch.ones(len(chances))


def products(model: Any, rows: torch.Tensor, draw: Draw, seed: int) -> dict[str, torch.Tensor]:
    """Sums of g g^T over all tokens, by layer."""
    generator, found = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()

    def hook_of(name: str) -> Any:
        def add(g: torch.Tensor) -> None:
            g = g.flatten(0, -2)
            found[name] = found.get(name, 0) + g.t() @ g

        def hook(_module: torch.nn.Module, _inputs: Any, out: torch.Tensor) -> None:
            out.register_hook(add)

        return hook

    head = model.get_output_embeddings()
    layers = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    hooks = [m.register_forward_hook(hook_of(name)) for name, m in layers.items()]
    hooks.append(model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: out.requires_grad_()))
    for part in torch.split(rows, max(1, AT_ONCE // rows.shape[1])):
        logits = model(part).logits.float().flatten(0, 1)
        labels, counts = draw(logits.detach().softmax(-1), generator)
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        (losses @ counts).backward()
    for hook in hooks:
        hook.remove()
    return found


def main() -> None:
    """Measures and appends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.jsonl"))
    args = parser.parse_args()
    model = load_model(args.model).float().requires_grad_(False)
    tokens = read_text(args.text, lambda: load_tokenizer(args.model)).tokens[: args.samples * args.seqlen]
    line: dict[str, Any] = {"model": args.model.parent.name, "text": args.text.name, "draws": args.draws}
    line |= {"samples": args.samples, "seqlen": args.seqlen}
    for way, draw in (("plain", plain), ("drawn", draw_labels)):
        drawn = [products(model, tokens.view(args.samples, args.seqlen), draw, seed) for seed in range(args.draws)]
        noise, trace = [], 0.0
        for name in drawn[0]:
            each = torch.stack([one[name] for one in drawn]).double()
            trace += float(each.mean(0).trace())
            spread = each.var(0).sum().sqrt() / each.mean(0).norm()
            noise.append(float(spread))
        line[way] = {"noise": round(statistics.mean(noise), 4), "trace": round(trace, 4)}
    print(json.dumps(line))
    with args.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
