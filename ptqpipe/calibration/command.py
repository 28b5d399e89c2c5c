"""calibrate: statistics of a model's linear inputs, collected layer by layer into a folder (`statistics.py`).

One file per layer, written when the layer is done and noted in a journal, so a killed run continues after it (finished
layers are run again, but not collected again). Several ranks share the samples; rank 0 writes their sums.
The folder appears under its name when stats.json, its last file, is in it.

Samples that are held out follow the others, and their moments are kept apart. With several devices each has a copy of
the layer that is run, and a share of the batches of samples; only the order of sums depends on how many there are. That
was tested with copies on one CPU, never on several GPUs.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.calibration.data import Samples, samples_of_model, tokens_digest
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.calibration.outputs import collect_outputs, learned_from
from ptqpipe.calibration.run_layers import HEAD, Collecting, open_runner, run_layers, sum_bytes
from ptqpipe.calibration.statistics import STATS_FILE, STATS_VERSION
from ptqpipe.calibration.store import OUTPUTS, digest_of, is_of_outputs, outputs_of, pairs_of
from ptqpipe.calibration.summary import described, no_held_out
from ptqpipe.checkpoint import Finished, LayerFolder, Mode, check_disjoint, check_place, name_of, resolve_source
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.language_model import layered_model_of, with_note
from ptqpipe.models.source import Source
from ptqpipe.run.machine import Machine, Ranks, compute_threads, peak_bytes, threads
from ptqpipe.runtime.loading import DTYPES, config_of
from ptqpipe.runtime.skeleton import Skeleton

MOMENTS = ("diagonal", "block", "full", "kl", "pairs")


def calibrate(
    model: str | Path,
    data: Sequence[str],
    out: Path,
    *,
    options: CalibrateOptions | None = None,
    mode: Mode = "new",
    machine: Machine | None = None,
    ranks: Ranks | None = None,
    devices: Sequence[torch.device] = (),
    warn: Callable[[str], None] | None = None,
    log: Callable[[str], None] | None = None,
) -> Finished | None:
    """Writes a statistics folder. The result on rank 0, None on the others.

    devices  that share the samples of this process, the first of them the machine's; none: the machine's alone
    warn     called with a line on what will be missing, before the model runs
    log      called with what is about to be done and what that takes, before the model runs

    Raises UsageError for data or settings that do not fit the model, CheckpointError for a model that cannot be run,
    NumericsError for activations that are not finite (then nothing is written), OutputError for the folder.
    """
    begun = time.monotonic()
    options, machine, ranks = options or CalibrateOptions(), machine or Machine(compute_threads()), ranks or Ranks()
    block, full = _which(options.moments)
    with Source.open(resolve_source(str(model))) as source:
        path = source.reader.path
        check_disjoint(path, out)
        check_place(out)
        config = config_of(source, layered_model_of)
        samples = samples_of_model(
            data,
            path,
            config,
            samples=options.samples,
            seqlen=options.seqlen,
            seed=options.seed,
            field=options.text_field,
            holdout=options.holdout,
        )
        if warn is not None and options.holdout is None and not len(samples.held_out):
            warn(no_held_out(samples, options))
        _check_shared(samples, options, ranks)
        collecting = Collecting(block, full, len(samples.held_out) > 0, ranks, tuple(devices) or (machine.device,))
        skeleton = Skeleton.of(source, dtype=_dtype_of(options.dtype, config), images=bool(samples.images))
        parts = _run_parts(source, samples, options)
        folder = LayerFolder(
            out, parts, source=source.reader, index_file=STATS_FILE, mode=mode, rank=ranks.rank, wait=ranks.barrier,
            lost_with=lambda unit: [OUTPUTS] if is_of_outputs(unit) else [],
        )  # fmt: skip
        with folder as output, threads(machine.workers, largest=skeleton.largest_matrix()):
            if log is not None and ranks.rank == 0:
                sums, kinds = sum_bytes(skeleton, collecting), _kinds(options)
                text = described(samples, skeleton, kinds, sums, seed=options.seed, dtype=options.dtype)
                log(with_note(f"{name_of(path)} on {text}", config, images=samples.shown))
            if _backwards(options) and OUTPUTS not in output.done:
                if mode == "resume" and log is not None and ranks.rank == 0:
                    log("the run backwards is kept only once it is complete: it begins with its first layer")
                backward: dict[str, Any] = {"ranks": ranks, "seed": options.seed, "moments": options.moments}
                records = collect_outputs(source, samples, output, machine, **backward)
                for name, part in records.items() if ranks.rank == 0 else [(OUTPUTS, None)]:  # the outputs are the last
                    output.commit(name, part.to_json() if part is not None else {})
            with open_runner(skeleton, samples, output, collecting, machine) as runner:
                notes = run_layers(runner, output, collecting, samples, shown=machine.progress)
            if ranks.rank != 0:
                return None
            content = _content(source, samples, options, output, skeleton, world=ranks.world)
            output.finish(content)
    return Finished(out, content, time.monotonic() - begun, peak_bytes(), tuple(notes))


def _check_shared(samples: Samples, options: CalibrateOptions, ranks: Ranks) -> None:
    if ranks.world > options.samples:
        raise UsageError(
            f"{ranks.world} processes for {options.samples} samples; start fewer, or raise {arg('samples')}"
        )
    backwards = _backwards(options)
    if backwards and samples.images:
        raise UsageError(
            f"{arg('moments', backwards[0])} cannot be used with rows with images; leave it out, or give rows of text"
        )
    if "pairs" in options.moments and ranks.world > 1:
        raise UsageError(
            f"{arg('moments', 'pairs')} needs a single process, not {ranks.world}; start it without torchrun"
        )


def _backwards(options: CalibrateOptions) -> list[str]:
    return [kind for kind in ("kl", "pairs") if kind in options.moments]


def _which(moments: Sequence[str]) -> tuple[bool, bool]:
    """(block, full). UsageError for an unknown kind, and for none."""
    if not moments:
        raise UsageError(f"{arg('moments')} names nothing; use {', '.join(MOMENTS)}, or several with commas")
    unknown = next((kind for kind in moments if kind not in MOMENTS), None)
    if unknown is not None:
        raise UsageError(f"{arg('moments', unknown)} is unknown; use {', '.join(MOMENTS)}")
    return "block" in moments, "full" in moments


def _dtype_of(name: str, config: Any) -> torch.dtype:
    dtypes = {**DTYPES, "float64": torch.float64}
    if name == "auto":
        own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        return own if isinstance(own, torch.dtype) else torch.float32
    if name not in dtypes:
        raise UsageError(f"{arg('dtype', name)} is unknown; use {', '.join(dtypes)} or auto")
    return dtypes[name]


def _run_parts(source: Source, samples: Samples, options: CalibrateOptions) -> dict[str, str]:
    """What decides the numbers of this run; a refused resume names the one that changed."""
    return {
        "stage": "calibrate",
        "the model": source.reader.fingerprint(),
        "the data": samples.sha256,
        "the held-out data": tokens_digest(samples.held_out),
        "the settings": json.dumps([sorted(set(options.moments)), options.dtype, list(samples.windows.shape)]),
        "the version of ptqpipe": __version__,
    }


def _kinds(options: CalibrateOptions) -> list[str]:
    return [kind for kind in MOMENTS if kind in {"diagonal", *options.moments}]


def _content(
    source: Source, samples: Samples, options: CalibrateOptions, output: LayerFolder, skeleton: Skeleton, *, world: int
) -> dict[str, Any]:
    """stats.json. ``world``: how many processes shared the samples."""
    names = [name for name, _ in (*skeleton.blocks, *skeleton.mtp)]
    every = (*names, HEAD, OUTPUTS, *map(outputs_of, names), *map(pairs_of, names))
    pairs = "pairs" in options.moments
    units = [name for name in every if output.done.get(name)]
    blocks = {name: output.done[name] for name in units}
    return {
        "version": STATS_VERSION,
        "ptqpipe": __version__,
        "run_id": output.run_id,
        "digest": digest_of(blocks),
        "model": {"name": name_of(source.reader.path), "fingerprint": source.reader.fingerprint()},
        "data": {
            "files": [file.to_json() for file in samples.files],
            "sha256": samples.sha256,
            "samples": samples.windows.shape[0],
            "seqlen": samples.windows.shape[1],
            "seed": options.seed,
            "field": options.text_field,
            "held_out": samples.held_out.shape[0],
            "held_out_sha256": tokens_digest(samples.held_out),
            "windows": samples.candidates,
            **({"backwards": len(learned_from(samples, world, pairs=pairs).windows)} if OUTPUTS in units else {}),
            "vocabulary_seen": int(torch.unique(samples.windows).numel()),
        },
        "settings": {
            "moments": _kinds(options),
            "dtype": options.dtype,
        },
        "files": {blocks[name]["file"]: blocks[name]["sha256"] for name in units},
        "modules": {module: entry for name in units for module, entry in blocks[name]["modules"].items()},
        "attention": {module: entry for name in units for module, entry in blocks[name]["attention"].items()},
        "unused": [module for name in units for module in blocks[name]["unused"]],
        "unplaced": list(skeleton.unplaced),
    }
