"""transform: a float checkpoint in, an equivalent float checkpoint out that loses less when it is quantized.

A *component* is a set of tensors that edges join (a norm with q, k, v and o; a norm with an MLP or all its experts):
its factors depend on nothing else, so one worker finds them and writes its tensors, in runs of rows. Everything else is
copied byte for byte. What cannot be folded exactly is refused before anything is read.

Sums are in float64 and every tensor is rounded once, to the dtype that is written. Factors that are powers of two are
exact in every float dtype: then the dtype stays, and the result computes the same bits as the source.
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe.checkpoint.layout import TensorSpec
from ptqpipe.checkpoint.source import resolve_source
from ptqpipe.checkpoint.writer import CheckpointWriter, Mode
from ptqpipe.errors import NumericsError
from ptqpipe.schemes import get_scheme
from ptqpipe.source import Source
from ptqpipe.stages.common.jobs import (
    copy_tensor,
    finish_checkpoint,
    run_id_of,
    write_checkpoint,
)
from ptqpipe.stages.common.machine import Machine, Ranks, resident_bytes
from ptqpipe.stages.common.text import size_text
from ptqpipe.stages.dequantize import with_dtype
from ptqpipe.stages.transform.plan import TORCH_DTYPES, Job, Prepared, TransformOptions, prepare
from ptqpipe.stages.transform.weights import Weights, input_quantizer, make_problem, weight_quantizer
from ptqpipe.transforms import ROTATIONS, get_rotation, get_scaling
from ptqpipe.transforms.folding import Op, is_exact, move_factors
from ptqpipe.transforms.problem import Solution, SolveOptions
from ptqpipe.transforms.structure import Edge


@dataclass(frozen=True, slots=True)
class Transformed:
    """What a finished transformation was.

    rounding  squared error of the one rounding to the written dtype, relative to the weights' energy
    """

    out: Path
    record: Mapping[str, Any]
    edges: int
    changed: int
    kept: int
    exact: bool
    rounding: float
    written_bytes: int
    seconds: float
    peak_rss_bytes: int


def transform(
    model: str | Path,
    out: Path,
    *,
    stats: Path | None = None,
    options: TransformOptions | None = None,
    mode: Mode = "new",
    machine: Machine | None = None,
    ranks: Ranks | None = None,
) -> Transformed | None:
    """Writes an equivalent checkpoint. The result on rank 0, None on the others.

    Raises UsageError for what cannot be folded exactly, for missing statistics and for those of another model,
    NumericsError for numbers that the written dtype cannot hold.
    """
    begun = time.monotonic()
    options = options or TransformOptions()
    with Source.open(resolve_source(str(model))) as source:
        prepared = prepare(source, Path(out), stats=stats, options=options)
        try:
            record = write_checkpoint(
                prepared.out,
                prepared.layout,
                jobs=prepared.jobs,
                source=source.reader,
                run_parts=prepared.run_parts,
                mode=mode,
                machine=machine or Machine(),
                ranks=ranks or Ranks(),
                work=lambda job, writer, _: _do(job, prepared, writer),
                finish=lambda writer: _finish(prepared, writer),
            )
        finally:
            if prepared.statistics is not None:
                prepared.statistics.close()
    if record is None:
        return None
    return Transformed(
        prepared.out,
        record,
        edges=len(record["foldings"]),
        changed=len(record["weights"]),
        kept=len(record["kept"]),
        exact=prepared.exact,
        rounding=record["rounding"],
        written_bytes=prepared.layout.file_bytes,
        seconds=time.monotonic() - begun,
        peak_rss_bytes=resident_bytes().peak,
    )


def _do(job: Job, prepared: Prepared, writer: CheckpointWriter) -> dict[str, Any]:
    source = prepared.source
    if not (job.edges or job.writers or job.embeddings):
        name = job.specs[0].name
        sha256, nbytes = copy_tensor(source.reader, name, writer, name)
        return {"kept": {name: {"sha256": sha256, "bytes": nbytes}}}
    weights = Weights(source.reader, prepared.origins)
    foldings = [entry for name in prepared.names for entry in _fold(name, job, prepared, weights)]
    members = {spec.name: _write(spec, weights, writer, exact=prepared.exact) for spec in job.specs}
    return {"members": members, "foldings": foldings}


def _fold(name: str, job: Job, prepared: Prepared, weights: Weights) -> list[dict[str, Any]]:
    """Adds what one transform folds in this component; one entry of the record for each edge."""
    options = prepared.options
    if name in ROTATIONS:
        foldings = get_rotation(name).fold(
            prepared.structure, job.edges, writers=job.writers, embeddings=job.embeddings, block=options.block,
            read=weights.whole,
        )  # fmt: skip
        weights.add(foldings)
        changed = list(dict.fromkeys(tensor for tensor, _ in foldings))
        return [{"transform": name, "block": options.block, "tensors": changed}] if changed else []
    scaling, statistics = get_scaling(name), prepared.statistics
    assert statistics is not None
    entries = []
    for edge in job.edges:
        if edge.kind not in (options.edges or scaling.EDGES):
            continue
        search_for = get_scheme(options.format).fmt if scaling.NEEDS_QUANTIZER else None
        problem = make_problem(edge, weights, statistics, search_for=search_for)
        if problem is None:
            entries.append({"transform": name, "edge": edge.id, "kind": edge.kind, "skipped": "nothing is quantized"})
            continue
        solution = scaling.solve(problem, _solve_options(prepared, name))
        weights.add(move_factors(edge, solution.factors))
        weights.divide_inputs(edge, solution.factors)
        entries.append(_entry(name, edge, solution))
    return entries


def _entry(name: str, edge: Edge, solution: Solution) -> dict[str, Any]:
    """What the record says of the factors on one edge."""
    factors = solution.factors
    entry: dict[str, Any] = {
        "transform": name,
        "edge": edge.id,
        "kind": edge.kind,
        "channels": edge.channels,
        "least": float(factors.amin()),
        "largest": float(factors.amax()),
        "changed": int((factors != 1).sum()),
        "tensors": edge.tensors(),
        **solution.facts,
    }
    return entry if solution.error is None else entry | {"error": solution.error, "plain_error": solution.plain_error}


def _solve_options(prepared: Prepared, name: str) -> SolveOptions:
    options, scaling = prepared.options, get_scaling(name)
    alpha = SolveOptions().alpha if options.alpha is None else options.alpha
    if not scaling.NEEDS_QUANTIZER:
        return SolveOptions(alpha=alpha, powers_of_two=options.powers_of_two)
    scheme = get_scheme(options.format)
    return SolveOptions(
        powers_of_two=options.powers_of_two,
        quantize=weight_quantizer(scheme.fmt),
        quantize_inputs=input_quantizer(scheme.activation) if scaling.NEEDS_INPUT_QUANTIZER else None,
    )


def _write(spec: TensorSpec, weights: Weights, writer: CheckpointWriter, *, exact: bool) -> dict[str, Any]:
    """Writes one tensor of a component; its hash and what rounding cost."""
    dtype = TORCH_DTYPES[spec.dtype]
    digest, offset = hashlib.sha256(), 0
    squared = energy = 0.0
    experts: Sequence[int | None] = range(spec.shape[0]) if len(spec.shape) == 3 else (None,)
    for expert in experts:
        for _, rows in weights.runs(spec.name, expert=expert):
            rounded = rows.to(dtype)
            error = float(((rounded.double() - rows) ** 2).sum())
            if not math.isfinite(error):
                raise NumericsError(f"'{spec.name}' has numbers that {spec.dtype} cannot hold; use --dtype fp32")
            squared, energy = squared + error, energy + float((rows**2).sum())
            raw = rounded.reshape(-1).view(torch.uint8)
            writer.write(spec.name, raw, byte_offset=offset)
            digest.update(raw.numpy().data)
            offset += raw.nbytes
    ops: list[Op] = weights.ops.get(spec.name, [])
    if squared and exact and is_exact(ops):
        raise NumericsError(f"'{spec.name}' leaves the range of {spec.dtype} by powers of two; use --dtype fp32")
    return {"shape": list(spec.shape), "squared_error": squared, "energy": energy, "sha256": digest.hexdigest()}


def _finish(prepared: Prepared, writer: CheckpointWriter) -> dict[str, Any]:
    config = dict(prepared.source.reader.config)
    if prepared.dtype is not None:
        config = with_dtype(config, prepared.dtype)
    if prepared.origins:
        config["tie_word_embeddings"] = False
    return finish_checkpoint(
        writer,
        prepared.jobs,
        prepared.source.reader,
        record=lambda records: _record(prepared, records),
        configs={"config.json": config},
    )


def _record(prepared: Prepared, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    written = {name: facts for entry in records for name, facts in entry.get("members", {}).items()}
    squared = sum(facts["squared_error"] for facts in written.values())
    energy = sum(facts["energy"] for facts in written.values())
    return {
        **prepared.asked,
        "run_id": run_id_of(prepared.run_parts),
        "rounding": squared / energy if energy else 0.0,
        "foldings": [folding for entry in records for folding in entry.get("foldings", [])],
        "weights": written,
        "kept": {name: facts for entry in records for name, facts in entry.get("kept", {}).items()},
    }


FLOAT32_ROUNDING = 1e-12  # relative MSE below which an error is float32's own: not worth a number


def render(done: Transformed) -> str:
    """What was done, for a terminal."""
    how = "exact: every factor is a power of two" if done.exact else f"rounded once to {done.record['dtype']}"
    if not done.exact and done.rounding > FLOAT32_ROUNDING:
        how += f", a relative MSE of {done.rounding:.1e}"
    return (
        f"{done.out}: {' then '.join(done.record['transforms'])}, {done.edges} foldings into {done.changed} tensors, "
        f"{done.kept} kept; {how}; {size_text(done.written_bytes)} in {done.seconds:.1f} s, peak memory "
        f"{done.peak_rss_bytes >> 20} MiB"
    )


def to_json(done: Transformed) -> dict[str, Any]:
    """The outcome as data."""
    return {
        "out": str(done.out),
        "transforms": done.record["transforms"],
        "foldings": done.record["foldings"],
        "changed": done.changed,
        "kept": done.kept,
        "exact": done.exact,
        "rounding": done.rounding,
        "written_bytes": done.written_bytes,
        "seconds": done.seconds,
        "peak_rss_bytes": done.peak_rss_bytes,
    }
