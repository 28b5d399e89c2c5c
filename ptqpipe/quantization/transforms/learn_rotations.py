"""Rotations that are learned: block diagonal orthogonal matrices R that make the quantized inputs of layers cost least.

What a rotation changes is the error of a layer's input, e = Q(x R) - x R, of which the model's KL divergence loses, to
second order and with tokens taken as independent,

    1/2 E[(e . h R)^2],    h = dLoss/dx

of which sum_i e_i^2 (h R)_i^2 is made small. What lies outside of this diagonal, products of errors of two columns, is
left out: its mean is small, and over some thousand tokens it is mostly noise, from which R would be learned.

R begins at 1 and goes by steps R exp(S) for each block, with S antisymmetric: Adam's steps for the gradient in these
directions, on pairs (x, h) of tokens. Rounding has no gradient, so e^2 counts as a multiple, one for each reader, of
the square of its local step, x^2 + floor * amax^2, which has one; the multiple is found anew where the loss is judged.

Source: the idea, with activations alone quantized, SpinQuant (Liu et al. 2024, arXiv 2405.16406), which descends on the
loss of the whole model instead.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from ptqpipe.models.folding.tensors import hadamard
from ptqpipe.quantization.transforms.problem import Quantize

BATCH = 1536  # inputs of each reader that a step sees at most, and that are judged at once
_TOGETHER, _LEAST = 8 * BATCH, 128  # inputs of all readers that a step sees, but of each no fewer
_RATE, _WARM_UP, _SEED = 0.025, 10, 20240526
_MEANS = 0.9, 0.99  # what the running means of slopes and of their squares keep with each step
_TINY = 1e-30
_AT_ONCE = 1 << 20  # numbers of matrices whose exponential is found together: that holds some copies
_JUDGED, _FEW = 8, 1024  # one of so many inputs is kept to judge by; of fewer inputs than those make, up to a quarter
_JUDGEMENTS, _PATIENCE = 16, 4  # how often it is judged on the way, and how often without a gain before it stops


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

    def blocks(
        self, rows: torch.Tensor | slice, block: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and gradients of some tokens, dtype [n, t, block]."""
        x, h = (side[rows].to(dtype).reshape(-1, len(self.turns), block) for side in (self.inputs, self.gradients))
        return x.transpose(0, 1), h.transpose(0, 1)

    def factors(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What inputs and gradients are multiplied by so that they are those before the gain, float32 [n, block, 1]:
        0 where the gain is, or nearly, so that its column counts for nothing."""
        inverse = torch.where(self.gain.abs() < _TINY, 0.0, 1 / self.gain)
        return inverse.reshape(-1, block, 1), self.gain.reshape(-1, block, 1)


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
    products: torch.dtype = torch.float32,
    stepped: Callable[[], None] = lambda: None,
) -> Learned:
    """``count`` matrices, each of ``block`` rows, for some readers. The same ones every time, with any number of
    threads, which take a reader each. ``stepped`` is called after every step. ``products`` is what slopes are computed
    in: bfloat16 where the CPU multiplies it, half the time for a slope that is off by less than a hundredth.

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
    batch = min(BATCH, max(_LEAST, _TOGETHER // len(readers)))
    with ThreadPoolExecutor(threads) as pool, torch.no_grad():
        judge = partial(_judge, pool, readers, kept, rounding=rounding)
        eye = torch.eye(block, dtype=torch.float64).expand(count, block, block)
        fixed = judge(hadamard(block).expand(count, block, block)).loss
        start = now = judge(eye)
        best, least, behind = eye.clone(), start.loss, 0
        for step in range(steps):
            stepped()
            if behind == _PATIENCE:
                continue
            rows = [_in_turn(order, batch, step) for order in orders]
            total = torch.zeros(count, block, block, dtype=torch.float64)
            of_each = partial(slope, matrices=descent.matrices.float(), rounding=rounding, dtype=products)
            for multiple, gradient in zip(now.multiples, pool.map(of_each, readers, rows), strict=True):
                total.add_(gradient, alpha=multiple)  # in their order: sums do not depend on who is first
            warm = min(1.0, (step + 1) / _WARM_UP)
            descent.step(total, _RATE * warm * (1 + math.cos(math.pi * step / steps)) / 2)
            if (step + 1) % every == 0 or step + 1 == steps:
                now = judge(descent.matrices)
                gains = now.loss < least
                best, least, behind = (descent.matrices, now.loss, 0) if gains else (best, least, behind + 1)
    return Learned(best, start.loss, fixed, least)


class _Descent:
    def __init__(self, count: int, block: int) -> None:
        self.matrices = torch.eye(block, dtype=torch.float64).repeat(count, 1, 1)
        self._mean, self._square = torch.zeros_like(self.matrices), torch.zeros_like(self.matrices)
        self._steps = 0

    def step(self, slopes: torch.Tensor, rate: float) -> None:
        """Goes down the slopes of the matrices, float64 as they are."""
        self._steps += 1
        step = self.matrices.mT @ slopes
        step -= step.mT.clone()
        (first, second) = _MEANS
        self._mean.mul_(first).add_(step, alpha=1 - first)
        self._square.mul_(second).addcmul_(step, step, value=1 - second)
        spread = (self._square / (1 - second**self._steps)).sqrt_().add_(_TINY)
        step = self._mean / spread * (-rate / (1 - first**self._steps))
        parts = zip(*(torch.split(each, _few(each.shape[-1])) for each in (self.matrices, step)), strict=True)
        self.matrices = torch.cat([matrices @ torch.linalg.matrix_exp(part) for matrices, part in parts])


def _in_turn(order: torch.Tensor, batch: int, step: int) -> torch.Tensor:
    """The inputs of a step: all come in their order before one comes again."""
    count = min(batch, len(order))
    return order[torch.arange(step * count, (step + 1) * count) % len(order)]


def _kept(inputs: int) -> int:
    return max(1, inputs // _JUDGED, min(inputs // 4, _FEW))


def slope(
    reader: Reader,
    rows: torch.Tensor | slice,
    *,
    matrices: torch.Tensor,
    rounding: Rounding,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The gradient for ``matrices`` float32 [count, block, block] of half the mean over some of a reader's tokens of
    the sum of s_i^2 (h R)_i^2, s the local steps: float32 of that shape, from products in ``dtype``."""
    block = matrices.shape[-1]
    x, h = reader.blocks(rows, block, dtype)
    turns, (inverse, gain) = matrices[reader.turns], reader.factors(block)
    by_x, by_h = _slopes(x @ (turns * inverse).to(dtype), h @ (turns * gain).to(dtype), rounding)
    gradient = (x.mT @ by_x).float().mul_(inverse).addcmul_((h.mT @ by_h).float(), gain)
    return torch.zeros_like(matrices).index_add_(0, reader.turns, gradient.div_(x.shape[1]))


def _slopes(x: torch.Tensor, h: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients for x and h [n, t, block] of half the sum of (x^2 + floor * amax^2) h^2."""
    both = x * h
    by_x, by_h = h * both, x * both
    if not rounding.floor:
        return by_x, by_h
    n, tokens, block = x.shape
    groups = tokens, -1, rounding.group or n * block  # a group may be of several blocks
    x, h, by_x, by_h = (each.transpose(0, 1).reshape(groups) for each in (x, h, by_x, by_h))
    top, places = x.abs().max(-1, keepdim=True)
    by_x.scatter_add_(-1, places, x.gather(-1, places) * (h.square().sum(-1, keepdim=True) * rounding.floor))
    by_h.addcmul_(h, top.square_(), value=rounding.floor)
    return by_x.reshape(tokens, n, block).transpose(0, 1), by_h.reshape(tokens, n, block).transpose(0, 1)


def _few(block: int) -> int:
    return max(1, _AT_ONCE // block**2)


@dataclass(frozen=True, slots=True)
class _Judgement:
    """The loss of all readers, and for each how many times the squares of its local steps its errors are."""

    loss: float
    multiples: list[float]


def _judge(
    pool: ThreadPoolExecutor,
    readers: Sequence[Reader],
    kept: Sequence[int],
    matrices: torch.Tensor,
    *,
    rounding: Rounding,
) -> _Judgement:
    rotated = matrices.float()

    def of(reader: Reader, last: int) -> tuple[float, float]:
        with torch.no_grad():  # each thread has its own
            first, count = len(reader.inputs) - last, len(reader.inputs)
            runs = [slice(start, min(start + BATCH, count)) for start in range(first, count, BATCH)]
            errors, steps = torch.stack([_sums(reader, run, rotated, rounding) for run in runs]).sum(0).tolist()
            return errors / (2 * last), errors / max(steps, _TINY)

    losses = list(pool.map(of, readers, kept))
    return _Judgement(sum(loss for loss, _ in losses), [multiple for _, multiple in losses])


def _sums(reader: Reader, rows: slice, matrices: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """float64 [2], over some of a reader's tokens: the sum of e_i^2 (h R)_i^2, and of s_i^2 (h R)_i^2 with local steps
    s."""
    block = matrices.shape[-1]
    turns, pairs = matrices[reader.turns], zip(reader.blocks(rows, block), reader.factors(block), strict=True)
    x, h = ((side @ (turns * factor)).transpose(0, 1).flatten(1) for side, factor in pairs)
    errors = (rounding.quantize(x) - x).mul_(h).square().sum()
    groups = x.square().reshape(len(x), -1, rounding.group or x.shape[1])
    steps = groups + rounding.floor * groups.amax(-1, keepdim=True)
    return torch.stack([errors, steps.flatten(1).mul_(h.square()).sum()]).double()
