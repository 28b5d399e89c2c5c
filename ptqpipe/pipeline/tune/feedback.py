"""Codes of one unit by GPTQ, for the inputs that it will get.

The target is what the float layer computed (``asymmetric.py``); the weight is quantized in the metric of the
input that the quantized layers before it give. Where a few of its rows so quantized lose more on inputs that were held
out than with the nearest codes, it is quantized without such a target, and where they still do, it keeps the nearest
codes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ptqpipe.calibration.cross_moments import ActivationCache, CrossMoments
from ptqpipe.calibration.gradients import Gradients, rows_of
from ptqpipe.calibration.inputs import Moments
from ptqpipe.models.slices import Member
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.pipeline.tune.start_codes import by_data
from ptqpipe.pipeline.tune.tuned_layer import TunedLayer
from ptqpipe.quantization import LoadedWeight, Task, asymmetric, gptq, joined, kronecker
from ptqpipe.quantization.metric import Metric
from ptqpipe.recipe.plan import Unit

TRIED_ROWS, TRIED_SHARE = 64, 16  # of a weight so many of its rows are tried first, but at most one of so many


@dataclass(frozen=True, slots=True)
class LayerState:
    """A decoder layer while GPTQ in order goes through it.

    seen, judged  numbers of the batches that are learned from, and of those that judge
    entering      hidden states of a batch as the quantized layers before this one return them
    decoded       key -> float32 [N, K]: every weight by its codes so far
    parameters    of the layer, made of these, but for those of modules that run later
    cache         of earlier runs
    gradients     of the float model in this layer, where errors cost what they add to the KL divergence of the model
    feedback      fraction of the error of earlier layers that is compensated for: 0 to 1
    """

    seen: Sequence[int]
    judged: Sequence[int]
    entering: Callable[[int], torch.Tensor]
    decoded: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    cache: ActivationCache
    gradients: Gradients | None
    feedback: float


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of one weight in both models, and what errors of it cost.

    inputs   that judge, in the float model and in the quantized one, float32 [tokens, K]
    outputs  E[g g^T] of its rows, by runs; None where nothing is known of them
    nearest  float32 [N, K]: the nearest codes, decoded
    """

    member: Member
    moments: CrossMoments
    inputs: tuple[torch.Tensor, torch.Tensor]
    outputs: Sequence[torch.Tensor] | None
    nearest: torch.Tensor


def chosen(work: TunedLayer, unit: Unit, members: Sequence[LayerInputs], *, feedback: float) -> dict[str, QTensor]:
    """Key -> the codes of one unit; none where it is to keep the nearest ones."""
    options, fmt = replace(by_data(unit), algorithm="gptq"), unit.scheme.fmt
    inputs: dict[int, tuple[Moments, Metric]] = {}  # by id of its moments
    for m in members:
        if id(m.moments) not in inputs:
            moments = Moments(m.moments.moment.diagonal().clone(), full_moment=m.moments.moment)
            name, device = m.member.weight, work.layer.device
            inputs[id(m.moments)] = moments, gptq.metric_of(moments, fmt, options, device=device, name=name)

    def choose(rows: Sequence[slice], feedback: float, *, outputs: bool) -> dict[str, QTensor]:
        weights = [work.weights[m.member.key][run].float() for m, run in zip(members, rows, strict=True)]
        wanted = list(weights)
        for of_input, (_, metric) in inputs.items() if feedback else ():
            sharing = [i for i, m in enumerate(members) if id(m.moments) == of_input]
            pair, name = members[sharing[0]].moments, members[sharing[0]].member.weight
            floats = [weights[i] for i in sharing]
            full = asymmetric.targets(floats, pair.moment, pair.cross, metric=metric, name=f"the input of '{name}'")
            for i, w, target in zip(sharing, floats, full, strict=True):
                wanted[i] = w + feedback * (target - w)
        runs: dict[tuple[int, int], QTensor] = {}
        task = Task(
            [LoadedWeight(w) for w in wanted],
            fmt,
            [m.member.weight for m in members],
            lambda member, row, q: runs.__setitem__((member, row), q),
            options,
            [replace(inputs[id(m.moments)][0], outputs=m.outputs if outputs else None) for m in members],
            device=work.layer.device,
        )
        gptq.choose(task, [inputs[id(m.moments)][1] for m in members])
        return {m.member.key: joined(runs, i) for i, m in enumerate(members)}

    if kronecker.possible(fmt):  # else rows share a scale, and some of them do not stand for all
        # An odd step: one that divides the size of a head would try the same places of each.
        rows = [slice(0, None, max(TRIED_SHARE, len(m.nearest) // TRIED_ROWS) | 1) for m in members]
        nearest = cost(work, members, rows, [m.nearest[run] for m, run in zip(members, rows, strict=True)])
        for tried in dict.fromkeys((feedback, 0.0)):
            codes = choose(rows, tried, outputs=False)
            if cost(work, members, rows, [decoded(codes[m.member.key]) for m in members]) <= nearest:
                feedback = tried
                break
        else:
            return {}
    return choose([slice(None)] * len(members), feedback, outputs=True)


def cost(
    work: TunedLayer, members: Sequence[LayerInputs], rows: Sequence[slice], decoded: Sequence[torch.Tensor]
) -> float:
    """Squared error of the outputs ``rows`` on held-out inputs, with those rows ``decoded``; each times its Fisher
    information, where there are gradients."""
    total = 0.0
    for m, run, values in zip(members, rows, decoded, strict=True):
        x, seen = m.inputs
        squares = (x @ work.weights[m.member.key][run].float().t() - seen @ values.t()).square_().sum(0).double()
        if m.outputs is not None:
            squares *= torch.cat([g.diagonal() for g in m.outputs])[run].to(squares)
        total += float(squares.sum())
    return total


def outputs_of(work: TunedLayer, key: str, gradients: Gradients | None) -> Sequence[torch.Tensor] | None:
    """E[g g^T] of the rows of a weight, by runs; None where nothing is known of them."""
    moments = None if gradients is None else gradients.outputs.get(work.places[key])
    matrix = next(a for a in work.assemblies if key in a.keys).part(key)
    if moments is None or len(matrix.keys) == 1:
        return moments
    return rows_of(moments, matrix.rows_of(key, {k: len(work.weights[k]) for k in matrix.keys}))
