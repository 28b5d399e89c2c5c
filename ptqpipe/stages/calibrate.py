"""calibrate: statistics of a model's linear inputs, collected block by block into a folder (`statistics.py`).

One file a block, written when the block is done and noted in a journal, so a killed run continues behind it (its
blocks are run again, not watched again). Several ranks share the samples; rank 0 writes what they found together.
The folder appears under its name when stats.json, its last file, is in it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.calibration.collect import Collector, find_attention, find_slots
from ptqpipe.calibration.data import Samples, load_samples
from ptqpipe.calibration.merge import merge_largest, merge_ranks
from ptqpipe.calibration.moments import Moments
from ptqpipe.calibration.runner import Block, Runner
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.calibration.store import BlockRecord, digest_of, write_block
from ptqpipe.checkpoint.source import check_disjoint, resolve_source
from ptqpipe.checkpoint.writer import Mode
from ptqpipe.errors import UsageError
from ptqpipe.runtime.loading import DTYPES, read_config
from ptqpipe.source import Source
from ptqpipe.stages.block_folder import BlockFolder
from ptqpipe.stages.machine import BASE_BYTES, Machine, Ranks, resident_bytes
from ptqpipe.stages.progress import Progress
from ptqpipe.statistics import STATS_FILE, STATS_VERSION

MOMENTS = ("diagonal", "block", "full")
DEFAULT_SEQLEN = 2048
HEAD = "head"


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What decides the statistics, beside model and data.

    seqlen   tokens of a sample; None: 2048, or the positions of the model where they are fewer
    moments  of MOMENTS; the diagonal is always there
    dtype    what the model computes in: float32, float64, bfloat16, float16, or auto for the checkpoint's own
    """

    samples: int = 128
    seqlen: int | None = None
    seed: int = 0
    field: str | None = None
    moments: tuple[str, ...] = ("diagonal", "block")
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a finished calibration was."""

    out: Path
    content: Mapping[str, Any]
    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A block, as the progress bar knows it."""

    id: str
    group: int
    source_bytes: int


def calibrate(
    model: str | Path,
    data: Sequence[str],
    out: Path,
    *,
    options: CalibrateOptions | None = None,
    mode: Mode = "new",
    machine: Machine | None = None,
    ranks: Ranks | None = None,
) -> Calibrated | None:
    """Writes a statistics folder. The result on rank 0, None on the others.

    Raises UsageError for data or settings that do not fit the model, CheckpointError for a model that cannot be run,
    NumericsError for activations that are not finite (then nothing is written), OutputError for the folder.
    """
    begun = time.monotonic()
    options, machine, ranks = options or CalibrateOptions(), machine or Machine(), ranks or Ranks()
    path = resolve_source(str(model))
    check_disjoint(path, out)
    block, full = _which(options.moments)
    config = read_config(path)
    seqlen = options.seqlen or min(
        DEFAULT_SEQLEN, getattr(config.get_text_config(), "max_position_embeddings", 1 << 30)
    )
    samples = load_samples(data, path, samples=options.samples, seqlen=seqlen, seed=options.seed, field=options.field)
    if ranks.world > options.samples:
        raise UsageError(f"{ranks.world} processes for {options.samples} samples; start fewer, or raise --samples")
    with Source.open(path) as source:
        skeleton = Skeleton.of(source, dtype=_dtype_of(options.dtype, config))
        parts = _run_parts(source, samples, options)
        with BlockFolder(out, parts, index_file=STATS_FILE, mode=mode, ranks=ranks) as output, machine.threads():
            torch.set_num_threads(machine.workers)
            runner = _open_runner(skeleton, samples, output, options, machine, ranks)
            with runner:
                _run(runner, output, block=block, full=full, machine=machine, ranks=ranks)
            if ranks.rank != 0:
                return None
            content = _content(source, samples, options, output, skeleton)
            output.finish(content)
    return Calibrated(out, content, time.monotonic() - begun, resident_bytes().peak)


