"""The statistics of one decoder layer: in memory, or as a safetensors file and its part of stats.json.

Entries, experts without data and attention are named here; `statistics.py` is how they are read again.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe.calibration.collect import Collector, Slot
from ptqpipe.calibration.experts import LEAST_TOKENS, is_product
from ptqpipe.calibration.gradients import Gradients
from ptqpipe.calibration.inputs import InputStatistics, Moments, lower_half
from ptqpipe.calibration.moments import RunningMoments, stand_in
from ptqpipe.checkpoint import write_tensors

OUTPUTS = "outputs"
OUTPUTS_FILE = f"{OUTPUTS}.safetensors"


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer's part of stats.json, and its row of the tables.

    modules    checkpoint module -> its entry
    attention  attention module -> its entry
    unused     modules that no sample reached
    sha256     of the file
    """

    modules: Mapping[str, Mapping[str, Any]]
    attention: Mapping[str, Mapping[str, Any]]
    unused: tuple[str, ...]
    file: str
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {
            "modules": {name: dict(entry) for name, entry in self.modules.items()},
            "attention": {name: dict(entry) for name, entry in self.attention.items()},
            "unused": list(self.unused),
            "file": self.file,
            "sha256": self.sha256,
        }


def write_layer(
    folder: Path,
    name: str,
    collector: Collector,
    *,
    block: bool,
    key_values: tuple[str, torch.Tensor, torch.Tensor] | None = None,
) -> LayerRecord | None:
    """Writes ``<name>.safetensors``; its part of stats.json, or None where no module was reached. Consumes the moments.

    key_values  an attention module's name, and its largest keys and values [heads]
    """
    tensors, modules, unused = _gathered(name, collector, block=block)
    attention: dict[str, dict[str, Any]] = {}
    if key_values is not None:
        module, k_amax, v_amax = key_values
        tensors |= {f"{module}.k_amax": k_amax.float(), f"{module}.v_amax": v_amax.float()}
        attention[module] = {"heads": k_amax.numel(), "k_amax": float(k_amax.max()), "v_amax": float(v_amax.max())}
    if not tensors:
        return None
    file = f"{name}.safetensors"
    return LayerRecord(modules, attention, tuple(unused), file, write_tensors(folder / file, tensors))


def write_outputs(
    folder: Path,
    layers: Iterable[tuple[str, Gradients]],
    origins: Mapping[str, Sequence[str]],
    *,
    full: bool,
) -> dict[str, LayerRecord]:
    """Writes ``outputs.safetensors``: of each linear module that is one tensor of the checkpoint the mean squares of
    the gradients at its outputs and of its weight, of each stacked expert those at its outputs; of each layer with
    ``full`` their products, ``<layer>.outputs.safetensors``, and with pairs ``<layer>.pairs.safetensors``. Their parts
    of stats.json, by the files' names without the ending.

    layers   (name of a layer, its gradients)
    origins  parameter of the model -> checkpoint tensors that make it
    """
    tensors, records = {}, {}
    for layer, gradients in layers:
        names = {f"{layer}.{name}.weight": name for name in gradients.outputs if not is_product(name)}
        made_of = {name: origins[parameter] for parameter, name in names.items() if len(origins[parameter]) == 1}
        for name, (tensor,) in made_of.items():
            module = tensor.removesuffix(".weight")
            tensors[f"{module}.output_moment"] = torch.cat([run.diagonal() for run in gradients.outputs[name]])
            if name in gradients.weights:
                tensors |= {f"{module}.gradient_{part}": t for part, t in asdict(gradients.weights[name]).items()}
        tensors |= {f"{module}.output_moment": moment for module, moment in gradients.experts.items()}
        products = {
            f"{module}.output_moments.{i}": lower_half(run)
            for module, runs in gradients.named.items()
            for i, run in enumerate(runs)
        }
        if full:
            records[outputs_of(layer)] = _record(folder, outputs_of(layer), products)
        if gradients.pairs:
            pairs = {f"{key}.pair_inputs": x for key, (x, _) in gradients.pairs.items()}
            pairs |= {f"{key}.pair_gradients": h for key, (_, h) in gradients.pairs.items()}
            records[pairs_of(layer)] = _record(folder, pairs_of(layer), pairs)
    return {**records, OUTPUTS: _record(folder, OUTPUTS, tensors)}


def outputs_of(layer: str) -> str:
    """The name of products of a layer's gradients in stats.json's journal, and of their file."""
    return f"{layer}.outputs"


def pairs_of(layer: str) -> str:
    """The name of a layer's pairs in stats.json's journal, and of their file."""
    return f"{layer}.pairs"


def is_of_outputs(unit: str) -> bool:
    """Whether a unit of the journal is one that the run backwards has written, all of them in one pass."""
    return unit == OUTPUTS or unit.endswith((outputs_of(""), pairs_of("")))


