"""Rotations that are learned: block diagonal orthogonal matrices R that make the quantized inputs of layers cost least.

What a rotation changes is the error of a layer's input, e = Q(x R) - x R, of which the model's KL divergence loses, to
second order and with tokens taken as independent,

    1/2 E[(e . h R)^2],    h = dLoss/dx

of which sum_i e_i^2 (h R)_i^2 is made small. What lies outside of this diagonal, products of errors of two columns, is
left out: its mean is small, and over some thousand tokens it is mostly noise, from which R would be learned.

R = exp(P - P^T) for each block, from R = 1, by Adam over P, on pairs (x, h) of tokens. Rounding has no gradient, so an
error counts as a multiple, one for all, of its local step, sqrt(x^2 + floor * amax^2), which has one. Source: the idea,
with activations alone quantized, SpinQuant (Liu et al. 2024, arXiv 2405.16406), which descends on the loss of the whole
model instead. Must not know formats or files.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from ptqpipe.transforms.folding import hadamard
from ptqpipe.transforms.problem import Quantize

BATCH = 1536  # inputs of each reader that a step sees
_RATE, _WARM_UP, _SEED = 0.02, 10, 20240526
_TINY = 1e-30
_AT_ONCE = 1 << 17  # numbers of matrices whose exponential is differentiated together: that holds some 90 copies


@dataclass(frozen=True, slots=True)
class Reader:
    """Layers that read one rotated input, K = n * block columns.

    inputs     floats [T, K] of any dtype, multiplied by ``gain``
    gradients  floats [T, K] of the model's loss at them
    turns      int64 [n]: the matrix that turns each block of columns
    gain       float32 [K]: what the rotation goes before, a norm's weight
    """

    inputs: torch.Tensor
    gradients: torch.Tensor
    turns: torch.Tensor
    gain: torch.Tensor

    def before(self, rows: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and gradients of some tokens where the rotation is, float32 [t, K]: 0 where the gain is."""
        x, h = self.inputs[rows].float(), self.gradients[rows].float()
        return torch.where(self.gain == 0, 0.0, x / self.gain), h * self.gain


@dataclass(frozen=True, slots=True)
class Rounding:
    """What happens to inputs [T, K]: ``quantize`` decodes them again.

    group  columns that share one scale; 0: all of a token
    floor  the share of the largest square of the group at which local steps stop falling with the number; 0: they
           never do
    """

    quantize: Quantize
    group: int
    floor: float


@dataclass(frozen=True, slots=True)
class Learned:
    """matrices float64 [count, block, block], x R being ``x @ matrix``, and the loss without, with a Hadamard matrix in
    each block, and with these; identities where learning has not lowered it."""

    matrices: torch.Tensor
    plain_error: float
    hadamard_error: float
    error: float


def learn(
    readers: Sequence[Reader],
    *,
    count: int,
    block: int,
    rounding: Rounding,
    steps: int,
    threads: int = 1,
    stepped: Callable[[], None] = lambda: None,
) -> Learned:
    """``count`` matrices, each of ``block`` rows, for some readers. The same ones every time, with any number of
    threads, which take a reader each. ``stepped`` is called after every step.

    The last quarter of the inputs is kept to judge by.
    """
    kept = [max(1, len(reader.inputs) // 4) for reader in readers]
    generator = torch.Generator().manual_seed(_SEED)
    skew = torch.zeros(count, block, block, dtype=torch.float64, requires_grad=True)
    descent = torch.optim.Adam([skew], lr=_RATE, betas=(0.9, 0.99))
    with ThreadPoolExecutor(threads) as pool:
        for step in range(steps):
            warm = min(1.0, (step + 1) / _WARM_UP)
            descent.param_groups[0]["lr"] = _RATE * warm * (1 + math.cos(math.pi * step / steps)) / 2
            descent.zero_grad()
            matrices = _orthogonal(skew.detach())
            rows = [
                torch.randint(max(1, len(reader.inputs) - last), (BATCH,), generator=generator)
                for reader, last in zip(readers, kept, strict=True)
            ]
            slope = partial(_slope, matrices=matrices.float(), rounding=rounding)
            total = torch.zeros(count, block, block, dtype=torch.float64)
            for found in pool.map(slope, readers, rows):  # in their order: sums do not depend on who is first
                total += found
            for part, slopes in zip(*(torch.split(each, _few(block)) for each in (skew, total)), strict=True):
                _orthogonal(part).backward(slopes)  # type: ignore[no-untyped-call]
            descent.step()
            stepped()
    return _best(readers, kept, _orthogonal(skew.detach()), rounding)


def _slope(reader: Reader, rows: torch.Tensor, *, matrices: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """The gradient of a reader's loss on some of its tokens for ``matrices``."""
    turned = matrices.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(_loss(reader, rows, turned, rounding), turned)
    return slope


def _best(readers: Sequence[Reader], kept: Sequence[int], learned: torch.Tensor, rounding: Rounding) -> Learned:
    """What was learned, or identities where it is no better on the tokens that are kept."""
    count, block, _ = learned.shape
    eye = torch.eye(block, dtype=torch.float64)
    tried = [*(each.expand(count, block, block) for each in (eye, hadamard(block))), learned]
    with torch.no_grad():
        plain, fixed, found = (_judge(readers, kept, each.float(), rounding) for each in tried)
    return Learned(tried[2], plain, fixed, found) if found < plain else Learned(tried[0].clone(), plain, fixed, plain)


def _orthogonal(skew: torch.Tensor) -> torch.Tensor:
    """Some matrices at a time: the powers of a series are held beside them."""
    parts = torch.split(skew, _few(skew.shape[-1]))
    return torch.cat([torch.linalg.matrix_exp(part - part.mT) for part in parts])


def _few(block: int) -> int:
    return max(1, _AT_ONCE // block**2)


def _judge(readers: Sequence[Reader], kept: Sequence[int], matrices: torch.Tensor, rounding: Rounding) -> float:
    return sum(
        float(_loss(reader, slice(-last, None), matrices, rounding)) for reader, last in zip(readers, kept, strict=True)
    )


def _loss(reader: Reader, rows: torch.Tensor | slice, matrices: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Half of the mean over some of a reader's tokens of the sum of e_i^2 (h R)_i^2, with a gradient for ``matrices``
    float32 [count, block, block]."""
    turns = matrices[reader.turns]
    x, h = (_turned(each, turns) for each in reader.before(rows))
    known = x.detach()
    error = rounding.quantize(known) - known
    by_steps = (_local_step(x, rounding) * h).square().sum()
    multiple = (error * h.detach()).square().sum() / by_steps.detach().clamp(min=_TINY)
    return multiple * by_steps / (2 * len(x))


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """float32 [T, K]: rows times the matrices [n, block, block] of their blocks."""
    n, block, _ = turns.shape
    return (x.reshape(-1, n, block).transpose(0, 1) @ turns).transpose(0, 1).flatten(1)


def _local_step(x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """What the error of each element is in proportion to, up to a constant: float32 [T, K], above 0."""
    groups = x.reshape(len(x), -1, rounding.group or x.shape[1])
    largest = groups.square().amax(-1, keepdim=True)
    steps: torch.Tensor = (groups.square() + rounding.floor * largest + _TINY).sqrt().flatten(1)
    return steps
