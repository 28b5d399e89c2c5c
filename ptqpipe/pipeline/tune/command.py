"""tune: learned codes for the weights of a model, one decoder layer at a time, into a folder (`rounding.py`).

The plan is convert's: tune changes the weights that a conversion with the same recipe quantizes. "layerwise" takes the
scales and codes that it would write with statistics, the other methods the nearest codes as a start. Moments are
collected for the current layer and then discarded, so they are never on disk. A folder of statistics gives the static
scales of inputs.

Two streams of hidden states go through the model: those of the float layers are the targets; those of the layers with
learned codes, activations quantized as the scheme says, are the inputs that each layer will get. For "layerwise" the
float stream is enough. Where errors cost KL divergence, the float model runs backwards first (`backwards.py`). After an
interruption finished layers are run again, not tuned again.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.calibration.activations import Activations, InMemory, OnDisk
from ptqpipe.calibration.collect import sums_of_layers
from ptqpipe.calibration.cross_moments import ActivationCache, cached_batches
from ptqpipe.calibration.data import Samples, load_samples, tokens_digest
from ptqpipe.calibration.expert_inputs import STREAMS
from ptqpipe.calibration.experts import STACKS, is_stacked
from ptqpipe.calibration.gradients import Gradients
from ptqpipe.calibration.likeness import Likeness, likeness_of, lines_of
from ptqpipe.calibration.runner import BATCH_TOKENS, Layer, MtpLayer, Runner
from ptqpipe.checkpoint import Finished, LayerFolder, Mode, check_place
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.language_model import takes_images, with_note
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.pipeline.tune import backwards, codes as codes_of
from ptqpipe.pipeline.tune.in_order import divided, follow
from ptqpipe.pipeline.tune.tune_options import TuneOptions, check
from ptqpipe.pipeline.tune.tune_summary import described
from ptqpipe.pipeline.tune.tuned_layer import TunedLayer, observe
from ptqpipe.quantization import kronecker
from ptqpipe.quantization.learned_codes import CODES_FILE
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import BASE_BYTES, Machine, compute_threads, counting_bar, peak_bytes, threads
from ptqpipe.runtime.loading import config_of, default_length
from ptqpipe.runtime.memory import keep_freed_memory
from ptqpipe.runtime.skeleton import Skeleton


def tune(
    model: str | Path,
    data: Sequence[str],
    out: Path,
    *,
    recipe: RecipeOptions | None = None,
    recipe_path: Path | None = None,
    stats: Path | None = None,
    options: TuneOptions | None = None,
    mode: Mode = "new",
    machine: Machine | None = None,
    log: Callable[[str], None] | None = None,
) -> Finished:
    """Writes a folder of learned codes.

    log  called with what is about to be done, before the model runs

    Raises UsageError for data or settings that do not fit the model, CheckpointError for a model that cannot be run,
    NumericsError for weights or activations that are not finite, OutputError for the folder.
    """
    begun = time.monotonic()
    options, machine = options or TuneOptions(), machine or Machine(compute_threads())
    check(options)
    descent = options.descent
    prepared = prepare(model, options=recipe, recipe_path=recipe_path, out=out, stats=stats, collected=True)
    with prepared:
        source = prepared.source
        check_place(out)
        config = config_of(source)
        samples = _samples(prepared, data, options, config)
        if samples.images or not _runs_backwards(prepared, options):
            options = replace(options, metric="output")  # the reverse pass takes rows of one length
        if descent is not None:
            options = descent.with_rate(prepared, options)
            descent.check(prepared, samples, options, machine)
        parts = _identity(prepared, samples, options)
        start: dict[str, Any] = {}
        if descent is not None:
            start = {"beside": codes_of.START, "lost_with": lambda unit: [codes_of.ENDED]}
        folder = LayerFolder(out, parts, source=source.reader, index_file=CODES_FILE, mode=mode, **start)
        likeness: dict[str, Likeness] = {}
        with folder, threads(machine.workers, largest=_largest(prepared)):
            if log is not None:
                log(with_note(described(prepared, samples, options), config, images=samples.shown))
            if codes_of.ENDED not in folder.done:
                keep_freed_memory()  # of moments, hidden states: clearing fresh pages is a tenth of the time
                likeness = _run(prepared, samples, folder, options, machine)
            if descent is not None:
                descent.improve(prepared, samples, folder, options, machine)
            content = codes_of.content(prepared, samples, options, folder)
            folder.finish(content)
    return Finished(out, content, time.monotonic() - begun, peak_bytes(), tuple(lines_of(likeness, samples)))


def _samples(prepared: Conversion, data: Sequence[str], options: TuneOptions, config: Any) -> Samples:
    """The rows of the data. UsageError for data that do not fit the model or the method."""
    path = prepared.source.reader.path
    samples = load_samples(
        data,
        path,
        samples=options.samples,
        seqlen=default_length(config) if options.seqlen is None else options.seqlen,
        seed=options.seed,
        field=options.text_field,
        holdout=None,
        images=takes_images(config, path),
    )
    if samples.images and options.metric == "kl":
        raise UsageError(
            f"{arg('metric', 'kl')} takes no rows with images; use {arg('metric', 'output')}, or data without images"
        )
    return samples.judged() if options.follows and samples.windows.numel() > BATCH_TOKENS else samples


def _identity(prepared: Conversion, samples: Samples, options: TuneOptions) -> dict[str, str]:
    """What decides the codes, by its name in a message."""
    return {
        "stage": "tune",
        "the model": prepared.source.reader.fingerprint(),
        "the recipe": prepared.run_parts["recipe"],
        "the statistics": prepared.run_parts.get("statistics", ""),
        "the data": samples.sha256,
        "the held-out data": tokens_digest(samples.held_out),
        "the settings": json.dumps(
            [options.method, options.by_kl, options.share, options.train, asdict(options.settings)]
        ),
        "the version of ptqpipe": __version__,
    }


def _runs_backwards(prepared: Conversion, options: TuneOptions) -> bool:
    """Whether gradients are of use: of layers by themselves, where rows do not share scales."""
    fits = any(kronecker.possible(unit.scheme.fmt) for unit in prepared.outputs.plan.units)
    return options.by_kl and (options.follows or fits)


def _largest(prepared: Conversion) -> int:
    """Numbers of the largest weight whose codes are chosen."""
    return max((m.shape[0] * m.shape[1] for unit in prepared.outputs.plan.units for m in unit.members), default=0)


def _run(
    prepared: Conversion, samples: Samples, folder: LayerFolder, options: TuneOptions, machine: Machine
) -> dict[str, Likeness]:
    """Every layer. Gives how likely the model finds each source of the data."""
    likely: dict[str, Likeness] = {}

    def look(runner: Runner) -> None:
        likely.update(likeness_of(runner, samples))

    skeleton = Skeleton.of(prepared.source, dtype=torch.float32, images=bool(samples.images))
    spill = folder.paths.partial
    gradients: Callable[[str], Gradients | None] = lambda name: None  # noqa: E731
    if options.by_kl:
        learned_from = backwards.learned_from(samples, options)
        noted: dict[str, Any] = {"done": folder.done, "commit": folder.commit}
        gradients = backwards.observe(prepared, learned_from, spill, machine, seed=options.seed, **noted)
    runner, keeps = _open_runner(prepared, skeleton, samples, options, machine, spill=spill)
    names = [*runner.names, *(name for name, _ in skeleton.mtp if _quantizes(prepared, skeleton, name))]
    count, done = len(names), sum(name in folder.done for name in names)
    with (
        runner,
        contextlib.ExitStack() as opened,
        counting_bar(count, "layers", shown=machine.progress, done=done) as advance,
    ):
        streams = _Streams.like(runner, spill, opened) if options.follows else None
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
                    _layerwise(TunedLayer.of(layer, prepared, runner), runner, folder, of_outputs)
                    on_part(1, "codes")
            else:
                if isinstance(layer, MtpLayer):
                    streams = _behind(layer, streams, _Streams.like(runner, spill, opened))
                work = TunedLayer.of(layer, prepared, runner)
                cache = ActivationCache(work.watched, keeps)
                _tune_layer(work, runner, folder, options, streams, of_outputs, cache, on_part=on_part)
            layer.advance()
    return likely


def _open_runner(
    prepared: Conversion,
    skeleton: Skeleton,
    samples: Samples,
    options: TuneOptions,
    machine: Machine,
    *,
    spill: Path,
) -> tuple[Runner, list[int]]:
    """Of the float model, with hidden states on disk in ``spill`` where memory is short of them; of which batches there
    is room for what `ActivationCache` keeps, too: of those that `follow` runs several times."""
    held_out = len(samples.held_out) > 0
    together = not options.follows or not _whole_stacks(prepared, skeleton)  # moments of all experts
    sums = max(sums_of_layers(skeleton, block=False, full=True, held_out=held_out, experts=together))
    memory = machine.memory_bytes - BASE_BYTES - sums
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


def _at_head(runner: Runner, look: Callable[[Runner], None]) -> Iterator[Layer]:
    """No layer: runs ``look`` behind the last one, with the head's weights loaded, where there is a head."""
    if runner.skeleton.head_name is not None:
        with runner.head():
            look(runner)
    yield from ()


