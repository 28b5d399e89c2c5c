"""calibrate: statistics of a model's linear inputs, collected layer by layer into a folder (`statistics.py`).

One file per layer, written when the layer is done and noted in a journal, so a killed run continues after it (finished
layers are run again, but not collected again). Several ranks share the samples; rank 0 writes their sums.
The folder appears under its name when stats.json, its last file, is in it.

Samples that are held out follow the others, and their moments are kept apart. With several devices each has a copy of
the layer that is run, and a share of the batches of samples; only the order of sums depends on how many there are. That
was tested with copies on one CPU, never on several GPUs.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.calibration.collect import Collector, find_attention, sums_of_layers
from ptqpipe.calibration.data import HELD_SHARE, Samples, load_samples, tokens_digest
from ptqpipe.calibration.kv import watching
from ptqpipe.calibration.likeness import Likeness, likeness_of, lines_of
from ptqpipe.calibration.merge import merge_copies, merge_largest, merge_ranks
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.calibration.outputs import collect_outputs, learned_from
from ptqpipe.calibration.pairs import most_tokens, nbytes as pairs_bytes
from ptqpipe.calibration.runner import Layer, Runner, advance_together
from ptqpipe.calibration.statistics import STATS_FILE, STATS_VERSION
from ptqpipe.calibration.store import OUTPUTS, LayerRecord, digest_of, is_of_outputs, outputs_of, pairs_of, write_layer
from ptqpipe.checkpoint import Finished, LayerFolder, Mode, check_disjoint, check_place, name_of, resolve_source
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.language_model import takes_images, with_note
from ptqpipe.models.source import Source
from ptqpipe.run.machine import BASE_BYTES, Machine, Ranks, compute_threads, counting_bar, peak_bytes, threads
from ptqpipe.run.quantities import counted, disk_size, memory_size
from ptqpipe.runtime.loading import DTYPES, config_of, default_length
from ptqpipe.runtime.skeleton import Skeleton

MOMENTS = ("diagonal", "block", "full", "kl", "pairs")
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


def calibrate(
    model: str | Path,
    data: Sequence[str],
    out: Path,
    *,
    options: CalibrateOptions | None = None,
    mode: Mode = "new",
    machine: Machine | None = None,
    ranks: Ranks | None = None,
    devices: Sequence[torch.device] = (),
    warn: Callable[[str], None] | None = None,
    log: Callable[[str], None] | None = None,
) -> Finished | None:
    """Writes a statistics folder. The result on rank 0, None on the others.

    devices  that share the samples of this process, the first of them the machine's; none: the machine's alone
    warn     called with a line on what will be missing, before the model runs
    log      called with what is about to be done and what that takes, before the model runs

    Raises UsageError for data or settings that do not fit the model, CheckpointError for a model that cannot be run,
    NumericsError for activations that are not finite (then nothing is written), OutputError for the folder.
    """
    begun = time.monotonic()
    options, machine, ranks = options or CalibrateOptions(), machine or Machine(compute_threads()), ranks or Ranks()
    block, full = _which(options.moments)
    with Source.open(resolve_source(str(model))) as source:
        path = source.reader.path
        check_disjoint(path, out)
        check_place(out)
        config = config_of(source)
        samples = _samples_of(data, path, config, options)
        if warn is not None and options.holdout is None and not len(samples.held_out):
            warn(_no_held_out(samples, options))
        _check_shared(samples, options, ranks)
        collecting = Collecting(block, full, len(samples.held_out) > 0, ranks, tuple(devices) or (machine.device,))
        skeleton = Skeleton.of(source, dtype=_dtype_of(options.dtype, config), images=bool(samples.images))
        parts = _run_parts(source, samples, options)
        folder = LayerFolder(
            out, parts, source=source.reader, index_file=STATS_FILE, mode=mode, rank=ranks.rank, wait=ranks.barrier,
            lost_with=lambda unit: [OUTPUTS] if is_of_outputs(unit) else [],
        )  # fmt: skip
        with folder as output, threads(machine.workers, largest=skeleton.largest_matrix()):
            if log is not None and ranks.rank == 0:
                described = _described(samples, skeleton, options, collecting)
                log(with_note(f"{name_of(path)} on {described}", config, images=samples.shown))
            if _backwards(options) and OUTPUTS not in output.done:
                if mode == "resume" and log is not None and ranks.rank == 0:
                    log("the run backwards is kept only once it is complete: it begins with its first layer")
                backward: dict[str, Any] = {"ranks": ranks, "seed": options.seed, "moments": options.moments}
                records = collect_outputs(source, samples, output, machine, **backward)
                for name, part in records.items() if ranks.rank == 0 else [(OUTPUTS, None)]:  # the outputs are the last
                    output.commit(name, part.to_json() if part is not None else {})
            with _open_runner(skeleton, samples, output, collecting, machine) as runner:
                likeness = run_layers(runner, output, collecting, samples, shown=machine.progress)
            if ranks.rank != 0:
                return None
            content = _content(source, samples, options, output, skeleton, world=ranks.world)
            output.finish(content)
    return Finished(out, content, time.monotonic() - begun, peak_bytes(), tuple(lines_of(likeness, samples)))


def _samples_of(data: Sequence[str], path: Path, config: Mapping[str, Any], options: CalibrateOptions) -> Samples:
    """UsageError for data that the model or the options cannot do with."""
    return load_samples(
        data,
        path,
        samples=options.samples,
        seqlen=default_length(config) if options.seqlen is None else options.seqlen,
        seed=options.seed,
        field=options.text_field,
        holdout=options.holdout,
        images=takes_images(config, path),
    )


def _check_shared(samples: Samples, options: CalibrateOptions, ranks: Ranks) -> None:
    """UsageError for samples that these processes cannot share."""
    if ranks.world > options.samples:
        raise UsageError(
            f"{ranks.world} processes for {options.samples} samples; start fewer, or raise {arg('samples')}"
        )
    backwards = _backwards(options)
    if backwards and samples.images:
        raise UsageError(
            f"{arg('moments', backwards[0])} cannot be used with rows with images; leave it out, or give rows of text"
        )
    if "pairs" in options.moments and ranks.world > 1:
        raise UsageError(
            f"{arg('moments', 'pairs')} needs a single process, not {ranks.world}; start it without torchrun"
        )


def _backwards(options: CalibrateOptions) -> list[str]:
    """The kinds that are asked for of those that run the model backwards."""
    return [kind for kind in ("kl", "pairs") if kind in options.moments]


def _no_held_out(samples: Samples, options: CalibrateOptions) -> str:
    why = f"the data have {counted(samples.candidates, 'window')} for {counted(options.samples, 'sample')}"
    remedy = f"give more data, or {arg('holdout')} with fewer {arg('samples')}"
    if options.samples < HELD_SHARE:
        why = f"{arg('samples', options.samples)} is below {HELD_SHARE}"
        remedy = f"give {arg('samples', HELD_SHARE)}, or {arg('holdout')}"
    return (
        f"no window is held out, since {why}: convert will judge its choices on the data that it makes them on; "
        f"{remedy}"
    )


def _which(moments: Sequence[str]) -> tuple[bool, bool]:
    """(block, full). UsageError for an unknown kind, and for none."""
    if not moments:
        raise UsageError(f"{arg('moments')} names nothing; use {', '.join(MOMENTS)}, or several with commas")
    unknown = next((kind for kind in moments if kind not in MOMENTS), None)
    if unknown is not None:
        raise UsageError(f"{arg('moments', unknown)} is unknown; use {', '.join(MOMENTS)}")
    return "block" in moments, "full" in moments


def _dtype_of(name: str, config: Any) -> torch.dtype:
    dtypes = {**DTYPES, "float64": torch.float64}
    if name == "auto":
        own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        return own if isinstance(own, torch.dtype) else torch.float32
    if name not in dtypes:
        raise UsageError(f"{arg('dtype', name)} is unknown; use {', '.join(dtypes)} or auto")
    return dtypes[name]


def _run_parts(source: Source, samples: Samples, options: CalibrateOptions) -> dict[str, str]:
    """What decides the numbers of this run; a refused --resume names the one that changed."""
    return {
        "stage": "calibrate",
        "the model": source.reader.fingerprint(),
        "the data": samples.sha256,
        "the held-out data": tokens_digest(samples.held_out),
        "the settings": json.dumps([sorted(set(options.moments)), options.dtype, list(samples.windows.shape)]),
        "the version of ptqpipe": __version__,
    }


def _open_runner(
    skeleton: Skeleton, samples: Samples, output: LayerFolder, collecting: Collecting, machine: Machine
) -> Runner:
    """This rank's share of the samples, every ``world``-th; what the sums of the largest layer need is set aside."""
    share = slice(collecting.ranks.rank, None, collecting.ranks.world)
    return Runner.open(
        skeleton,
        samples.windows[share],
        held_out=samples.held_out[share],
        device=machine.device,
        memory_bytes=machine.memory_bytes - BASE_BYTES - max(_sum_bytes(skeleton, collecting)),
        spill=output.paths.partial,
        images=samples.images_of(share),
    )


