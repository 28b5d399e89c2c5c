"""After GPTQ in the order of the model, codes by the KL divergence of the whole model, all layers at once
(`descent.py`), and then, with these codes, what --train names (`floats.py`).

The codes that GPTQ found lie beside the output until those that are learned from them are written. Each time that codes
are judged, on held-out samples of each --data and on the sample text of the package, the state of descent goes to disk,
so that a killed run continues; what descent ends with goes into the journal before any layer is written.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch

from ptqpipe.calibration.activations import InMemory, OnDisk
from ptqpipe.calibration.data import HELD_SHARE, Samples
from ptqpipe.calibration.runner import BATCH_TOKENS, Runner
from ptqpipe.check.evaluate.tokenized_text import SAMPLE, read_text
from ptqpipe.checkpoint import CheckpointReader, LayerFolder, is_sealed, output_errors, write_tensors
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.errors import UsageError, arg, argv
from ptqpipe.pipeline.tune import codes as codes_of
from ptqpipe.pipeline.tune.in_order import divided
from ptqpipe.pipeline.tune.kl.choice import Choice, with_codes
from ptqpipe.pipeline.tune.kl.descent import DescentResult, Variables, descend
from ptqpipe.pipeline.tune.kl.floats import Trained, TrainedTensor, find_kept, unit_name, with_gain
from ptqpipe.pipeline.tune.kl.model_divergence import LayerForward, ModelPair
from ptqpipe.pipeline.tune.tune_options import GLOBAL, TuneOptions
from ptqpipe.pipeline.tune.tuned_layer import TunedLayer
from ptqpipe.quantization.learned_codes import LearnedCodes, relative_change, sha256_of
from ptqpipe.recipe.plan import Unit
from ptqpipe.run.machine import BASE_BYTES, Machine, counting_bar
from ptqpipe.run.quantities import option_size, option_size_above
from ptqpipe.runtime.loading import load_tokenizer
from ptqpipe.runtime.skeleton import Skeleton

FOUR_BIT_RATE = 0.01  # where inputs have 4 bits: at the usual one, too few codes move to make up for these
DATA, OTHER = "held-out samples", "sample text"
_STATE, _FOUND, _FILE = "state", "found", "model.safetensors"  # folders beside the output, and what each has
_BYTES = 36  # for each weight: base, step and place of its choice, v, its gradient, two moments, codes, what is saved


def with_rate(prepared: Conversion, options: TuneOptions) -> TuneOptions:
    """The options with the rate of descent that belongs to the inputs' formats."""
    if not any(unit.scheme.activation.four_bits for unit in prepared.outputs.plan.units):
        return options
    return replace(options, settings=replace(options.settings, rate=FOUR_BIT_RATE))


