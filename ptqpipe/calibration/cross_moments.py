"""Moments of a layer's inputs in two runs: on what the float model gives it, and on what a quantized one does.

Sums as in ``moments.py``: float32 products over one batch, batches added in float64.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ptqpipe.calibration.experts import Observer, attached, is_stacked, observe, rows_of_token, stack_of
from ptqpipe.calibration.moments import NO_ROWS, Rows, add_outer, first_tokens, mirror, weight_of, weighted
from ptqpipe.calibration.runner import Layer, Runner
from ptqpipe.errors import NumericsError
from ptqpipe.numerics.rotation import rotated
from ptqpipe.runtime.capture import StopForward
from ptqpipe.runtime.skeleton import Skeleton


class Quantizer(Protocol):
    """What happens to a layer's input: it is rotated by layers of ``rotation`` columns (0: not), then quantized."""

    @property
    def rotation(self) -> int: ...

    def quantized(self, x: torch.Tensor, /) -> torch.Tensor: ...


_Q = TypeVar("_Q", bound=Quantizer)
_EXPERT = re.compile(r"(.*)\[(\d+)\]\.(up|down)")


@dataclass(frozen=True, slots=True)
class CrossMoments:
    """Second moments of the input of a module, x in the float model and x' in the quantized one. float32 [K, K].

    moment  E[x' x'^T]
    cross   E[x x'^T]

    Where the layer rotates its input both are of the rotated one.
    """

    moment: torch.Tensor
    cross: torch.Tensor


