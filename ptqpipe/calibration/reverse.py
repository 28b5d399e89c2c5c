"""How much the model's output distribution minds an error at each linear layer: gradients, from the head backwards.

To second order, the KL divergence of a slightly changed model to the model itself is half of the Fisher information of
the change. For one linear layer y = W x with an error E in its weight, with one label a token that is drawn from the
model's own distribution and g = dLoss/dy of the loss summed over tokens, that is, a token and with tokens taken as
independent,

    KL = 1/2 E[(g^T E x)^2]  ~  1/2 tr(G E H E^T),    H = E[x x^T],    G = E[g g^T |x|^2] / E[|x|^2]

An error of a weight is one error at all tokens, and what it does at one adds up with what it does at the next: keys and
values are where tokens meet. Squares of the weight's whole gradient over a window, `WeightGradients`, know this.

No label of the data is needed. Blocks are run backwards one after the other with the weights of one in memory. What
enters every ``step``-th block was stored on the way forward; what enters those between two of them is computed again
from the nearest one before when it is needed.

Source: the idea, and the product form with weights in both factors, YAQA (Tseng et al. 2025, arXiv 2505.22988). Weights
of tokens in H, which GuidedQuant (Kim et al. 2025, arXiv 2505.07004) has, too, were tried and gained nothing here.
It must not know formats, files or what the moments are for.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ptqpipe.calibration.activations import Activations, InMemory, OnDisk
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.merge import merge_added, merge_windows
from ptqpipe.calibration.moments import symmetric
from ptqpipe.calibration.pairs import PAIRS, Pair, PairCollector, most_tokens, nbytes as pair_bytes
from ptqpipe.calibration.runner import Block, Runner
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.errors import NumericsError
from ptqpipe.inputs import OUT_ROWS, WeightGradients

HEAD_TOKENS = 256  # whose logits are in memory at once
TOKENS = 16_384  # of samples, all of which are run backwards
SQUARED = 1 << 20  # numbers of a weight's gradients, of some windows and rows, that are in memory at once
SHARE = 8  # of more samples at least one of so many


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the gradients at the outputs of a block's linear layers say; float32 on the CPU.

    outputs  module of the block -> E[g g^T] of every run of OUT_ROWS of its outputs, [b, b] each: what lies between
             two runs counts as zero
    last     E[g g^T] by runs likewise, at the output of the block itself
    weights  module of the block -> of its weight, where asked for; none of a module that is not given every token once
    pairs    input of linear layers, by its name in statistics -> inputs and gradients at it, where they are kept
    """

    outputs: Mapping[str, Sequence[torch.Tensor]]
    last: Sequence[torch.Tensor]
    weights: Mapping[str, WeightGradients] = field(default_factory=dict)
    pairs: Mapping[str, Pair] = field(default_factory=dict)


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


def least_step(blocks: int) -> int:
    """The ``step`` that stores about the fewest hidden states of a model of so many blocks: the root of their number,
    rounded up."""
    return math.isqrt(blocks - 1) + 1


