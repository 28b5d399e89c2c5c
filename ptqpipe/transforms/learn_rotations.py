"""Rotations that are learned: block diagonal orthogonal matrices R that make the quantized inputs of layers cost least.

What a rotation changes is the error of a layer's input, e = Q(x R) - x R, of which the model's KL divergence loses, to
second order and with tokens taken as independent,

    1/2 E[(e . h R)^2],    h = dLoss/dx

of which sum_i e_i^2 (h R)_i^2 is made small. What lies outside of this diagonal, products of errors of two columns, is
left out: its mean is small, and over some thousand tokens it is mostly noise, from which R would be learned.

R begins at 1 and goes by steps R exp(S) for each block, with S antisymmetric: Adam's steps for the gradient in these
directions, on pairs (x, h) of tokens. Rounding has no gradient, so an error counts as a multiple, one for all, of its
local step, sqrt(x^2 + floor * amax^2), which has one. Source: the idea, with activations alone quantized, SpinQuant
(Liu et al. 2024, arXiv 2405.16406), which descends on the loss of the whole model instead. Must not know formats or
files.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from ptqpipe.transforms.folding import hadamard
from ptqpipe.transforms.problem import Quantize

BATCH = 1536  # inputs of each reader that a step sees, and that are judged at once
_RATE, _WARM_UP, _SEED = 0.025, 10, 20240526
_MEANS = 0.9, 0.99  # what the running means of slopes and of their squares keep with each step
_TINY = 1e-30
_AT_ONCE = 1 << 20  # numbers of matrices whose exponential is found together: that holds some copies
_JUDGED, _FEW = 8, 1024  # one of so many inputs is kept to judge by; of fewer inputs than those make, up to a quarter
_JUDGEMENTS, _PATIENCE = 8, 3  # how often it is judged on the way, and how often without a gain before it stops


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

    The last eighth of the inputs is kept to judge by, on the way, too: what was best there is taken, and where that
    stays behind for long no further steps are taken.
    """
    kept = [_kept(len(reader.inputs)) for reader in readers]
    generator = torch.Generator().manual_seed(_SEED)
    orders = [
        torch.randperm(max(1, len(reader.inputs) - last), generator=generator)
        for reader, last in zip(readers, kept, strict=True)
    ]
    descent, every = _Descent(count, block), max(1, steps // _JUDGEMENTS)
    with ThreadPoolExecutor(threads) as pool, torch.no_grad():
        judge = partial(_judge, pool, readers, kept, rounding=rounding)
        eye = torch.eye(block, dtype=torch.float64).expand(count, block, block)
        plain, fixed = judge(eye), judge(hadamard(block).expand(count, block, block))
        best, least, behind = eye.clone(), math.inf, 0
        for step in range(steps):
            stepped()
            if behind == _PATIENCE:
                continue
            rows = [_in_turn(order, step) for order in orders]
            total = torch.zeros(count, block, block, dtype=torch.float64)
            slope = partial(_slope, matrices=descent.matrices.float(), rounding=rounding)
            for found in pool.map(slope, readers, rows):  # in their order: sums do not depend on who is first
                total += found
            warm = min(1.0, (step + 1) / _WARM_UP)
            descent.step(total, _RATE * warm * (1 + math.cos(math.pi * step / steps)) / 2)
            if (step + 1) % every == 0 or step + 1 == steps:
                now = judge(descent.matrices)
                best, least, behind = (descent.matrices, now, 0) if now < least else (best, least, behind + 1)
    return Learned(best, plain, fixed, least) if least < plain else Learned(eye.clone(), plain, fixed, plain)


class _Descent:
    """Some matrices on their way."""

    def __init__(self, count: int, block: int) -> None:
        self.matrices = torch.eye(block, dtype=torch.float64).repeat(count, 1, 1)
        self._mean, self._square = torch.zeros_like(self.matrices), torch.zeros_like(self.matrices)
        self._steps = 0

    def step(self, slopes: torch.Tensor, rate: float) -> None:
        """Goes down the slopes of the matrices, float64 as they are."""
        self._steps += 1
        turned = self.matrices.mT @ slopes
        turned -= turned.mT.clone()
        (first, second) = _MEANS
        self._mean.mul_(first).add_(turned, alpha=1 - first)
        self._square.mul_(second).addcmul_(turned, turned, value=1 - second)
        spread = (self._square / (1 - second**self._steps)).sqrt_().add_(_TINY)
        turned = self._mean / spread * (-rate / (1 - first**self._steps))
        parts = zip(*(torch.split(each, _few(each.shape[-1])) for each in (self.matrices, turned)), strict=True)
        self.matrices = torch.cat([matrices @ torch.linalg.matrix_exp(part) for matrices, part in parts])


def _in_turn(order: torch.Tensor, step: int) -> torch.Tensor:
    """The inputs of a step: all come in their order before one comes again."""
    count = min(BATCH, len(order))
    return order[torch.arange(step * count, (step + 1) * count) % len(order)]


def _kept(inputs: int) -> int:
    """How many of so many inputs are kept to judge by."""
    return max(1, inputs // _JUDGED, min(inputs // 4, _FEW))


def _slope(reader: Reader, rows: torch.Tensor, *, matrices: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """The gradient of a reader's loss on some of its tokens for ``matrices``."""
    with torch.enable_grad():
        turned = matrices.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(_loss(reader, rows, turned, rounding), turned)
    return slope


def _few(block: int) -> int:
    return max(1, _AT_ONCE // block**2)


def _judge(
    pool: ThreadPoolExecutor,
    readers: Sequence[Reader],
    kept: Sequence[int],
    matrices: torch.Tensor,
    *,
    rounding: Rounding,
) -> float:
    """The sum of the readers' losses on the last ``kept`` inputs of each."""
    turned = matrices.float()

    def of(reader: Reader, last: int) -> float:
        with torch.no_grad():  # each thread has its own
            first, count = len(reader.inputs) - last, len(reader.inputs)
            runs = [slice(at, min(at + BATCH, count)) for at in range(first, count, BATCH)]
            return sum(float(_loss(reader, run, turned, rounding)) * (run.stop - run.start) for run in runs) / last

    return sum(pool.map(of, readers, kept))


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
