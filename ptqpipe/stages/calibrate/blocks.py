"""The run of calibrate: every block of a model over all samples, what its linear inputs were, one file a block.

Samples that are held out follow the others, and their moments are kept apart. With several devices each has a copy of
the block that is run, and every so-many-th batch of samples; only the order of sums depends on how many there are. That
was run with copies on one CPU, never on GPUs. Knows runners and folders; must not know data files, options or the
command line.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.calibration.collect import Collector, find_attention
from ptqpipe.calibration.merge import merge_copies, merge_largest, merge_ranks
from ptqpipe.calibration.runner import Block, Runner, advance_together
from ptqpipe.calibration.store import BlockRecord, write_block
from ptqpipe.checkpoint.block_folder import BlockFolder
from ptqpipe.stages.common.jobs import Job, progress_bar
from ptqpipe.stages.common.machine import Ranks

HEAD = "head"


@dataclass(frozen=True, slots=True)
class Watch:
    """What is summed: outer products in blocks of 16, whole ones, those of held-out samples; over which ranks, and on
    which devices of this one, the first of them the runner's."""

    block: bool
    full: bool
    held: bool
    ranks: Ranks
    devices: tuple[torch.device, ...]


def run_blocks(runner: Runner, output: BlockFolder, watch: Watch, *, shown: bool) -> None:
    """Every block, then what enters the head; those that are done already are run without being watched."""
    steps = {name: Job(name, i, runner.skeleton.nbytes(name)) for i, name in enumerate(runner.names)}
    with progress_bar(list(steps.values()), shown=shown and watch.ranks.rank == 0) as advance:
        for part in runner.blocks():
            copies = [part, *(part.on(device) for device in watch.devices[1 : part.batches])]
            if part.name in output.done:
                advance_together(copies, [None] * len(copies))
            else:
                record = _block(runner, copies, output, watch)
                output.commit(part.name, record.to_json() if record is not None else {})
            del copies  # before the next block is loaded
            advance(steps[part.name])
    head = runner.skeleton.head_name
    if head is not None and HEAD not in output.done:
        record = _head(runner, head, output, watch)
        output.commit(HEAD, record.to_json() if record is not None else {})


def _block(runner: Runner, copies: Sequence[Block], output: BlockFolder, watch: Watch) -> BlockRecord | None:
    """Runs a block and writes what was seen; None on all ranks but the first."""
    name, observer = copies[0].name, runner.key_values
    attention = find_attention(name, copies[0].module, copies[0].origins)
    collectors = [
        Collector(name, part.module, part.origins, block=watch.block, full=watch.full, device=part.device)
        for part in copies
    ]
    observer.start(attention or name)
    with contextlib.ExitStack() as stack:
        for collector in collectors:
            stack.enter_context(collector)
        advance_together(copies, [_switch(collector, runner) for collector in collectors])
    observer.stop()
    observer.look_away(False)
    collector = merge_copies(collectors)
    merge_ranks(collector, world=watch.ranks.world, held=watch.held)
    found = [merge_largest(t, world=watch.ranks.world) for t in (observer.k_amax, observer.v_amax)]
    if watch.ranks.rank != 0:
        return None
    key_values = None
    if attention is not None and found[0] is not None and found[1] is not None:
        key_values = (attention, found[0], found[1])
    return write_block(output.paths.growing, name, collector, block=watch.block, key_values=key_values)


def _switch(collector: Collector, runner: Runner) -> Callable[[int], None]:
    """What is called before each batch: held-out ones are summed apart, and their keys and values not at all."""

    def before(batch: int) -> None:
        collector.holding_out = batch >= runner.held_from
        runner.key_values.look_away(collector.holding_out)

    return before


def _head(runner: Runner, name: str, output: BlockFolder, watch: Watch) -> BlockRecord | None:
    """The language-model head's input. A head that is the embedding goes by the embedding's name in the checkpoint."""
    skeleton = runner.skeleton
    module = skeleton.model.get_submodule(name)
    own = skeleton.origins.get(f"{name}.weight")
    origins = {f"{name}.weight": own or (f"{name}.weight",)}
    collector = Collector(name, module, origins, block=watch.block, full=watch.full, device=runner.device)
    for batch, x in enumerate(runner.head_inputs()):
        collector.holding_out = batch >= runner.held_from
        collector.see(name, x)
        collector.forget()
    merge_ranks(collector, world=watch.ranks.world, held=watch.held)
    if watch.ranks.rank != 0:
        return None
    return write_block(output.paths.growing, name, collector, block=watch.block)
