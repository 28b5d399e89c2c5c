"""The reverse pass before codes are chosen, and its files: one for each decoder layer, beside the codes until these are
complete.

It runs from the last layer to the first, so its files are usable once that of the first is there; a run that was killed
before that does the pass again.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from ptqpipe.calibration.activations import Activations, InMemory, OnDisk
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.reverse import Gradients, nbytes, reverse
from ptqpipe.calibration.runner import Block, Runner
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.checkpoint import CheckpointReader, output_errors, write_tensors
from ptqpipe.stages.common import BASE_BYTES, Machine, counting_bar
from ptqpipe.stages.convert.run import Conversion
from ptqpipe.stages.tune.block import divided

_BLOCK = "."  # where a module's name would be: the block's own output


def observe(
    prepared: Conversion, samples: Samples, spill: Path, machine: Machine, *, held_out: float, seed: int
) -> Callable[[str], Gradients]:
    """What reads the gradients of a block by its name; they are in files of a folder in ``spill``, made now where they
    are not.

    held_out  share of the batches that only judge: their gradients count for nothing
    seed      of the labels
    """
    folder = spill / "gradients"
    with output_errors(folder):
        folder.mkdir(exist_ok=True)
    skeleton = Skeleton.of(prepared.source, dtype=torch.float32)
    names = [name for name, _ in skeleton.blocks]
    if not _file(folder, names[0]).exists():
        wanted = {m.source.tensor for unit in prepared.outputs.plan.units for m in unit.members}
        sums = max(nbytes(_outputs(module)) for _, module in skeleton.blocks)
        runner = Runner.open(
            skeleton,
            samples.windows,
            held_out=samples.held_out,
            device=machine.device,
            memory_bytes=machine.memory_bytes - BASE_BYTES - sums,
            spill=spill,
            streams=len(names) + 2,
        )
        with runner, contextlib.ExitStack() as opened:
            disk = isinstance(runner.activations, OnDisk)

            def store() -> Activations:
                made: Activations = OnDisk(spill) if disk else InMemory()
                opened.callback(made.close)
                return made

            seen, _ = divided(len(runner.batches), held_out)
            found = reverse(runner, batches=seen, seed=seed, store=store, modules=lambda b: _modules(b, wanted))
            with counting_bar(len(names), "layers", shown=machine.progress, title="backwards") as advance:
                for name, gradients in found:
                    _write(folder, name, gradients)
                    advance(1, name)
    return lambda name: _read(folder, name)


def _modules(block: Block, wanted: set[str]) -> list[str]:
    """Names in the block of the modules whose weight, a matrix, is made of ``wanted`` tensors."""
    found = []
    for name, module in block.module.named_modules():
        weight = module._parameters.get("weight")
        origins = block.origins.get(f"{block.name}.{name}.weight", ())
        if weight is not None and weight.dim() == 2 and origins and wanted.issuperset(origins):
            found.append(name)
    return found


def _outputs(module: torch.nn.Module) -> list[int]:
    """At most how many outputs each linear layer of a block has."""
    return [max(p.shape) for name, p in module.named_parameters() if name.endswith(".weight") and p.dim() == 2]


def _file(folder: Path, block: str) -> Path:
    return folder / f"{block}.safetensors"


def _write(folder: Path, block: str, gradients: Gradients) -> None:
    runs = {_BLOCK: gradients.last} | dict(gradients.outputs)
    tensors = {f"{block}/{name}/{i}": run for name, found in runs.items() for i, run in enumerate(found)}
    growing = folder / "growing"
    write_tensors(growing, tensors)
    with output_errors(folder):
        growing.rename(_file(folder, block))


def _read(folder: Path, block: str) -> Gradients:
    runs: dict[str, dict[int, torch.Tensor]] = {}
    with CheckpointReader.open(folder) as reader:
        for key in reader.entries:
            of, name, place = key.split("/")
            if of == block:
                runs.setdefault(name, {})[int(place)] = reader.read(key)
    outputs = {name: [found[i] for i in sorted(found)] for name, found in runs.items()}
    last = outputs.pop(_BLOCK)
    return Gradients(outputs, last)