class CrossSums:
    """Running float64 sums behind `CrossMoments`."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._weight = 0.0

    def add(self, x: torch.Tensor, seen: torch.Tensor, first: Rows = NO_ROWS) -> None:
        """Adds inputs [tokens, K] in the float model and in the quantized one; ``first`` as `weighted` has it."""
        if not self._sums:
            self._sums = [x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64) for _ in range(2)]
        self._weight += weight_of(x, first)
        x, seen = weighted(x, first), weighted(seen, first)
        add_outer(self._sums[0], seen)
        add_outer(self._sums[1], x, seen)

    def mean(self, name: str) -> CrossMoments:
        """NumericsError for inputs, those of ``name``, that are not finite."""
        mirror(self._sums[0])
        means = CrossMoments(*((each / self._weight).float() for each in self._sums))
        if not bool(torch.isfinite(means.moment).all()) or not bool(torch.isfinite(means.cross).all()):
            raise NumericsError(f"the input of '{name}' is not finite; check the model's weights")
        return means


class ActivationCache:
    """Caches a layer's inputs and outputs between passes.

    modules  those that are watched, names in the layer
    batches  whose tensors are kept: as many as memory has room for
    order    the watched modules that the layer calls, by their first call
    settled  those whose weight and input in the quantized model will not change any more: outputs of no others are kept
    """

    def __init__(self, modules: Iterable[str], batches: Iterable[int]) -> None:
        self.modules = tuple(dict.fromkeys(modules))
        self.batches = frozenset(batches)
        self.order: list[str] = []
        self.settled: list[str] = []
        self._inputs: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}  # with its version: it may be overwritten
        self._outputs: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}

    @contextlib.contextmanager
    def watching(self, layer: Layer, batch: int) -> Iterator[None]:
        """While it is open, the float layer runs over a batch."""

        def hook_of(name: str) -> Any:
            def hook(_module: torch.nn.Module, args: tuple[Any, ...]) -> None:
                if name not in self.order:
                    self.order.append(name)
                if batch in self.batches and args:
                    self._inputs[batch, name] = args[0], args[0]._version

            return hook

        hooks = {name: hook_of(name) for name in self.modules if batch in self.batches or not batch}
        handles = [layer.module.get_submodule(name).register_forward_pre_hook(hook) for name, hook in hooks.items()]
        with attached(handles):
            yield

    def inputs(self, batch: int, modules: Sequence[str]) -> dict[str, torch.Tensor] | None:
        """Module -> its input in the float model; None unless all of them are known. They are forgotten then."""
        inputs = {name: _unchanged(self._inputs.pop((batch, name), None)) for name in modules}
        valid = {name: x for name, x in inputs.items() if x is not None}
        return valid if len(valid) == len(inputs) else None

    def settle(self, chosen: Collection[str]) -> None:
        """``chosen`` are the modules whose weights are: settled are those before the first of the others."""
        self.settled = list(itertools.takewhile(lambda name: name in chosen, self.order))

    def outputs(self, batch: int) -> dict[str, torch.Tensor]:
        """Module -> its output in the quantized model, of settled ones that have run in it."""
        cached = {name: _unchanged(self._outputs.get((batch, name))) for name in self.settled}
        return {name: x for name, x in cached.items() if x is not None}

    def left(self, batch: int, quantizers: Mapping[str, _Q]) -> dict[str, _Q]:
        """Those of ``quantizers``, by place in the layer, whose module runs again: its output is not known."""
        ready = self.outputs(batch)
        return {place: q for place, q in quantizers.items() if stack_of(place) not in ready}

    @contextlib.contextmanager
    def reusing(self, layer: Layer, batch: int) -> Iterator[None]:
        """While it is open, the quantized layer runs over a batch: modules with a cached output compute nothing, and
        outputs of other settled ones are kept."""

        def hook_of(name: str) -> Any:
            def hook(_module: torch.nn.Module, _args: Any, out: torch.Tensor) -> None:
                self._outputs[batch, name] = out, out._version

            return hook

        ready = self.outputs(batch)
        new = [name for name in self.settled if name not in ready and batch in self.batches]
        handles = [layer.module.get_submodule(name).register_forward_hook(hook_of(name)) for name in new]
        modules = {name: layer.module.get_submodule(name) for name in ready}
        own = {name: vars(module).get("forward") for name, module in modules.items()}  # of stacked experts, observed
        for name, module in modules.items():
            vars(module)["forward"] = lambda *_args, out=ready[name], **_kwargs: out
        try:
            with attached(handles):
                yield
        finally:
            for name, module in modules.items():
                del module.forward
                if own[name] is not None:
                    vars(module)["forward"] = own[name]


def _unchanged(kept: tuple[torch.Tensor, int] | None) -> torch.Tensor | None:
    """A tensor that nothing has written into since it was kept: some models add to the output of a layer in place."""
    return None if kept is None or kept[0]._version != kept[1] else kept[0]


def cached_streams(skeleton: Skeleton) -> int:
    """Sets of hidden states that `ActivationCache` keeps at most: of each module its input, then its output."""
    hidden: int = skeleton.model.config.get_text_config().hidden_size
    widths = (
        sum(max(p.shape) for p in module.parameters() if p.dim() == 2)
        + sum(hidden * rows_of_token(child) for child in module.modules() if is_stacked(child))
        for _, module in skeleton.blocks
    )
    return -(-max(widths) // hidden)


def cached_batches(runner: Runner, batches: Iterable[int], memory_bytes: int, *, streams: int) -> list[int]:
    """The first of ``batches`` whose tensors `ActivationCache` may keep in ``memory_bytes``, beside the weights of a
    layer and ``streams`` sets of hidden states of all batches. Not all freed memory is used again: measured, a quarter
    more."""
    left = runner.skeleton.room(memory_bytes) - streams * runner.tokens
    left = max(0, left) * 3 // 4 // cached_streams(runner.skeleton)  # tokens
    fitting = []
    for batch in batches:
        if runner.batches[batch].numel() <= left:
            fitting.append(batch)
            left -= runner.batches[batch].numel()
    return fitting


def collect_cross_moments(
    layer: Layer,
    modules: Sequence[str],
    *,
    batches: Sequence[int],
    entering: Callable[[int], torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    quantizers: Mapping[str, Quantizer],
    cache: ActivationCache,
) -> dict[str, CrossMoments]:
    """The moments of the inputs of ``modules`` (names in the layer, each called once a run); those that are given one
    input share the object.

    entering    hidden states of a batch as the quantized layers before this one return them
    parameters  the layer's quantized parameters so far, by their names in the layer
    quantizers  what happens to a module's input in the quantized model, by module; nothing where there is none
    cache       of earlier runs; more is, afterwards

    NumericsError for inputs that are not finite.
    """
    sums: dict[str, CrossSums] = {}
    leaders: dict[str, str] = {}
    for batch in batches:
        rows = paired_inputs(layer, modules, leaders, batch, entering, parameters, quantizers, cache)
        for name, (x, seen) in rows.items():
            sums.setdefault(name, CrossSums()).add(x, seen, first_tokens(layer.windows(batch), len(x)))
    means = {name: total.mean(f"{layer.name}.{name}") for name, total in sums.items()}
    return {name: means[leaders[name]] for name in modules}


def paired_inputs(
    layer: Layer,
    modules: Sequence[str],
    leaders: dict[str, str],
    batch: int,
    entering: Callable[[int], torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    quantizers: Mapping[str, Quantizer],
    cache: ActivationCache,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The inputs of ``modules`` in one batch, in the float model and in the quantized one, [tokens, K] each in the
    layer's dtype and rotated where the layer rotates its input; by the first of the modules that are given it. The
    other arguments are those of `collect_cross_moments`.

    leaders  module -> that first one; found out and noted here where it is empty
    """
    names = list(dict.fromkeys(leaders.values())) or modules
    exact = cache.inputs(batch, modules) or _inputs(layer, names, {}, layer.inputs(batch), batch, {})
    if not leaders:
        leaders |= _leaders(modules, exact, quantizers)
        names = list(dict.fromkeys(leaders.values()))
    with cache.reusing(layer, batch):
        in_quantized = _inputs(layer, names, cache.left(batch, quantizers), entering(batch), batch, parameters)
    both = {}
    for name in names:
        x, seen = (rows[name].reshape(-1, rows[name].shape[-1]) for rows in (exact, in_quantized))
        both[name] = rotated(x, quantizers[name].rotation) if name in quantizers else x, seen
    return both


