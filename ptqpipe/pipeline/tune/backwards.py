"""The reverse pass before codes are chosen, and its files: one for each decoder layer, beside the codes until these are
complete.

It runs from the last layer to the first. Behind each layer the slopes that it goes on from are kept, too, until those
of the next are: a run that was killed goes on behind the last layer that is in the journal, which has the sha256 of
every file. Where one is damaged, the pass runs again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ptqpipe.calibration.backward import Slopes, expert_products, linear_modules, run_model_backward
from ptqpipe.calibration.data import Samples
from ptqpipe.calibration.gradients import Gradients
from ptqpipe.calibration.inputs import from_lower_half, lower_half
from ptqpipe.calibration.runner import in_batches
from ptqpipe.checkpoint import CheckpointReader, file_sha256, output_errors, write_tensors
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.quantization import kronecker
from ptqpipe.run.machine import BASE_BYTES, Machine, counting_bar
from ptqpipe.runtime.skeleton import Skeleton

PASS = "backwards"  # the pass as a unit of the journal: {"layers": {layer: sha256}, "slopes": sha256 or None}
_BLOCK = "."  # where a module's name would be: the layer's own output


def are_used(prepared: Conversion, options: TuneOptions) -> bool:
    """Whether gradients are of use: of layers by themselves, where rows do not share scales."""
    fits = any(kronecker.possible(unit.scheme.fmt) for unit in prepared.outputs.plan.units)
    return options.by_kl and (options.follows or fits)


def observe(
    prepared: Conversion,
    samples: Samples,
    spill: Path,
    machine: Machine,
    *,
    dtype: torch.dtype,
    seed: int,
    done: Mapping[str, Any],
    commit: Callable[[str, Mapping[str, Any]], None],
) -> Callable[[str], Gradients]:
    """A function that reads the gradients of a layer by its name from files in ``spill``, which are written first where
    they are missing.

    samples       those of `tune_samples.learned_from`
    dtype         that the pass runs in
    seed          of the labels
    done, commit  units of the journal that are done, and what notes another one
    """
    folder, slopes = spill / "gradients", spill / "slopes"
    with output_errors(folder):
        folder.mkdir(exist_ok=True)
        slopes.mkdir(exist_ok=True)
    skeleton = Skeleton.of(prepared.source, dtype=dtype)
    names = [name for name, _ in skeleton.blocks]
    layers = _sound(done.get(PASS, {}), folder, slopes, names)
    if len(layers) < len(names):
        wanted = {m.source.tensor for unit in prepared.outputs.plan.units for m in unit.members}

        def save(name: str, get: Slopes) -> None:
            digest = write_tensors(_file(slopes, name), _ByBatch(get, len(batches)))
            commit(PASS, {"layers": dict(layers), "slopes": digest})
            _clear(slopes, keep=_file(slopes, name))

        batches = [*in_batches(samples.windows), *in_batches(samples.held_out)]
        with CheckpointReader.open(slopes) if layers else nullcontext() as reader:
            gradients_of_layers = run_model_backward(
                skeleton,
                samples,
                seed=seed,
                device=machine.device,
                memory_bytes=machine.memory_bytes - BASE_BYTES,
                spill=spill,
                modules=lambda layer: [*linear_modules(layer, wanted), *expert_products(layer, wanted)],
                former=None if reader is None else (len(layers), lambda batch: reader.read(str(batch))),
                save=save,
            )
            shown = machine.progress
            with counting_bar(len(names), "layers", shown=shown, title="backwards", done=len(layers)) as advance:
                for name, gradients in gradients_of_layers:
                    layers[name] = _write(folder, name, gradients)
                    advance(1, name)
        commit(PASS, {"layers": layers, "slopes": None})
    _clear(slopes)
    return lambda name: _read(folder, name)


class _ByBatch(Mapping[str, torch.Tensor]):
    """The slopes of all batches by their numbers, one of them in memory at a time where they lie on disk."""

    def __init__(self, get: Slopes, count: int) -> None:
        self._get, self._names = get, [str(batch) for batch in range(count)]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._get(int(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _sound(former: Mapping[str, Any], folder: Path, slopes: Path, names: Sequence[str]) -> dict[str, str]:
    """Layer -> sha256 of its file, of those that a stopped run is behind; none where the pass has to run again. Slopes
    that are not the journal's go: those of a layer that was not noted."""
    layers, digest = dict(former.get("layers", {})), former.get("slopes")
    if any(not _has(_file(folder, name), sha256) for name, sha256 in layers.items()):
        layers = {}
    if layers and len(layers) < len(names):
        last = _file(slopes, list(layers)[-1])
        if _has(last, digest):
            _clear(slopes, keep=last)
            return layers
        layers = {}
    _clear(slopes)
    return layers


def _has(file: Path, sha256: str | None) -> bool:
    return file.is_file() and file_sha256(file) == sha256


def _clear(folder: Path, keep: Path | None = None) -> None:
    with output_errors(folder):
        for file in folder.iterdir():
            if file != keep:
                file.unlink()


def _file(folder: Path, layer: str) -> Path:
    return folder / f"{layer}.safetensors"


def _write(folder: Path, layer: str, gradients: Gradients) -> str:
    """The lower half of every matrix: all are symmetric. The file's sha256."""
    runs = {_BLOCK: gradients.last} | dict(gradients.outputs)
    tensors = {f"{layer}/{name}/{i}": lower_half(run) for name, parts in runs.items() for i, run in enumerate(parts)}
    return write_tensors(_file(folder, layer), tensors)


def _read(folder: Path, layer: str) -> Gradients:
    runs: dict[str, dict[int, torch.Tensor]] = {}
    with CheckpointReader.open(folder) as reader:
        for key in reader.entries:
            own, name, number = key.split("/")
            if own == layer:
                runs.setdefault(name, {})[int(number)] = from_lower_half(reader.read(key))
    outputs = {name: [by_number[i] for i in sorted(by_number)] for name, by_number in runs.items()}
    last = outputs.pop(_BLOCK)
    return Gradients(outputs, last)
