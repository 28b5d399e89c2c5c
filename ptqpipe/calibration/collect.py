"""Collects moments of the linear inputs of one decoder layer while it runs, once for modules that share an input.

Watched: linear layers, GPT-2's Conv1D, routers (modules with a matrix of their own that their input fits), and every
expert of stacked experts. Modules that are given the same tensor (q, k and v; gate and up; a router and its experts'
neighbours) share one entry, that of the first of them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.calibration.experts import SIDES, gate_and_up, is_product, is_stacked, observe, product_name
from ptqpipe.calibration.moments import LARGEST, RunningMoments, first_tokens
from ptqpipe.calibration.statistics import of_all_experts
from ptqpipe.errors import not_finite
from ptqpipe.models.families import Family, family_of
from ptqpipe.runtime.skeleton import Skeleton
from ptqpipe.runtime.stacked_experts import first_stack, is_turned


@dataclass(frozen=True, slots=True)
class Slot:
    """One linear input to watch.

    id       its name in the model, for an expert of a stack with the expert's number
    names    checkpoint modules whose input it is
    columns  K
    """

    id: str
    names: tuple[str, ...]
    columns: int

    @property
    def group(self) -> str | None:
        """What stands in for each other: the same projection of all experts. None for what is no expert."""
        shared_name = of_all_experts(self.names[0])
        return shared_name if shared_name != self.names[0] else None


class Collector:
    """Collects while it is open; use as a context manager around the run of a layer."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        origins: Mapping[str, tuple[str, ...]],
        *,
        block: bool,
        full: bool,
        device: torch.device,
        quantiles: bool = True,
        wanted: frozenset[str] | None = None,
    ) -> None:
        """
        name, module  the part of the model to watch
        origins       its parameters and the checkpoint tensors that make them
        block, full   which outer products to sum
        quantiles     whether to count values for them
        wanted        checkpoint modules whose inputs are watched; None: all
        """
        slots = find_slots(name, module, origins)
        self.slots: dict[str, Slot] = {s.id: s for s in slots if wanted is None or not wanted.isdisjoint(s.names)}
        self.leaders: dict[str, str] = {}
        self.moments: dict[str, RunningMoments] = {}
        self.held_out: dict[str, RunningMoments] = {}  # the same of inputs that were shown while ``holding_out``
        self.holding_out = False
        self._name = name
        self._module = module
        self.empty: Callable[[int], RunningMoments] = lambda columns: RunningMoments.empty(
            columns, block=block, full=full, device=device, quantiles=quantiles
        )
        self._hooks: list[Any] = []
        self._stacked: list[torch.nn.Module] = []
        self._seen: dict[tuple[int, int, int, int], tuple[str, torch.Tensor]] = {}
        self._windows = (0, 0)  # of the batch that runs: samples and tokens

    def __enter__(self) -> "Collector":
        self._hooks.append(self._module.register_forward_pre_hook(self._starts))
        for path, module in _named(self._name, self._module):
            if is_stacked(module):
                observe(module, self._expert_observer(path))
                self._stacked.append(module)
            elif path in self.slots:
                self._hooks.append(module.register_forward_pre_hook(self._hook(path), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._stacked:
            observe(module, None)
        self._hooks, self._stacked, self._seen = [], [], {}

    def start(self, shape: Sequence[int]) -> None:
        """Begins a batch of hidden states [samples, tokens, hidden]."""
        self._windows = (shape[0], shape[1])
        self._seen.clear()

    def see(self, slot: str, x: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        """Adds the rows [..., K] that a slot is given, those of ``tokens`` int64 of the batch, or of all. NumericsError
        where one is not finite."""
        if slot not in self.slots:
            return
        columns = self.slots[slot].columns
        if x.shape[-1] != columns or not x.numel():
            return
        leader = self.leaders.get(slot) or self._assign(slot, x)
        if leader != slot:
            return
        moments = self.held_out if self.holding_out else self.moments
        if slot not in moments:
            moments[slot] = self.empty(columns)
        rows = x.reshape(-1, columns)
        first = first_tokens(self._windows, len(rows)) if tokens is None else tokens % self._windows[1] == 0
        if not moments[slot].add(rows, first):
            bad = x.numel() - int((x.abs() < LARGEST).sum())
            name = self.slots[slot].names[0]
            raise not_finite(
                f"the input of '{name}' has {bad} of {x.numel()} values that are NaN, inf or huge", x.dtype
            )

    def _assign(self, slot: str, x: torch.Tensor) -> str:
        """The slot that has this very tensor already; kept alive until the layer's next batch, so its place is its
        name."""
        place = (x.data_ptr(), x.numel(), x.shape[-1], x._version)
        leader = self._seen.setdefault(place, (slot, x))[0]
        self.leaders[slot] = leader
        return leader

    def _starts(self, _module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self.start(next(x.shape for x in args if isinstance(x, torch.Tensor)))

    def _hook(self, slot: str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(x, torch.Tensor):
                self.see(slot, x)

        return hook

    def _expert_observer(self, path: str) -> Callable[[int, str, torch.Tensor, torch.Tensor], None]:
        return lambda expert, side, x, tokens: self.see(product_name(path, expert, side), x, tokens)


def sums_of_layers(skeleton: Skeleton, *, block: bool, full: bool, held_out: bool, experts: bool = True) -> list[int]:
    """The bytes in float64 that the moments of each decoder layer take while it runs, less where inputs are shared.
    ``held_out``: those sums, too. ``experts``: of all stacked experts together, else of one at a time."""
    sums = []
    for name, module in (*skeleton.blocks, *skeleton.mtp):
        linear, stacked = [0], [0]
        for slot in find_slots(name, module, skeleton.origins):
            nbytes = RunningMoments.nbytes(slot.columns, block=block, full=full)
            (stacked if is_product(slot.id) else linear).append(nbytes)
        sums.append((2 if held_out else 1) * (sum(linear) + (sum if experts else max)(stacked)))
    return sums


def find_attention(
    name: str, module: torch.nn.Module, origins: Mapping[str, tuple[str, ...]]
) -> tuple[str, str] | None:
    """The names of the attention module of a layer: in the layer, and in the checkpoint. None where there is none."""
    for path, child in _named(name, module):
        if path != name and hasattr(child, "layer_idx") and "attention" in type(child).__name__.lower():
            for parameter, tensors in origins.items():
                leaf = parameter.removeprefix(f"{path}.")
                if parameter.startswith(f"{path}.") and tensors and tensors[0].endswith(f".{leaf}"):
                    return path.removeprefix(f"{name}."), tensors[0].removesuffix(f".{leaf}")
            return path.removeprefix(f"{name}."), path
    return None


def _named(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for path, child in module.named_modules():
        yield (f"{name}.{path}" if path else name), child


def find_slots(name: str, module: torch.nn.Module, origins: Mapping[str, tuple[str, ...]]) -> Iterator[Slot]:
    """The linear inputs of a part of a model that have a name in the checkpoint."""
    configs = (child.config for child in module.modules() if hasattr(child, "config"))
    family = family_of({"model_type": getattr(next(configs, None), "model_type", None)})
    for path, child in _named(name, module):
        if is_stacked(child):
            yield from _expert_slots(path, child, origins, family)
            continue
        columns = _columns(child)
        names = tuple(origin.removesuffix(".weight") for origin in origins.get(f"{path}.weight", ()))
        if columns and names:
            yield Slot(path, names, columns)


def _columns(module: torch.nn.Module) -> int:
    """K of a module that multiplies its input by a matrix of its own, else 0."""
    from transformers.pytorch_utils import Conv1D

    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or isinstance(module, torch.nn.Embedding):
        return 0
    return int(weight.shape[0] if isinstance(module, Conv1D) else weight.shape[1])


def _expert_slots(path: str, module: Any, origins: Mapping[str, tuple[str, ...]], family: Family) -> Iterator[Slot]:
    """The inputs of both products of every expert, with the names that they have in the checkpoint."""
    for leaf, side in zip((first_stack(module), "down_proj"), SIDES, strict=True):
        stack = getattr(module, leaf)
        columns = int(stack.shape[1] if is_turned(module) else stack.shape[2])
        apart, together = _by_expert(origins.get(f"{path}.{leaf}", ()))
        for expert in range(stack.shape[0]):
            names = (*apart.get(expert, ()), *_places_in(together, expert, family))
            if names:
                yield Slot(product_name(path, expert, side), names, columns)


def rows_of_names(module: Any, slot: Slot, outputs: int) -> dict[str, slice]:
    """Checkpoint module of an expert of ``module`` -> which of the ``outputs`` of its product are that module's."""
    apart = [name for name in slot.names if not name.endswith("]")]
    parts = gate_and_up(module, outputs) if len(apart) == 2 else [slice(0, outputs)] * len(apart)
    return dict.fromkeys(slot.names, slice(0, outputs)) | dict(zip(apart, parts, strict=True))


def _by_expert(origins: Sequence[str]) -> tuple[dict[int, list[str]], list[str]]:
    """Checkpoint modules by the expert that is in their name, and tensors that are stacks of all."""
    apart: dict[int, list[str]] = {}
    together: list[str] = []
    for origin in origins:
        number = re.search(r"\.experts\.(\d+)\.", origin)
        if number is None:
            together.append(origin)
        else:
            apart.setdefault(int(number[1]), []).append(origin.removesuffix(".weight"))
    return apart, together


def _places_in(stacks: Sequence[str], expert: int, family: Family) -> Iterator[str]:
    """The place of an expert in ``stacks``, by both names that a converted checkpoint may have for it:
    ``experts.down_proj[3]`` and ``experts.3.down_proj``; of gate_up_proj also ``experts.3.gate_proj`` and
    ``experts.3.up_proj``.
    """
    for stack in stacks:
        yield f"{stack}[{expert}]"
        yield from (name.format(expert) for name in family.single_experts(stack.removesuffix(".weight")))
