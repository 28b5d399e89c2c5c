"""tune of one decoder layer: its codes are chosen, written, noted in the journal, and applied to the hidden states."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ptqpipe.calibration.activations import Activations
from ptqpipe.calibration.cross_moments import ActivationCache
from ptqpipe.calibration.gradients import Gradients
from ptqpipe.calibration.runner import Layer, MtpLayer, Runner
from ptqpipe.checkpoint import LayerFolder
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.pipeline.tune import codes_folder
from ptqpipe.pipeline.tune.in_order import follow
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.pipeline.tune.start_codes import observe, start_codes
from ptqpipe.pipeline.tune.tuned_layer import TunedLayer
from ptqpipe.runtime.memory import return_freed_memory


@dataclass(frozen=True, slots=True)
class Streams:
    """Hidden states of all batches: what float layers return (``targets``), and what enters the tuned ones."""

    targets: Activations
    entering: Activations

    @classmethod
    def like(cls, runner: Runner, opened: ExitStack) -> "Streams":
        """Empty ones, where the runner's own hidden states are; ``opened`` closes them."""
        both = [runner.activations.another() for _ in range(2)]
        for stream in both:
            opened.callback(stream.close)
        return cls(*both)

    def behind(self, layer: MtpLayer, empty: "Streams") -> "Streams":
        """``empty``, with what enters the layer of multi-token prediction behind the tuned layers."""
        for batch in range(layer.batches):
            empty.entering.put(batch, layer.pairs(batch, self.entering.get(batch)))
        return empty


def choose_by_layer(work: TunedLayer, runner: Runner, folder: LayerFolder, gradients: Gradients | None) -> None:
    """Chooses, writes and journals the codes of one layer by the inputs of the float model, which is then behind it."""
    layer = work.layer
    inputs = observe(layer, runner, layer.advance, units=work.units, gradients=gradients)
    codes = start_codes(work, inputs)
    entry: dict[str, Any] = {"start_loss": None, "learned_loss": None, "kept": False, "moved": 0.0, "held_out": False}
    entry |= {"not_learned": []}
    folder.commit(work.layer.name, entry | codes_folder.write(folder.files, work.layer.name, codes))
    return_freed_memory()


def choose_in_order(
    work: TunedLayer,
    runner: Runner,
    folder: LayerFolder,
    options: TuneOptions,
    streams: Streams,
    gradients: Gradients | None,
    cache: ActivationCache,
    *,
    on_part: Callable[[float, str], None],
) -> None:
    """Learns, writes and applies the codes of one layer; afterwards both streams are behind it."""
    layer, targets, entering = work.layer, streams.targets, streams.entering
    if layer.index == 0:
        for batch in range(layer.batches):
            entering.put(batch, layer.inputs(batch))

    @torch.no_grad()
    def run(before: Callable[[int], None]) -> None:
        for batch in range(layer.batches):
            before(batch)
            with cache.watching(layer, batch):
                targets.put(batch, layer.forward(layer.inputs(batch), batch))

    if layer.name in folder.done:
        run(lambda batch: None)
        codes = codes_folder.read(folder, layer, work.units)
    else:
        alone = [unit for unit in work.units if unit not in work.followed]
        inputs = observe(layer, runner, run, units=alone) if alone else None
        if inputs is None:
            run(lambda batch: None)
        start = start_codes(work, inputs, followed=True)
        del inputs  # the moments
        store = runner.activations.another
        codes, record = _find(work, options, start, streams, gradients, cache, store, on_part=on_part)
        record |= codes_folder.write(folder.files, layer.name, codes)
        folder.commit(layer.name, record)
    parameters = work.parameters({key: decoded(q) for key, q in codes.items()})
    with torch.no_grad():
        for batch in range(layer.batches):
            entering.put(batch, work.outputs(entering.get(batch).to(runner.device), batch, parameters, cache))
            runner.activations.put(batch, targets.get(batch))
    layer.advanced = True
    return_freed_memory()  # else a layer's caches and moments, of all sizes, leave holes for the next one's


def _find(
    work: TunedLayer,
    options: TuneOptions,
    start: Mapping[str, QTensor],
    streams: Streams,
    gradients: Gradients | None,
    cache: ActivationCache,
    store: Callable[[], Activations],
    *,
    on_part: Callable[[float, str], None],
) -> tuple[dict[str, QTensor], dict[str, Any]]:
    """The codes of every weight of the layer, found from those of ``start``, and their journal entry.

    on_part  called with parts of the layer that are done, which add up to 1
    """
    part_of_start = 0.5 if work.usable else 1.0
    on_part(part_of_start, "start")
    record: dict[str, Any] = {"start_loss": None, "learned_loss": None, "kept": False, "moved": 0.0}
    record["held_out"] = work.layer.batches > 1  # else the one batch both learns and judges
    codes: Mapping[str, QTensor] = start
    if work.usable:
        codes, before, after = follow(
            work,
            start,
            feedback=options.feedback,
            held_out=options.settings.held_out,
            inputs=partial(_at, layer=work.layer, stream=streams.entering),
            targets=partial(_at, layer=work.layer, stream=streams.targets),
            cache=cache,
            store=store,
            gradients=gradients,
            on_unit=lambda part, name: on_part((1 - part_of_start) * part, name),
        )
        record |= {"start_loss": before, "learned_loss": after, "kept": after < before}
    total = sum(start[key].codes.numel() for key in work.usable)
    record["moved"] = sum(int((codes[k].codes != start[k].codes).sum()) for k in work.usable) / max(1, total)
    return dict(codes), record | {"not_learned": sorted(start.keys() - work.usable)}


def _at(batch: int, *, layer: Layer, stream: Activations) -> torch.Tensor:
    return stream.get(batch).to(layer.device)
