"""Learns codes, and then floats, by descent on the KL divergence of the whole model, which is loaded here.

The state of descent goes to disk each time that codes are judged, so that a killed run continues.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.runner import Runner
from ptqpipe.checkpoint import CheckpointReader, is_sealed, output_errors, write_tensors
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.pipeline.tune.kl.choice import Choice
from ptqpipe.pipeline.tune.kl.descent import DescentResult, Variables, descend
from ptqpipe.pipeline.tune.kl.floats import Trained, TrainedTensor, check_trainable, find_kept, global_scales
from ptqpipe.pipeline.tune.kl.judging_text import OTHER, held_out_sources, sample_windows
from ptqpipe.pipeline.tune.kl.model_divergence import LayerForward, ModelPair
from ptqpipe.pipeline.tune.options import GLOBAL, TuneOptions
from ptqpipe.pipeline.tune.tune_samples import divided
from ptqpipe.pipeline.tune.tuned_layer import TunedLayer
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.run.machine import BASE_BYTES, Machine, counting_bar
from ptqpipe.runtime.skeleton import Skeleton

STATE_FILE = "model.safetensors"
_BYTES = 36  # for each weight: base, step and place of its choice, v, its gradient, two moments, codes, what is saved


def memory_need(prepared: Conversion, train: Sequence[str]) -> int:
    """About what the model takes while codes, and floats, are learned."""
    weights = sum(m.shape[0] * m.shape[1] for unit in prepared.outputs.plan.units for m in unit.members)
    all_weights = sum(prod(shape) for _, shape in prepared.source.tensors.values())
    floats = 20 * (all_weights - weights) if train else 0  # its gradient, two moments, the float model's, what is saved
    return _BYTES * weights + 4 * all_weights + floats


def learn(
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
                held_out=sample_windows(prepared, samples),
                device=machine.device,
                memory_bytes=machine.memory_bytes - BASE_BYTES - memory_need(prepared, options.train),
                spill=partial,
                streams=2,
            )
        )
        check_trainable(runner, options.train)
        learned, judged = divided(runner.held_from, settings.held_out)
        entering = runner.activations.another()
        opened.callback(entering.close)
        count = len(runner.names)
        with counting_bar(count, "layers", shown=machine.progress, title="float model") as advance:
            models = opened.enter_context(ModelPair.open(runner, entering, lambda name: advance(1, name)))
        if kept:
            opened.enter_context(runner.embeddings())
            models.entering = runner.embedded
        place = _place(machine.device, memory_need(prepared, options.train))
        trained = Trained(skeleton, kept, global_scales(prepared, stored) if GLOBAL in options.train else [], place)
        models.float_head = trained.float_head
        choices = _quantized(models, prepared, runner, stored, trained, place)
        others = list(range(runner.held_from, len(runner.batches)))
        names = held_out_sources(samples, judged, [len(batch) for batch in runner.batches])

        def judge() -> dict[str, float]:
            divergences, of_others = models.divergence(judged), models.divergence(others)
            of_data = {name: float(divergences[windows].mean()) for name, windows in names.items()}
            return {**of_data, OTHER: float(of_others.mean())}

        def run(variables: Variables, title: str) -> DescentResult:
            state = partial / f"state of {title}"
            with counting_bar(settings.steps, "steps", shown=machine.progress, title=title) as advance:
                return descend(
                    variables,
                    backward=models.backward,
                    judge=judge,
                    batches=learned,
                    per_step=max(1, settings.windows // len(runner.batches[0])),
                    settings=settings,
                    state=read_state(state),
                    save=lambda tensors: save_state(state, tensors),
                    on_step=lambda step: advance(1, f"step {step}"),
                )

        result = run(Variables(choices, {}), "codes")
        floats = run(Variables({}, trained.floats), "floats") if options.train else None
    return result, floats, kept


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

    def run(x: torch.Tensor, batch: int) -> torch.Tensor:
        weights = {key: choice.weight().to(device) for key, choice in choices.items()}
        return work.outputs(x, batch, work.parameters(weights))

    return run


def read_state(folder: Path) -> dict[str, torch.Tensor] | None:
    """What a stopped run has saved in a folder; None where it is damaged, too."""
    if not is_sealed(folder / STATE_FILE):
        return None
    with CheckpointReader.open(folder) as reader:
        return {name: reader.read(name) for name in reader.entries}


def save_state(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replaces what a folder has, in one go."""
    growing = folder.with_name(f"{folder.name}.growing")
    write_tensors(growing, tensors, sealed=True)
    with output_errors(folder):
        folder.mkdir(exist_ok=True)
        growing.rename(folder / STATE_FILE)
