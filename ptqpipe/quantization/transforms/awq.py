"""AWQ-style search: the exponent that leaves the least output error once the weights are quantized.

    min over r of E || (Q(W s_r) / s_r - W) x ||^2,   Q being the quantizer that will be used (Lin et al., 2023, eq. 4)

with the second moments of the inputs in place of their samples. Activations count as not quantized (see ``aqas``).
"""

from ptqpipe.quantization.transforms._search import candidates, weight_error
from ptqpipe.quantization.transforms.problem import Problem, Solution, SolveOptions

EDGES: tuple[str, ...] = ("norm", "latent", "value", "up")
NEEDS_QUANTIZER = True
NEEDS_INPUT_QUANTIZER = False
ALWAYS_POWERS_OF_TWO = False


def solve(problem: Problem, options: SolveOptions) -> Solution:
    """The best candidate; factors of 1 where none is below them."""
    assert options.quantize is not None
    best: Solution | None = None
    for factors, facts in candidates(problem, options):
        columns = factors[problem.channel_of].float()
        error = sum(
            consumer.inputs.tokens * weight_error(consumer, columns, options.quantize) for consumer in problem.consumers
        )
        if best is None or error < (best.error or 0.0):
            plain = error if best is None else best.plain_error
            best = Solution(factors, error, plain, facts)
    assert best is not None
    return best
