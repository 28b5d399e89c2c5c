"""Sums of the gradients in one decoder layer while it runs backwards: at the outputs of its linear layers and of
stacked experts, at its own output, and of weights by windows of text.

It must not know how the model is run; ``backward.py`` does.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ptqpipe.calibration.collect import find_slots, rows_of_names
from ptqpipe.calibration.experts import (
    LEAST_TOKENS,
    OutputObserver,
    attached,
    is_product,
    observe,
    product_name,
    stack_of,
)
from ptqpipe.calibration.inputs import EXPERT_ROWS, OUT_ROWS, WeightGradients
from ptqpipe.calibration.merge import merge_added, merge_windows
from ptqpipe.calibration.moments import add_outer, mirror
from ptqpipe.calibration.pairs import Pair
from ptqpipe.calibration.runner import Layer
from ptqpipe.errors import NumericsError, arg

SQUARED = 1 << 20  # numbers of a weight's gradients, of some windows and rows, that are in memory at once


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the gradients at the outputs of a layer's linear layers say; float32 on the CPU.

    outputs  module of the layer, or product of a stacked expert (``<module>[<expert>].up`` and ``.down``) ->
             block-diagonal E[g g^T], blocks [b, b] of OUT_ROWS outputs, of EXPERT_ROWS for an expert
    last     the same at the output of the layer itself
    weights  module of the layer -> of its weight, where asked for; none of a module that is not given every token once
    experts  with them, checkpoint module of a stacked expert -> float32 [N] E[g^2] of its outputs, means over all
             tokens, of which it is given some
    named    with them, checkpoint module, of stacked experts, too -> what ``outputs`` has of it; none of a parameter
             that is made of several checkpoint tensors
    pairs    input of linear layers, by its name in statistics -> inputs and gradients at it, where they are kept
    """

    outputs: Mapping[str, Sequence[torch.Tensor]]
    last: Sequence[torch.Tensor]
    weights: Mapping[str, WeightGradients] = field(default_factory=dict)
    experts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    named: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    pairs: Mapping[str, Pair] = field(default_factory=dict)


