"""Codes by gradient descent on the KL divergence of the whole model.

The start is codes that another method chose; the scales stay. Each weight may move to the neighbour of its code on the
other side of the float weight, where the learned v makes it (`rounding.Choice`): few do. v follows Adam on the
straight-through gradient of the divergence, with a step that grows over the first steps and then falls to zero. Several
times on the way the codes are judged on text that is not learned from, of more than one kind. What is returned are the
codes that lower the divergence most on average, among those for which it is above the start's on no kind of text: the
start itself where there are none. Descent ends early where judging found nothing better several times in a row.

Sources: AdaRound (Nagel et al., arXiv 2004.10568) for the choice between two neighbours, learned there layer by layer;
the divergence to the float model as the loss is that of quantization-aware distillation (NVIDIA, arXiv 2601.20088). The
gate on several kinds of text, and descent from codes that are already optimized, are this file's.

It must not know models or files; a model is a function that gives gradients and divergences.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.calibration.rounding import Choice, Settings

WARM_UP = 10  # steps
JUDGED = 8  # times
PATIENCE = 3  # times in a row without anything better
_PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class Found:
    """What descent gave.

    codes          key -> uint8 codes [N, K]; the start's where nothing was better
    start, result  text -> mean KL divergence to the float model, nats a token, on tokens that were not learned from
    steps          of gradient descent that were made
    best           the step whose codes these are; 0 is the start
    moved          share of the weights that left the start's codes
    """

    codes: Mapping[str, torch.Tensor]
    start: Mapping[str, float]
    result: Mapping[str, float]
    steps: int
    best: int
    moved: float


@dataclass(slots=True)
class _Progress:
    """How far descent is, and what was best so far."""

    step: int
    start: dict[str, float]
    result: dict[str, float]
    best: int = 0
    since: int = 0  # judgements since then

    def takes(self, judged: Mapping[str, float]) -> bool:
        """Whether codes with these divergences are the best so far; notes them if so."""
        worse = any(judged[name] > before for name, before in self.start.items())
        if worse or _mean(judged, self.start) >= _mean(self.result, self.start):
            self.since += 1
            return False
        self.result, self.best, self.since = dict(judged), self.step, 0
        return True


def _mean(found: Mapping[str, float], start: Mapping[str, float]) -> float:
    """Of the ratios to the start."""
    return sum(found[name] / before if before > 0 else 1.0 for name, before in start.items()) / len(start)


def descend(
    choices: Mapping[str, Choice],
    *,
    backward: Callable[[int, float], float],
    judge: Callable[[], Mapping[str, float]],
    batches: Sequence[int],
    per_step: int,
    settings: Settings,
    state: Mapping[str, torch.Tensor] | None,
    save: Callable[[Mapping[str, torch.Tensor]], None],
    on_step: Callable[[int], None] = lambda step: None,
) -> Found:
    """Learns the codes of all weights at once.

    choices   by key, at the start's codes
    backward  (batch, share): adds the gradient of ``share`` times the batch's mean divergence to every ``Choice.v``
    judge     text -> mean divergence of the present codes there, on tokens that are not learned from
    batches   numbers of those that are learned from, ``per_step`` in each step
    state     what `save` was given last by a run that was stopped; None for a new one
    on_step   called with how many steps are done
    """
    variables = [choice.v for choice in choices.values()]
    optimizer = torch.optim.Adam(variables, lr=settings.rate, betas=(0.9, 0.99), eps=1e-12)
    progress, moves = _begin(choices, optimizer, state, judge)
    every = max(1, settings.steps // JUDGED)
    while progress.step < settings.steps and progress.since < PATIENCE:
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * _fraction(progress.step, settings.steps)
        optimizer.zero_grad()
        for number in range(progress.step * per_step, (progress.step + 1) * per_step):
            backward(_drawn(batches, number, settings.seed), 1 / per_step)
        optimizer.step()
        for v in variables:
            v.data.clamp_(-0.5, 0.5)
        progress.step += 1
        if progress.step % every == 0 or progress.step == settings.steps:
            if progress.takes(judge()):
                moves = {key: choice.moves for key, choice in choices.items()}
            save(_state(progress, moves, choices, optimizer))
        on_step(progress.step)
    codes = {key: choice.moved(moves[key]) for key, choice in choices.items()}
    moved = sum(int(m.sum()) for m in moves.values()) / sum(m.numel() for m in moves.values())
    return Found(codes, progress.start, progress.result, progress.step, progress.best, moved)


def _fraction(step: int, steps: int) -> float:
    """Of the rate, at a step."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _drawn(batches: Sequence[int], number: int, seed: int) -> int:
    """The batch that is learned from as the ``number``-th: all in turn, in an order of its own each time."""
    turn, place = divmod(number, len(batches))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    return batches[int(torch.randperm(len(batches), generator=generator)[place])]


def _begin(
    choices: Mapping[str, Choice],
    optimizer: torch.optim.Adam,
    state: Mapping[str, torch.Tensor] | None,
    judge: Callable[[], Mapping[str, float]],
) -> tuple[_Progress, dict[str, torch.Tensor]]:
    """How far a stopped run was and its best moves, its variables restored; or a new run."""
    if state is None:
        start = dict(judge())
        return _Progress(0, start, dict(start)), {key: torch.zeros_like(c.moves) for key, c in choices.items()}
    progress = _Progress(**json.loads(bytes(state[_PROGRESS].tolist())))
    for key, choice in choices.items():
        choice.v.data.copy_(state[f"{key}/v"])
        optimizer.state[choice.v] = {
            "step": torch.tensor(float(progress.step)),
            "exp_avg": state[f"{key}/mean"].clone(),
            "exp_avg_sq": state[f"{key}/square"].clone(),
        }
    return progress, {key: state[f"{key}/moves"].bool() for key in choices}


def _state(
    progress: _Progress,
    moves: Mapping[str, torch.Tensor],
    choices: Mapping[str, Choice],
    optimizer: torch.optim.Adam,
) -> dict[str, torch.Tensor]:
    """All that a stopped run needs to go on to the same codes."""
    told = json.dumps({name: getattr(progress, name) for name in _Progress.__slots__})
    found = {_PROGRESS: torch.tensor(list(told.encode()), dtype=torch.uint8)}
    for key, choice in choices.items():
        known = optimizer.state[choice.v]
        found |= {f"{key}/v": choice.v.detach(), f"{key}/moves": moves[key].to(torch.uint8)}
        found |= {f"{key}/mean": known["exp_avg"], f"{key}/square": known["exp_avg_sq"]}
    return found
