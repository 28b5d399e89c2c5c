"""Moments "kl" and "pairs" of calibrate: Fisher information at outputs and inputs of the linear layers."""

import math
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace

from ptqpipe.calibration.backward import expert_products, linear_modules, run_model_backward, thinned
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.gradients import Gradients
from ptqpipe.calibration.runner import Layer
from ptqpipe.calibration.store import LayerRecord, write_outputs
from ptqpipe.checkpoint import LayerFolder
from ptqpipe.checkpoint.tensor_names import layer_of
from ptqpipe.models.source import Source
from ptqpipe.recipe.weight_map import WeightMap
from ptqpipe.run.machine import BASE_BYTES, Machine, Ranks, counting_bar
from ptqpipe.runtime.compiled import pass_dtype
from ptqpipe.runtime.skeleton import Skeleton


def learned_from(samples: Samples, world: int, *, pairs: bool = False) -> Samples:
    """Those that are run backwards by so many processes; none that is held out."""
    return thinned(replace(samples, held_out=samples.held_out[:0]), world, pairs=pairs)


def collect_outputs(
    source: Source,
    samples: Samples,
    output: LayerFolder,
    machine: Machine,
    *,
    ranks: Ranks,
    seed: int,
    moments: Collection[str],
) -> dict[str, LayerRecord]:
    """Runs the model backwards on `learned_from`, and writes what of ``moments`` that gives: "kl" what gradients at
    outputs and of weights say, "pairs" those at inputs. Every rank runs its share of the samples; the first one writes,
    the others return nothing."""
    weights = WeightMap.of(source).weights.items()
    largest = max((math.prod(member.shape) for name, member in weights if layer_of(name) is not None), default=0)
    every = {"kl", "full"} <= set(moments)

    def modules(layer: Layer) -> list[str]:
        linear = linear_modules(layer) if "kl" in moments else []
        return linear + (expert_products(layer) if every else [])

    skeleton, pairs = Skeleton.of(source, dtype=pass_dtype(largest, machine.device)), "pairs" in moments
    gradients_of_layers = run_model_backward(
        skeleton,
        learned_from(samples, ranks.world, pairs=pairs),
        seed=seed,
        device=machine.device,
        memory_bytes=machine.memory_bytes - BASE_BYTES,
        spill=output.paths.partial,
        modules=modules,
        of_ranks=(ranks.rank, ranks.world),
        weights="kl" in moments,
        pairs=pairs,
    )
    shown = machine.progress and ranks.rank == 0
    with counting_bar(len(skeleton.blocks), "layers", shown=shown, title="backwards") as advance:

        def counted() -> Iterator[tuple[str, Gradients]]:
            for name, gradients in gradients_of_layers:
                yield name, gradients
                advance(1, name)

        if ranks.rank != 0:
            deque(counted(), maxlen=0)
            return {}
        return write_outputs(output.paths.growing, counted(), skeleton.origins, full=every)
