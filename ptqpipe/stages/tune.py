"""tune: learned codes for the weights of a model, decoder block by decoder block, into a folder (`rounding.py`).

The plan is convert's, so what is tuned is what a conversion with the same recipe will quantize; the start, scales and
codes, is what that would write. Two streams of hidden states go through the model: of the float blocks, which say what
is wanted, and of the blocks with the codes that were learned, activations quantized as the scheme says, which say what
will be there. A killed run runs the finished blocks again with their codes and goes on.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ptqpipe._version import __version__
from ptqpipe.calibration.activations import Activations, InMemory, OnDisk
from ptqpipe.calibration.assembly import Assembly, assemble
from ptqpipe.calibration.data import Samples, load_samples
from ptqpipe.calibration.rounding import Learned, Settings, learn
from ptqpipe.calibration.runner import Block, Runner
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.checkpoint.direct import bytes_of
from ptqpipe.checkpoint.header import DTYPE_NAMES, header_bytes
from ptqpipe.checkpoint.partial import output_errors
from ptqpipe.checkpoint.source import check_disjoint
from ptqpipe.checkpoint.writer import Mode
from ptqpipe.errors import UsageError
from ptqpipe.plan import Member, Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.recipe import RecipeOptions
from ptqpipe.rounding import ROUNDING_FILE, ROUNDING_VERSION, Rounding
from ptqpipe.runtime.activations import InputQuantizer
from ptqpipe.runtime.loading import read_config
from ptqpipe.schemes import Activation
from ptqpipe.source import SourceRows
from ptqpipe.stages import convert
from ptqpipe.stages.block_folder import BlockFolder
from ptqpipe.stages.machine import Machine, resident_bytes
from ptqpipe.stages.progress import Progress

DEFAULT_SEQLEN = 2048


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What decides the codes, beside model, recipe and data. ``seqlen`` None: 2048, or the model's positions."""

    samples: int = 128
    seqlen: int | None = None
    seed: int = 0
    data_field: str | None = None
    settings: Settings = field(default_factory=Settings)


