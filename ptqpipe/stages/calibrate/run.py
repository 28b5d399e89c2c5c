"""calibrate: statistics of a model's linear inputs, collected block by block into a folder (`statistics.py`).

One file a block, written when the block is done and noted in a journal, so a killed run continues behind it (its
blocks are run again, not watched again). Several ranks share the samples; rank 0 writes what they found together.
The folder appears under its name when stats.json, its last file, is in it.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.calibration.collect import find_slots
from ptqpipe.calibration.data import HELD_SHARE, Samples, load_samples, tokens_digest
from ptqpipe.calibration.moments import Moments
from ptqpipe.calibration.runner import Runner
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.calibration.store import digest_of
from ptqpipe.checkpoint.source import check_disjoint, resolve_source
from ptqpipe.checkpoint.writer import Mode
from ptqpipe.errors import UsageError
from ptqpipe.runtime.loading import DTYPES, default_length, read_config
from ptqpipe.source import Source
from ptqpipe.stages.calibrate.blocks import HEAD, Watch, run_blocks
from ptqpipe.stages.common.block_folder import BlockFolder
from ptqpipe.stages.common.identity import name_of
from ptqpipe.stages.common.machine import BASE_BYTES, Machine, Ranks, compute_threads, resident_bytes, threads
from ptqpipe.statistics import STATS_FILE, STATS_VERSION

MOMENTS = ("diagonal", "block", "full")


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What decides the statistics, beside model and data.

    seqlen   tokens of a sample; None: 2048, or the positions of the model where they are fewer
    holdout  further windows whose moments are kept apart, for judging; None: one for every eight samples, where the
             data have so many. They double the moments, in memory and on disk
    moments  of MOMENTS; the diagonal is always there
    dtype    what the model computes in: float32, float64, bfloat16, float16, or auto for the checkpoint's own
    """

    samples: int = 128
    seqlen: int | None = None
    seed: int = 0
    field: str | None = None
    moments: tuple[str, ...] = ("diagonal", "full")
    dtype: str = "float32"
    holdout: int | None = None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a finished calibration was."""

    out: Path
    content: Mapping[str, Any]
    seconds: float
    peak_rss_bytes: int


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
) -> Calibrated | None:
    """Writes a statistics folder. The result on rank 0, None on the others.

    devices  that share the samples of this process, the first of them the machine's; none: the machine's alone
    warn     called with a line on what will be missing, before the model runs

    Raises UsageError for data or settings that do not fit the model, CheckpointError for a model that cannot be run,
    NumericsError for activations that are not finite (then nothing is written), OutputError for the folder.
    """
    begun = time.monotonic()
    options, machine, ranks = options or CalibrateOptions(), machine or Machine(compute_threads()), ranks or Ranks()
    path = resolve_source(str(model))
    check_disjoint(path, out)
    block, full = _which(options.moments)
    config = read_config(path)
    seqlen = default_length(config) if options.seqlen is None else options.seqlen
    samples = load_samples(
        data,
        path,
        samples=options.samples,
        seqlen=seqlen,
        seed=options.seed,
        field=options.field,
        holdout=options.holdout,
    )
    if warn is not None and options.holdout is None and not len(samples.held):
        warn(_no_held_out(samples, options))
    if ranks.world > options.samples:
        raise UsageError(f"{ranks.world} processes for {options.samples} samples; start fewer, or raise --samples")
    watch = Watch(block, full, len(samples.held) > 0, ranks, tuple(devices) or (machine.device,))
    with Source.open(path) as source:
        skeleton = Skeleton.of(source, dtype=_dtype_of(options.dtype, config))
        parts = _run_parts(source, samples, options)
        folder = BlockFolder(out, parts, source=source.reader, index_file=STATS_FILE, mode=mode, ranks=ranks)
        with folder as output, threads(machine.workers):
            runner = _open_runner(skeleton, samples, output, watch, machine)
            with runner:
                run_blocks(runner, output, watch, shown=machine.progress)
            if ranks.rank != 0:
                return None
            content = _content(source, samples, options, output, skeleton)
            output.finish(content)
    return Calibrated(out, content, time.monotonic() - begun, resident_bytes().peak)


def _no_held_out(samples: Samples, options: CalibrateOptions) -> str:
    have = f"the data have {samples.candidates} windows" if options.samples >= HELD_SHARE else "there are fewer than 8"
    return (
        f"no window is held out, {have} for {options.samples} samples: convert will judge its choices on the data that "
        "it makes them on; give more data, or --holdout N with fewer --samples"
    )


def _which(moments: Sequence[str]) -> tuple[bool, bool]:
    """(block, full). UsageError for an unknown kind, and for none."""
    if not moments:
        raise UsageError(f"--moments names nothing; use {', '.join(MOMENTS)}, or several with commas")
    unknown = next((kind for kind in moments if kind not in MOMENTS), None)
    if unknown is not None:
        raise UsageError(f"--moments {unknown!r} is unknown; use {', '.join(MOMENTS)}")
    return "block" in moments, "full" in moments


def _dtype_of(name: str, config: Any) -> torch.dtype:
    known = {**DTYPES, "float64": torch.float64}
    if name == "auto":
        found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        return found if isinstance(found, torch.dtype) else torch.float32
    if name not in known:
        raise UsageError(f"--dtype {name!r} is unknown; use {', '.join(known)} or auto")
    return known[name]


def _run_parts(source: Source, samples: Samples, options: CalibrateOptions) -> dict[str, str]:
    """What decides the numbers of this run; which of them changed is what a refused --resume says."""
    return {
        "stage": "calibrate",
        "the model": source.reader.fingerprint(),
        "the data": samples.sha256,
        "the held-out data": tokens_digest(samples.held),
        "the settings": json.dumps([sorted(set(options.moments)), options.dtype, list(samples.windows.shape)]),
        "the version of ptqpipe": __version__,
    }


def _open_runner(skeleton: Skeleton, samples: Samples, output: BlockFolder, watch: Watch, machine: Machine) -> Runner:
    """This rank's share of the samples, every ``world``-th; what the sums of the largest block need is set aside."""
    sums = [
        sum(
            Moments.nbytes(slot.columns, block=watch.block, full=watch.full)
            for slot in find_slots(name, module, skeleton.origins)
        )
        for name, module in skeleton.blocks
    ]
    share = slice(watch.ranks.rank, None, watch.ranks.world)
    return Runner.open(
        skeleton,
        samples.windows[share],
        held=samples.held[share],
        device=machine.device,
        memory_bytes=machine.memory_bytes - BASE_BYTES - max(sums) * (2 if watch.held else 1),
        spill=output.paths.partial,
    )


