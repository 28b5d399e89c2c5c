"""--method kl: after GPTQ in the order of the model, codes by the KL divergence of the whole model, all layers at once
(`calibration/end_to_end.py`).

The codes that GPTQ found lie beside the output until those that are learned from them are written. Each time that codes
are judged, on held-out samples of the data and on the sample text of the package, the state of descent goes to disk, so
that a killed run continues; what descent ends with goes into the journal before any layer is written.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from ptqpipe.calibration.activations import InMemory, OnDisk
from ptqpipe.calibration.data import HELD_SHARE, Samples
from ptqpipe.calibration.end_to_end import Found, descend
from ptqpipe.calibration.rounding import Choice, Settings, with_codes
from ptqpipe.calibration.runner import BATCH_TOKENS, Runner
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.calibration.whole import Layer, Whole
from ptqpipe.checkpoint import BlockFolder, CheckpointReader, output_errors, write_tensors
from ptqpipe.errors import UsageError
from ptqpipe.evaluation.text import SAMPLE, read_text
from ptqpipe.quantities import option_size, option_size_above
from ptqpipe.rounding import Rounding
from ptqpipe.runtime.loading import load_tokenizer
from ptqpipe.stages.common import BASE_BYTES, Machine, counting_bar
from ptqpipe.stages.convert.run import Conversion
from ptqpipe.stages.tune import codes as codes_of
from ptqpipe.stages.tune.block import BlockWork, divided

DATA, OTHER = "held-out samples", "sample text"
_STATE, _FOUND = "state", "found"  # folders beside the output
_BYTES = 36  # for each weight: base, step and place of its choice, v, its gradient, two moments, codes, what is saved


def check(prepared: Conversion, samples: Samples, machine: Machine) -> None:
    """UsageError for images, data too short for a part that is not learned from, windows longer than the sample text,
    and too little memory."""
    if samples.images:
        raise UsageError("--method kl takes no rows with images; use --method gptq, or data without images")
    rows, seqlen = len(samples.windows) + len(samples.held_out), samples.windows.shape[1]
    if rows <= max(1, BATCH_TOKENS // seqlen):
        raise UsageError(
            f"--method kl judges by samples that it does not learn from, and the data give {rows} of {seqlen} tokens, "
            f"which is one batch; give more --samples, beyond {BATCH_TOKENS} tokens"
        )
    _other(prepared, samples)
    least = _need(prepared) + BASE_BYTES
    if least > machine.memory_bytes:
        raise UsageError(
            f"--max-memory {option_size(machine.memory_bytes)} is too small for --method kl, which has all decoder "
            f"layers in memory; give --max-memory {option_size_above(least)}, or --method gptq"
        )


def _need(prepared: Conversion) -> int:
    """About what the model takes while codes are learned."""
    weights = sum(m.shape[0] * m.shape[1] for unit in prepared.outputs.plan.units for m in unit.members)
    return _BYTES * weights + 4 * sum(prod(shape) for _, shape in prepared.source.tensors.values())


def improve(prepared: Conversion, samples: Samples, folder: BlockFolder, settings: Settings, machine: Machine) -> None:
    """Learns codes from those that GPTQ has found, and commits every decoder layer with them."""
    partial, layers = folder.paths.partial, [name for name in folder.done if name != codes_of.ENDED]
    weights = {key: of for name in layers for key, of in folder.done[name]["weights"].items()}
    with Rounding.of_files(codes_of.place(folder, "kl"), {"weights": weights}) as stored:
        if codes_of.ENDED not in folder.done:
            found = _learn(prepared, samples, stored, partial, settings, machine)
            _save(partial / _FOUND, found.codes)
            told = {name: getattr(found, name) for name in ("start", "result", "steps", "best", "moved")}
            folder.commit(codes_of.ENDED, told)
        formats = {m.key: (unit.scheme.fmt, m.shape) for unit in prepared.outputs.plan.units for m in unit.members}
        with CheckpointReader.open(partial / _FOUND) as reader:
            for name in layers:
                codes = {}
                for key in folder.done[name]["weights"]:
                    codes[key] = q = stored.of(key, formats[key][0], shape=formats[key][1])
                    if key in reader.entries:
                        codes[key] = with_codes(q, reader.read(key))
                folder.commit(name, folder.done[name] | codes_of.write(folder.paths.growing, name, codes))


def _learn(
    prepared: Conversion, samples: Samples, stored: Rounding, partial: Path, settings: Settings, machine: Machine
) -> Found:
    """Loads the model, all of it, and learns; what a stopped run has learned is in ``partial``."""
    skeleton = Skeleton.of(prepared.source, dtype=torch.float32)
    rows = torch.cat((samples.windows, samples.held_out))
    with contextlib.ExitStack() as opened:
        runner = opened.enter_context(
            Runner.open(
                skeleton,
                rows,
                held_out=_other(prepared, samples),
                device=machine.device,
                memory_bytes=machine.memory_bytes - BASE_BYTES - _need(prepared),
                spill=partial,
                streams=2,
            )
        )
        learned, judged = divided(runner.held_from, settings.held_out)
        entering = OnDisk(partial) if isinstance(runner.activations, OnDisk) else InMemory()
        opened.callback(entering.close)
        count = len(runner.names)
        with counting_bar(count, "layers", shown=machine.progress, title="float model") as advance:
            whole = opened.enter_context(Whole.open(runner, entering, lambda name: advance(1, name)))
        choices = _quantized(whole, prepared, runner, stored)
        sources = {DATA: judged, OTHER: list(range(runner.held_from, len(runner.batches)))}
        with counting_bar(settings.steps, "steps", shown=machine.progress, title="end to end") as advance:
            return descend(
                choices,
                backward=whole.backward,
                judge=lambda: {name: whole.divergence(batches) for name, batches in sources.items()},
                batches=learned,
                per_step=max(1, settings.windows // len(runner.batches[0])),
                settings=settings,
                state=_read(partial / _STATE),
                save=lambda tensors: _save(partial / _STATE, tensors),
                on_step=lambda step: advance(1, f"step {step}"),
            )


def _quantized(whole: Whole, prepared: Conversion, runner: Runner, stored: Rounding) -> dict[str, Choice]:
    """Puts the quantized layers in the place of the float ones; the choices that their weights come from, by key."""
    choices: dict[str, Choice] = {}
    layers = []
    for block in whole.blocks:
        work = BlockWork.of(block, prepared, runner)
        own = {}
        for unit in work.units:
            for m in unit.members:
                if m.key in work.usable:
                    own[m.key] = Choice(work.weights[m.key], stored.of(m.key, unit.scheme.fmt, shape=m.shape))
        runner.skeleton.free([f"{block.name}.{a.parameter}" for a in work.assemblies])
        layers.append(_layer(replace(work, weights={}), own, runner.device))
        choices |= own
    whole.layers = layers
    return choices


def _layer(work: BlockWork, choices: Mapping[str, Choice], device: torch.device) -> Layer:
    """A decoder layer whose weights are those that are chosen."""

    def run(x: torch.Tensor, batch: int) -> torch.Tensor:
        return work.outputs(x, batch, {key: choice.weight().to(device) for key, choice in choices.items()})

    return run


def _other(prepared: Conversion, samples: Samples) -> torch.Tensor:
    """Windows [n, seqlen] of the sample text, spread over it, as many as judge the data. UsageError where the text is
    shorter than one."""
    model, seqlen = prepared.source.reader.path, samples.windows.shape[1]
    tokens = read_text(SAMPLE, lambda: load_tokenizer(model)).tokens
    count = len(tokens) // seqlen
    if not count:
        raise UsageError(
            f"--method kl judges by the sample text of the package, too, which has {len(tokens)} tokens, less than "
            f"--seqlen {seqlen}; lower it"
        )
    most = max(1, round((len(samples.windows) + len(samples.held_out)) / HELD_SHARE))
    return tokens[: count * seqlen].view(count, seqlen)[:: -(-count // most)]


def _read(folder: Path) -> dict[str, torch.Tensor] | None:
    """What a stopped run has saved in a folder."""
    if not folder.exists():
        return None
    with CheckpointReader.open(folder) as reader:
        return {name: reader.read(name) for name in reader.entries}


def _save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replaces what a folder has, in one go."""
    growing = folder.with_name(f"{folder.name}.growing")
    write_tensors(growing, tensors)
    with output_errors(folder):
        folder.mkdir(exist_ok=True)
        growing.rename(folder / "model.safetensors")