def _inputs(
    layer: Layer,
    modules: Sequence[str],
    quantizers: Mapping[str, Quantizer],
    hidden: torch.Tensor,
    batch: int,
    parameters: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    return {name: args[0] for name, args in arguments(layer, modules, quantizers, hidden, batch, parameters).items()}


def arguments(
    layer: Layer,
    modules: Sequence[str],
    quantizers: Mapping[str, Quantizer],
    hidden: torch.Tensor,
    batch: int,
    parameters: Mapping[str, torch.Tensor],
) -> dict[str, tuple[Any, ...]]:
    """Module -> all that it is given in one run, which ends when all are seen."""
    seen: dict[str, tuple[Any, ...]] = {}

    def hook_of(name: str) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = (*args, *kwargs.values())
            if len(seen) == len(modules):
                raise StopForward

        return hook

    with torch.no_grad(), quantized_inputs(layer.module, quantizers):
        handles = [
            layer.module.get_submodule(name).register_forward_pre_hook(hook_of(name), with_kwargs=True)
            for name in modules
        ]
        with attached(handles), contextlib.suppress(StopForward):
            layer.forward(hidden, batch, parameters=parameters)
    return seen


def _leaders(
    modules: Sequence[str], inputs: Mapping[str, torch.Tensor], quantizers: Mapping[str, Quantizer]
) -> dict[str, str]:
    """Module -> the first module that is given the same tensor, and does the same with it."""
    leaders: dict[str, str] = {}
    for name in modules:
        x = inputs[name]
        same = (
            other
            for other in leaders
            if inputs[other].data_ptr() == x.data_ptr()
            and inputs[other].shape == x.shape
            and quantizers.get(other) == quantizers.get(name)
        )
        leaders[name] = next(same, name)
    return leaders


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
        with attached(handles):
            yield
    finally:
        for name in stacks:
            observe(module.get_submodule(name), None)


def _expert_quantizer(quantizers: Mapping[tuple[int, str], Quantizer]) -> Observer:
    def quantized(expert: int, side: str, x: torch.Tensor, _tokens: torch.Tensor) -> torch.Tensor | None:
        quantizer = quantizers.get((expert, side))
        return None if quantizer is None else _straight_through(quantizer, x)

    return quantized


def _straight_through(quantizer: Quantizer, x: torch.Tensor) -> torch.Tensor:
    x = rotated(x, quantizer.rotation)
    if not torch.is_grad_enabled():
        return quantizer.quantized(x)
    return x + (quantizer.quantized(x.detach()) - x.detach())
