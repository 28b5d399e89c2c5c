"""Method gptq of tune: error feedback in the order in which a decoder layer's matrices run.

`follow` takes the linear layers, and the stacks of experts, in the order in which they are called; each compensates
for the error of earlier ones. For each, both models are run up to it: the float one, and the one that is quantized so
far, inputs quantized as the scheme says; ``feedback.py`` chooses the codes. None of them is taken where the layer's
output on held-out samples is not better than with the nearest codes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.calibration.activations import Activations
from ptqpipe.calibration.cross_moments import ActivationCache, collect_cross_moments, paired_inputs
from ptqpipe.calibration.experts import is_product, stack_of
from ptqpipe.calibration.gradients import Gradients
from ptqpipe.calibration.inputs import OUT_ROWS
from ptqpipe.errors import NumericsError
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.pipeline.tune.expert_feedback import follow_stack
from ptqpipe.pipeline.tune.feedback import LayerInputs, LayerState, chosen, outputs_of
from ptqpipe.pipeline.tune.tune_samples import divided
from ptqpipe.pipeline.tune.tuned_layer import TunedLayer
from ptqpipe.recipe.plan import Unit


def follow(
    work: TunedLayer,
    start: Mapping[str, QTensor],
    *,
    feedback: float,
    held_out: float,
    inputs: Callable[[int], torch.Tensor],
    targets: Callable[[int], torch.Tensor],
    cache: ActivationCache,
    store: Callable[[], Activations],
    gradients: Gradients | None = None,
    on_unit: Callable[[float, str], None] = lambda part, name: None,
) -> tuple[Mapping[str, QTensor], float, float]:
    """(codes of one layer by key, mean errors of its output on the samples that were held out with the start
    and with what was found). The codes are the start's where those are not better; both errors are the same where no
    weight gains on the rows that are tried first.

    start            those of `TunedLayer.start`
    feedback         fraction of the error of earlier layers that each layer compensates for: 0 to 1
    held_out         share of the batches that only the gate sees
    inputs, targets  hidden states of a batch, where the layer is: what the quantized ones before return, this should
    cache            of the float layer's run; of the quantized one's with the codes that are returned, afterwards
    store            opens a place for hidden states of all batches
    gradients        of the float model in this layer, over the batches that are not held out: then errors cost what
                     they add to the KL divergence of the model, and the errors that are returned are in nats
    on_unit          called when a unit is done, with its share of the units and its name

    NumericsError for moments or errors that are not finite.
    """
    seen, judged = divided(work.layer.batches, held_out)
    better: dict[str, QTensor] = {}
    weights = {key: decoded(q) for key, q in start.items()}
    metric = None if gradients is None else [g.to(work.layer.device) for g in gradients.last]
    before = _loss(work, weights, judged, inputs, targets, metric)
    steps = _in_order(work, cache.order)
    waiting = {module for step in steps for module in step.modules}
    part = 1 / max(1, sum(len(step.units) for step in steps))
    for step in steps:
        cache.settle(set(cache.order) - waiting)
        later = cache.order[max(map(cache.order.index, step.modules)) + 1 :]
        parameters = work.parameters(weights, without=later)
        state = LayerState(seen, judged, inputs, weights, parameters, cache, gradients, feedback)
        codes = step.codes(work, state, store, lambda name: on_unit(part, name))
        waiting -= set(step.modules)
        better |= codes
        weights |= {key: decoded(q) for key, q in codes.items()}
    cache.settle(cache.order)
    after = _loss(work, weights, judged, inputs, targets, metric, cache) if better else before
    if not (before < float("inf") and after < float("inf")):
        raise NumericsError(f"the output error of {work.layer.name} is {after}; check the model's weights and the data")
    if better and not after < before:
        cache.settle(())  # its codes are others
    return {**start, **better} if after < before else start, before, after


@dataclass(frozen=True, slots=True)
class _Step:
    """A unit of linear layers, or all those of a stack of experts, and the modules that have them."""

    units: Sequence[Unit]
    modules: Sequence[str]
    stacked: bool

    def codes(
        self, work: TunedLayer, state: LayerState, store: Callable[[], Activations], on_unit: Callable[[str], None]
    ) -> dict[str, QTensor]:
        """Key -> the codes that were found; none of weights that are to keep theirs."""
        if self.stacked:
            return follow_stack(work, self.modules[0], self.units, state, store, on_unit)
        on_unit(self.units[0].id)
        return _linear(work, self.units[0], state)


def _linear(work: TunedLayer, unit: Unit, state: LayerState) -> dict[str, QTensor]:
    places = work.places
    modules = [places[m.key] for m in unit.members]
    each, leaders = list(dict.fromkeys(modules)), dict[str, str]()
    runs = (state.entering, state.parameters, work.quantizers)
    moments = collect_cross_moments(
        work.layer,
        each,
        batches=state.seen,
        entering=state.entering,
        parameters=state.parameters,
        quantizers=work.quantizers,
        cache=state.cache,
    )
    rows = paired_inputs(work.layer, each, leaders, state.judged[0], *runs, state.cache)
    if not all(bool((pair.moment.diagonal() > 0).any()) for pair in moments.values()):
        return {}  # no activation has reached it: nothing to compensate for
    floats = {name: (x.float(), seen.float()) for name, (x, seen) in rows.items()}
    members = [
        LayerInputs(
            m, moments[name], floats[leaders[name]], outputs_of(work, m.key, state.gradients), state.decoded[m.key]
        )
        for m, name in zip(unit.members, modules, strict=True)
    ]
    return chosen(work, unit, members, feedback=state.feedback)


def _in_order(work: TunedLayer, order: Sequence[str]) -> list[_Step]:
    """What the layer runs with, by the first call of one of its modules.

    order  modules as the layer calls them
    """
    steps, places = list[_Step](), work.places
    stacks: dict[str, list[Unit]] = {}
    for unit in work.followed:
        modules = list(dict.fromkeys(stack_of(places[m.key]) for m in unit.members))
        if any(name not in order for name in modules):
            continue
        if is_product(places[unit.members[0].key]):
            stacks.setdefault(modules[0], []).append(unit)
        else:
            steps.append(_Step([unit], modules, stacked=False))
    steps += [_Step(units, [stack], stacked=True) for stack, units in stacks.items()]
    return sorted(steps, key=lambda step: min(order.index(name) for name in step.modules))


@torch.no_grad()
def _loss(
    work: TunedLayer,
    decoded: Mapping[str, torch.Tensor],
    batches: Sequence[int],
    inputs: Callable[[int], torch.Tensor],
    targets: Callable[[int], torch.Tensor],
    metric: Sequence[torch.Tensor] | None,
    cache: ActivationCache | None = None,
) -> float:
    """Mean squared difference of the quantized layer's output to the target; with ``metric``, the
    moments of the gradients there by runs, half of its mean cost in it: nats of KL, to second order."""
    errors, parameters = [], work.parameters(decoded)
    for batch in batches:
        error = work.outputs(inputs(batch), batch, parameters, cache).float() - targets(batch).float()
        if metric is None:
            errors.append(error.square().mean())
            continue
        runs = zip(torch.split(error, OUT_ROWS, dim=-1), metric, strict=True)
        errors.append(0.5 * torch.stack([((run @ g) * run).sum(-1).mean() for run, g in runs]).sum())
    return float(torch.stack(errors).mean())
