"""tune --method gptq: error feedback in the order of the model; layers compensate for the error of earlier ones.

The layers of a block are quantized in the order in which the block calls them. For each, both models are run up to it:
the float one, and the one that is quantized so far, inputs quantized as the scheme says. What the layer should then
compute is what the float layer did (``algorithms.asymmetric``); that weight is quantized by GPTQ in the metric of the
input that will be there. The codes that convert would write stay where
the block's output on samples that were held out is not better.

Knows one block; must not know folders.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ptqpipe.algorithms import asymmetric, gptq
from ptqpipe.algorithms.unit import Matrix, Task, joined
from ptqpipe.calibration.paired import Paired, call_order, paired_moments
from ptqpipe.errors import NumericsError
from ptqpipe.inputs import Moments
from ptqpipe.plan import Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.stages.tune.block import BlockWork


def follow(
    work: BlockWork,
    start: Mapping[str, QTensor],
    *,
    share: float,
    held_out: float,
    inputs: Callable[[int], torch.Tensor],
    targets: Callable[[int], torch.Tensor],
) -> tuple[Mapping[str, QTensor], float, float]:
    """(codes of one block by key, mean squared errors of its output on the samples that were held out with the start
    and with what was found). The codes are the start's where those are not better.

    start            those that convert would write
    share            fraction of the error of earlier layers that each layer compensates for: 0 to 1
    held_out         share of the batches that only the gate sees
    inputs, targets  hidden states of a batch: what the quantized blocks before this return, what this should return

    NumericsError for moments or errors that are not finite.
    """
    batches = list(range(work.block.batches))
    held = batches[-max(1, round(len(batches) * held_out)) :] if len(batches) > 1 else batches
    seen = batches[: -len(held)] or batches
    found = dict(start)
    decoded = {key: q.dequantize() for key, q in start.items()}
    before = _loss(work, decoded, held, inputs, targets)
    for unit, modules in _in_order(work):
        moments = paired_moments(
            work.block,
            list(dict.fromkeys(modules)),
            batches=seen,
            given=inputs,
            parameters=work.parameters(decoded),
            quantizers=work.quantizers,
        )
        if not all(bool((pair.moment.diagonal() > 0).any()) for pair in moments.values()):
            continue  # no activation has reached it: nothing to compensate for
        codes = quantize_unit(work, unit, [moments[name] for name in modules], share=share)
        found |= codes
        decoded |= {key: q.dequantize() for key, q in codes.items()}
    after = _loss(work, decoded, held, inputs, targets)
    if not (before < float("inf") and after < float("inf")):
        raise NumericsError(f"the output error of {work.block.name} is {after}; check the model's weights and the data")
    return found if after < before else start, before, after


def quantize_unit(work: BlockWork, unit: Unit, moments: Sequence[Paired], *, share: float) -> dict[str, QTensor]:
    """Key -> the codes of one unit, given the moments of every member's input."""
    # without data the rule has no weighting, but GPTQ's scales follow the data
    weighting = unit.rule.weighting if unit.rule.calibrated else "diagonal"
    options = replace(unit.rule, algorithm="gptq", weighting=weighting)
    known: dict[int, Moments] = {}
    targets, inputs = [], []
    for member, pair in zip(unit.members, moments, strict=True):
        w, name = work.weights[member.key].float(), f"the input of '{member.weight}'"
        full = asymmetric.target(w, pair.moment, pair.cross, damping=options.damping, name=name)
        targets.append(w + share * (full - w))
        inputs.append(known.setdefault(id(pair), Moments(pair.moment.diagonal().clone(), full_moment=pair.moment)))
    runs: dict[tuple[int, int], QTensor] = {}
    task = Task(
        [Matrix(t) for t in targets],
        unit.scheme.fmt,
        [m.weight for m in unit.members],
        lambda member, row, q: runs.__setitem__((member, row), q),
        options,
        inputs,
    )
    gptq.quantize(task)
    return {m.key: joined(runs, i) for i, m in enumerate(unit.members)}


def _in_order(work: BlockWork) -> list[tuple[Unit, list[str]]]:
    """(unit, module of every member) for units that the block runs with, by the first call of one of their modules."""
    modules = work.modules
    usable = [unit for unit in work.units if all(m.key in modules for m in unit.members)]
    order = call_order(work.block, list(dict.fromkeys(modules[m.key] for unit in usable for m in unit.members)))
    named = [(unit, [modules[m.key] for m in unit.members]) for unit in usable]
    called = [(unit, names) for unit, names in named if all(name in order for name in names)]
    return sorted(called, key=lambda found: min(order.index(name) for name in found[1]))


@torch.no_grad()
def _loss(
    work: BlockWork,
    decoded: Mapping[str, torch.Tensor],
    batches: Sequence[int],
    inputs: Callable[[int], torch.Tensor],
    targets: Callable[[int], torch.Tensor],
) -> float:
    """Mean squared difference of the quantized block's output to the target."""
    errors = [
        (work.outputs(inputs(batch), batch, decoded).float() - targets(batch).float()).square().mean()
        for batch in batches
    ]
    return float(torch.stack(errors).mean())