def settings_of(steps: int, *, seed: int) -> Settings:
    """UsageError for a number of steps that is none."""
    if steps < 1:
        raise UsageError(f"--steps {steps} is too few; use 1 or more")
    return Settings(steps=steps, seed=seed)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a finished tuning was."""

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


def tune(
    model: str | Path,
    data: Sequence[str],
    out: Path,
    *,
    recipe: RecipeOptions | None = None,
    recipe_path: Path | None = None,
    stats: Path | None = None,
    options: TuneOptions | None = None,
    mode: Mode = "new",
    machine: Machine | None = None,
) -> Tuned:
    """Writes a folder of learned codes.

    Raises UsageError for data or settings that do not fit the model, CheckpointError for a model that cannot be run,
    NumericsError for weights or activations that are not finite, OutputError for the folder.
    """
    begun = time.monotonic()
    options, machine = options or TuneOptions(), machine or Machine()
    prepared = convert.prepare(model, options=recipe, recipe_path=recipe_path, out=out, stats=stats)
    with prepared.source as source:
        if any(unit.scheme.low_rank is not None for unit in prepared.plan.units):
            raise UsageError("tune does not learn codes beside a low-rank part; leave low_rank out of the recipe")
        check_disjoint(prepared.source_path, out)
        config = read_config(prepared.source_path)
        positions = getattr(config.get_text_config(), "max_position_embeddings", DEFAULT_SEQLEN)
        samples = load_samples(
            data,
            prepared.source_path,
            samples=options.samples,
            seqlen=options.seqlen or min(DEFAULT_SEQLEN, positions),
            seed=options.seed,
            field=options.data_field,
        )
        parts = {
            "stage": "tune",
            "the model": source.reader.fingerprint(),
            "the recipe": prepared.run_parts["recipe"],
            "the statistics": prepared.run_parts.get("statistics", ""),
            "the data": samples.sha256,
            "the settings": json.dumps(asdict(options.settings)),
            "the version of ptqpipe": __version__,
        }
        folder = BlockFolder(out, parts, index_file=ROUNDING_FILE, mode=mode)
        with folder, machine.threads():
            torch.set_num_threads(machine.workers)
            _run(prepared, samples, folder, options.settings, machine)
            content = _content(prepared, samples, options, folder)
            folder.finish(content)
    return Tuned(out, content, time.monotonic() - begun, resident_bytes().peak)


def _run(
    prepared: convert.Prepared, samples: Samples, folder: BlockFolder, settings: Settings, machine: Machine
) -> None:
    skeleton = Skeleton.of(prepared.source, dtype=torch.float32)
    runner = Runner.open(skeleton, samples.windows, device=machine.device, spill=folder.paths.partial)
    steps = {name: _Step(name, i, skeleton.nbytes(name)) for i, name in enumerate(runner.names)}
    streams: list[Activations] = []
    try:
        for _ in range(2):  # what float blocks return, what the tuned ones return
            disk = isinstance(runner.activations, OnDisk)
            streams.append(OnDisk(folder.paths.partial) if disk else InMemory())
        with runner, Progress(list(steps.values()), shown=machine.progress) as progress:
            for block in runner.blocks():
                _tune_block(block, prepared, runner, folder, settings, wanted=streams[0], given=streams[1])
                progress.advance(steps[block.name])
    finally:
        for stream in streams:
            stream.close()


def _tune_block(
    block: Block,
    prepared: convert.Prepared,
    runner: Runner,
    folder: BlockFolder,
    settings: Settings,
    *,
    wanted: Activations,
    given: Activations,
) -> None:
    """Learns, writes and applies the codes of one block; afterwards both streams are behind it."""
    if block.index == 0:
        for batch in range(block.batches):
            given.put(batch, block.inputs(batch))
    units = _units_of(block, prepared)
    weights = _weights_of(units, prepared)
    members = {m.key: m for unit in units for m in unit.members}
    parameters = {name.removeprefix(f"{block.name}."): t for name, t in _parameters(block, runner).items()}
    origins = {name.removeprefix(f"{block.name}."): found for name, found in block.origins.items()}
    assemblies = assemble(parameters, origins, members, weights)
    amax = _run_float(block, assemblies, wanted)
    quantizers = _quantizers(assemblies, members, units, amax)
    if block.name in folder.done:
        codes = _read_codes(folder, block, units)
    else:
        codes, record = _learn(
            block, prepared, units, weights, assemblies, quantizers, settings, wanted=wanted, given=given
        )
        record |= _write(folder.paths.growing, block.name, codes)
        folder.commit(block.name, record)
    decoded = {key: q.dequantize() for key, q in codes.items()}
    replaced = {a.parameter: a.build(decoded) for a in assemblies}
    with torch.no_grad(), _quantized_inputs(block.module, quantizers):
        for batch in range(block.batches):
            given.put(batch, block.forward(given.get(batch).to(runner.device), batch, parameters=replaced))
            runner.activations.put(batch, wanted.get(batch))
    block.advanced = True


def _learn(
    block: Block,
    prepared: convert.Prepared,
    units: Sequence[Unit],
    weights: Mapping[str, torch.Tensor],
    assemblies: Sequence[Assembly],
    quantizers: Mapping[str, InputQuantizer],
    settings: Settings,
    *,
    wanted: Activations,
    given: Activations,
) -> tuple[dict[str, QTensor], dict[str, Any]]:
    """The codes of every weight of the block, and what the journal says of them."""
    start = {key: q for unit in units for key, q in _quantize(unit, weights, prepared).items()}
    learnable = {key for a in assemblies for key in a.keys}
    fixed = {key: q.dequantize() for key, q in start.items() if key not in learnable}

    def forward(x: torch.Tensor, batch: int, chosen: Mapping[str, torch.Tensor]) -> torch.Tensor:
        built = {a.parameter: a.build({**fixed, **chosen}) for a in assemblies}
        with _quantized_inputs(block.module, quantizers):
            return block.forward(x, batch, parameters=built)

    learned: Learned | None = None
    if learnable:
        learned = learn(
            {key: weights[key] for key in learnable},
            {key: start[key] for key in learnable},
            forward=forward,
            inputs=given.get,
            targets=wanted.get,
            batches=block.batches,
            windows_per_batch=given.get(0).shape[0],
            settings=settings,
        )
    codes = {
        key: q if learned is None or key not in learned.codes else QTensor.from_codes(
            learned.codes[key], q.scales, fmt=q.fmt, global_scale=q.global_scale
        )
        for key, q in start.items()
    }  # fmt: skip
    return codes, {
        "start_loss": learned.start_loss if learned else None,
        "learned_loss": learned.learned_loss if learned else None,
        "kept": bool(learned and learned.kept),
        "moved": learned.moved if learned else 0.0,
        "not_learned": sorted(start.keys() - learnable),
    }


def _units_of(block: Block, prepared: convert.Prepared) -> list[Unit]:
    """The units of the plan whose weights are this block's."""
    tensors = {tensor for found in block.origins.values() for tensor in found}
    return [u for u in prepared.plan.units if all(m.source.tensor in tensors for m in u.members)]