def rows_of(outputs: Sequence[torch.Tensor], places: torch.Tensor) -> list[torch.Tensor]:
    """``outputs`` of `Gradients` for a matrix whose rows are the outputs ``places`` int64 [n] of the module."""
    blocks, size = [], len(outputs[0])
    for run in torch.split(places, size):
        block = torch.zeros(len(run), len(run))
        for number, stored in enumerate(outputs):
            here = (run // size == number).nonzero().squeeze(1)
            inside = run[here] - number * size
            block[here.unsqueeze(1), here] = stored[inside.unsqueeze(1), inside]
        blocks.append(block)
    return blocks


def nbytes(outputs: Sequence[int], experts: Sequence[int] = ()) -> int:
    """What the sums over a layer take whose linear layers have these numbers of outputs, and whose products of stacked
    experts those, at their peak."""
    sizes = [(m, OUT_ROWS) for m in outputs] + [(m, EXPERT_ROWS) for m in experts]
    return sum(16 * m * min(m, run) for m, run in sizes)


class OutputSums:
    """Of the gradients at one linear layer, at one product of a stacked expert, or at the layer's output."""

    def __init__(self, run: int = OUT_ROWS) -> None:
        self.run = run
        self.parts: list[torch.Tensor] = []  # float64, of every run of outputs; and the number of tokens [1]
        self.total = 0.0

    @property
    def tokens(self) -> int:
        return int(self.parts[-1]) if self.parts else 0

    def add(self, g: torch.Tensor, energy: torch.Tensor) -> None:
        """Adds gradients [tokens, m] and what each token counts [tokens]."""
        weighted = g.float() * energy.sqrt().unsqueeze(1)
        # bfloat16 has float32's range, float16 has not.
        runs = torch.split(weighted.bfloat16() if g.dtype == torch.bfloat16 else weighted, self.run, dim=1)
        if not self.parts:
            shapes = [(run.shape[1], run.shape[1]) for run in runs]
            self.parts = [torch.zeros(s, dtype=torch.float64, device=g.device) for s in (*shapes, (1,))]
        for part, run in zip(self.parts, runs, strict=False):  # the last part is the number of tokens
            add_outer(part, run)
        self.parts[-1] += len(g)
        self.total += float(energy.double().sum())

    def means(self) -> list[torch.Tensor]:
        """By runs, symmetric."""
        for part in self.parts[:-1]:
            mirror(part)
        return [(part / self.total).float().cpu() for part in self.parts[:-1]]


class WeightSums:
    """Of the gradients of one weight over windows, as `WeightGradients` has them."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []  # float64: rows and columns
        self.along: list[torch.Tensor] = []  # float64 [windows] of each call
        self.total = 0.0

    def add(self, w: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> None:
        """Adds windows of a weight [N, K]: inputs [windows, tokens, K] and gradients at the outputs, of the same dtype,
        [windows, tokens, N]."""
        f64 = torch.float64
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
        """Per token, of the sums of all processes; and of the windows of all of them. NumericsError where they are not
        finite."""
        rows, columns = ((part / self.total).float().cpu() for part in self.parts)
        along = merge_windows(torch.cat(self.along).float(), world=world)
        if not bool(torch.isfinite(torch.cat((rows, columns, along))).all()):
            raise NumericsError(
                "the squares of a weight's gradients are NaN, or too large for float32; check the model's weights, or "
                f"leave kl out of {arg('moments')}"
            )
        return WeightGradients(rows, columns, along)


class ExpertSums:
    """Of the gradients at the outputs of one product of a stacked expert: squares, and how many tokens it was given."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []  # float64 [N] and [1]
        self.total = 0.0

    def add(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """Adds inputs [tokens, K] and gradients at the outputs [tokens, N], weighted as in `OutputSums`."""
        energy = x.float().square().mean(1)
        squares = energy @ g.float().square()
        added = [squares.double(), torch.tensor([float(len(x))], dtype=torch.float64, device=x.device)]
        self.parts = [a.add_(b) for a, b in zip(self.parts, added, strict=True)] if self.parts else added
        self.total += float(energy.double().sum())


@dataclass(frozen=True, slots=True)
class LayerSums:
    """Over one layer.

    outputs  by module, or by product of a stacked expert; by "" those at the layer's output
    weights  by module, where they are asked for
    experts  by slot of stacked experts, likewise
    """

    outputs: dict[str, OutputSums]
    weights: dict[str, WeightSums]
    experts: dict[str, ExpertSums]

    @classmethod
    def of(cls, layer: Layer, modules: Sequence[str], *, weights: bool) -> "LayerSums":
        squares = {name: WeightSums() for name in modules if weights}
        slots = find_slots(layer.name, layer.module, layer.origins) if weights else ()
        experts = {slot.id: ExpertSums() for slot in slots if is_product(slot.id)}
        outputs = {name: OutputSums(EXPERT_ROWS if is_product(name) else OUT_ROWS) for name in ("", *modules)}
        return cls(outputs, squares, experts)

    def merged(self, layer: Layer, world: int, pairs: Mapping[str, Pair]) -> Gradients:
        """Of all processes; every one of them calls it."""
        for by_name in (self.outputs, self.weights, self.experts):
            merge_added(by_name, world=world)
        tokens = self.outputs[""].total
        enough = {name: LEAST_TOKENS if is_product(name) else 1 for name in self.outputs}
        means = {
            name: sums.means() for name, sums in self.outputs.items() if sums.tokens >= enough[name] and sums.total > 0
        }
        weights = {name: sums.means(world) for name, sums in self.weights.items() if sums.total == tokens}
        last = means.pop("")
        named = by_checkpoint(layer, means) if self.weights else {}
        return Gradients(means, last, weights, self._of_experts(layer, tokens), named, pairs)

    def _of_experts(self, layer: Layer, tokens: float) -> dict[str, torch.Tensor]:
        """As `Gradients` has them. An expert that was given few tokens has the mean of its group."""
        moments: dict[str, torch.Tensor] = {}
        slots = {slot.id: slot for slot in find_slots(layer.name, layer.module, layer.origins)}
        groups: dict[str | None, list[ExpertSums]] = {}
        for name, sums in self.experts.items():
            groups.setdefault(slots[name].group, []).extend([sums] if sums.parts else [])
        for name, sums in self.experts.items():
            tokens_here = float(sums.parts[1]) if sums.parts else 0.0
            chosen = [sums] if tokens_here >= LEAST_TOKENS else groups[slots[name].group]
            energy = sum(each.total for each in chosen)
            if not energy > 0:
                continue
            moment = torch.stack([each.parts[0] for each in chosen]).sum(0) / energy * max(tokens_here, 1.0) / tokens
            module = layer.module.get_submodule(stack_of(name).removeprefix(f"{layer.name}."))
            for checkpoint, rows in rows_of_names(module, slots[name], len(moment)).items():
                moments[checkpoint] = moment[rows].float().cpu()
        return moments


def by_checkpoint(layer: Layer, outputs: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, Sequence[torch.Tensor]]:
    """``outputs`` of `Gradients` by checkpoint modules, as its ``named``."""
    slots = {slot.id: slot for slot in find_slots(layer.name, layer.module, layer.origins)}
    by_name: dict[str, Sequence[torch.Tensor]] = {}
    for place, runs in outputs.items():
        if not is_product(place):
            made_of = layer.origins.get(f"{layer.name}.{place}.weight", ())
            by_name |= {made_of[0].removesuffix(".weight"): runs} if len(made_of) == 1 else {}
        elif f"{layer.name}.{place}" in slots:
            slot, module = slots[f"{layer.name}.{place}"], layer.module.get_submodule(stack_of(place))
            every = torch.arange(sum(map(len, runs)))
            named = rows_of_names(module, slot, len(every))
            by_name |= {name: rows_of(runs, every[rows]) for name, rows in named.items()}
    return by_name


def _matrix(linear: torch.nn.Module) -> torch.Tensor:
    """The weight of a module as [N, K]."""
    from transformers.pytorch_utils import Conv1D

    weight = linear.get_parameter("weight").detach()
    return weight.t() if isinstance(linear, Conv1D) else weight


@contextlib.contextmanager
def watched(layer: Layer, windows: tuple[int, ...], sums: LayerSums) -> Iterator[None]:
    """While it is open, gradients at the outputs of submodules and of stacked experts go into their sums, and those of
    the weights of modules that are given all tokens [windows, tokens] into their squares."""

    def hook_of(name: str) -> Any:
        squares = sums.weights.get(name)

        def hook(linear: torch.nn.Module, args: tuple[torch.Tensor, ...], out: Any) -> None:
            if not (isinstance(out, torch.Tensor) and out.requires_grad):
                return
            x, w = args[0].detach(), _matrix(linear)
            energy, version = x.flatten(0, -2).float().square().mean(1), x._version
            whole = x.shape[:-1] in (windows, (math.prod(windows),)) and (out.shape[-1], x.shape[-1]) == w.shape

            def see(g: torch.Tensor) -> None:
                sums.outputs[name].add(g.flatten(0, -2), energy)
                if squares is not None and whole and x._version == version:  # not changed since
                    squares.add(w, *(part.reshape(*windows, -1) for part in (x, g.to(x.dtype))))

            out.register_hook(see)

        return hook

    def outputs_of(stack: str) -> OutputObserver:
        def see(expert: int, side: str, x: torch.Tensor, out: torch.Tensor) -> None:
            name, rows = product_name(stack, expert, side), x.detach()
            squares, outer = sums.experts.get(f"{layer.name}.{name}"), sums.outputs.get(name)
            if squares is not None and out.requires_grad:
                out.register_hook(lambda g: squares.add(rows, g))
            if outer is not None and out.requires_grad:
                energy = rows.float().square().mean(1)
                out.register_hook(lambda g: outer.add(g, energy))

        return see

    module = layer.module
    linear = [name for name in sums.outputs if name and not is_product(name)]
    handles = [module.get_submodule(name).register_forward_hook(hook_of(name)) for name in linear]
    products = [*(name.removeprefix(f"{layer.name}.") for name in sums.experts), *filter(is_product, sums.outputs)]
    stacks = {stack: module.get_submodule(stack) for stack in map(stack_of, products)}
    for stack, experts in stacks.items():
        observe(experts, None, outputs_of(stack))
    try:
        with attached(handles):
            yield
    finally:
        for experts in stacks.values():
            observe(experts, None)