def _which(moments: Sequence[str]) -> tuple[bool, bool]:
    """(block, full). UsageError for an unknown kind."""
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
        "the settings": json.dumps([sorted(set(options.moments)), options.dtype, list(samples.windows.shape)]),
        "the version of ptqpipe": __version__,
    }


def _open_runner(
    skeleton: Skeleton,
    samples: Samples,
    output: BlockFolder,
    options: CalibrateOptions,
    machine: Machine,
    ranks: Ranks,
) -> Runner:
    """This rank's share of the samples, every ``world``-th; what the sums of the largest block need is set aside."""
    block, full = _which(options.moments)
    sums = [
        sum(Moments.nbytes(slot.columns, block=block, full=full) for slot in find_slots(name, module, skeleton.origins))
        for name, module in skeleton.blocks
    ]
    return Runner.open(
        skeleton,
        samples.windows[ranks.rank :: ranks.world],
        device=machine.device,
        memory_bytes=machine.memory_bytes - BASE_BYTES - max(sums),
        spill=output.paths.partial,
    )


def _run(runner: Runner, output: BlockFolder, *, block: bool, full: bool, machine: Machine, ranks: Ranks) -> None:
    """Every block, then what enters the head; those that are done already are run without being watched."""
    steps = {name: _Step(name, i, runner.skeleton.nbytes(name)) for i, name in enumerate(runner.names)}
    with Progress(list(steps.values()), shown=machine.progress and ranks.rank == 0) as progress:
        for part in runner.blocks():
            if part.name in output.done:
                part.advance()
            else:
                record = _block(runner, part, output, block=block, full=full, ranks=ranks)
                output.commit(part.name, record.to_json() if record is not None else {})
            progress.advance(steps[part.name])
    head = runner.skeleton.head_name
    if head is not None and HEAD not in output.done:
        record = _head(runner, head, output, block=block, full=full, ranks=ranks)
        output.commit(HEAD, record.to_json() if record is not None else {})


def _block(
    runner: Runner, part: Block, output: BlockFolder, *, block: bool, full: bool, ranks: Ranks
) -> BlockRecord | None:
    """Runs a block and writes what was seen; None on all ranks but the first."""
    attention = find_attention(part.name, part.module, part.origins)
    collector = Collector(part.name, part.module, part.origins, block=block, full=full, device=runner.device)
    runner.key_values.start(attention or part.name)
    with collector:
        part.advance()
    runner.key_values.stop()
    merge_ranks(collector, world=ranks.world)
    found = [merge_largest(t, world=ranks.world) for t in (runner.key_values.k_amax, runner.key_values.v_amax)]
    if ranks.rank != 0:
        return None
    key_values = None
    if attention is not None and found[0] is not None and found[1] is not None:
        key_values = (attention, found[0], found[1])
    return write_block(output.paths.growing, part.name, collector, block=block, key_values=key_values)


def _head(
    runner: Runner, name: str, output: BlockFolder, *, block: bool, full: bool, ranks: Ranks
) -> BlockRecord | None:
    """The language-model head's input. A head that is the embedding goes by the embedding's name in the checkpoint."""
    skeleton = runner.skeleton
    module = skeleton.model.get_submodule(name)
    own = skeleton.origins.get(f"{name}.weight")
    origins = {f"{name}.weight": own or (f"{name}.weight",)}
    collector = Collector(name, module, origins, block=block, full=full, device=runner.device)
    for x in runner.head_inputs():
        collector.see(name, x)
        collector.forget()
    merge_ranks(collector, world=ranks.world)
    return write_block(output.paths.growing, name, collector, block=block) if ranks.rank == 0 else None


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
        "model": {"name": source.reader.path.resolve().name, "fingerprint": source.reader.fingerprint()},
        "data": {
            "files": [{"name": name, "rows": rows, "tokens": tokens} for name, rows, tokens in samples.files],
            "sha256": samples.sha256,
            "samples": samples.windows.shape[0],
            "seqlen": samples.windows.shape[1],
            "seed": options.seed,
            "field": options.field,
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
