"""The runner of the float model, with room for what tune keeps beside it: moments, streams of hidden states, caches."""

from dataclasses import replace
from pathlib import Path

import torch

from ptqpipe.calibration.collect import sums_of_layers
from ptqpipe.calibration.cross_moments import cached_batches
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.expert_inputs import STREAMS
from ptqpipe.calibration.experts import STACKS, is_stacked
from ptqpipe.calibration.runner import Runner
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.input_moments import unit_extra_bytes
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.pipeline.tune.start_codes import by_data
from ptqpipe.pipeline.tune.tune_samples import divided
from ptqpipe.run.machine import BASE_BYTES, WORKER_BYTES, Machine
from ptqpipe.runtime.skeleton import Skeleton


def open_runner(
    prepared: Conversion,
    samples: Samples,
    options: TuneOptions,
    machine: Machine,
    *,
    dtype: torch.dtype,
    spill: Path,
) -> tuple[Runner, list[int]]:
    """Of the float model in ``dtype``, with hidden states on disk in ``spill`` where memory is short of them; of which
    batches there is room for what `ActivationCache` keeps, too: of those that `follow` runs several times."""
    skeleton = Skeleton.of(prepared.source, dtype=dtype, images=bool(samples.images))
    held_out = len(samples.held_out) > 0
    together = not options.follows or not _whole_stacks(prepared, skeleton)  # moments of all experts
    sums = max(sums_of_layers(skeleton, block=False, full=True, held_out=held_out, experts=together))
    units = (replace(unit, rule=by_data(unit)) for unit in prepared.outputs.plan.units)
    searches = max((unit_extra_bytes(unit, None) for unit in units), default=0)
    memory = machine.memory_bytes - BASE_BYTES - WORKER_BYTES - sums - searches
    stacked = options.follows and any(is_stacked(m) for _, layer in skeleton.blocks for m in layer.modules())
    streams = (3 if options.follows else 1) + (STREAMS if stacked else 0)
    runner = Runner.open(
        skeleton,
        samples.windows,
        held_out=samples.held_out,
        device=machine.device,
        memory_bytes=memory,
        spill=spill,
        streams=streams,
        images=samples.images,
    )
    of_host = machine.device.type == "cpu"  # whose memory that is
    seen, judged = divided(len(runner.batches), options.settings.held_out)
    again = dict.fromkeys((*seen, judged[0]))
    return runner, cached_batches(runner, again, memory, streams=streams) if of_host else []


def _whole_stacks(prepared: Conversion, skeleton: Skeleton) -> bool:
    """Whether every stack of experts is quantized whole or not at all: others are done by themselves."""
    quantized = {member.source.tensor for unit in prepared.outputs.plan.units for member in unit.members}
    stacks = (
        set(skeleton.origins.get(f"{name}.{path}.{leaf}", ()))
        for name, layer in skeleton.blocks
        for path, module in layer.named_modules()
        for leaf in (STACKS if is_stacked(module) else ())
    )
    return all(origins <= quantized or origins.isdisjoint(quantized) for origins in stacks)
