"""Smooth-SwiGLU: evens out the channels that down_proj reads, by powers of two in the rows of up_proj.

    act(gate(x)) * (up(x) / f) = (act(gate(x)) * up(x)) / f,        f_i = 2^round(alpha log2(amax_i / middle))

Exact in every float dtype, since every f is a power of two. alpha = 1 takes the whole spread out of the activations
and puts it into the columns of down_proj. Source: Fishman et al., 2024 (arXiv 2409.12517), there for training in FP8.
"""

from ptqpipe.models.folding.tensors import power_of_two
from ptqpipe.quantization.transforms.problem import Problem, Solution, SolveOptions, spread

EDGES: tuple[str, ...] = ("up",)
NEEDS_QUANTIZER = False
NEEDS_INPUT_QUANTIZER = False
ALWAYS_POWERS_OF_TWO = True


def solve(problem: Problem, options: SolveOptions) -> Solution:
    """The factors of one MLP from the maxima of down_proj's inputs."""
    inputs = problem.by_channel(problem.input_amax)
    factors = spread(inputs, inputs, input_power=options.alpha, weight_power=0.0)
    return Solution(power_of_two(factors), facts={"alpha": options.alpha})
