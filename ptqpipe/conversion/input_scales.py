"""The static scales of the inputs of units: a constant, or from statistics.

Readers fuse the gate and up projections of all experts of a layer, so these have one scale, which is found once.
"""

import re
import threading
from collections import defaultdict

import torch

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.conversion.input_moments import module_of
from ptqpipe.numerics.schemes import Activation
from ptqpipe.quantization import fp8_scale, nvfp4_scale, static_amax
from ptqpipe.recipe.plan import Unit
from ptqpipe.recipe.recipe import Recipe

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.([^.]+)")


class InputScales:
    """The static scale of every unit's input. What experts share is read once and kept; may be asked by threads."""

    def __init__(self, recipe: Recipe, statistics: Statistics | None) -> None:
        """``statistics`` None: the constant of the recipe."""
        self._recipe = recipe
        self._statistics = statistics
        self._experts: dict[tuple[str, str], list[str]] | None = None  # (experts, leaf) -> modules
        self._shared: dict[tuple[float, str, tuple[str, ...]], float] = {}
        self._lock = threading.Lock()

    def of(self, unit: Unit) -> list[torch.Tensor | None]:
        """The scale of every member's input, float32 0-d, which they share; None where the scheme has none."""
        largest = unit.scheme.activation.static_max
        if largest is None:
            return [None] * len(unit.members)
        statistics = self._statistics
        if statistics is None:
            constant = torch.tensor(self._recipe.largest_input(unit.scheme.activation), dtype=torch.float32) / largest
            return [constant] * len(unit.members)
        amax = 0.0
        alone = []
        for module in map(module_of, unit.members):
            match = _EXPERT.fullmatch(module)
            leaves = () if match is None else self._fused_with(match[2])
            if match is None or len(leaves) == 1:
                alone.append(module)
            else:
                amax = max(amax, self._of_experts(statistics, match[1], leaves, largest))
        amax = max(amax, self._amax(statistics, alone, largest))
        nvfp4 = unit.scheme.activation is Activation.NVFP4_STATIC_GLOBAL
        scale = (nvfp4_scale if nvfp4 else fp8_scale)(amax, headroom=self._recipe.headroom)
        return [scale] * len(unit.members)

    def _fused_with(self, leaf: str) -> tuple[str, ...]:
        return next((group for group in self._recipe.fuse if leaf in group), (leaf,))

    def _of_experts(self, statistics: Statistics, experts: str, leaves: tuple[str, ...], largest: float) -> float:
        key = (largest, experts, leaves)
        with self._lock:
            if key not in self._shared:
                index = self._index(statistics)
                modules = [module for leaf in leaves for module in index.get((experts, leaf), ())]
                self._shared[key] = self._amax(statistics, modules, largest)
            return self._shared[key]

    def _index(self, statistics: Statistics) -> dict[tuple[str, str], list[str]]:
        """(experts, leaf) -> the modules of that projection."""
        if self._experts is None:
            self._experts = defaultdict(list)
            for module in statistics.modules:
                match = _EXPERT.fullmatch(module)
                if match is not None:
                    self._experts[match[1], match[2]].append(module)
        return self._experts

    def _amax(self, statistics: Statistics, modules: list[str], largest: float) -> float:
        """The largest activation that must not clip, over the inputs of these modules; 0 for none."""
        first = {statistics.key(module): module for module in reversed(modules)}  # each input once
        amax = 0.0
        for module in first.values():
            stored = statistics.of(module)
            bound = static_amax(
                stored.amax,
                stored.second_moment,
                stored.quantiles,
                policy=self._recipe.input_scale,
                largest=largest,
                name=module,
            )
            amax = max(amax, bound)
        return amax
