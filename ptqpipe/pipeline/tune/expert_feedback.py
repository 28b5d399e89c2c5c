"""Error feedback in the stacked experts of a layer, for each on the tokens that the quantized model sends to it.

The first product of an expert is quantized on what the quantized layers before the stack give it, then the second one
on what the first one makes of that by its codes. What the float model has at the same tokens is the target of both. A
token counts as much as the expert's output does in the layer's. Experts go one by one, so the moments of one are in
memory.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ptqpipe.calibration.activations import Activations
from ptqpipe.calibration.expert_inputs import ExpertInputs, StackInputs
from ptqpipe.calibration.experts import SIDES, product_name, second_input
from ptqpipe.calibration.runner import BATCH_TOKENS
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.rotation import rotated
from ptqpipe.pipeline.tune.feedback import LayerInputs, LayerState, chosen, outputs_of
from ptqpipe.pipeline.tune.tuned_layer import TunedLayer
from ptqpipe.recipe.plan import Unit
from ptqpipe.runtime.stacked_experts import first_stack


def follow_stack(
    work: TunedLayer,
    stack: str,
    units: Sequence[Unit],
    state: LayerState,
    store: Callable[[], Activations],
    on_unit: Callable[[str], None],
) -> dict[str, QTensor]:
    """Key -> the codes of the experts of the module ``stack``; none of weights that are to keep theirs.

    units    of the stack, each in one product of one expert
    store    opens a place for hidden states of all batches
    on_unit  called with the name of each unit
    """
    places, of_place = work.places, defaultdict[str, list[Unit]](list)
    for unit in units:
        of_place[places[unit.members[0].key]].append(unit)
    both = (*state.seen, *(batch for batch in state.judged if batch not in state.seen))
    stack_inputs = StackInputs.of(
        work.layer,
        stack,
        batches=both,
        entering=state.entering,
        parameters=state.parameters,
        quantizers=work.quantizers,
        cache=state.cache,
        store=store,
    )
    codes: dict[str, QTensor] = {}
    with contextlib.closing(stack_inputs):
        count = len(work.layer.module.get_submodule(stack).get_parameter("down_proj"))
        for group in stack_inputs.groups(both, count):
            learned, judging = (stack_inputs.inputs(group, batches) for batches in (state.seen, state.judged))
            for expert in group:
                codes |= _follow_expert(work, stack, expert, of_place, learned.pop(expert), judging.pop(expert), state)
                for unit in (unit for side in SIDES for unit in of_place[product_name(stack, expert, side)]):
                    on_unit(unit.id)
    return codes


@torch.no_grad()
def _follow_expert(
    work: TunedLayer,
    stack: str,
    expert: int,
    of_place: Mapping[str, Sequence[Unit]],
    learned: ExpertInputs,
    judging: ExpertInputs,
    state: LayerState,
) -> dict[str, QTensor]:
    """Key -> the codes of one expert, learned from some inputs and judged by others; ``of_place``: units by product."""
    codes: dict[str, QTensor] = {}
    for side in SIDES:
        place = product_name(stack, expert, side)
        products = [_product_inputs(work, place, inputs) for inputs in (learned, judging)]
        if here := of_place[place]:
            moments, rows = products[0].moments(f"{work.layer.name}.{place}"), products[1].weighted()
            for unit in here if bool((moments.moment.diagonal() > 0).any()) else ():
                members = [
                    LayerInputs(m, moments, rows, outputs_of(work, m.key, state.gradients), state.decoded[m.key])
                    for m in unit.members
                ]
                codes |= chosen(work, unit, members, feedback=state.feedback)
        if side == "up":
            first = _first(work, stack, expert, {**state.decoded, **{key: decoded(q) for key, q in codes.items()}})
            module = work.layer.module.get_submodule(stack)
            learned, judging = (
                replace(
                    inputs,
                    exact=_second_inputs(module, expert, inputs.exact, None),
                    seen=_second_inputs(module, expert, product.seen, first),
                )
                for inputs, product in zip((learned, judging), products, strict=True)
            )
    return codes


def _product_inputs(work: TunedLayer, place: str, inputs: ExpertInputs) -> ExpertInputs:
    """What a product of an expert multiplies: inputs rotated as it does it, and quantized in the quantized model."""
    quantizer = work.quantizers.get(place)
    if quantizer is None:
        return inputs
    exact, seen = (rotated(x, quantizer.rotation) for x in (inputs.exact, inputs.seen))
    return replace(inputs, exact=exact, seen=quantizer.quantized(seen))


def _first(work: TunedLayer, stack: str, expert: int, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    name = first_stack(work.layer.module.get_submodule(stack))
    assembly = next((a for a in work.assemblies if a.parameter == f"{stack}.{name}"), None)
    return None if assembly is None else assembly.part(assembly.stacks[0][expert]).build(weights)[0]


def _second_inputs(module: Any, expert: int, x: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    dtype = module.down_proj.dtype  # that the layer runs in
    first = None if first is None else first.to(dtype)
    parts = (second_input(module, expert, rows.to(dtype), first) for rows in torch.split(x, BATCH_TOKENS))
    return torch.cat(list(parts)).float()
