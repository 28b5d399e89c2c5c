"""SmoothQuant: divides outlying input channels by factors and multiplies the weights that read them.

    s_j = max |x_j|^alpha / max |w_j|^(1 - alpha)            Xiao et al., 2022, equation 4

Only ratios between channels matter to formats with a global scale, so the factors are centred around 1.
"""

from ptqpipe.quantization.transforms.problem import Problem, Solution, SolveOptions, spread

EDGES: tuple[str, ...] = ("norm", "latent")
NEEDS_QUANTIZER = False
NEEDS_INPUT_QUANTIZER = False
ALWAYS_POWERS_OF_TWO = False


def solve(problem: Problem, options: SolveOptions) -> Solution:
    """The factors of one edge from the maxima of its inputs and weights."""
    inputs, weights = problem.by_channel(problem.input_amax), problem.by_channel(problem.weight_amax)
    factors = spread(inputs, weights, input_power=options.alpha, weight_power=1 - options.alpha)
    return Solution(options.round(factors), facts={"alpha": options.alpha})