def streams(blocks: int, step: int) -> int:
    """How many sets of hidden states there are at once, at most: what enters every ``step``-th block and those between
    two of them, and the gradients."""
    return -(-blocks // step) + min(step, blocks)


def enough(windows: int, seqlen: int, *, pairs: bool = False) -> int:
    """How many of so many windows of ``seqlen`` tokens are run backwards: all of TOKENS tokens, or with ``pairs`` of
    PAIRS, but at least one of SHARE. More of them change the moments of gradients, and what they lead to, by less than
    another text does; what is learned from pairs gains by more of them."""
    return min(windows, max(1, (PAIRS if pairs else TOKENS) // seqlen, windows // SHARE))


def thinned(samples: Samples, world: int = 1, *, pairs: bool = False) -> Samples:
    """The samples that are run backwards, evenly spread over those that may be; at least one for each of ``world``
    processes."""
    count, seqlen = samples.windows.shape
    most = max(enough(count, seqlen, pairs=pairs), min(count, world))
    return samples.spread(most) if count > most else samples


def reverse(
    runner: Runner,
    *,
    seed: int,
    store: Callable[[], Activations],
    modules: Callable[[Block], Sequence[str]],
    step: int = 1,
    of_ranks: tuple[int, int] = (0, 1),
    weights: bool = False,
    pairs: int = 0,
) -> Iterator[tuple[str, Gradients]]:
    """(name of a block, its gradients), the last block first. Uses the runner up.

    seed     of the labels, which depend on a window's number and not on what runs beside it
    store    opens a place for the hidden states that enter a block; the caller closes those that are left at the end
    modules  linear layers of a block (names in the block) that are wanted
    step     1: every block runs forward once. More: hidden states of every ``step``-th block are stored, and most
             blocks run forward twice; the result is the same
    of_ranks  (rank, world) of this process among those that share the windows: window i of the runner is number
              rank + i * world of all; every process gets the gradients of all windows
    weights  whether to square the gradients of weights, too: as much work again as a block takes forward
    pairs    of how many tokens to keep pairs, too; of this process's windows alone

    NumericsError for hidden states or gradients that are not finite.
    """
    entering: dict[int, Activations] = {}
    batches = range(len(runner.batches))

    def keep(index: int, get: Callable[[int], torch.Tensor]) -> None:
        entering[index] = store()
        for batch in batches:
            entering[index].put(batch, get(batch))

    count = len(runner.names)
    for block in runner.blocks():
        if block.index % step == 0 or block.index >= (count - 1) // step * step:
            keep(block.index, block.inputs)
        block.advance()
    gradients = runner.activations  # of each batch, in the place of its hidden states
    begun, (rank, world) = 0, of_ranks
    with runner.head():
        for batch in batches:
            windows = range(begun, begun + len(runner.batches[batch]))
            numbers = [rank + window * world for window in windows]
            gradients.put(batch, _from_head(runner, batch, [seed * 1_000_003 + number for number in numbers]))
            begun = windows.stop
    for index in reversed(range(count)):
        for before in range(index // step * step, index) if index not in entering else ():
            with runner.loaded(before) as block, torch.no_grad():
                keep(before + 1, _after(block, entering[before]))
        with runner.loaded(index) as block:
            known = (block.name, block.module, block.origins)
            collector = PairCollector(*known, tokens=runner.tokens, most=pairs) if pairs else None
            sums, squares = _through(block, modules(block), entering[index], gradients, collector, weights=weights)
            merge_added(sums, world=world)
            merge_added(squares, world=world)
            means = {name: of.means() for name, of in sums.items() if of.total > 0}
            of_weights = {name: of.means(world) for name, of in squares.items() if of.total == sums[""].total}
            last = means.pop("")
            yield block.name, Gradients(means, last, of_weights, {} if collector is None else collector.pairs())
        entering.pop(index).close()


def reverse_model(
    skeleton: Skeleton,
    samples: Samples,
    *,
    seed: int,
    device: torch.device,
    memory_bytes: int,
    spill: Path,
    modules: Callable[[Block], Sequence[str]],
    of_ranks: tuple[int, int] = (0, 1),
    weights: bool = False,
    pairs: bool = False,
) -> Iterator[tuple[str, Gradients]]:
    """`reverse` of a whole model, with the hidden states in memory or, where they do not fit, in ``spill``, a folder
    that exists. Each process takes its share of the samples, of which `thinned` says how many are enough.

    memory_bytes  what weights of a block, hidden states and sums may take together
    weights       whether to square the gradients of weights
    pairs         whether to keep them, of `most_tokens`
    """
    share = slice(of_ranks[0], None, of_ranks[1])
    windows, held_out = samples.windows[share], samples.held_out[share]
    count, tokens = len(skeleton.blocks), windows.numel() + held_out.numel()
    kept = most_tokens(skeleton.blocks, skeleton.origins) if pairs else 0
    memory_bytes -= max(
        nbytes(_widths(module)) + pair_bytes(name, module, skeleton.origins, kept) for name, module in skeleton.blocks
    )
    step = 1 if skeleton.has_room(tokens, memory_bytes, streams(count, 1)) else least_step(count)
    runner = Runner.open(
        skeleton,
        windows,
        held_out=held_out,
        device=device,
        memory_bytes=memory_bytes,
        spill=spill,
        streams=streams(count, step),
    )
    with runner, contextlib.ExitStack() as opened:
        disk = isinstance(runner.activations, OnDisk)

        def store() -> Activations:
            made: Activations = OnDisk(spill) if disk else InMemory()
            opened.callback(made.close)
            return made

        yield from reverse(
            runner,
            seed=seed,
            store=store,
            modules=modules,
            step=step,
            of_ranks=of_ranks,
            weights=weights,
            pairs=kept,
        )


def linear_modules(block: Block, wanted: set[str] | None = None) -> list[str]:
    """Names in the block of the modules whose weight is a matrix that is made of checkpoint tensors, all of them
    ``wanted`` ones."""
    found = []
    for name, module in block.module.named_modules():
        weight = module._parameters.get("weight")
        origins = block.origins.get(f"{block.name}.{name}.weight", ())
        if weight is not None and weight.dim() == 2 and origins and (wanted is None or wanted.issuperset(origins)):
            found.append(name)
    return found


def _widths(module: torch.nn.Module) -> list[int]:
    """At most how many outputs each linear layer of a block has."""
    return [max(p.shape) for name, p in module.named_parameters() if name.endswith(".weight") and p.dim() == 2]


def _after(block: Block, entering: Activations) -> Callable[[int], torch.Tensor]:
    """What makes the hidden states of a batch that leave the block."""
    return lambda batch: block.forward(entering.get(batch).to(block.device), batch)


def pieces(x: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of hidden states [samples, tokens, hidden], of HEAD_TOKENS at most, that the head is given one by one."""
    samples = max(1, HEAD_TOKENS // x.shape[1])
    for start in range(0, len(x), samples):
        for first in range(0, x.shape[1], HEAD_TOKENS):
            yield slice(start, start + samples), slice(first, first + HEAD_TOKENS)


def _from_head(runner: Runner, batch: int, seeds: Sequence[int]) -> torch.Tensor:
    """dLoss/dx of what the last block returns in a batch, at one label a token drawn from the model's distribution.
    NumericsError where that is not finite.

    seeds  of the labels, one for each window of the batch
    """
    x, ids = runner.activations.get(batch), runner.batches[batch]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    found = torch.empty_like(x)
    for piece in pieces(x):
        rows = x[piece].to(runner.device).detach().requires_grad_(True)
        with torch.enable_grad():
            logits = runner.logits(ids[piece], rows).float()
            chances = logits.detach().softmax(-1).cpu()
            if not bool(torch.isfinite(chances).all()):
                raise NumericsError(
                    "the model's logits are not finite; check the weights of its last norm and its head"
                )
            drawn = [torch.multinomial(p, 1, generator=g) for p, g in zip(chances, generators[piece[0]], strict=True)]
            labels = torch.cat(drawn).squeeze(1).to(logits.device)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels, reduction="sum")
            (found[piece],) = torch.autograd.grad(loss, rows)
    return found


class _GradientSums:
    """Of the gradients at one linear layer, or at the block's output."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []  # float64, of every run of OUT_ROWS
        self.total = 0.0

    def add(self, g: torch.Tensor, energy: torch.Tensor) -> None:
        """Adds gradients [tokens, m] and what each token counts [tokens]."""
        weighted = g * energy.unsqueeze(1)
        pairs = zip(torch.split(g, OUT_ROWS, dim=1), torch.split(weighted, OUT_ROWS, dim=1), strict=True)
        outer = [symmetric(run, other).double() for run, other in pairs]
        self.parts = [a.add_(b) for a, b in zip(self.parts, outer, strict=True)] if self.parts else outer
        self.total += float(energy.double().sum())

    def means(self) -> list[torch.Tensor]:
        """By runs, symmetric."""
        return [((h + h.t()) / (2 * self.total)).float().cpu() for h in self.parts]


class _SquareSums:
    """Of the gradients of one weight over windows, as `WeightGradients` has them."""

    def __init__(self, module: torch.nn.Module) -> None:
        from transformers.pytorch_utils import Conv1D

        weight = module.get_parameter("weight").detach()
        self._weight = weight.t() if isinstance(module, Conv1D) else weight
        self.parts: list[torch.Tensor] = []  # float64: rows and columns
        self.along: list[torch.Tensor] = []  # float64 [windows] of each call
        self.total = 0.0

    def add(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """Adds windows: inputs [windows, tokens, K] and gradients at the outputs [windows, tokens, N], of one dtype."""
        w, f64 = self._weight, torch.float64
        rows, columns = self.parts or [torch.zeros(size, dtype=f64, device=w.device) for size in w.shape]
        run = max(1, min(w.shape[0], SQUARED // w.shape[1]))
        count = max(1, SQUARED // (run * w.shape[1]))
        for some_x, some_g in zip(torch.split(x, count), torch.split(g, count), strict=True):
            along = torch.zeros(len(some_x), dtype=f64, device=w.device)
            for start in range(0, w.shape[0], run):
                here = slice(start, start + run)
                d = torch.bmm(some_g[:, :, here].transpose(1, 2), some_x).float()
                along += (d * w[here]).sum((1, 2), dtype=f64)
                d.square_()
                rows[here] += d.sum((0, 2))
                columns += d.sum((0, 1))
            self.along.append(along / x.shape[1] ** 0.5)
        self.parts = [rows, columns]
        self.total += x.shape[0] * x.shape[1]

    def means(self, world: int) -> WeightGradients:
        """Per token; of this process's sums, which are those of all, and of the windows of all processes."""
        rows, columns = ((part / self.total).float().cpu() for part in self.parts)
        return WeightGradients(rows, columns, merge_windows(torch.cat(self.along).float(), world=world))


def _through(
    block: Block,
    modules: Sequence[str],
    entering: Activations,
    leaving: Activations,
    pairs: PairCollector | None,
    *,
    weights: bool,
) -> tuple[dict[str, _GradientSums], dict[str, _SquareSums]]:
    """Sums of the gradients in a block: at its modules and, by the name "", at its output; and of the ``weights`` of
    its modules. ``leaving`` then has the gradients at its input, and ``pairs`` what it collects."""
    sums = {name: _GradientSums() for name in ("", *modules)}
    squares = {name: _SquareSums(block.module.get_submodule(name)) for name in modules if weights}
    for batch in range(block.batches):
        x = entering.get(batch).to(block.device).requires_grad_(True)
        gradient = leaving.get(batch).to(block.device)
        rows = gradient.flatten(0, -2).float()
        sums[""].add(rows, torch.ones(len(rows), device=block.device))
        kept = contextlib.nullcontext() if pairs is None else pairs.batch(len(rows))
        with torch.enable_grad(), _watched(block.module, x.shape[:-1], sums, squares), kept:
            out = block.forward(x, batch)
            (found,) = torch.autograd.grad(out, x, gradient)
        if not bool(torch.isfinite(found).all()):
            raise NumericsError(f"the gradients in '{block.name}' are not finite; check the model's weights")
        leaving.put(batch, found)
    return sums, squares


@contextlib.contextmanager
def _watched(
    module: torch.nn.Module,
    windows: tuple[int, ...],
    sums: Mapping[str, _GradientSums],
    squares: Mapping[str, _SquareSums],
) -> Iterator[None]:
    """While it is open, gradients at the outputs of submodules go into their sums, and those of the weights of modules
    that are given all tokens [windows, tokens] into their squares."""

    def hook_of(name: str) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], out: Any) -> None:
            if not (isinstance(out, torch.Tensor) and out.requires_grad):
                return
            x = args[0].detach()
            energy = x.flatten(0, -2).float().square().mean(1)
            whole = name in squares and len(energy) == math.prod(windows)

            def see(g: torch.Tensor) -> None:
                sums[name].add(g.flatten(0, -2).float(), energy)
                if whole:
                    squares[name].add(*(part.reshape(*windows, -1) for part in (x, g.to(x.dtype))))

            out.register_hook(see)

        return hook

    handles = [module.get_submodule(name).register_forward_hook(hook_of(name)) for name in sums if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
