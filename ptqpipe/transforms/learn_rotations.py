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
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ptqpipe.transforms.folding import hadamard
from ptqpipe.transforms.problem import Quantize

BATCH = 1536  # inputs of each reader that a step sees
_RATE, _WARM_UP, _SEED = 0.02, 10, 20240526
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Reader:
    """Layers that read one rotated input, K = n * block columns.

    inputs     float32 [T, K], before the rotation
    gradients  float32 [T, K] of the model's loss at them
    turns      int64 [n]: the matrix that turns each block of columns
    """

    inputs: torch.Tensor
    gradients: torch.Tensor
    turns: torch.Tensor

    def __getitem__(self, rows: torch.Tensor | slice) -> "Reader":
        """Some of the tokens."""
        return Reader(self.inputs[rows], self.gradients[rows], self.turns)


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


def learn(readers: Sequence[Reader], *, count: int, block: int, rounding: Rounding, steps: int) -> Learned:
    """``count`` matrices, each of ``block`` rows, for some readers. The same ones every time.

    The last quarter of the inputs is kept to judge by.
    """
    kept = [max(1, len(reader.inputs) // 4) for reader in readers]
    generator = torch.Generator().manual_seed(_SEED)
    skew = torch.zeros(count, block, block, dtype=torch.float64, requires_grad=True)
    descent = torch.optim.Adam([skew], lr=_RATE, betas=(0.9, 0.99))
    for step in range(steps):
        warm = min(1.0, (step + 1) / _WARM_UP)
        descent.param_groups[0]["lr"] = _RATE * warm * (1 + math.cos(math.pi * step / steps)) / 2
        descent.zero_grad()
        matrices = _orthogonal(skew)
        turned = matrices.detach().float().requires_grad_(True)
        for reader, last in zip(readers, kept, strict=True):  # one reader's graph at a time
            rows = torch.randint(max(1, len(reader.inputs) - last), (BATCH,), generator=generator)
            _loss(reader[rows], turned, rounding).backward()  # type: ignore[no-untyped-call]
        matrices.backward(None if turned.grad is None else turned.grad.double())  # type: ignore[no-untyped-call]
        descent.step()
    eye = torch.eye(block, dtype=torch.float64)
    tried = [each.expand(count, block, block) for each in (eye, hadamard(block))] + [_orthogonal(skew).detach()]
    with torch.no_grad():
        plain, fixed, found = (_judge(readers, kept, each.float(), rounding) for each in tried)
    return Learned(tried[2], plain, fixed, found) if found < plain else Learned(tried[0].clone(), plain, fixed, plain)


def _orthogonal(skew: torch.Tensor) -> torch.Tensor:
    turned: torch.Tensor = torch.linalg.matrix_exp(skew - skew.mT)
    return turned


def _judge(readers: Sequence[Reader], kept: Sequence[int], matrices: torch.Tensor, rounding: Rounding) -> float:
    return sum(
        float(_loss(reader[slice(-last, None)], matrices, rounding)) for reader, last in zip(readers, kept, strict=True)
    )


def _loss(reader: Reader, matrices: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Half of the mean over a reader's tokens of the sum of e_i^2 (h R)_i^2, with a gradient for ``matrices`` float32
    [count, block, block]."""
    turns = matrices[reader.turns]
    x, h = (_turned(each, turns) for each in (reader.inputs, reader.gradients))
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
