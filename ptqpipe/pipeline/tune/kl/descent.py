"""Codes, and by choice tensors that stay floats, by gradient descent on the KL divergence of the whole model.

The start is codes that another method chose; the scales stay. Each weight may move to the neighbour of its code on the
other side of the float weight, where the learned v makes it (`choice.Choice`): few do. v follows Adam on the
straight-through gradient of the divergence, with a step that grows over the first steps and then falls to zero. So do
the floats (`Float`: norms, a head, ...), each with a step in proportion to its size. Several times on the way all of it
is judged on text that is not learned from, of more than one kind, with floats as they will be stored. What is returned
lowers the divergence most on average, among what leaves it above the start's on no kind of text: the start itself where
there is none. Descent ends early where judging found nothing better several times in a row; a time at which the step is
still large does not count.

Sources: AdaRound (Nagel et al., arXiv 2004.10568) for the choice between two neighbours, learned there layer by layer;
the divergence to the float model as the loss is that of quantization-aware distillation (NVIDIA, arXiv 2601.20088). The
gate on several kinds of text, and descent from codes that are already optimized, are this file's.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.pipeline.tune.kl.choice import Choice
from ptqpipe.pipeline.tune.options import Settings

WARM_UP = 10  # steps
JUDGED = 8  # times
PATIENCE = 3  # times in a row without anything better
CALM = 0.005  # step of v up to which these count: with larger ones codes move back and forth, and get better later
_PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class Float:
    """A tensor that stays a float and is learned, too.

    variable  float32; what the model computes with. Its gradient is that of the divergence
    rate      its first step
    store     turns a value into that which will be stored: of another dtype, or near by
    """

    variable: torch.Tensor
    rate: float
    store: Callable[[torch.Tensor], torch.Tensor]

    @property
    def stored(self) -> torch.Tensor:
        """Its value as it will be stored."""
        return self.store(self.variable.detach().clone())


@dataclass(frozen=True, slots=True)
class DescentResult:
    """The codes and floats of one descent.

    codes          key -> uint8 codes [N, K]; the start's where nothing was better
    floats         name -> value, as it will be stored
    start, result  text -> mean KL divergence to the float model, nats a token, on tokens that were not learned from
    steps          of gradient descent that were made
    best           the step whose codes these are; 0 is the start
    moved          share of the weights that left the start's codes
    """

    codes: Mapping[str, torch.Tensor]
    floats: Mapping[str, torch.Tensor]
    start: Mapping[str, float]
    result: Mapping[str, float]
    steps: int
    best: int
    moved: float


@dataclass(slots=True)
class _Progress:
    step: int
    start: dict[str, float]
    result: dict[str, float]
    best: int = 0
    since: int = 0  # evaluations without improvement (early stopping)

    def takes(self, judged: Mapping[str, float], *, counts: bool) -> bool:
        """Whether codes with these divergences are the best so far; notes them if so, and otherwise that there was a
        judgement without anything better, if it ``counts``."""
        worse = any(judged[name] > before for name, before in self.start.items())
        if worse or _mean(judged, self.start) >= _mean(self.result, self.start):
            self.since += counts
            return False
        self.result, self.best, self.since = dict(judged), self.step, 0
        return True


def _mean(divergences: Mapping[str, float], start: Mapping[str, float]) -> float:
    return sum(divergences[name] / before if before > 0 else 1.0 for name, before in start.items()) / len(start)


@dataclass(frozen=True, slots=True)
class Variables:
    """What is learned: codes, and floats, by name. No name is both."""

    choices: Mapping[str, Choice]
    floats: Mapping[str, Float]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: choice.v for name, choice in self.choices.items()} | {
            name: each.variable for name, each in self.floats.items()
        }

    def optimizer(self, rate: float) -> torch.optim.Adam:
        """Of all of them, with their first steps; ``rate`` is that of the codes."""
        groups = [{"params": [choice.v], "first": rate} for choice in self.choices.values()]
        groups += [{"params": [each.variable], "first": each.rate} for each in self.floats.values()]
        return torch.optim.Adam(groups, lr=rate, betas=(0.9, 0.99), eps=1e-12)

    def taken(self) -> dict[str, torch.Tensor]:
        """Which weights leave their codes, and floats as they will be stored."""
        moves = {name: choice.moves.to(torch.uint8) for name, choice in self.choices.items()}
        return moves | {name: each.stored for name, each in self.floats.items()}

    def put(self, taken: Mapping[str, torch.Tensor]) -> None:
        """Gives all of them the values that `taken` has returned; nothing is learned of them any more."""
        for name, choice in self.choices.items():
            choice.v.requires_grad_(False).copy_(0.5 * taken[name])
        for name, each in self.floats.items():
            each.variable.requires_grad_(False).copy_(taken[name])

    @contextlib.contextmanager
    def as_stored(self) -> Iterator[None]:
        """The model computes with floats as they will be stored while it is open."""
        learned = {name: each.variable.data for name, each in self.floats.items()}
        for each in self.floats.values():
            each.variable.data = each.stored.float()
        try:
            yield
        finally:
            for name, each in self.floats.items():
                each.variable.data = learned[name]


def descend(
    variables: Variables,
    *,
    backward: Callable[[int, float], float],
    judge: Callable[[], Mapping[str, float]],
    batches: Sequence[int],
    per_step: int,
    settings: Settings,
    state: Mapping[str, torch.Tensor] | None,
    save: Callable[[Mapping[str, torch.Tensor]], None],
    on_step: Callable[[int], None] = lambda step: None,
) -> DescentResult:
    """Learns the codes of all weights at once, or floats. Afterwards the variables have the values that were found.

    variables  at the start's values
    backward   (batch, share): adds the gradient of ``share`` times the batch's mean divergence to every variable
    judge      text -> mean divergence of their present values there, on tokens that are not learned from
    batches    numbers of those that are learned from, ``per_step`` in each step
    state      what `save` was given last by a run that was stopped; None for a new one
    on_step    called with how many steps are done
    """
    optimizer = variables.optimizer(settings.rate)
    progress, best = _begin(variables, optimizer, state, judge)
    every = max(1, settings.steps // JUDGED)
    largest = settings.rate if variables.choices else 0.0
    while progress.step < settings.steps and progress.since < PATIENCE:
        for group in optimizer.param_groups:
            group["lr"] = group["first"] * _fraction(progress.step, settings.steps)
        optimizer.zero_grad()
        for number in range(progress.step * per_step, (progress.step + 1) * per_step):
            backward(_drawn(batches, number, settings.seed), 1 / per_step)
        optimizer.step()
        for choice in variables.choices.values():
            choice.v.data.clamp_(-0.5, 0.5)
        progress.step += 1
        if progress.step % every == 0 or progress.step == settings.steps:
            with variables.as_stored():
                judged = judge()
            if progress.takes(judged, counts=largest * _fall(progress.step, settings.steps) <= CALM):
                best = variables.taken()
            save(_state(progress, best, variables, optimizer))
        on_step(progress.step)
    moves = {key: best[key].bool() for key in variables.choices}
    codes = {key: choice.moved(moves[key]) for key, choice in variables.choices.items()}
    moved = sum(int(m.sum()) for m in moves.values()) / max(1, sum(m.numel() for m in moves.values()))
    variables.put(best)
    floats = {name: best[name].cpu() for name in variables.floats}
    return DescentResult(codes, floats, progress.start, progress.result, progress.step, progress.best, moved)


def _fraction(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARM_UP) * _fall(step, steps)


def _fall(step: int, steps: int) -> float:
    """What is left of the rate behind a step, were there no first steps at which it grows."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def _drawn(batches: Sequence[int], number: int, seed: int) -> int:
    """The batch that is learned from as the ``number``-th: all in turn, in an order of its own each time."""
    turn, place = divmod(number, len(batches))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    return batches[int(torch.randperm(len(batches), generator=generator)[place])]