def _sum_bytes(skeleton: Skeleton, collecting: Collecting) -> list[int]:
    return sums_of_layers(skeleton, block=collecting.block, full=collecting.full, held_out=collecting.held_out)


def _described(samples: Samples, skeleton: Skeleton, options: CalibrateOptions, collecting: Collecting) -> str:
    """The header: which samples, how much there is to run, and what statistics take. Moments are stored in float32."""
    (count, seqlen), held_out, sums = samples.windows.shape, len(samples.held_out), _sum_bytes(skeleton, collecting)
    blocks = skeleton.blocks if "pairs" in options.moments else ()
    most = most_tokens(blocks, skeleton.origins)
    pairs = [pairs_bytes(name, module, skeleton.origins, most) for name, module in blocks]
    return (
        f"{counted(count, 'sample')} of {counted(seqlen, 'token')}, {held_out} more held out (of "
        f"{counted(samples.candidates, 'window')}{samples.thinned}, seed {options.seed})\n"
        f"{(count + held_out) * seqlen:,} tokens through {counted(len(skeleton.blocks), 'layer')} in {options.dtype}\n"
        f"moments {', '.join(_kinds(options))}: at most {disk_size(sum(sums) / 2 + sum(pairs))} on disk, "
        f"{memory_size(max([*sums, *pairs]))} in memory"
    )


