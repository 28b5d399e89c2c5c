"""The folder of learned codes: what is written of each decoder layer, read of a finished one, and its rounding.json."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.calibration.data import Samples, tokens_digest
from ptqpipe.calibration.runner import Layer
from ptqpipe.checkpoint import LayerFolder, Mode, name_of, write_tensors
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.pipeline.tune import backwards
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.pipeline.tune.tune_samples import learned_from
from ptqpipe.quantization.learned_codes import CODES_FILE, CODES_VERSION, TRAINED_FILE, LearnedCodes
from ptqpipe.recipe.plan import Unit

ENDED = "end to end"  # what gradient descent on the whole model has ended with: its entry in the journal
START = "start"  # where codes lie, beside the output, from which others are learned


def open_folder(out: Path, prepared: Conversion, samples: Samples, options: TuneOptions, *, mode: Mode) -> LayerFolder:
    """The folder, new or resumed. Codes from which descent goes on lie beside it."""
    start: dict[str, Any] = {}
    if options.descent is not None:
        start = {"beside": START, "lost_with": lambda unit: [ENDED]}
    parts = _identity(prepared, samples, options)
    return LayerFolder(out, parts, source=prepared.source.reader, index_file=CODES_FILE, mode=mode, **start)


def _identity(prepared: Conversion, samples: Samples, options: TuneOptions) -> dict[str, str]:
    return {
        "stage": "tune",
        "the model": prepared.source.reader.fingerprint(),
        "the recipe": prepared.run_parts["recipe"],
        "the statistics": prepared.run_parts.get("statistics", ""),
        "the data": samples.sha256,
        "the held-out data": tokens_digest(samples.held_out),
        "the settings": json.dumps(
            [options.method, options.by_kl, options.feedback, options.train, asdict(options.settings)]
        ),
        "the version of ptqpipe": __version__,
    }


def write(folder: Path, layer: str, codes: Mapping[str, QTensor]) -> dict[str, Any]:
    """One safetensors file, on disk when this returns; its entry in the index."""
    tensors: dict[str, torch.Tensor] = {}
    for key, q in codes.items():
        tensors |= {f"{key}.data": q.data, f"{key}.scales": q.scales}
        if q.global_scale is not None:
            tensors[f"{key}.global_scale"] = q.global_scale.reshape(1)
    path = folder / f"{layer}.safetensors"
    return {
        "file": path.name,
        "sha256": write_tensors(path, tensors),
        "weights": {key: {"format": q.fmt.name, "shape": list(q.shape)} for key, q in codes.items()},
    }


def write_trained(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The file of tensors that were trained with the codes, on disk when this returns; none where there are none."""
    if tensors:
        write_tensors(folder / TRAINED_FILE, tensors)


def read(folder: LayerFolder, layer: Layer, units: Sequence[Unit]) -> dict[str, QTensor]:
    """What a former run has written of a layer."""
    content = {"weights": folder.done[layer.name]["weights"]}
    with LearnedCodes.of_files(folder.files, content) as stored:
        return {m.key: stored.of(m.key, unit.scheme.fmt, shape=m.shape) for unit in units for m in unit.members}


def layers_of(folder: LayerFolder) -> dict[str, dict[str, Any]]:
    """Journal entries of the decoder layers."""
    return {name: entry for name, entry in folder.done.items() if name not in (ENDED, backwards.PASS)}


def content(prepared: Conversion, samples: Samples, options: TuneOptions, folder: LayerFolder) -> dict[str, Any]:
    """rounding.json."""
    layers = layers_of(folder)
    ended = folder.done.get(ENDED)
    trained = (ended or {}).get("trained")
    decides = json.dumps([layers, trained] if trained else layers, sort_keys=True)
    source = prepared.source
    return {
        "version": CODES_VERSION,
        "ptqpipe": __version__,
        "run_id": folder.run_id,
        "digest": hashlib.sha256(decides.encode()).hexdigest(),
        "model": {"name": name_of(prepared.source.reader.path), "fingerprint": source.reader.fingerprint()},
        "recipe": prepared.outputs.recipe.to_json(),
        "statistics": prepared.run_parts.get("statistics"),
        "data": {
            "files": [file.to_json() for file in samples.files],
            "sha256": samples.sha256,
            "samples": samples.windows.shape[0],
            "seqlen": samples.windows.shape[1],
            "seed": options.seed,
            **({"held_out": samples.held_out.shape[0]} if len(samples.held_out) else {}),
            **_backwards(samples, options),
        },
        "method": options.method,
        "metric": "kl" if options.by_kl else "output",
        "share": options.feedback,
        **({} if options.follows else {"start": "gptq"}),
        "settings": asdict(options.settings),
        **({} if ended is None else {"end_to_end": ended}),
        "blocks": {name: {k: v for k, v in entry.items() if k != "weights"} for name, entry in layers.items()},
        "weights": {key: entry for layer in layers.values() for key, entry in layer["weights"].items()},
    }


def _backwards(samples: Samples, options: TuneOptions) -> dict[str, int]:
    if not options.by_kl:
        return {}
    return {"backwards": len(learned_from(samples, options).windows)}