def _quantizes(prepared: Conversion, skeleton: Skeleton, part: str) -> bool:
    """Whether the plan has a weight of a part of the model."""
    tensors = {tensor for name in skeleton.names_in(part) for tensor in skeleton.origins.get(name, ())}
    return any(member.source.tensor in tensors for unit in prepared.outputs.plan.units for member in unit.members)


def _behind(layer: MtpLayer, streams: "_Streams", empty: "_Streams") -> "_Streams":
    """``empty``, with what enters the layer of multi-token prediction behind the tuned layers."""
    for batch in range(layer.batches):
        empty.entering.put(batch, layer.pairs(batch, streams.entering.get(batch)))
    return empty


def _advance(advance: Callable[[float, str], None], layer: str, part: float, note: str) -> None:
    """Moves the bar by a part of a layer, and says what of it is done."""
    advance(part, f"{layer}, {note}")


@dataclass(frozen=True, slots=True)
class _Streams:
    """Hidden states of all batches: what float layers return (``targets``), and what enters the tuned ones."""

    targets: Activations
    entering: Activations

    @classmethod
    def like(cls, runner: Runner, spill: Path, opened: contextlib.ExitStack) -> "_Streams":
        """`_open_stream` of each; ``opened`` closes them."""
        both = [_open_stream(runner, spill) for _ in range(2)]
        for stream in both:
            opened.callback(stream.close)
        return cls(*both)


