"""calibrate's pass over the decoder layers: runs each, collects what enters its linear layers, and writes that."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ptqpipe.calibration.collect import Collector, find_attention, sums_of_layers
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.kv import watching
from ptqpipe.calibration.likeness import likeness_of, lines_of
from ptqpipe.calibration.merge import merge_copies, merge_largest, merge_ranks
from ptqpipe.calibration.runner import Layer, Runner, advance_together
from ptqpipe.calibration.store import LayerRecord, write_layer
from ptqpipe.checkpoint import LayerFolder
from ptqpipe.run.machine import BASE_BYTES, Machine, Ranks, counting_bar
from ptqpipe.runtime.skeleton import Skeleton

HEAD = "head"


@dataclass(frozen=True, slots=True)
class Collecting:
    """Which second moments to collect, and on which ranks and devices.

    block, full  moments in blocks of 16 columns, whole ones
    held_out     those of held-out samples too
    devices      of this rank, the first of them the runner's
    """

    block: bool
    full: bool
    held_out: bool
    ranks: Ranks
    devices: tuple[torch.device, ...]


def open_runner(
    skeleton: Skeleton, samples: Samples, output: LayerFolder, collecting: Collecting, machine: Machine
) -> Runner:
    """This rank's share of the samples, every ``world``-th; what the sums of the largest layer need is set aside."""
    share = slice(collecting.ranks.rank, None, collecting.ranks.world)
    return Runner.open(
        skeleton,
        samples.windows[share],
        held_out=samples.held_out[share],
        device=machine.device,
        memory_bytes=machine.memory_bytes - BASE_BYTES - max(sum_bytes(skeleton, collecting)),
        spill=output.paths.partial,
        images=samples.images_of(share),
    )


def sum_bytes(skeleton: Skeleton, collecting: Collecting) -> list[int]:
    """`sums_of_layers` of what is collected."""
    return sums_of_layers(skeleton, block=collecting.block, full=collecting.full, held_out=collecting.held_out)


def run_layers(
    runner: Runner, output: LayerFolder, collecting: Collecting, samples: Samples, *, shown: bool
) -> list[str]:
    """Every layer, then what enters the head, then the layer of multi-token prediction; layers that are done already
    are run without collecting. Returns lines on how likely this rank's share
    of each source is; none where the head is done."""
    lines = lines_of({}, samples)
    head = runner.skeleton.head_name
    units = [*runner.names, *([HEAD] if head is not None else []), *(name for name, _ in runner.skeleton.mtp)]
    done = runner.tokens * sum(name in output.done for name in units)
    shown = shown and collecting.ranks.rank == 0
    with counting_bar(runner.tokens * len(units), "tokens", shown=shown, done=done) as advance:
        for part in runner.layers():
            again, layer = part.name in output.done, f"layer {part.index + 1} of {len(runner.names)}"
            copies = [part, *(part.on(device) for device in collecting.devices[1 : part.batches])]
            if again:
                runner.on_tokens = partial(_advance, advance, 0, f"{layer}, run again")
                advance_together(copies, [None] * len(copies))
            else:
                runner.on_tokens = partial(_advance, advance, 1, layer)
                record = _layer(runner, copies, output, collecting)
                output.commit(part.name, record.to_json() if record is not None else {})
            del copies  # before the next layer is loaded
        if head is not None and HEAD not in output.done:
            runner.on_tokens = partial(_advance, advance, 1, "head")
            record = _head(runner, head, output, collecting)
            output.commit(HEAD, record.to_json() if record is not None else {})
            if collecting.ranks.rank == 0:
                with runner.head():
                    share = slice(0, None, collecting.ranks.world)
                    lines = lines_of(likeness_of(runner, samples, share=share), samples)
        for last in runner.mtp_layers() if any(name not in output.done for name, _ in runner.skeleton.mtp) else ():
            runner.on_tokens = partial(_advance, advance, 1, "multi-token prediction layer")
            record = _layer(runner, [last], output, collecting)
            output.commit(last.name, record.to_json() if record is not None else {})
    return lines


def _advance(advance: Callable[[float, str], None], times: int, note: str, tokens: int) -> None:
    advance(times * tokens, note)


def _layer(runner: Runner, copies: Sequence[Layer], output: LayerFolder, collecting: Collecting) -> LayerRecord | None:
    name, observer = copies[0].name, runner.key_values
    inside, attention = find_attention(name, copies[0].module, copies[0].origins) or ("", None)
    collectors = [
        Collector(name, part.module, part.origins, block=collecting.block, full=collecting.full, device=part.device)
        for part in copies
    ]
    observer.start(attention or name)
    with contextlib.ExitStack() as stack:
        for collector in collectors:
            stack.enter_context(collector)
        for part in copies if inside and runner.cache is None else ():
            stack.enter_context(watching(part.module.get_submodule(inside), observer, runner.skeleton.model.config))
        advance_together(copies, [_switch(collector, runner) for collector in collectors])
    observer.stop()
    observer.look_away(False)
    collector = merge_copies(collectors)
    merge_ranks(collector, world=collecting.ranks.world, held_out=collecting.held_out)
    largest = [merge_largest(t, world=collecting.ranks.world) for t in (observer.k_amax, observer.v_amax)]
    if collecting.ranks.rank != 0:
        return None
    key_values = None
    if attention is not None and largest[0] is not None and largest[1] is not None:
        key_values = (attention, largest[0], largest[1])
    return write_layer(output.paths.growing, name, collector, block=collecting.block, key_values=key_values)


def _switch(collector: Collector, runner: Runner) -> Callable[[int], None]:
    """What is called before each batch: held-out ones are summed apart, and their keys and values not at all."""

    def before(batch: int) -> None:
        collector.holding_out = batch >= runner.held_from
        runner.key_values.look_away(collector.holding_out)

    return before


def _head(runner: Runner, name: str, output: LayerFolder, collecting: Collecting) -> LayerRecord | None:
    """The language-model head's input. A head that is the embedding goes by the embedding's name in the checkpoint."""
    skeleton = runner.skeleton
    module = skeleton.model.get_submodule(name)
    own = skeleton.origins.get(f"{name}.weight")
    origins = {f"{name}.weight": own or (f"{name}.weight",)}
    collector = Collector(name, module, origins, block=collecting.block, full=collecting.full, device=runner.device)
    for batch, x in enumerate(runner.head_inputs()):
        collector.holding_out = batch >= runner.held_from
        collector.start(x.shape)
        collector.see(name, x)
        runner.on_tokens(x.shape[0] * x.shape[1])
    merge_ranks(collector, world=collecting.ranks.world, held_out=collecting.held_out)
    if collecting.ranks.rank != 0:
        return None
    return write_layer(output.paths.growing, name, collector, block=collecting.block)
