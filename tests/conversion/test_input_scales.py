"""Claims about static scales of activations: shared where runtimes fuse, and found once."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ptqpipe.calibration.inputs import InputStatistics
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.conversion.input_scales import InputScales
from ptqpipe.numerics.schemes import Activation, get_scheme
from ptqpipe.recipe.file import build_recipe
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.recipe.plan import Unit, make_plan
from ptqpipe.recipe.recipe import Recipe, Rule
from ptqpipe.runtime.input_quantizers import InputQuantizer

LAYERS, EXPERTS = 3, 8
LEAVES = ("gate_proj", "up_proj", "down_proj")


class Counted(Statistics):
    """Statistics of a mixture of experts, each expert with inputs of its own: how often each module is asked for."""

    def __init__(self) -> None:
        names = [
            f"model.layers.{i}.mlp.experts.{e}.{leaf}" for i in range(LAYERS) for e in range(EXPERTS) for leaf in LEAVES
        ]
        self.path = Path("counted")
        self.content = {"modules": {name: {"key": name.replace("up_proj", "gate_proj")} for name in names}}
        self.asked: list[str] = []
        self.listed = 0

    @property
    def modules(self) -> Any:
        self.listed += 1
        return self.content["modules"].keys()

    def of(self, module: str, *, block: bool = False, full: bool = False, held_out: bool = False) -> InputStatistics:
        self.asked.append(module)
        amax = torch.full((64,), amax_of(module))
        return InputStatistics(amax.square(), tokens=1, amax=amax, mean=amax)


def amax_of(module: str) -> float:
    parts = module.split(".")
    return 1.0 + int(parts[2]) + 10.0 * int(parts[5]) + (500.0 if parts[6] == "down_proj" else 0.0)


@pytest.fixture
def recipe() -> Recipe:
    return build_recipe(RecipeOptions(format="nvfp4_w4a4"))


def units(recipe: Recipe) -> list[Unit]:
    tensors = {f"{name}.weight": ("BF16", (64, 64)) for name in Counted().content["modules"]}
    return list(make_plan(tensors, {"model_type": "qwen3_moe"}, recipe=recipe).units)


def test_experts_share_the_scale_of_what_is_fused_and_keep_their_own_down(recipe: Recipe) -> None:
    scales = InputScales(recipe, Counted())
    planned = units(recipe)
    assert sum(len(unit.members) for unit in planned) == LAYERS * EXPERTS * len(LEAVES)
    for unit in planned:
        found = scales.of(unit)
        assert len({float(scale) for scale in found if scale is not None}) == 1
        module = unit.members[0].module
        layer, expert = int(module.split(".")[2]), int(module.split(".")[5])
        largest = 501.0 + layer + 10.0 * expert if "down" in module else 1.0 + layer + 10.0 * (EXPERTS - 1)
        assert found[0] is not None
        assert math.isclose(float(found[0]), largest / 2688.0, rel_tol=1e-4)  # up to the canonical one beside it


def test_every_input_is_read_once_and_the_names_are_looked_through_once(recipe: Recipe) -> None:
    statistics = Counted()
    scales = InputScales(recipe, statistics)
    for unit in units(recipe):
        scales.of(unit)
    assert sorted(statistics.asked) == sorted({m for m in statistics.content["modules"] if "up_proj" not in m})
    assert statistics.listed == 1


@pytest.mark.parametrize(
    ("given", "nvfp4", "fp8"), [(None, 2928 / (6 * 448), 336 / 448), (448.0, 448 / (6 * 448), 448 / 448)]
)
def test_without_statistics_each_format_has_its_constant_unless_one_is_given(
    given: float | None, nvfp4: float, fp8: float
) -> None:
    rules = (Rule("*.down_proj", get_scheme("fp8_static")), Rule("*", get_scheme("nvfp4_w4a4")))
    recipe = Recipe(rules, container="compressed_tensors", input_amax=given)
    scales = InputScales(recipe, None)
    for unit in units(recipe):
        down = all(member.weight.endswith("down_proj.weight") for member in unit.members)
        wanted = torch.tensor(fp8 if down else nvfp4, dtype=torch.float32)
        for scale in scales.of(unit):
            assert scale is not None
            assert torch.equal(scale, wanted)


def error_of(scale: float, size: float) -> float:
    """Relative squared error of normal inputs of this standard deviation at an NVFP4 global scale."""
    x = size * torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    found = InputQuantizer(Activation.NVFP4_STATIC_GLOBAL, scale)(x)
    return float((found - x).double().square().sum() / x.double().square().sum())


def test_the_constant_of_nvfp4_clips_nothing_below_it_and_costs_small_inputs_nothing(recipe: Recipe) -> None:
    constant = InputScales(recipe, None).of(units(recipe)[0])[0]
    assert constant is not None
    scale, outlier = float(constant), torch.zeros(1, 16)
    for size, seen in ((2928.0, 2928.0), (6000.0, 2928.0)):
        outlier[0, 3] = size
        found = InputQuantizer(Activation.NVFP4_STATIC_GLOBAL, scale)(outlier)
        assert math.isclose(float(found.max()), seen, rel_tol=1e-6)
    for size in (100.0, 1.0, 0.1):  # the least error is that at a scale made for inputs of this size
        assert error_of(scale, size) < 1.005 * error_of(size * 6 / (6 * 448), size)