def _open_stream(runner: Runner, spill: Path) -> Activations:
    """Empty; on disk, in the folder ``spill``, where the runner's own hidden states are."""
    return OnDisk(spill) if isinstance(runner.activations, OnDisk) else InMemory()


def _layerwise(work: TunedLayer, runner: Runner, folder: LayerFolder, gradients: Gradients | None) -> None:
    """Chooses, writes and journals the codes of one layer by the inputs of the float model, which is then behind it."""
    layer = work.layer
    inputs = observe(layer, runner, layer.advance, units=work.units, gradients=gradients)
    codes = work.start(inputs)
    entry: dict[str, Any] = {"start_loss": None, "learned_loss": None, "kept": False, "moved": 0.0, "held_out": False}
    entry |= {"not_learned": []}
    folder.commit(work.layer.name, entry | codes_of.write(folder.files, work.layer.name, codes))


def _tune_layer(
    work: TunedLayer,
    runner: Runner,
    folder: LayerFolder,
    options: TuneOptions,
    streams: _Streams,
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
        codes = codes_of.read(folder, layer, work.units)
    else:
        alone = [unit for unit in work.units if unit not in work.followed]
        inputs = observe(layer, runner, run, units=alone) if alone else None
        if inputs is None:
            run(lambda batch: None)
        start = work.start(inputs, followed=True)
        del inputs  # the moments
        store = partial(_open_stream, runner, folder.paths.partial)
        codes, record = _find(work, options, start, streams, gradients, cache, store, on_part=on_part)
        record |= codes_of.write(folder.files, layer.name, codes)
        folder.commit(layer.name, record)
    parameters = work.parameters({key: decoded(q) for key, q in codes.items()})
    with torch.no_grad():
        for batch in range(layer.batches):
            entering.put(batch, work.outputs(entering.get(batch).to(runner.device), batch, parameters, cache))
            runner.activations.put(batch, targets.get(batch))
    layer.advanced = True


def _find(
    work: TunedLayer,
    options: TuneOptions,
    start: Mapping[str, QTensor],
    streams: _Streams,
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
            share=options.share,
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
    """The hidden states of a batch where the layer is."""
    return stream.get(batch).to(layer.device)
