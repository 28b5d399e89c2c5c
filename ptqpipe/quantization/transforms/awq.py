"""AWQ-style search: the exponent that leaves the least output error once the weights are quantized.

    min over r of E || (Q(W s_r) / s_r - W) x ||^2,   Q being the quantizer that will be used (Lin et al., 2023, eq. 4)

with the second moments of the inputs in place of their samples. Activations count as not quantized (see ``aqas``).
"""

from ptqpipe.quantization.transforms._search import best_candidate, weight_error
from ptqpipe.quantization.transforms.problem import Problem, Solution, SolveOptions

EDGES: tuple[str, ...] = ("norm", "latent", "value", "up")
NEEDS_QUANTIZER = True
NEEDS_INPUT_QUANTIZER = False
ALWAYS_POWERS_OF_TWO = False


def solve(problem: Problem, options: SolveOptions) -> Solution:
    """The best candidate; factors of 1 where none is below them."""
    quantize, consumers = options.quantize, problem.consumers
    assert quantize is not None
    return best_candidate(
        problem, options, lambda columns: sum(c.inputs.tokens * weight_error(c, columns, quantize) for c in consumers)
    )