def _record(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> LayerRecord:
    file = f"{name}.safetensors"
    return LayerRecord({}, {}, (), file, write_tensors(folder / file, tensors))


def _gathered(
    name: str, collector: Collector, *, block: bool
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]], list[str]]:
    """(tensors by the names that a folder has for them, entry of every module, modules that no sample reached).
    Consumes the moments."""
    tensors: dict[str, torch.Tensor] = {}
    modules: dict[str, dict[str, Any]] = {}
    unused: list[str] = []
    stand_ins = _stand_ins(collector)
    for key, (whole, _) in stand_ins.items():
        _put(tensors, key, whole, block=block)
    for slot in collector.slots.values():
        leader = collector.leaders.get(slot.id)
        moments = collector.moments.get(leader) if leader is not None else None
        tokens = moments.tokens if moments is not None else 0
        if slot.group is not None and slot.group in stand_ins and tokens < LEAST_TOKENS:
            entry = _entry(slot.group, tokens, stand_ins[slot.group][1], name, measured=False)
        elif moments is None or leader is None or not tokens:
            unused += slot.names
            continue
        else:
            key = collector.slots[leader].names[0]
            entry = _entry(key, tokens, moments.quantiles(), name, measured=True)
            held_out = collector.held_out.get(leader)
            if held_out is not None and held_out.tokens >= (LEAST_TOKENS if slot.group is not None else 1):
                entry["held_tokens"] = held_out.tokens
            if leader == slot.id:
                _put(tensors, key, moments, block=block)
                if held_out is not None and "held_tokens" in entry:
                    _put_held(tensors, key, held_out, block=block)
        modules |= dict.fromkeys(slot.names, entry)
    return tensors, modules, unused


class LayerStatistics:
    """The statistics of the linear inputs of one decoder layer, in memory: what `Statistics` would read from a folder
    that `write_layer` wrote, to the bit."""

    def __init__(
        self, name: str, collector: Collector, outputs: Mapping[str, Sequence[torch.Tensor]] | None = None
    ) -> None:
        """
        name       of the layer
        collector  which has watched it; its moments are consumed
        outputs    ``named`` of its `Gradients`, where they are known
        """
        self._tensors, self._modules, _ = _gathered(name, collector, block=False)
        self._outputs = outputs or {}

    def key(self, module: str) -> str:
        """What names the input of a module: modules with one input have one. KeyError where no sample reached it."""
        return str(self._modules[module]["key"])

    def has(self, module: str, moment: str) -> bool:
        """Whether ``moment`` ("second_moment", "full_moment", ...) of a module was collected."""
        return module in self._modules and f"{self.key(module)}.{moment}" in self._tensors

    def of(self, module: str, *, block: bool = False, full: bool = False, held_out: bool = False) -> InputStatistics:
        """The statistics of one module; ``block`` must be False, since blocks are cut from the full moments."""
        if block:
            raise ValueError("blocks are cut from the full moments")
        entry, key = self._modules[module], self.key(module)
        tensors = self._tensors
        held = None
        if held_out and "held_tokens" in entry:
            moment = tensors[f"{key}.held_full_moment"] if full else None
            held = Moments(tensors[f"{key}.held_second_moment"], None, moment, tokens=int(entry["held_tokens"]))
        return InputStatistics(
            tokens=int(entry["tokens"]),
            measured=bool(entry["measured"]),
            amax=tensors[f"{key}.amax"],
            mean=tensors[f"{key}.mean"],
            second_moment=tensors[f"{key}.second_moment"],
            quantiles={float(p): value for p, value in entry["quantiles"].items()},
            full_moment=tensors[f"{key}.full_moment"] if full else None,
            held_out=held,
        )

    def output_moments(self, module: str, outputs: int) -> list[torch.Tensor] | None:
        """E[g g^T] of the gradients at a module's outputs, by runs; None where nothing is known of so many."""
        moments = list(self._outputs.get(module, ()))
        return moments if moments and sum(map(len, moments)) == outputs else None


def _put(tensors: dict[str, torch.Tensor], key: str, moments: RunningMoments, *, block: bool) -> None:
    tensors |= {f"{key}.{name}": tensor for name, tensor in moments.tensors(block=block).items()}


def _put_held(tensors: dict[str, torch.Tensor], key: str, held_out: RunningMoments, *, block: bool) -> None:
    moments = held_out.tensors(block=block)
    tensors |= {f"{key}.held_{name}": tensor for name, tensor in moments.items() if name.endswith("_moment")}


def _entry(key: str, tokens: int, quantiles: Mapping[float, float], block: str, *, measured: bool) -> dict[str, Any]:
    return {
        "file": f"{block}.safetensors",
        "key": key,
        "tokens": tokens,
        "measured": measured,
        "quantiles": {repr(p): value for p, value in quantiles.items()},
    }


def _stand_ins(collector: Collector) -> dict[str, tuple[RunningMoments, dict[float, float]]]:
    """For every group of experts with one that saw too little: what those that saw enough give it.

    Where none saw enough, all that saw anything count.
    """
    groups: dict[str, list[Slot]] = defaultdict(list)
    for slot in collector.slots.values():
        if slot.group is not None:
            groups[slot.group].append(slot)
    stand_ins = {}
    for group, slots in groups.items():
        moments = [collector.moments.get(collector.leaders.get(slot.id, slot.id)) for slot in slots]
        counts = [0 if m is None else m.tokens for m in moments]
        if min(counts) >= LEAST_TOKENS:
            continue
        least = min(LEAST_TOKENS, max(counts))
        measured = [m for m in moments if m is not None and m.tokens and m.tokens >= least]
        if measured:
            stand_ins[group] = stand_in(measured)
    return stand_ins


def digest_of(blocks: Mapping[str, Mapping[str, Any]]) -> str:
    """sha256 of all blocks: of their files' digests and of their parts of stats.json."""
    return hashlib.sha256(json.dumps(blocks, sort_keys=True).encode()).hexdigest()
