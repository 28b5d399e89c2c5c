"""Gradients of the model's output distribution at each linear layer, from the head backwards: the Fisher information.

To second order, the KL divergence of a slightly changed model to the model itself is half of the Fisher information of
the change. For one linear layer y = W x with an error E in its weight, with one label a token that follows from the
model's own distribution (`draw_labels`) and g = dLoss/dy of the loss summed over tokens, that is, a token and with
tokens taken as independent,

    KL = 1/2 E[(g^T E x)^2]  ~  1/2 tr(G E H E^T),    H = E[x x^T],    G = E[g g^T |x|^2] / E[|x|^2]

An error of a weight is one error at all tokens, and what it does at one adds up with what it does at the next: keys and
values are where tokens meet. Squares of the weight's whole gradient over a window, `WeightGradients`, know this.

No label of the data is needed. Layers are run backwards one after the other with the weights of one in memory. What
enters every ``step``-th layer was stored on the way forward; what enters those between two of them is computed again
from the nearest one before when it is needed.

Source: the idea, and the product form with weights in both factors, YAQA (Tseng et al. 2025, arXiv 2505.22988). Weights
of tokens in H, which GuidedQuant (Kim et al. 2025, arXiv 2505.07004) has, too, were tried and gained nothing here.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ptqpipe.calibration.activations import Activations
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.experts import SIDES, is_stacked, product_name
from ptqpipe.calibration.gradients import Gradients, LayerSums, nbytes, watched
from ptqpipe.calibration.pairs import PAIRS, PairCollector, most_tokens, nbytes as pair_bytes
from ptqpipe.calibration.runner import Layer, Runner
from ptqpipe.errors import NumericsError
from ptqpipe.runtime.skeleton import Skeleton
from ptqpipe.runtime.stacked_experts import first_stack

HEAD_TOKENS = 256  # whose logits are in memory at once
TOKENS = 16_384  # of samples, all of which are run backwards
SHARE = 8  # run at least one window in 8 backwards
STATES_SHARE = 4  # one in so many bytes may have hidden states: a file, written and read in order, is as fast
_TINY = 1e-30

Slopes = Callable[[int], torch.Tensor]
"""Number of a batch -> dLoss/dx [samples, tokens, hidden] of its hidden states between two layers."""


def least_step(layers: int) -> int:
    """The ``step`` that stores about the fewest hidden states of a model of so many layers: the root of their number,
    rounded up."""
    return math.isqrt(layers - 1) + 1


def streams(layers: int, step: int) -> int:
    """How many sets of hidden states there are at once, at most: what enters every ``step``-th layer and those between
    two of them, and the gradients."""
    return -(-layers // step) + min(step, layers)


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


def run_backward(
    runner: Runner,
    *,
    seed: int,
    store: Callable[[], Activations],
    modules: Callable[[Layer], Sequence[str]],
    step: int = 1,
    of_ranks: tuple[int, int] = (0, 1),
    weights: bool = False,
    pairs: int = 0,
    former: tuple[int, Slopes] | None = None,
    save: Callable[[str, Slopes], None] = lambda name, slopes: None,
) -> Iterator[tuple[str, Gradients]]:
    """(name of a layer, its gradients), the last layer first. Uses the runner up.

    seed     of the labels, which depend on a window's number and not on what runs beside it
    store    opens a place for the hidden states that enter a layer; the caller closes those that are left at the end
    modules  linear layers of a layer (names in the layer), and `expert_products`, that are wanted
    step     1: every layer runs forward once. More: hidden states of every ``step``-th layer are stored, and most
             layers run forward twice; the result is the same
    of_ranks  (rank, world) of this process among those that share the windows: window i of the runner is number
              rank + i * world of all; every process gets the gradients of all windows
    weights  whether to square the gradients of weights and at outputs of stacked experts, too: as much work again as a
             layer takes forward
    pairs    of how many tokens to keep pairs, too; of this process's windows alone
    former   where a stopped pass goes on: how many of the last layers are behind it, and what it has saved
    save     called with the name of a layer, when the caller has its gradients and others are before it, and with what
             the pass goes on from: of each batch dLoss/dx at the layer's input

    NumericsError for hidden states or gradients that are not finite.
    """
    if runner.skeleton.pooling is None:
        runner.skeleton.require_head()  # before the layers run
    entering: dict[int, Activations] = {}
    batches = range(len(runner.batches))

    def keep(index: int, get: Callable[[int], torch.Tensor]) -> None:
        entering[index] = store()
        for batch in batches:
            entering[index].put(batch, get(batch))

    count = len(runner.names) - (0 if former is None else former[0])
    for index in range(count):
        with runner.loaded(index) as layer:
            if index % step == 0 or index >= (count - 1) // step * step:
                keep(index, layer.inputs)
            if former is None or index + 1 < count:
                layer.advance()
    gradients = runner.activations  # of each batch, in the place of its hidden states
    if former is not None:
        for batch in batches:
            gradients.put(batch, former[1](batch))
    else:
        _through_head(runner, gradients, seed, of_ranks)
    world = of_ranks[1]
    for index in reversed(range(count)):
        for before in range(index // step * step, index) if index not in entering else ():
            with runner.loaded(before) as layer, torch.no_grad():
                keep(before + 1, _after(layer, entering[before]))
        with runner.loaded(index) as layer:
            named = (layer.name, layer.module, layer.origins)
            collector = PairCollector(*named, tokens=runner.tokens, most=pairs) if pairs else None
            sums = LayerSums.of(layer, modules(layer), weights=weights)
            _through(layer, sums, entering[index], gradients, collector)
            yield layer.name, sums.merged(layer, world, {} if collector is None else collector.pairs())
        entering.pop(index).close()
        if index:
            save(runner.names[index], gradients.get)


def run_model_backward(
    skeleton: Skeleton,
    samples: Samples,
    *,
    seed: int,
    device: torch.device,
    memory_bytes: int,
    spill: Path,
    modules: Callable[[Layer], Sequence[str]],
    of_ranks: tuple[int, int] = (0, 1),
    weights: bool = False,
    pairs: bool = False,
    former: tuple[int, Slopes] | None = None,
    save: Callable[[str, Slopes], None] = lambda name, slopes: None,
) -> Iterator[tuple[str, Gradients]]:
    """`run_backward` of a whole model, with the hidden states in memory or, where they do not fit, in the existing
    folder ``spill``. Each process takes its share of the samples, of which `thinned` says how many are enough.

    memory_bytes  what weights of a layer, hidden states and sums may take together
    weights       whether to square the gradients of weights and at outputs of stacked experts
    pairs         whether to keep them, of `most_tokens`
    former, save  as `run_backward` has them
    """
    share = slice(of_ranks[0], None, of_ranks[1])
    windows, held_out = samples.windows[share], samples.held_out[share]
    count, tokens = len(skeleton.blocks), windows.numel() + held_out.numel()
    kept = most_tokens(skeleton.blocks, skeleton.origins) if pairs else 0
    memory_bytes -= max(
        nbytes(*_widths(module)) + pair_bytes(name, module, skeleton.origins, kept) for name, module in skeleton.blocks
    )
    step = 1 if skeleton.has_room(tokens, memory_bytes, streams(count, 1)) else least_step(count)
    runner = Runner.open(
        skeleton,
        windows,
        held_out=held_out,
        device=device,
        memory_bytes=memory_bytes // STATES_SHARE,
        spill=spill,
        streams=streams(count, step),
    )
    with runner, contextlib.ExitStack() as opened:

        def store() -> Activations:
            states = runner.activations.another()
            opened.callback(states.close)
            return states

        yield from run_backward(
            runner,
            seed=seed,
            store=store,
            modules=modules,
            step=step,
            of_ranks=of_ranks,
            weights=weights,
            pairs=kept,
            former=former,
            save=save,
        )


def linear_modules(layer: Layer, wanted: set[str] | None = None) -> list[str]:
    """Names in the layer of the modules whose weight is a matrix that is made of checkpoint tensors, all of them
    ``wanted`` ones."""
    names = []
    for name, module in layer.module.named_modules():
        weight = module._parameters.get("weight")
        origins = layer.origins.get(f"{layer.name}.{name}.weight", ())
        if weight is not None and weight.dim() == 2 and origins and (wanted is None or wanted.issuperset(origins)):
            names.append(name)
    return names


def expert_products(layer: Layer, wanted: set[str] | None = None) -> list[str]:
    """The product of each of the layer's stacked experts whose stack is made of checkpoint tensors, all of them
    ``wanted`` ones."""
    products = []
    for name, module in layer.module.named_modules():
        for leaf, side in zip((first_stack(module), "down_proj"), SIDES, strict=True) if is_stacked(module) else ():
            origins = layer.origins.get(f"{layer.name}.{name}.{leaf}", ())
            if origins and (wanted is None or wanted.issuperset(origins)):
                products += [product_name(name, expert, side) for expert in range(len(module.get_parameter(leaf)))]
    return products


def _widths(module: torch.nn.Module) -> tuple[list[int], list[int]]:
    """At most how many outputs each linear layer of a layer has, and each product of a stacked expert."""
    parameters = list(module.named_parameters())
    linear = [max(p.shape) for name, p in parameters if name.endswith(".weight") and p.dim() == 2]
    return linear, [max(p.shape[1:]) for _, p in parameters if p.dim() == 3 for _ in range(len(p))]


def _after(layer: Layer, entering: Activations) -> Callable[[int], torch.Tensor]:
    return lambda batch: layer.forward(entering.get(batch).to(layer.device), batch)


def pieces(x: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of hidden states [samples, tokens, hidden], of HEAD_TOKENS at most, that the head is given one by one."""
    samples = max(1, HEAD_TOKENS // x.shape[1])
    for start in range(0, len(x), samples):
        for first in range(0, x.shape[1], HEAD_TOKENS):
            yield slice(start, start + samples), slice(first, first + HEAD_TOKENS)


def draw_labels(chances: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """One label for each token, int64 [tokens], and what its loss counts, float32 [tokens], from the distributions
    ``chances`` float32 [tokens, vocabulary] on the CPU.

    With p a token's distribution and e a label's unit vector, the slope of the logits is c (e - p); the mean of its
    outer product is the Fisher information diag(p) - p p^T, as it is with c = 1 and labels as likely as p says.
    Of these most say nothing where the model is sure, and few say much. Here a label is as likely as it adds to the
    information's trace, p |e - p|^2, and c makes up for that; so all slopes of a token are equally long. The sign of c
    is drawn, too: the mean of the slope is zero, and what tokens of one window have in common stays what it was.
    """
    lengths = torch.linalg.vecdot(chances, chances).unsqueeze(1)  # |e - p|^2 is 1 + |p|^2 - 2 p_e
    sums = (chances * -2).add_(1 + lengths).clamp_(min=0).mul_(chances).cumsum_(1)
    places, signs = torch.rand(2, len(chances), 1, generator=generator)
    labels = torch.searchsorted(sums, sums[:, -1:] * places, right=True).clamp_(max=chances.shape[1] - 1)
    of_label = (1 + lengths - 2 * chances.gather(1, labels)).clamp_(min=_TINY)
    counts = (sums[:, -1:] / of_label).sqrt_().copysign_(signs - 0.5)
    return labels.squeeze(1), counts.squeeze(1)


def _through_head(runner: Runner, gradients: Activations, seed: int, of_ranks: tuple[int, int]) -> None:
    begun, (rank, world) = 0, of_ranks
    embeds = runner.skeleton.pooling is not None
    with contextlib.nullcontext() if embeds else runner.head():
        for batch, ids in enumerate(runner.batches):
            numbers = [rank + window * world for window in range(begun, begun + len(ids))]
            seeds = [seed * 1_000_003 + number for number in numbers]
            gradients.put(batch, (_from_embedding if embeds else _from_head)(runner, batch, seeds))
            begun += len(ids)


def _from_head(runner: Runner, batch: int, seeds: Sequence[int]) -> torch.Tensor:
    """dLoss/dx of what the last layer returns in a batch, at one label a token. NumericsError where the model's
    distribution is not finite.

    seeds  of the labels, one for each window of the batch
    """
    x, ids = runner.activations.get(batch), runner.batches[batch]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    gradient = torch.empty_like(x)
    for piece in pieces(x):
        rows = x[piece].to(runner.device).detach().requires_grad_(True)
        with torch.enable_grad():
            logits = runner.logits(ids[piece], rows).float()
            chances = logits.detach().softmax(-1)
            if not bool(torch.isfinite(chances).all()):
                raise NumericsError(
                    "the model's logits are not finite; check the weights of its last norm and its head"
                )
            drawn = [draw_labels(p, g) for p, g in zip(chances.cpu(), generators[piece[0]], strict=True)]
            labels, counts = (torch.stack(part).unsqueeze(2).to(logits.device) for part in zip(*drawn, strict=True))
            slopes = chances.mul_(counts).scatter_add_(2, labels, -counts)  # of counts times the labels' losses
            (gradient[piece],) = torch.autograd.grad(logits, rows, slopes)
    return gradient


def _from_embedding(runner: Runner, batch: int, seeds: Sequence[int]) -> torch.Tensor:
    """dLoss/dx of what the last layer returns in a batch of a sentence embedder. The loss of a text is the inner
    product of its embedding, at length 1, with a normal vector: the mean of the slope's outer product is the
    Gauss-Newton matrix of half the squared distance of embeddings, which is one minus their cosine.

    seeds  of the vectors, one for each window of the batch
    """
    rows = runner.activations.get(batch).to(runner.device).detach().requires_grad_(True)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    with torch.enable_grad():
        vectors = torch.nn.functional.normalize(runner.embeddings_of(batch, rows))
        drawn = torch.stack([torch.randn(vectors.shape[1], generator=generator) for generator in generators])
        (gradient,) = torch.autograd.grad(vectors, rows, drawn.to(vectors))
    return gradient


def _through(
    layer: Layer, sums: LayerSums, entering: Activations, leaving: Activations, pairs: PairCollector | None
) -> None:
    """Runs a layer forward and backward, batch by batch, for its sums and ``pairs``; ``leaving`` has the gradients at
    its output, and then those at its input."""
    for batch in range(layer.batches):
        x = entering.get(batch).to(layer.device).requires_grad_(True)
        gradient = leaving.get(batch).to(layer.device)
        rows = gradient.flatten(0, -2)
        sums.outputs[""].add(rows, torch.ones(len(rows), device=layer.device))
        kept = contextlib.nullcontext() if pairs is None else pairs.batch(len(rows))
        with torch.enable_grad(), watched(layer, x.shape[:-1], sums), kept:
            out = layer.forward(x, batch)
            (slope,) = torch.autograd.grad(out, x, gradient)
        if not bool(torch.isfinite(slope).all()):
            raise NumericsError(f"the gradients in '{layer.name}' are not finite; check the model's weights")
        leaving.put(batch, slope)