def _weights_of(units: Sequence[Unit], prepared: convert.Prepared) -> dict[str, torch.Tensor]:
    """Key -> the matrix [N, K] as the source has it."""
    found = {}
    for unit in units:
        for m in unit.members:
            found[m.key] = SourceRows(prepared.source, m.source, shape=m.shape).rows(0, m.shape[0])
    return found


def _parameters(block: Block, runner: Runner) -> dict[str, torch.Tensor]:
    return {name: runner.skeleton.model.get_parameter(name) for name in block.origins if _is_parameter(runner, name)}


def _is_parameter(runner: Runner, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    return leaf in runner.skeleton.model.get_submodule(parent)._parameters


class _Rows:
    """A matrix in memory, as an algorithm reads it."""

    def __init__(self, w: torch.Tensor) -> None:
        self.shape = (w.shape[0], w.shape[1])
        self._w = w

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop)."""
        return self._w[start:stop]


def _quantize(unit: Unit, weights: Mapping[str, torch.Tensor], prepared: convert.Prepared) -> dict[str, QTensor]:
    """The unit as convert would write it."""
    runs: dict[tuple[int, int], QTensor] = {}
    convert.quantize_unit(
        unit,
        [_Rows(weights[m.key]) for m in unit.members],
        prepared,
        sink=lambda member, row, q: runs.__setitem__((member, row), q),
    )
    return {m.key: _joined([runs[at] for at in sorted(runs) if at[0] == i]) for i, m in enumerate(unit.members)}


def _joined(runs: Sequence[QTensor]) -> QTensor:
    """Runs of rows of one weight as one."""
    first = runs[0]
    if len(runs) == 1:
        return first
    shape = (sum(q.shape[0] for q in runs), first.shape[1])
    scales = first.scales if first.fmt.block[0] == 0 else torch.cat([q.scales for q in runs])
    return QTensor(first.fmt, shape, torch.cat([q.data for q in runs]), scales, first.global_scale)


def _run_float(block: Block, assemblies: Sequence[Assembly], wanted: Activations) -> dict[str, float]:
    """Runs the float block; its outputs go to ``wanted``. Largest input magnitude of every linear module."""
    amax: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            amax[name] = max(amax.get(name, 0.0), float(args[0].abs().amax()))

        return hook

    modules = [a.parameter.rpartition(".")[0] for a in assemblies if not a.stacked]
    handles = [block.module.get_submodule(name).register_forward_pre_hook(watch(name)) for name in modules]
    try:
        with torch.no_grad():
            for batch in range(block.batches):
                wanted.put(batch, block.forward(block.inputs(batch), batch))
    finally:
        for handle in handles:
            handle.remove()
    return amax


def _quantizers(
    assemblies: Sequence[Assembly], members: Mapping[str, Member], units: Sequence[Unit], amax: Mapping[str, float]
) -> dict[str, InputQuantizer]:
    """Module of the block -> what its scheme does with its input. Inputs of stacked experts are left as they are."""
    schemes = {m.key: unit.scheme for unit in units for m in unit.members}
    found = {}
    for a in assemblies:
        module, activation = a.parameter.rpartition(".")[0], schemes[a.keys[0]].activation
        if a.stacked or activation is Activation.NONE or module not in amax:
            continue
        scale = None
        if activation is Activation.NVFP4_STATIC_GLOBAL:
            fused = {k for u in units for k in (m.key for m in u.members) if any(m.key == a.keys[0] for m in u.members)}
            shared = [amax.get(b.parameter.rpartition(".")[0], 0.0) for b in assemblies if fused & set(b.keys)]
            scale = max(*shared, 1e-12) / 2688.0
        found[module] = InputQuantizer(activation, scale)
    return found


@contextmanager
def _quantized_inputs(module: torch.nn.Module, quantizers: Mapping[str, InputQuantizer]) -> Iterator[None]:
    """Inputs are quantized while it is open; gradients pass straight through."""

    def hook_of(quantizer: InputQuantizer) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x = args[0]
            return (x + (quantizer(x.detach()) - x.detach()), *args[1:])

        return hook

    handles = [module.get_submodule(name).register_forward_pre_hook(hook_of(q)) for name, q in quantizers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _write(folder: Path, block: str, codes: Mapping[str, QTensor]) -> dict[str, Any]:
    """One safetensors file, on disk when this returns; what the index says of it."""
    tensors: dict[str, torch.Tensor] = {}
    for key, q in codes.items():
        tensors |= {f"{key}.data": q.data, f"{key}.scales": q.scales}
        if q.global_scale is not None:
            tensors[f"{key}.global_scale"] = q.global_scale.reshape(1)
    names = sorted(tensors)
    digest = hashlib.sha256()
    entries = [(name, DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape)) for name in names]
    path = folder / f"{block}.safetensors"
    with output_errors(path), open(path, "wb") as file:
        for chunk in (memoryview(header_bytes(entries)), *(bytes_of(tensors[name].contiguous()) for name in names)):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {
        "file": path.name,
        "sha256": digest.hexdigest(),
        "weights": {key: {"format": q.fmt.name, "shape": list(q.shape)} for key, q in codes.items()},
    }


def _read_codes(folder: BlockFolder, block: Block, units: Sequence[Unit]) -> dict[str, QTensor]:
    """What a former run has learned of a block."""
    content = {"weights": folder.done[block.name]["weights"]}
    with Rounding.of_files(folder.paths.growing, content) as stored:
        return {m.key: stored.of(m.key, unit.scheme.fmt, shape=m.shape) for unit in units for m in unit.members}


def _content(prepared: convert.Prepared, samples: Samples, options: TuneOptions, folder: BlockFolder) -> dict[str, Any]:
    """rounding.json."""
    blocks = folder.done
    source = prepared.source
    return {
        "version": ROUNDING_VERSION,
        "ptqpipe": __version__,
        "run_id": folder.run_id,
        "digest": hashlib.sha256(json.dumps(blocks, sort_keys=True).encode()).hexdigest(),
        "model": {"name": prepared.source_path.resolve().name, "fingerprint": source.reader.fingerprint()},
        "recipe": convert.describe_recipe(prepared.recipe),
        "data": {
            "files": [{"name": name, "rows": rows, "tokens": tokens} for name, rows, tokens in samples.files],
            "sha256": samples.sha256,
            "samples": samples.windows.shape[0],
            "seqlen": samples.windows.shape[1],
            "seed": options.seed,
        },
        "settings": asdict(options.settings),
        "blocks": {name: {k: v for k, v in entry.items() if k != "weights"} for name, entry in blocks.items()},
        "weights": {key: entry for block in blocks.values() for key, entry in block["weights"].items()},
    }