def _content(
    source: Source, samples: Samples, options: CalibrateOptions, output: BlockFolder, skeleton: Skeleton
) -> dict[str, Any]:
    """stats.json."""
    units = [name for name in (*(name for name, _ in skeleton.blocks), HEAD) if output.done.get(name)]
    blocks = {name: output.done[name] for name in units}
    return {
        "version": STATS_VERSION,
        "ptqpipe": __version__,
        "run_id": output.run_id,
        "digest": digest_of(blocks),
        "model": {"name": name_of(source.reader.path), "fingerprint": source.reader.fingerprint()},
        "data": {
            "files": [asdict(file) for file in samples.files],
            "sha256": samples.sha256,
            "samples": samples.windows.shape[0],
            "seqlen": samples.windows.shape[1],
            "seed": options.seed,
            "field": options.field,
            "held_out": samples.held.shape[0],
            "held_out_sha256": tokens_digest(samples.held),
            "windows": samples.candidates,
            "vocabulary_seen": int(torch.unique(samples.windows).numel()),
        },
        "settings": {
            "moments": [kind for kind in MOMENTS if kind in {"diagonal", *options.moments}],
            "dtype": options.dtype,
        },
        "files": {blocks[name]["file"]: blocks[name]["sha256"] for name in units},
        "modules": {module: entry for name in units for module, entry in blocks[name]["modules"].items()},
        "attention": {module: entry for name in units for module, entry in blocks[name]["attention"].items()},
        "unused": [module for name in units for module in blocks[name]["unused"]],
        "unplaced": list(skeleton.unplaced),
    }
