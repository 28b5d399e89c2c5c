"""The reverse pass before codes are chosen, and its files: one for each decoder layer, beside the codes until these are
complete.

It runs from the last layer to the first, so its files are usable once that of the first is there; a run that was killed
before that does the pass again.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from ptqpipe.calibration.activations import Activations, InMemory, OnDisk
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.reverse import Gradients, nbytes, reverse
from ptqpipe.calibration.runner import Block, Runner
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.checkpoint import output_errors, write_tensors
from ptqpipe.stages.common import BASE_BYTES, Machine, counting_bar
from ptqpipe.stages.convert.run import Conversion
from ptqpipe.stages.tune.block import divided


def observe(
    prepared: Conversion, samples: Samples, folder: Path, machine: Machine, *, held_out: float, seed: int
) -> Callable[[str], Gradients]:
    """What reads the gradients of a block by its name; they are in files of ``folder``, made now where they are not.

    held_out  share of the batches that only judge: their gradients count for nothing
    seed      of the labels
    """
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
            spill=folder,
            streams=len(names) + 2,
        )
        with runner, contextlib.ExitStack() as opened:
            disk = isinstance(runner.activations, OnDisk)

            def store() -> Activations:
                made: Activations = OnDisk(folder) if disk else InMemory()
                opened.callback(made.close)
                return made

            seen, _ = divided(len(runner.batches), held_out)
            found = reverse(runner, batches=seen, seed=seed, store=store, modules=lambda b: _modules(b, wanted))
            with counting_bar(len(names), "layers", shown=machine.progress, title="backwards") as advance:
                for name, gradients in found:
                    _write(_file(folder, name), gradients)
                    advance(1, name)
    return lambda name: _read(_file(folder, name))


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
    return folder / f"gradients-{block}.safetensors"


def _write(file: Path, gradients: Gradients) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for kind, by_module in (("outputs", gradients.outputs), ("last", {"": gradients.last})):
        tensors |= {f"{kind}/{name}/{i}": part for name, parts in by_module.items() for i, part in enumerate(parts)}
    growing = file.with_name(file.name + ".growing")
    write_tensors(growing, tensors)
    with output_errors(file):
        os.replace(growing, file)


def _read(file: Path) -> Gradients:
    with output_errors(file), safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return Gradients(_of(tensors, "outputs"), _of(tensors, "last")[""])


def _of(tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, Sequence[torch.Tensor]]:
    """Module -> its tensors of a kind, in order."""
    places: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(f"{kind}/"):
            name, _, place = key.removeprefix(f"{kind}/").rpartition("/")
            places.setdefault(name, {})[int(place)] = tensor
    return {name: [parts[i] for i in sorted(parts)] for name, parts in places.items()}