def check(prepared: Conversion, samples: Samples, options: TuneOptions, machine: Machine) -> None:
    """UsageError for images, data too short for a part that is not learned from, windows longer than the sample text,
    tensors that cannot be trained, and too little memory."""
    if samples.images:
        raise UsageError(
            f"{arg('method', 'kl')} takes no rows with images; use {arg('method', 'gptq')}, or data without images"
        )
    rows, seqlen = len(samples.windows) + len(samples.held_out), samples.windows.shape[1]
    if rows <= max(1, BATCH_TOKENS // seqlen):
        raise UsageError(
            f"{arg('method', 'kl')} needs held-out samples, but the data give {rows} of {seqlen} tokens, which is one "
            f"batch; give {arg('samples', BATCH_TOKENS // seqlen + 1)} or more"
        )
    _other(prepared, samples)
    if options.train:
        find_kept(prepared, Skeleton.of(prepared.source, dtype=torch.float32), options.train)
    least = _need(prepared, options.train) + BASE_BYTES
    if least > machine.memory_bytes:
        raise UsageError(
            f"{arg('max_memory', option_size(machine.memory_bytes))} is too small for {arg('method', 'kl')}, which "
            f"has all decoder layers in memory; give {arg('max_memory', option_size_above(least))}, or "
            + arg("method", "gptq")
        )


def _need(prepared: Conversion, train: Sequence[str]) -> int:
    """About what the model takes while codes, and floats, are learned."""
    weights = sum(m.shape[0] * m.shape[1] for unit in prepared.outputs.plan.units for m in unit.members)
    all_weights = sum(prod(shape) for _, shape in prepared.source.tensors.values())
    floats = 20 * (all_weights - weights) if train else 0  # its gradient, two moments, the float model's, what is saved
    return _BYTES * weights + 4 * all_weights + floats


def improve(
    prepared: Conversion, samples: Samples, folder: LayerFolder, options: TuneOptions, machine: Machine
) -> None:
    """Learns codes from those that GPTQ has found, and commits every decoder layer with them."""
    partial, layers = folder.paths.partial, list(codes_of.layers_of(folder))
    weights = {key: entry for name in layers for key, entry in folder.done[name]["weights"].items()}
    with LearnedCodes.of_files(folder.files, {"weights": weights}) as stored:
        if codes_of.ENDED not in folder.done or not is_sealed(partial / _FOUND / _FILE):
            learned, floats, kept = _learn(prepared, samples, stored, partial, options, machine)
            _save(partial / _FOUND, {**learned.codes, **({} if floats is None else floats.floats)})
            entry = _told(learned) | {"moved": learned.moved}
            folder.commit(codes_of.ENDED, entry | _trained(prepared, floats, kept, options))
        units = {member.key: unit for unit in prepared.outputs.plan.units for member in unit.members}
        shapes = {member.key: member.shape for unit in prepared.outputs.plan.units for member in unit.members}
        with CheckpointReader.open(partial / _FOUND) as reader:
            for name in layers:
                codes = {}
                for key in folder.done[name]["weights"]:
                    codes[key] = q = stored.of(key, units[key].scheme.fmt, shape=shapes[key])
                    if key in reader.entries:
                        codes[key] = q = with_codes(q, reader.read(key))
                    gain = unit_name(units[key])
                    if gain in reader.entries:
                        codes[key] = with_gain(q, reader.read(gain))
                # Not in the journal, which says what the start was: a run that is resumed writes all of these again.
                folder.done[name] |= codes_of.write(folder.paths.growing, name, codes)
            trained = folder.done[codes_of.ENDED].get("trained", {})
            codes_of.write_trained(folder.paths.growing, {name: reader.read(name) for name in trained})


def _sources(samples: Samples, judged: Sequence[int], sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """What held-out samples are called -> which of the windows of the ``judged`` batches they are: of several --data
    each by itself, so that none gets worse for the sake of the others. ``sizes``: windows of each batch."""
    ends = list(accumulate(sizes))
    windows = torch.cat([torch.arange(ends[batch] - sizes[batch], ends[batch]) for batch in judged])
    origin = samples.origin[windows] if len(samples.files) > 1 else torch.zeros(len(windows), dtype=torch.int64)
    files = origin.unique().tolist()
    if len(files) == 1:
        return {DATA: torch.arange(len(windows))}
    return {f"{DATA} of {' '.join(argv(data=file + 1))}": (origin == file).nonzero().squeeze(1) for file in files}


def _told(result: DescentResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ("start", "result", "steps", "best")}


def _trained(
    prepared: Conversion, result: DescentResult | None, kept: Sequence[TrainedTensor], options: TuneOptions
) -> dict[str, Any]:
    """What rounding.json says of what was trained after the codes. "trained" has nothing where the start is kept."""
    if result is None:
        return {}
    tensors = {}
    for each in kept if result.best else ():
        before, after = prepared.source.reader.read(each.tensor), result.floats[each.tensor]
        change = relative_change(before, after)
        tensors[each.tensor] = {"kind": each.kind, "sha256": sha256_of(after), "change": change}
    return {"train": {"kinds": list(options.train), **_told(result)}, "trained": tensors}


def _learn(
    prepared: Conversion, samples: Samples, stored: LearnedCodes, partial: Path, options: TuneOptions, machine: Machine
) -> tuple[DescentResult, DescentResult | None, tuple[TrainedTensor, ...]]:
    """Loads the model, all of it, and learns codes, and then what ``options.train`` names; what a stopped run has
    learned is in ``partial``. Gives what was found of both, and the tensors that were trained."""
    settings = options.settings
    skeleton = Skeleton.of(prepared.source, dtype=torch.float32)
    kept = find_kept(prepared, skeleton, options.train)
    rows = torch.cat((samples.windows, samples.held_out))
    with contextlib.ExitStack() as opened:
        runner = opened.enter_context(
            Runner.open(
                skeleton,
                rows,
                held_out=_other(prepared, samples),
                device=machine.device,
                memory_bytes=machine.memory_bytes - BASE_BYTES - _need(prepared, options.train),
                spill=partial,
                streams=2,
            )
        )
        if runner.of_tokens and (wrong := [kind for kind in ("embeddings", "norms") if kind in options.train]):
            raise UsageError(
                f"{arg('train', wrong[0])}: {type(skeleton.model).__name__} gives its decoder layers more of the "
                f"tokens than hidden states, which would change; leave {wrong[0]} out"
            )
        learned, judged = divided(runner.held_from, settings.held_out)
        entering = OnDisk(partial) if isinstance(runner.activations, OnDisk) else InMemory()
        opened.callback(entering.close)
        count = len(runner.names)
        with counting_bar(count, "layers", shown=machine.progress, title="float model") as advance:
            models = opened.enter_context(ModelPair.open(runner, entering, lambda name: advance(1, name)))
        if kept:
            opened.enter_context(runner.embeddings())
            models.entering = runner.embedded
        place = _place(machine.device, _need(prepared, options.train))
        trained = Trained(skeleton, kept, _global_scales(prepared, stored) if GLOBAL in options.train else [], place)
        models.float_head = trained.float_head
        choices = _quantized(models, prepared, runner, stored, trained, place)
        others = list(range(runner.held_from, len(runner.batches)))
        names = _sources(samples, judged, [len(batch) for batch in runner.batches])

        def judge() -> dict[str, float]:
            divergences, of_others = models.divergence(judged), models.divergence(others)
            of_data = {name: float(divergences[windows].mean()) for name, windows in names.items()}
            return {**of_data, OTHER: float(of_others.mean())}

        def learn(variables: Variables, title: str) -> DescentResult:
            state = partial / f"{_STATE} of {title}"
            with counting_bar(settings.steps, "steps", shown=machine.progress, title=title) as advance:
                return descend(
                    variables,
                    backward=models.backward,
                    judge=judge,
                    batches=learned,
                    per_step=max(1, settings.windows // len(runner.batches[0])),
                    settings=settings,
                    state=_read(state),
                    save=lambda tensors: _save(state, tensors),
                    on_step=lambda step: advance(1, f"step {step}"),
                )

        result = learn(Variables(choices, {}), "codes")
        floats = learn(Variables({}, trained.floats), "floats") if options.train else None
    return result, floats, kept


def _global_scales(prepared: Conversion, stored: LearnedCodes) -> list[tuple[Unit, torch.Tensor]]:
    """Units whose weights share a global scale, with that scale."""
    scales = []
    for unit in prepared.outputs.plan.units:
        first = unit.members[0]
        scale = stored.of(first.key, unit.scheme.fmt, shape=first.shape).global_scale
        scales += [] if scale is None else [(unit, scale)]
    return scales


def _place(device: torch.device, need: int) -> torch.device:
    """Where codes are chosen: in a GPU's memory if it has as much as what is learned takes, else in the host's."""
    roomy = device.type == "cpu" or torch.cuda.mem_get_info(device)[0] >= need
    return device if roomy else torch.device("cpu")


def _quantized(
    models: ModelPair, prepared: Conversion, runner: Runner, stored: LearnedCodes, trained: Trained, place: torch.device
) -> dict[str, Choice]:
    """Puts the quantized layers in the place of the float ones; the choices, in memory of ``place``, that their weights
    come from, by key."""
    choices: dict[str, Choice] = {}
    layers = []
    for layer in models.float_layers:
        work = TunedLayer.of(layer, prepared, runner)
        own = {}
        for unit in work.units:
            for m in unit.members:
                if m.key in work.usable:
                    q = stored.of(m.key, unit.scheme.fmt, shape=m.shape)
                    own[m.key] = Choice(work.weights[m.key].to(place), q, trained.gains.get(m.key))
        runner.skeleton.free([f"{layer.name}.{a.parameter}" for a in work.assemblies])
        layers.append(_layer(replace(work, weights={}), own, runner.device))
        choices |= own
    models.layers = layers
    return choices


def _layer(work: TunedLayer, choices: Mapping[str, Choice], device: torch.device) -> LayerForward:
    """A decoder layer whose weights are those that are chosen."""

    def run(x: torch.Tensor, batch: int) -> torch.Tensor:
        weights = {key: choice.weight().to(device) for key, choice in choices.items()}
        return work.outputs(x, batch, work.parameters(weights))

    return run


def _other(prepared: Conversion, samples: Samples) -> torch.Tensor:
    """Windows [n, seqlen] of the sample text, spread over it, as many as judge the data. UsageError where the text is
    shorter than one."""
    model, seqlen = prepared.source.reader.path, samples.windows.shape[1]
    text = read_text(SAMPLE, lambda: load_tokenizer(model))
    windows = text.windows(seqlen)
    if not len(windows):
        raise UsageError(
            f"{arg('method', 'kl')} also tests on the sample text of the package, which has {len(text.tokens)} "
            f"tokens, less than {arg('seqlen', seqlen)}; lower {arg('seqlen')}"
        )
    most = max(1, round((len(samples.windows) + len(samples.held_out)) / HELD_SHARE))
    return windows[:: -(-len(windows) // most)]


def _read(folder: Path) -> dict[str, torch.Tensor] | None:
    """What a stopped run has saved in a folder; None where it is damaged, too."""
    if not is_sealed(folder / _FILE):
        return None
    with CheckpointReader.open(folder) as reader:
        return {name: reader.read(name) for name in reader.entries}


def _save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replaces what a folder has, in one go."""
    growing = folder.with_name(f"{folder.name}.growing")
    write_tensors(growing, tensors, sealed=True)
    with output_errors(folder):
        folder.mkdir(exist_ok=True)
        growing.rename(folder / _FILE)
