"""How likely a model finds the text that it is calibrated on: the perplexity of each source, in a line.

A model that knows a kind of text loses about as much on it as it expects to lose: the entropy of its own distributions.
On text of another kind it loses more than it expects, so the difference says without any reference text whether a
source is like what the model was trained on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ptqpipe.calibration.backward import HEAD_TOKENS
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.runner import Runner
from ptqpipe.errors import arg

WINDOWS = 8  # of each source: a head over a large vocabulary costs about as much as some layers
UNLIKE = 0.7  # nats a token above the entropy; labs/likeness_table/NOTES.md has what was measured


@dataclass(frozen=True, slots=True)
class Likeness:
    """Of one source: mean loss and mean entropy in nats a token."""

    loss: float
    entropy: float

    @property
    def unlike(self) -> bool:
        """Whether the model loses much more on it than it expects."""
        return self.loss - self.entropy > UNLIKE


def likeness_of(runner: Runner, samples: Samples, *, share: slice = slice(None)) -> dict[str, Likeness]:
    """By the name of each source, numbered where several have one, on the first `WINDOWS` of its windows. After the
    last layer, inside of `Runner.head`. Empty for samples with images.

    share  which of the samples' windows the runner has
    """
    sums: dict[str, torch.Tensor] = {}  # of loss, of entropy, tokens; float64 [3]
    names = _names(samples)
    left = dict.fromkeys(names, WINDOWS)
    origins = iter([] if samples.images else samples.origin[: len(samples.windows)][share].tolist())
    for batch, ids in enumerate(runner.batches):
        for row, origin in zip(range(len(ids)), origins):  # noqa: B905  # what is held out has no origin here
            name = names[origin]
            if left[name] and ids.shape[1] > 1:
                left[name] -= 1
                total = _sums(runner, ids[row : row + 1], runner.activations.get(batch)[row : row + 1])
                sums[name] = sums.get(name, torch.zeros(3, dtype=torch.float64)) + total
    return {name: Likeness(*(total[:2] / total[2]).tolist()) for name, total in sums.items()}


def _names(samples: Samples) -> list[str]:
    all_names = [file.name for file in samples.files]
    return [
        name if all_names.count(name) == 1 else f"{name} ({all_names[:number].count(name) + 1})"
        for number, name in enumerate(all_names)
    ]


def _sums(runner: Runner, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Sum of losses, sum of entropies and number of tokens of one window [1, tokens]; float64 [3]."""
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, ids.shape[1] - 1, HEAD_TOKENS):
        run = slice(start, min(start + HEAD_TOKENS, ids.shape[1] - 1))
        with torch.no_grad():
            logs = runner.logits(ids[:, run], x[:, run].to(runner.device))[0].float().log_softmax(-1)
        labels = ids[0, run.start + 1 : run.stop + 1].to(logs.device)
        loss = -logs.gather(1, labels.unsqueeze(1)).double().sum()
        entropy = -(logs.exp() * logs).double().sum()
        sums += torch.tensor([float(loss), float(entropy), float(len(labels))], dtype=torch.float64)
    return sums


def lines_of(likeness: Mapping[str, Likeness], samples: Samples) -> list[str]:
    """How the rows are read; all sources of the samples in a line; then warnings of those that are unlike what the
    model knows, or that say nothing since the model gives NaN for them, and of those that give no window."""
    if any(math.isnan(one.loss) for one in likeness.values()):
        nan = "warning: the model's logits are not finite; check the weights of its last norm and its head"
        return [*samples.notes, nan, *_unused(samples)]
    each = ", ".join(f"{name} {_perplexity(one.loss)}" for name, one in likeness.items())
    lines = [f"perplexity of the data under the model: {each}{samples.thinned}"] if likeness else []
    lines += [
        f"warning: {name} is unlike what the model knows: perplexity {_perplexity(one.loss)}, where it expects "
        f"{_perplexity(one.entropy)}; calibrate on text like what it will serve, or on its own "
        f"({arg('data', 'self')}, generate)"
        for name, one in likeness.items()
        if one.unlike
    ]
    return [*samples.notes, *lines, *_unused(samples)]


def _unused(samples: Samples) -> list[str]:
    taken, count = set(samples.origin.tolist()), len(samples.windows)
    none = [
        n
        for number, n in enumerate(_names(samples))
        if samples.files[number].weight is not None and number not in taken
    ]
    if not none:
        return []
    more = f" and {len(none) - 1} more" if len(none) > 1 else ""
    return [
        f"warning: no text of {none[0]}{more} is used, its weight gives it none of {count} windows; raise its weight, "
        f"or {arg('samples')}"
    ]


def _perplexity(nats: float) -> str:
    return f"{math.exp(min(nats, 700)):.3g}"
