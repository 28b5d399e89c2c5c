"""Transforms: a float checkpoint in, an equivalent float checkpoint out that loses less when it is quantized.

A *scaling* moves a factor per channel from one weight into another, over an edge of the model. One file for each, found
by its name: ``solve(problem, options) -> Solution``, ``EDGES`` and whether it needs a quantizer. Rotations stand in
``folding``; ``learn_rotations.py`` finds their matrices.

Tensors and structure in, factors out: nothing here knows files, statistics folders or searches. Quantizers are
passed in as callables.
"""

from importlib import import_module
from typing import Protocol, cast

from ptqpipe.errors import UsageError, arg, did_you_mean
from ptqpipe.models.folding import ROTATIONS
from ptqpipe.quantization.transforms.learn_rotations import BATCH, Learned, Reader, Rounding, learn
from ptqpipe.quantization.transforms.problem import Consumer, Problem, Quantize, Solution, SolveOptions

SCALINGS = ("smoothquant", "awq", "aqas", "smooth_swiglu")
# Rotations that a reader applies while it runs: ``rotate`` of convert writes those of linear layers' inputs.
ONLINE = ("rotate_online", "rotate_down", "rotate_keys", "r3", "r4")
_SHORT = {"rotate": ROTATIONS, "r1": ("rotate_residual",), "r2": ("rotate_values",), "swiglu": ("smooth_swiglu",)}


class Scaling(Protocol):
    """The shape of a scaling's file."""

    EDGES: tuple[str, ...]
    NEEDS_QUANTIZER: bool
    NEEDS_INPUT_QUANTIZER: bool
    ALWAYS_POWERS_OF_TWO: bool

    def solve(self, problem: Problem, options: SolveOptions) -> Solution: ...


def transform_names(text: str) -> tuple[str, ...]:
    """The transforms of a list like ``smoothquant,rotate``, in its order. UsageError for unknown or repeated names."""
    chosen_names: list[str] = []
    for part in text.split(","):
        key = part.strip().lower().replace("-", "_")
        if key in ONLINE:
            raise UsageError(
                f"{key!r} rotates activations while the model runs, which is no change of a float model; use "
                f"{arg('rotate', 'down_proj:64')} of convert, or rotate_residual and rotate_values, which are folded "
                "into the weights"
            )
        names = _SHORT.get(key, (key,))
        for name in names:
            if name not in SCALINGS + ROTATIONS:
                remedy = did_you_mean(name, [*SCALINGS, *ROTATIONS], listed=True)
                raise UsageError(f"unknown transform {name!r}; {remedy}, and rotate for both rotations")
            if name in chosen_names:
                raise UsageError(f"{name} is asked for twice; name each transform once")
            chosen_names.append(name)
    return tuple(chosen_names)


def get_scaling(name: str) -> Scaling:
    """The module of one of ``SCALINGS``."""
    return cast(Scaling, import_module(f"{__name__}.{name}"))
