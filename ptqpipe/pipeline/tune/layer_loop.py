"""tune's pass over the decoder layers, with the weights of one in memory.

Two streams of hidden states go through the model: those of the float layers are the targets; those of the layers with
learned codes, activations quantized as the scheme says, are the inputs that each layer will get. For "layerwise" the
float stream is enough. Where errors cost KL divergence, the float model runs backwards first (`backwards.py`). After an
interruption finished layers are run again, not tuned again.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ptqpipe.calibration.cross_moments import ActivationCache
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.gradients import Gradients
from ptqpipe.calibration.likeness import Likeness, likeness_of, lines_of
from ptqpipe.calibration.runner import Layer, MtpLayer, Runner
from ptqpipe.checkpoint import LayerFolder
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.pipeline.tune import backwards
from ptqpipe.pipeline.tune.layer_codes import Streams, choose_by_layer, choose_in_order
from ptqpipe.pipeline.tune.open_runner import open_runner
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.pipeline.tune.tune_samples import learned_from
from ptqpipe.pipeline.tune.tuned_layer import TunedLayer
from ptqpipe.run.machine import Machine, counting_bar
from ptqpipe.runtime.compiled import pass_dtype

COARSE_BITS = 6  # finer codes change a layer's output by little more than rounding to bfloat16 does


def tune_layers(
    prepared: Conversion, samples: Samples, folder: LayerFolder, options: TuneOptions, machine: Machine
) -> list[str]:
    """Tunes every layer. Returns lines on how likely the model finds each source of the data."""
    likely: dict[str, Likeness] = {}

    def look(runner: Runner) -> None:
        likely.update(likeness_of(runner, samples))

    units = prepared.outputs.plan.units
    dtype = pass_dtype(max(math.prod(m.shape) for unit in units for m in unit.members), machine.device)
    spill = folder.paths.partial
    gradients: Callable[[str], Gradients | None] = lambda name: None  # noqa: E731
    if options.by_kl:
        learned = learned_from(samples, options)
        noted: dict[str, Any] = {"done": folder.done, "commit": folder.commit}
        gradients = backwards.observe(prepared, learned, spill, machine, dtype=dtype, seed=options.seed, **noted)
    if any(unit.scheme.fmt.element.bits > COARSE_BITS for unit in units):
        dtype = torch.float32
    runner, keeps = open_runner(prepared, samples, options, machine, dtype=dtype, spill=spill)
    names = [*runner.names, *(name for name, _ in runner.skeleton.mtp if _quantizes(prepared, runner, name))]
    count, done = len(names), sum(name in folder.done for name in names)
    with (
        runner,
        contextlib.ExitStack() as opened,
        counting_bar(count, "layers", shown=machine.progress, done=done) as advance,
    ):
        streams = Streams.like(runner, opened) if options.follows else None
        last = runner.mtp_layers() if count > len(runner.names) else ()
        for layer in itertools.chain(runner.layers(), _at_head(runner, look), last):
            on_part = partial(_advance, advance, f"layer {layer.index + 1} of {count}")
            finished = layer.name in folder.done
            if finished:
                on_part(0, "run again")
            # Behind the model's output no gradient comes from there.
            of_outputs = None if finished or isinstance(layer, MtpLayer) else gradients(layer.name)
            if streams is None:
                if not finished:
                    choose_by_layer(TunedLayer.of(layer, prepared, runner), runner, folder, of_outputs)
                    on_part(1, "codes")
            else:
                if isinstance(layer, MtpLayer):
                    streams = streams.behind(layer, Streams.like(runner, opened))
                work = TunedLayer.of(layer, prepared, runner)
                cache = ActivationCache(work.watched, keeps)
                choose_in_order(work, runner, folder, options, streams, of_outputs, cache, on_part=on_part)
            layer.advance()
    return lines_of(likely, samples)


def _at_head(runner: Runner, look: Callable[[Runner], None]) -> Iterator[Layer]:
    """No layer: runs ``look`` behind the last one, with the head's weights loaded, where there is a head."""
    if runner.skeleton.head_name is not None:
        with runner.head():
            look(runner)
    yield from ()


def _quantizes(prepared: Conversion, runner: Runner, part: str) -> bool:
    skeleton = runner.skeleton
    tensors = {tensor for name in skeleton.names_in(part) for tensor in skeleton.origins.get(name, ())}
    return any(member.source.tensor in tensors for unit in prepared.outputs.plan.units for member in unit.members)


def _advance(advance: Callable[[float, str], None], layer: str, part: float, note: str) -> None:
    advance(part, f"{layer}, {note}")
