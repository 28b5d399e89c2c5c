"""Learned rounding: rounds each weight to one of its two neighbours in the format, so that a whole decoder layer
computes what it did before.

The start is the nearest codes, or those of another algorithm (GPTQ); the scales are the start's and stay. A weight
moves from its code to the next one towards the float weight where p + v >= 1/2: p is the float weight's place between
the two (0 where the start left it more than half a step away, on purpose), and v in [-1/2, 1/2] is learned. The loss is
the mean squared difference of the block's output to that of the float block, where the block is given what the
quantized blocks before it return and the float block what float blocks return. v follows Adam on the straight-through
gradient, with a step that falls to zero. After AdaRound (Nagel et al., arXiv 2004.10568) and SignRound (Cheng et al.,
arXiv 2309.05516); what differs: scales proven optimal instead of learned clips, Adam instead of signs (a third less
error on the model that it was tried on), any start, and a gate, which keeps the start where samples that were not
trained on do not gain.

Must not know files; it knows blocks as functions of hidden states, and formats.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.errors import NumericsError
from ptqpipe.numerics.formats import Codec
from ptqpipe.numerics.qtensor import QTensor, code_values

Forward = Callable[[torch.Tensor, int, Mapping[str, torch.Tensor]], torch.Tensor]
"""(inputs of a batch, its number, weights by key) -> outputs of the block."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How long and how carefully.

    steps       of gradient descent
    rate        how far a step moves v at first
    windows     samples in one step
    held_out    share of the batches that decide whether what was learned is kept
    seed        of the order of the samples
    """

    steps: int = 200
    rate: float = 0.002
    windows: int = 8
    held_out: float = 0.125
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Learned:
    """What learning a block gave: mean squared errors of its output on the samples that were not trained on.

    codes  key -> uint8 codes [N, K]; those of the start where ``kept`` is False
    """

    codes: Mapping[str, torch.Tensor]
    start_loss: float
    learned_loss: float
    kept: bool
    moved: float  # share of the weights that left the code of the start


class Choice:
    """The code of every weight of one matrix, its neighbour towards the float weight, and what chooses between them,
    where the float matrix is.

    gain  logarithm of what the matrix is multiplied by, float32 0-d; may require a gradient. None: 0
    """

    def __init__(self, w: torch.Tensor, q: QTensor, gain: torch.Tensor | None = None) -> None:
        self.gain = gain
        codec = q.fmt.element
        block = q.fmt.block_extent(q.shape)
        scale = q.block_scales().to(w.device).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        values, codes = (found.to(w.device) for found in _sorted_codes(codec))
        y = torch.where(scale > 0, w.float() / scale, torch.zeros(()))
        chosen = q.codes.to(w.device)
        start = torch.searchsorted(values, code_values(chosen, codec))
        # The other choice lies on the side of the float weight: none for a weight beyond the largest code.
        other = (start + torch.where(y >= values[start], 1, -1)).clamp(0, len(values) - 1)
        span = values[other] - values[start]
        self._codes, self._start, self._other = codes, chosen, other.to(torch.int16)
        self.base = values[start] * scale
        self.step = span * scale
        place = torch.where(span != 0, (y - values[start]) / span.masked_fill(span == 0, 1.0), torch.zeros(()))
        self.place = torch.where(place < 0.5 + 2**-20, place.clamp(max=0.5 - 2**-20), torch.zeros(()))
        self.v = torch.zeros_like(self.place, requires_grad=True)

    def weight(self) -> torch.Tensor:
        """The decoded matrix, float32, with the straight-through gradient to ``v``."""
        hard = (self.place + self.v.detach() >= 0.5).float()
        decoded = self.base + self.step * (hard + (self.v - self.v.detach()))
        return decoded if self.gain is None else decoded * self.gain.exp()

    @property
    def moves(self) -> torch.Tensor:
        """bool [N, K]: which weights leave their codes."""
        return (self.place + self.v.detach() >= 0.5) & (self.step != 0)

    def moved(self, moves: torch.Tensor) -> torch.Tensor:
        """uint8 [N, K]: the codes where these weights have left theirs."""
        return torch.where(moves, self._codes[self._other.long()], self._start)

    def codes(self) -> torch.Tensor:
        """uint8 [N, K]: those chosen."""
        return self.moved(self.moves)


def with_codes(q: QTensor, codes: torch.Tensor) -> QTensor:
    """``q`` with other codes [N, K]."""
    return QTensor.from_codes(codes, q.scales, fmt=q.fmt, global_scale=q.global_scale)


def learn(
    originals: Mapping[str, torch.Tensor],
    quantized: Mapping[str, QTensor],
    *,
    forward: Forward,
    inputs: Callable[[int], torch.Tensor],
    targets: Callable[[int], torch.Tensor],
    batches: int,
    windows_per_batch: int,
    settings: Settings,
    on_step: Callable[[int], None] = lambda step: None,
) -> Learned:
    """Learns the codes of one block.

    originals, quantized  by key: matrices [N, K], and their QTensors at the scales that stay
    inputs, targets       hidden states of a batch: what the block will be given, and what it should then return
    on_step               called after each step with how many are done

    NumericsError for a loss that is not finite.
    """
    choices = {key: Choice(originals[key], q) for key, q in quantized.items()}
    order = list(range(batches))
    held = order[-max(1, round(batches * settings.held_out)) :] if batches > 1 else order
    trained = order[: -len(held)] or order

    def loss(batch: int) -> torch.Tensor:
        out = forward(inputs(batch), batch, {key: choice.weight() for key, choice in choices.items()})
        return (out.float() - targets(batch).float()).square().mean()

    def held_loss() -> float:
        with torch.no_grad():
            return float(torch.stack([loss(batch) for batch in held]).mean())

    start = held_loss()
    per_step = max(1, settings.windows // windows_per_batch)
    _descend(choices, loss, trained, per_step=per_step, settings=settings, on_step=on_step)
    learned = held_loss()
    if not start < float("inf"):
        raise NumericsError(
            f"learned rounding: the loss is {start} before the first step; check the model's weights and the data"
        )
    if not learned < float("inf"):
        raise NumericsError(
            f"learned rounding: the loss grew from {start:.3g} to {learned}; lower --steps, or use --method gptq"
        )
    kept = learned < start
    if not kept:
        for choice in choices.values():
            choice.v.data.zero_()
    moved = sum(int((choice.codes() != quantized[key].codes).sum()) for key, choice in choices.items())
    total = sum(choice.v.numel() for choice in choices.values())
    return Learned({k: choice.codes() for k, choice in choices.items()}, start, learned, kept, moved / total)


def _descend(
    choices: Mapping[str, Choice],
    loss: Callable[[int], torch.Tensor],
    batches: Sequence[int],
    *,
    per_step: int,
    settings: Settings,
    on_step: Callable[[int], None],
) -> None:
    generator = torch.Generator().manual_seed(settings.seed)
    variables = [choice.v for choice in choices.values()]
    optimizer = torch.optim.Adam(variables, lr=settings.rate, betas=(0.9, 0.99), eps=1e-12)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
    queue: list[int] = []
    for step in range(settings.steps):
        optimizer.zero_grad()
        for _ in range(per_step):
            if not queue:
                queue = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
            torch.autograd.backward(loss(queue.pop()))
        optimizer.step()
        schedule.step()
        for v in variables:
            v.data.clamp_(-0.5, 0.5)
        on_step(step + 1)


def _sorted_codes(codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Every distinct value of a codec, ascending, and a code of it."""
    codes = torch.arange(1 << codec.bits, dtype=torch.uint8)
    values = code_values(codes, codec)
    finite = torch.isfinite(values)
    codes, values = codes[finite], values[finite]
    order = torch.argsort(values, stable=True)
    codes, values = codes[order], values[order]
    first = torch.ones(len(values), dtype=torch.bool)
    first[1:] = values[1:] != values[:-1]
    return values[first], codes[first]
