"""Pairs (x, h) of tokens that run backwards: an input of linear layers, and the gradient h = dLoss/dx at it.

What an error e of an input costs in KL divergence is, to second order and with tokens taken as independent, half of the
mean of (e . h)^2. For layers y = W x that share an input, h is the sum of W^T dLoss/dy over them. Of the experts of a
layer, which are given what all tokens are, it is the sum over those that a token is sent to. Routers are no part of it:
they are not quantized.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ptqpipe.calibration.collect import find_slots
from ptqpipe.calibration.experts import is_stacked

PAIRS = 32_768  # tokens of which pairs are kept, where so many are given
LEAST, NUMBERS = 256, 1 << 30  # fewer where all of a model would have more numbers, but not below the least
_SEED = 20240526

Pair = tuple[torch.Tensor, torch.Tensor]
"""x and h, both bfloat16 [tokens, K]."""


def places_of(tokens: int, most: int) -> torch.Tensor:
    """int64 [``most`` or fewer]: of so many tokens in a row those that are kept, one drawn from each of equal runs: all
    samples, and all places in them, have their share."""
    count = min(tokens, most)
    within = torch.rand(count, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    return ((torch.arange(count) + within) * tokens / max(1, count)).long()


def watched_modules(name: str, module: torch.nn.Module, origins: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Name in a layer of each module whose input is watched -> the name by which statistics know it."""
    from transformers.pytorch_utils import Conv1D

    slots = {slot.id: slot for slot in find_slots(name, module, origins)}
    names_of = {}
    for path, child in module.named_modules():
        slot = slots.get(f"{name}.{path}[0].up" if is_stacked(child) else f"{name}.{path}")
        if slot is not None and (is_stacked(child) or isinstance(child, torch.nn.Linear | Conv1D)):
            names_of[path] = slot.group or slot.names[0]
    return names_of


def most_tokens(layers: Sequence[tuple[str, torch.nn.Module]], origins: Mapping[str, tuple[str, ...]]) -> int:
    """Of how many tokens a model's pairs are kept; layers that share an input count as if they did not."""
    return most_pairs(sum(sum(_columns(name, module, origins)) for name, module in layers))


def most_pairs(columns: int) -> int:
    """The same of a model whose inputs have so many columns together."""
    return max(LEAST, min(PAIRS, NUMBERS // max(1, 2 * columns)))


def nbytes(name: str, module: torch.nn.Module, origins: Mapping[str, tuple[str, ...]], most: int) -> int:
    """What the pairs of a layer, of ``most`` tokens, take at their peak, when the parts of all batches are joined; less
    where layers share an input."""
    columns = _columns(name, module, origins)
    return (sum(columns) + max(columns, default=0)) * most * 2 * 2


def _columns(name: str, module: torch.nn.Module, origins: Mapping[str, tuple[str, ...]]) -> list[int]:
    slots = {slot.id: slot.columns for slot in find_slots(name, module, origins)}
    return [
        slots.get(f"{name}.{path}") or slots[f"{name}.{path}[0].up"] for path in watched_modules(name, module, origins)
    ]


class PairCollector:
    """The pairs of one layer, batch by batch."""

    def __init__(
        self, name: str, module: torch.nn.Module, origins: Mapping[str, tuple[str, ...]], *, tokens: int, most: int
    ) -> None:
        """``tokens``: of all batches together, of which ``most`` are kept."""
        self._module, self._names = module, watched_modules(name, module, origins)
        self._places, self._begun = places_of(tokens, most), 0
        self._found: dict[str, list[Pair]] = {}

    @contextlib.contextmanager
    def batch(self, tokens: int) -> Iterator[None]:
        """While it is open, the next batch, of so many tokens, runs through the layer and back."""
        places = self._places - self._begun
        rows = places[(places >= 0) & (places < tokens)]
        self._begun += tokens
        seen: dict[Any, tuple[str, torch.Tensor]] = {}  # kept alive, so that its place in memory is its name
        inputs: dict[str, torch.Tensor] = {}
        gradients: dict[str, torch.Tensor] = {}

        def hook_of(path: str, stacked: bool) -> Any:
            def hook(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
                if not args or not args[0].requires_grad or args[0].shape[:-1].numel() != tokens:
                    return None
                x = args[0]
                place = path if stacked else (x.data_ptr(), x.numel(), x.shape[-1], x._version)
                leader = seen.setdefault(place, (path, x))[0]
                if leader == path:
                    inputs[path] = x.detach().flatten(0, -2)[rows]
                    gradients[path] = torch.zeros_like(inputs[path], dtype=torch.float32)
                own = x.view_as(x)  # the gradient at it is that of this module alone

                def add(g: torch.Tensor) -> None:
                    gradients[leader].add_(g.flatten(0, -2)[rows])

                own.register_hook(add)
                return (own, *args[1:])

            return hook

        named = [(path, self._module.get_submodule(path)) for path in self._names]
        handles = [child.register_forward_pre_hook(hook_of(path, is_stacked(child))) for path, child in named]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for path, x in inputs.items():
            pair = (x.bfloat16().cpu(), gradients[path].bfloat16().cpu())
            self._found.setdefault(self._names[path], []).append(pair)

    def pairs(self) -> dict[str, Pair]:
        """Name in statistics of an input -> its pairs, in the order of the tokens. Consumes them."""
        pairs = {}
        for name in list(self._found):
            x, h = zip(*self._found.pop(name), strict=True)
            pairs[name] = (torch.cat(x), torch.cat(h))
        return pairs