def _kinds(options: CalibrateOptions) -> list[str]:
    return [kind for kind in MOMENTS if kind in {"diagonal", *options.moments}]


def _content(
    source: Source, samples: Samples, options: CalibrateOptions, output: LayerFolder, skeleton: Skeleton, *, world: int
) -> dict[str, Any]:
    """stats.json. ``world``: how many processes shared the samples."""
    names = [name for name, _ in (*skeleton.blocks, *skeleton.mtp)]
    every = (*names, HEAD, OUTPUTS, *map(outputs_of, names), *map(pairs_of, names))
    pairs = "pairs" in options.moments
    units = [name for name in every if output.done.get(name)]
    blocks = {name: output.done[name] for name in units}
    return {
        "version": STATS_VERSION,
        "ptqpipe": __version__,
        "run_id": output.run_id,
        "digest": digest_of(blocks),
        "model": {"name": name_of(source.reader.path), "fingerprint": source.reader.fingerprint()},
        "data": {
            "files": [file.to_json() for file in samples.files],
            "sha256": samples.sha256,
            "samples": samples.windows.shape[0],
            "seqlen": samples.windows.shape[1],
            "seed": options.seed,
            "field": options.text_field,
            "held_out": samples.held_out.shape[0],
            "held_out_sha256": tokens_digest(samples.held_out),
            "windows": samples.candidates,
            **({"backwards": len(learned_from(samples, world, pairs=pairs).windows)} if OUTPUTS in units else {}),
            "vocabulary_seen": int(torch.unique(samples.windows).numel()),
        },
        "settings": {
            "moments": _kinds(options),
            "dtype": options.dtype,
        },
        "files": {blocks[name]["file"]: blocks[name]["sha256"] for name in units},
        "modules": {module: entry for name in units for module, entry in blocks[name]["modules"].items()},
        "attention": {module: entry for name in units for module, entry in blocks[name]["attention"].items()},
        "unused": [module for name in units for module in blocks[name]["unused"]],
        "unplaced": list(skeleton.unplaced),
    }


def run_layers(
    runner: Runner, output: LayerFolder, collecting: Collecting, samples: Samples, *, shown: bool
) -> dict[str, Likeness]:
    """Every layer, then what enters the head, then the layer of multi-token prediction; layers that are done already
    are run without collecting. Gives how likely this rank's share of each source is; nothing where the head is done."""
    likeness: dict[str, Likeness] = {}
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
                    likeness = likeness_of(runner, samples, share=slice(0, None, collecting.ranks.world))
        for last in runner.mtp_layers() if any(name not in output.done for name, _ in runner.skeleton.mtp) else ():
            runner.on_tokens = partial(_advance, advance, 1, "multi-token prediction layer")
            record = _layer(runner, [last], output, collecting)
            output.commit(last.name, record.to_json() if record is not None else {})
    return likeness


def _advance(advance: Callable[[float, str], None], times: int, note: str, tokens: int) -> None:
    """Moves the bar by ``tokens``, or not at all for a layer that counts already."""
    advance(times * tokens, note)


def _layer(runner: Runner, copies: Sequence[Layer], output: LayerFolder, collecting: Collecting) -> LayerRecord | None:
    """Runs a layer and writes what was seen; None on all ranks but the first."""
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
        collector.see(name, x)
        collector.forget()
        runner.on_tokens(x.shape[0] * x.shape[1])
    merge_ranks(collector, world=collecting.ranks.world, held_out=collecting.held_out)
    if collecting.ranks.rank != 0:
        return None
    return write_layer(output.paths.growing, name, collector, block=collecting.block)
