"""How much the model's output distribution minds an error at each linear layer: gradients, from the head backwards.

To second order, the KL divergence of a slightly changed model to the model itself is half of the Fisher information of
the change. For one linear layer y = W x with an error E in its weight, with one label a token that is drawn from the
model's own distribution and g = dLoss/dy of the loss summed over tokens, that is, a token and with tokens taken as
independent,

    KL = 1/2 E[(g^T E x)^2]  ~  1/2 tr(G E H E^T),    H = E[x x^T],    G = E[g g^T |x|^2] / E[|x|^2]

No label of the data is needed. Blocks are run backwards one after the other with the weights of one in memory; what
enters each was stored on the way forward.

Source: the idea, and the product form with weights in both factors, YAQA (Tseng et al. 2025, arXiv 2505.22988). Weights
of tokens in H, which GuidedQuant (Kim et al. 2025, arXiv 2505.07004) has, too, were tried and gained nothing here.
It must not know formats, files or what the moments are for.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.calibration.activations import Activations
from ptqpipe.calibration.runner import Block, Runner
from ptqpipe.errors import NumericsError
from ptqpipe.inputs import OUT_ROWS

HEAD_TOKENS = 256  # whose logits are in memory at once


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the gradients at the outputs of a block's linear layers say; float32 on the CPU.

    outputs  module of the block -> E[g g^T] of every run of OUT_ROWS of its outputs, [b, b] each: what lies between
             two runs counts as zero
    last     E[g g^T] by runs likewise, at the output of the block itself
    """

    outputs: Mapping[str, Sequence[torch.Tensor]]
    last: Sequence[torch.Tensor]


def rows_of(outputs: Sequence[torch.Tensor], places: torch.Tensor) -> list[torch.Tensor]:
    """``outputs`` of `Gradients` for a matrix whose rows are the outputs ``places`` int64 [n] of the module."""
    found = []
    for run in torch.split(places, OUT_ROWS):
        made = torch.zeros(len(run), len(run))
        for number, known in enumerate(outputs):
            here = (run // OUT_ROWS == number).nonzero().squeeze(1)
            inside = run[here] - number * OUT_ROWS
            made[here.unsqueeze(1), here] = known[inside.unsqueeze(1), inside]
        found.append(made)
    return found


def nbytes(outputs: Sequence[int]) -> int:
    """What the sums over a block take whose linear layers have these numbers of outputs, at their peak."""
    return sum(16 * m * min(m, OUT_ROWS) for m in outputs)


def reverse(
    runner: Runner,
    *,
    batches: Sequence[int],
    seed: int,
    store: Callable[[], Activations],
    modules: Callable[[Block], Sequence[str]],
) -> Iterator[tuple[str, Gradients]]:
    """(name of a block, its gradients), the last block first. Uses the runner up.

    batches  whose tokens count
    seed     of the labels
    store    opens a place for hidden states: one for every block, and one for gradients; the caller closes them
    modules  linear layers of a block (names in the block) that are wanted

    NumericsError for gradients that are not finite.
    """
    entering: list[Activations] = []
    for block in runner.blocks():
        entering.append(store())
        for batch in batches:
            entering[-1].put(batch, block.inputs(batch))
    leaving = store()
    with runner.head():
        for batch in batches:
            leaving.put(batch, _from_head(runner, batch, seed))
    for block in runner.blocks_backwards():
        yield block.name, _through(block, modules(block), batches, entering[block.index], leaving)


def _from_head(runner: Runner, batch: int, seed: int) -> torch.Tensor:
    """dLoss/dx of what the last block returns in a batch, at one label a token drawn from the model's distribution."""
    x, ids = runner.activations.get(batch), runner.batches[batch]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + batch)
    found = torch.empty_like(x)
    samples = max(1, HEAD_TOKENS // x.shape[1])
    for part in (slice(start, start + samples) for start in range(0, len(x), samples)):
        for run in (slice(start, start + HEAD_TOKENS) for start in range(0, x.shape[1], HEAD_TOKENS)):
            rows = x[part, run].to(runner.device).detach().requires_grad_(True)
            with torch.enable_grad():
                logits = runner.logits(ids[part, run], rows).float().flatten(0, -2)
                labels = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator).squeeze(1)
                loss = torch.nn.functional.cross_entropy(logits, labels.to(logits.device), reduction="sum")
                (found[part, run],) = torch.autograd.grad(loss, rows)
    return found


class _Sums:
    """Of the gradients at one linear layer, or at the block's output."""

    def __init__(self) -> None:
        self.outer: list[torch.Tensor] = []  # float64
        self.total = 0.0

    def add(self, g: torch.Tensor, energy: torch.Tensor) -> None:
        """Gradients [tokens, m] and what each token counts [tokens]."""
        weighted = g * energy.unsqueeze(1)
        pairs = zip(torch.split(g, OUT_ROWS, dim=1), torch.split(weighted, OUT_ROWS, dim=1), strict=True)
        outer = [(run.t() @ other).double() for run, other in pairs]
        self.outer = [a.add_(b) for a, b in zip(self.outer, outer, strict=True)] if self.outer else outer
        self.total += float(energy.double().sum())

    def means(self) -> list[torch.Tensor]:
        """By runs, symmetric."""
        return [((h + h.t()) / (2 * self.total)).float().cpu() for h in self.outer]


def _through(
    block: Block, modules: Sequence[str], batches: Sequence[int], entering: Activations, leaving: Activations
) -> Gradients:
    """The gradients in a block; ``leaving`` then has those at its input."""
    sums = {name: _Sums() for name in ("", *modules)}
    for batch in batches:
        x = entering.get(batch).to(block.device).requires_grad_(True)
        gradient = leaving.get(batch).to(block.device)
        rows = gradient.flatten(0, -2).float()
        sums[""].add(rows, torch.ones(len(rows), device=block.device))
        with torch.enable_grad(), _watched(block.module, modules, sums):
            out = block.forward(x, batch)
            (found,) = torch.autograd.grad(out, x, gradient)
        if not bool(torch.isfinite(found).all()):
            raise NumericsError(f"the gradients in '{block.name}' are not finite; check the model's weights")
        leaving.put(batch, found)
    means = {name: of.means() for name, of in sums.items() if of.total > 0}
    last = means.pop("")
    return Gradients(means, last)


@contextlib.contextmanager
def _watched(module: torch.nn.Module, modules: Sequence[str], sums: Mapping[str, _Sums]) -> Iterator[None]:
    """While it is open, gradients at the outputs of submodules go into their sums."""

    def hook_of(name: str) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], out: Any) -> None:
            if not (isinstance(out, torch.Tensor) and out.requires_grad):
                return
            energy = args[0].detach().flatten(0, -2).float().square().mean(1)
            see = lambda g: sums[name].add(g.flatten(0, -2).float(), energy)  # noqa: E731
            out.register_hook(see)  # type: ignore[no-untyped-call]

        return hook

    handles = [module.get_submodule(name).register_forward_hook(hook_of(name)) for name in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
