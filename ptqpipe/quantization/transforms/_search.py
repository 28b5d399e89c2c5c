"""What the searches over exponents share: their candidates, the error of quantized weights, inputs drawn from moments.

candidates   a^r / w^(1-r) and a^r, r = 0, 1/grid, ..., 1: powers of the sizes of inputs (a) and weights (w)
error        E || (Q(W s) / s - W) x ||^2, by the best second moments that the statistics hold
"""

import math
from collections.abc import Callable, Iterator

import torch

from ptqpipe.calibration.inputs import InputStatistics
from ptqpipe.quantization.transforms.problem import Consumer, Problem, Quantize, Solution, SolveOptions, spread

MAX_FULL = 4096  # columns up to which inputs are drawn with all their correlations
TAILS = tuple(0.5 + 0.05 * i for i in range(51))  # 0.5 .. 3
_SEED = 20231112


def best_candidate(problem: Problem, options: SolveOptions, error: Callable[[torch.Tensor], float]) -> Solution:
    """The candidate with the least error; factors of 1 where none is below them.

    error  of the factors of all columns, float32 [K]
    """
    best: Solution | None = None
    for factors, facts in candidates(problem, options):
        own = error(factors[problem.channel_of].float())
        if best is None or own < (best.error or 0.0):
            best = Solution(factors, own, own if best is None else best.plain_error, facts)
    assert best is not None
    return best


def candidates(problem: Problem, options: SolveOptions) -> Iterator[tuple[torch.Tensor, dict[str, float | str]]]:
    """(factors float64 [channels], what they are); the first ones are all 1. Rounded as they will be folded."""
    yield torch.ones(problem.channels, dtype=torch.float64), {"rule": "none"}
    inputs, weights = _sizes(problem)
    for i in range(options.grid + 1):
        r = i / options.grid
        facts: dict[str, float | str] = {"rule": "inputs and weights", "exponent": r}
        yield options.round(spread(inputs, weights, input_power=r, weight_power=1 - r)), facts
        if 0 < i < options.grid:
            alone: dict[str, float | str] = {"rule": "inputs", "exponent": r}
            yield options.round(spread(inputs, weights, input_power=r, weight_power=0.0)), alone


def _sizes(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [channels]: root mean squares of inputs and of weights, the largest among the columns of a channel."""
    count = sum(consumer.inputs.tokens for consumer in problem.consumers) or 1
    second = (
        sum(consumer.inputs.second_moment.double() * consumer.inputs.tokens for consumer in problem.consumers) / count
    )
    energy = sum((consumer.weights.double() ** 2).sum(dim=0) for consumer in problem.consumers)
    assert isinstance(second, torch.Tensor)
    assert isinstance(energy, torch.Tensor)
    return problem.by_channel(second.sqrt()), problem.by_channel(energy.sqrt())


def weight_error(consumer: Consumer, factors: torch.Tensor, quantize: Quantize) -> float:
    """E || (Q(W s) / s - W) x ||^2 over the sampled rows.

    factors  float32 [K], by column
    """
    difference = quantize(consumer.weights * factors) / factors - consumer.weights
    return moment_of(difference, consumer.inputs)


def moment_of(difference: torch.Tensor, inputs: InputStatistics) -> float:
    """sum over rows d of d^T E[x x^T] d: by the full moment, the blocks of 16 columns, or the diagonal."""
    if inputs.full_moment is not None:
        return float(((difference @ inputs.full_moment) * difference).sum(dtype=torch.float64))
    if inputs.block_moment is not None:
        blocks = difference.reshape(difference.shape[0], -1, 16).transpose(0, 1)
        return float(((blocks @ inputs.block_moment) * blocks).sum(dtype=torch.float64))
    return float((difference.double() ** 2 @ inputs.second_moment.double()).sum())


def draw(inputs: InputStatistics, count: int) -> torch.Tensor:
    """float32 [count, K]: inputs with the second moments and the maxima of those that were seen. Always the same ones.

    Statistics hold no tokens, so these are drawn: normal, with the correlations of the full moment (of the blocks where
    there is none, or where it is too large to factor), and then x -> sign(x) |x|^p by channel, with the p that puts
    the expected largest of ``tokens`` at amax while E[x^2] stays. A heuristic: real inputs have more structure.
    """
    generator = torch.Generator().manual_seed(_SEED)
    k = inputs.second_moment.numel()
    z = torch.randn(count, k, generator=generator)
    rms = inputs.second_moment.clamp(min=0).sqrt()
    inverse = torch.where(rms > 0, 1.0 / rms, 0.0)
    if inputs.full_moment is not None and k <= MAX_FULL:
        z = z @ _root(inputs.full_moment * inverse[:, None] * inverse[None, :])
    elif inputs.block_moment is not None:
        blocks = inverse.reshape(-1, 16)
        roots = _root(inputs.block_moment * blocks[:, :, None] * blocks[:, None, :])
        z = (z.reshape(count, -1, 16).transpose(0, 1) @ roots).transpose(0, 1).reshape(count, k)
    power = _tails(inputs.amax * inverse, inputs.tokens)
    x = z.sign() * z.abs() ** power
    return x / (x.square().mean(dim=0).sqrt() + 1e-20) * rms


def _root(correlations: torch.Tensor) -> torch.Tensor:
    """The symmetric square root of positive semidefinite matrices [..., n, n]."""
    values, vectors = torch.linalg.eigh(correlations.double())
    root: torch.Tensor = (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT
    return root.float()


def _tails(peaks: torch.Tensor, tokens: int) -> torch.Tensor:
    """float32 [K]: the p at which |z|^p of mean square 1 has its expected largest of ``tokens`` at ``peaks``."""
    largest = math.sqrt(2 * math.log(max(tokens, 3)))
    reached = []
    for p in TAILS:  # E |z|^(2p) = 2^p gamma(p + 1/2) / sqrt(pi)
        reached.append(largest**p / math.sqrt(2**p * math.gamma(p + 0.5) / math.sqrt(math.pi)))
    distance = (peaks[:, None] - torch.tensor(reached)).abs()
    return torch.tensor(TAILS)[distance.argmin(dim=1)]
