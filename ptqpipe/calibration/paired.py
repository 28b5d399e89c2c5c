"""Moments of a layer's inputs in two runs: on what the float model gives it, and on what a quantized one does.

Sums as in ``moments.py``: float32 products over one batch, batches added in float64. It must not know formats, files or
what the moments are for.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ptqpipe.calibration.capture import StopForward
from ptqpipe.calibration.experts import Observer, observe
from ptqpipe.calibration.moments import symmetric
from ptqpipe.calibration.runner import Block
from ptqpipe.errors import NumericsError
from ptqpipe.rotation import rotated


class Quantizer(Protocol):
    """What happens to a layer's input: it is rotated by blocks of ``rotation`` columns (0: not), then quantized."""

    @property
    def rotation(self) -> int: ...

    def quantized(self, x: torch.Tensor, /) -> torch.Tensor: ...


_EXPERT = re.compile(r"(.*)\[(\d+)\]\.(up|down)")


@dataclass(frozen=True, slots=True)
class Paired:
    """Second moments of the input of a module, x in the float model and x' in the quantized one. float32 [K, K].

    moment  E[x' x'^T]
    cross   E[x x'^T]

    Where the layer rotates its input both are of the rotated one.
    """

    moment: torch.Tensor
    cross: torch.Tensor


def call_order(block: Block, modules: Sequence[str]) -> list[str]:
    """Those of ``modules`` (names in the block) that the block calls, in the order in which it does."""
    order: list[str] = []
    watched = [
        block.module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: order.append(name))
        for name in modules
    ]
    try:
        with torch.no_grad():
            block.forward(block.inputs(0), 0)
    finally:
        for handle in watched:
            handle.remove()
    return list(dict.fromkeys(order))


def paired_moments(
    block: Block,
    modules: Sequence[str],
    *,
    batches: Sequence[int],
    given: Callable[[int], torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    quantizers: Mapping[str, Quantizer],
) -> dict[str, Paired]:
    """The moments of the inputs of ``modules`` (names in the block, each called once a run); those that are given one
    input share the object.

    given       hidden states of a batch as the quantized blocks before this one return them
    parameters  the block's quantized parameters so far, by their names in the block
    quantizers  what happens to a module's input in the quantized model, by module; nothing where there is none

    NumericsError for inputs that are not finite.
    """
    leaders: dict[str, str] = {}
    sums: dict[tuple[str, int], torch.Tensor] = {}  # float64
    tokens = 0
    for batch in batches:
        exact = _inputs(block, modules, {}, block.inputs(batch), batch, {})
        found = _inputs(block, modules, quantizers, given(batch), batch, parameters)
        if not leaders:
            leaders = _leaders(modules, exact, quantizers)
        for name in dict.fromkeys(leaders.values()):
            x, seen = (rows[name].reshape(-1, rows[name].shape[-1]).float() for rows in (exact, found))
            x = rotated(x, quantizers[name].rotation) if name in quantizers else x
            for place, product in enumerate((symmetric(seen, seen), x.t() @ seen)):
                sums.setdefault((name, place), torch.zeros_like(product, dtype=torch.float64)).add_(product)
        tokens += exact[modules[0]].shape[:-1].numel()
    names = dict.fromkeys(leaders.values())
    means = {name: Paired(*((sums[name, place] / tokens).float() for place in (0, 1))) for name in names}
    for name, pair in means.items():
        if not bool(torch.isfinite(pair.moment).all()) or not bool(torch.isfinite(pair.cross).all()):
            raise NumericsError(f"the input of '{block.name}.{name}' is not finite; check the model's weights")
    return {name: means[leaders[name]] for name in modules}


def _inputs(
    block: Block,
    modules: Sequence[str],
    quantizers: Mapping[str, Quantizer],
    hidden: torch.Tensor,
    batch: int,
    parameters: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Module -> its (quantized) input in one run, which ends when all are seen."""
    seen: dict[str, torch.Tensor] = {}

    def hook_of(name: str) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen[name] = args[0]
            if len(seen) == len(modules):
                raise StopForward

        return hook

    with torch.no_grad(), quantized_inputs(block.module, quantizers):
        handles = [block.module.get_submodule(name).register_forward_pre_hook(hook_of(name)) for name in modules]
        try:
            with contextlib.suppress(StopForward):
                block.forward(hidden, batch, parameters=parameters)
        finally:
            for handle in handles:
                handle.remove()
    return seen


def _leaders(
    modules: Sequence[str], inputs: Mapping[str, torch.Tensor], quantizers: Mapping[str, Quantizer]
) -> dict[str, str]:
    """Module -> the first module that is given the same tensor, and does the same with it."""
    found: dict[str, str] = {}
    for name in modules:
        x = inputs[name]
        same = (
            other
            for other in found
            if inputs[other].data_ptr() == x.data_ptr()
            and inputs[other].shape == x.shape
            and quantizers.get(other) == quantizers.get(name)
        )
        found[name] = next(same, name)
    return found


@contextlib.contextmanager
def quantized_inputs(module: torch.nn.Module, quantizers: Mapping[str, Quantizer]) -> Iterator[None]:
    """The inputs of submodules of ``module`` are quantized while it is open; gradients pass straight through.

    quantizers  by the submodule's name; of stacked experts by ``<name>[<expert>].up`` and ``.down``, for the inputs of
                their first and second product
    """

    last: list[tuple[torch.Tensor, int, Quantizer, torch.Tensor]] = []  # q, k and v are given the same tensor

    def hook_of(quantizer: Quantizer) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x = args[0]
            if not (last and last[0][0] is x and last[0][1] == x._version and last[0][2] == quantizer):
                last[:] = [(x, x._version, quantizer, _straight_through(quantizer, x))]
            return (last[0][3], *args[1:])

        return hook

    stacks: dict[str, dict[tuple[int, str], Quantizer]] = {}
    handles = []
    for name, quantizer in quantizers.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            stacks.setdefault(match[1], {})[int(match[2]), match[3]] = quantizer
            continue
        handles.append(module.get_submodule(name).register_forward_pre_hook(hook_of(quantizer)))
    for name, of_stack in stacks.items():
        observe(module.get_submodule(name), _expert_quantizer(of_stack))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name in stacks:
            observe(module.get_submodule(name), None)


def _expert_quantizer(quantizers: Mapping[tuple[int, str], Quantizer]) -> Observer:
    def quantized(expert: int, side: str, x: torch.Tensor) -> torch.Tensor | None:
        found = quantizers.get((expert, side))
        return None if found is None else _straight_through(found, x)

    return quantized


def _straight_through(quantizer: Quantizer, x: torch.Tensor) -> torch.Tensor:
    x = rotated(x, quantizer.rotation)
    if not torch.is_grad_enabled():
        return quantizer.quantized(x)
    return x + (quantizer.quantized(x.detach()) - x.detach())
