"""AQAS: smoothing chosen with both quantizers in the objective, that of the weights and that of the activations.

    min over r of E || Q_w(W s_r) Q_x(x / s_r) - W x ||^2        Lee et al., 2023 (arXiv 2311.05161)

over the exponents of ``_search.py``, on inputs drawn from their statistics. For formats that leave activations in 16
bits the objective is that of ``awq``.
"""

import torch

from ptqpipe.quantization.transforms import awq
from ptqpipe.quantization.transforms._search import candidates, draw
from ptqpipe.quantization.transforms.problem import Problem, Solution, SolveOptions

EDGES: tuple[str, ...] = ("norm", "latent", "value", "up")
NEEDS_QUANTIZER = True
NEEDS_INPUT_QUANTIZER = True
ALWAYS_POWERS_OF_TWO = False


def solve(problem: Problem, options: SolveOptions) -> Solution:
    """The best candidate; factors of 1 where none is below them."""
    if options.quantize_inputs is None:
        return awq.solve(problem, options)
    samples = [draw(consumer.inputs, options.samples) for consumer in problem.consumers]
    outputs = [x @ consumer.weights.T for x, consumer in zip(samples, problem.consumers, strict=True)]
    best: Solution | None = None
    for factors, facts in candidates(problem, options):
        columns = factors[problem.channel_of].float()
        error = 0.0
        for consumer, x, y in zip(problem.consumers, samples, outputs, strict=True):
            error += consumer.inputs.tokens * _error(consumer.weights, x, y, columns=columns, options=options)
        if best is None or error < (best.error or 0.0):
            plain = error if best is None else best.plain_error
            best = Solution(factors, error, plain, facts)
    assert best is not None
    return best


def _error(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, columns: torch.Tensor, options: SolveOptions) -> float:
    assert options.quantize is not None
    assert options.quantize_inputs is not None
    output = options.quantize_inputs(x / columns) @ options.quantize(w * columns).T
    return float((output - y).square().sum(dtype=torch.float64)) / x.shape[0]
