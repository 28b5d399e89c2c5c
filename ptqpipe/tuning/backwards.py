"""The reverse pass before codes are chosen, and its files: one for each decoder layer, beside the codes until these are
complete.

It runs from the last layer to the first; a run that was killed before it came to that, or that finds a damaged file,
does the pass again.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.gradients import Gradients
from ptqpipe.calibration.reverse import expert_products, linear_modules, reverse_model, thinned
from ptqpipe.calibration.runner import in_batches
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.checkpoint import CheckpointReader, is_sealed, output_errors, write_tensors
from ptqpipe.inputs import lower_half, whole
from ptqpipe.machine import BASE_BYTES, Machine, counting_bar
from ptqpipe.rewriting.conversion import Conversion
from ptqpipe.runtime.compiled import pass_dtype
from ptqpipe.tuning.in_order import divided
from ptqpipe.tuning.options import TuneOptions

_BLOCK = "."  # where a module's name would be: the block's own output


def observe(
    prepared: Conversion,
    samples: Samples,
    spill: Path,
    machine: Machine,
    *,
    seed: int,
) -> Callable[[str], Gradients]:
    """What reads the gradients of a block by its name; they are in files of a folder in ``spill``, made now where they
    are not.

    samples  those of `learned_from`
    seed     of the labels
    """
    folder = spill / "gradients"
    with output_errors(folder):
        folder.mkdir(exist_ok=True)
    largest = max(math.prod(m.shape) for unit in prepared.outputs.plan.units for m in unit.members)
    skeleton = Skeleton.of(prepared.source, dtype=pass_dtype(largest, machine.device))
    names = [name for name, _ in skeleton.blocks]
    if not all(is_sealed(_file(folder, name)) for name in names):
        wanted = {m.source.tensor for unit in prepared.outputs.plan.units for m in unit.members}
        found = reverse_model(
            skeleton,
            samples,
            seed=seed,
            device=machine.device,
            memory_bytes=machine.memory_bytes - BASE_BYTES,
            spill=spill,
            modules=lambda block: [*linear_modules(block, wanted), *expert_products(block, wanted)],
        )
        with counting_bar(len(names), "layers", shown=machine.progress, title="backwards") as advance:
            for name, gradients in found:
                _write(folder, name, gradients)
                advance(1, name)
    return lambda name: _read(folder, name)


def learned_from(samples: Samples, options: TuneOptions) -> Samples:
    """The samples that are run backwards; none that are held out, or of GPTQ in order none of the batches that only
    judge, as `divided` says by their share."""
    held_out = options.settings.held_out
    if not options.follows:
        return thinned(replace(samples, held_out=samples.held_out[:0]))
    batches = [*in_batches(samples.windows), *in_batches(samples.held_out)]
    return thinned(samples.first(sum(len(batches[i]) for i in divided(len(batches), held_out)[0])))


def _file(folder: Path, block: str) -> Path:
    return folder / f"{block}.safetensors"


def _write(folder: Path, block: str, gradients: Gradients) -> None:
    """The lower half of every matrix: all are symmetric."""
    runs = {_BLOCK: gradients.last} | dict(gradients.outputs)
    tensors = {f"{block}/{name}/{i}": lower_half(run) for name, found in runs.items() for i, run in enumerate(found)}
    growing = folder / "growing"
    write_tensors(growing, tensors, sealed=True)
    with output_errors(folder):
        growing.rename(_file(folder, block))


def _read(folder: Path, block: str) -> Gradients:
    runs: dict[str, dict[int, torch.Tensor]] = {}
    with CheckpointReader.open(folder) as reader:
        for key in reader.entries:
            of, name, place = key.split("/")
            if of == block:
                runs.setdefault(name, {})[int(place)] = whole(reader.read(key))
    outputs = {name: [found[i] for i in sorted(found)] for name, found in runs.items()}
    last = outputs.pop(_BLOCK)
    return Gradients(outputs, last)
