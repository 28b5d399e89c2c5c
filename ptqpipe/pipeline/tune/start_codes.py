"""The codes of a decoder layer that tune starts from: what convert would write with the layer's own statistics."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from ptqpipe.calibration.collect import Collector
from ptqpipe.calibration.gradients import Gradients, by_checkpoint
from ptqpipe.calibration.runner import Layer, Runner
from ptqpipe.calibration.statistics import MomentSource
from ptqpipe.calibration.store import LayerStatistics
from ptqpipe.conversion.input_moments import module_of
from ptqpipe.conversion.units import check_kept_alive, quantize_unit
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.pipeline.tune.tuned_layer import TunedLayer
from ptqpipe.quantization import LoadedWeight, joined
from ptqpipe.recipe.options import ALGORITHMS
from ptqpipe.recipe.plan import Unit
from ptqpipe.recipe.recipe import Rule


def start_codes(work: TunedLayer, inputs: MomentSource | None = None, *, followed: bool = False) -> dict[str, QTensor]:
    """Key -> the weight as convert would write it: with ``inputs``, the statistics of the layer, by the full moments. A
    weight that no sample reached has its nearest codes.

    followed  whether GPTQ in order comes next: then what it finds codes of has its nearest ones, which cost little
    """
    later = work.followed if followed else ()
    return {key: q for unit in work.units for key, q in _start(work, unit, inputs, plain=unit in later).items()}


def _start(work: TunedLayer, unit: Unit, inputs: MomentSource | None, *, plain: bool) -> dict[str, QTensor]:
    runs: dict[tuple[int, int], QTensor] = {}
    statistics: MomentSource | None = work.prepared.statistics
    if plain:
        unit = replace(unit, rule=nearest(unit))
    elif inputs is not None:
        reached = all(inputs.has(module_of(member), "second_moment") for member in unit.members)
        statistics = inputs if reached else None
        unit = replace(unit, rule=by_data(unit) if reached else nearest(unit))
    done = quantize_unit(
        unit,
        [LoadedWeight(work.weights[m.key]) for m in unit.members],
        lambda member, row, q: runs.__setitem__((member, row), q),
        statistics=statistics,
        device=work.layer.device,
    )
    check_kept_alive(unit, done.errors)  # convert takes the codes as they come
    return {m.key: joined(runs, i) for i, m in enumerate(unit.members)}


def by_data(unit: Unit) -> Rule:
    """The unit's rule where it reads moments, else GPTQ with the weighting that convert takes."""
    rule = unit.rule
    return rule if rule.calibrated else replace(rule, algorithm="gptq", objective=ALGORITHMS["gptq"].objective)


def nearest(unit: Unit) -> Rule:
    """The unit's rule without what reads moments."""
    return replace(unit.rule, algorithm="rtn", objective="none")


def observe(
    layer: Layer,
    runner: Runner,
    run: Callable[[Callable[[int], None]], None],
    *,
    units: Iterable[Unit],
    gradients: Gradients | None = None,
) -> LayerStatistics:
    """Statistics of the inputs of some of the layer's weights, full moments and those of held-out windows apart, as
    `calibrate` has them, but for quantiles; with ``gradients`` what these say of outputs.

    run    runs the float layer over all batches, and calls what it is given with the number of each before it runs
    units  that have the weights
    """
    collector = Collector(
        layer.name,
        layer.module,
        layer.origins,
        block=False,
        full=True,
        device=runner.device,
        quantiles=False,
        wanted=frozenset(module_of(member) for unit in units for member in unit.members),
    )

    def before(batch: int) -> None:
        collector.holding_out = batch >= runner.held_from

    with collector:
        run(before)
    return LayerStatistics(layer.name, collector, by_checkpoint(layer, gradients.outputs) if gradients else None)