def _begin(
    variables: Variables,
    optimizer: torch.optim.Adam,
    state: Mapping[str, torch.Tensor] | None,
    judge: Callable[[], Mapping[str, float]],
) -> tuple[_Progress, dict[str, torch.Tensor]]:
    """(progress, best values) of a stopped run, its variables restored, or of a new one."""
    if state is None:
        start = dict(judge())
        return _Progress(0, start, dict(start)), variables.taken()
    progress = _Progress(**json.loads(bytes(state[_PROGRESS].tolist())))
    for name, variable in variables.tensors.items():
        variable.data.copy_(state[f"{name}/variable"])
        optimizer.state[variable] = {
            "step": torch.tensor(float(progress.step)),
            "exp_avg": state[f"{name}/mean"].to(variable.device, copy=True),
            "exp_avg_sq": state[f"{name}/square"].to(variable.device, copy=True),
        }
    return progress, {name: state[f"{name}/best"].to(variable.device) for name, variable in variables.tensors.items()}


def _state(
    progress: _Progress,
    best: Mapping[str, torch.Tensor],
    variables: Variables,
    optimizer: torch.optim.Adam,
) -> dict[str, torch.Tensor]:
    fields = json.dumps({name: getattr(progress, name) for name in _Progress.__slots__})
    state = {_PROGRESS: torch.tensor(list(fields.encode()), dtype=torch.uint8)}
    for name, variable in variables.tensors.items():
        moments, zero = optimizer.state[variable], torch.zeros_like(variable)  # of one that nothing depends on
        state |= {f"{name}/variable": variable.detach(), f"{name}/best": best[name]}
        state |= {f"{name}/mean": moments.get("exp_avg", zero), f"{name}/square": moments.get("exp_avg_sq", zero)}
    return {name: tensor.cpu() for name, tensor in state.items()}
