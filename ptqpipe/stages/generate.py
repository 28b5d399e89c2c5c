"""generate: a model's own text as rows of token ids, which `calibrate` and `tune` read like any other data."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from ptqpipe.calibration.generate import generate as windows_of
from ptqpipe.checkpoint.partial import output_errors
from ptqpipe.checkpoint.source import resolve_source
from ptqpipe.errors import OutputError
from ptqpipe.runtime.loading import load_model, read_config
from ptqpipe.stages.common.machine import Machine, compute_threads, threads

DEFAULT_SEQLEN = 2048


@dataclass(frozen=True, slots=True)
class Generated:
    """A file of windows, one {"input_ids": [...]} a line."""

    out: Path
    samples: int
    seqlen: int
    seconds: float


def generate(
    model: str | Path,
    out: Path,
    *,
    samples: int = 128,
    seqlen: int | None = None,
    seed: int = 0,
    dtype: str = "float32",
    overwrite: bool = False,
    machine: Machine | None = None,
) -> Generated:
    """Writes ``out``. The whole model is loaded, in ``dtype``.

    seqlen  None: 2048, or the positions of the model where they are fewer

    Raises UsageError for settings that do not fit the model, OutputError for a file that exists or cannot be written.
    """
    begun = time.monotonic()
    machine = machine or Machine(compute_threads())
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists; --overwrite replaces it")
    path = resolve_source(str(model))
    config = read_config(path)
    positions = getattr(config.get_text_config(), "max_position_embeddings", DEFAULT_SEQLEN)
    seqlen = seqlen or min(DEFAULT_SEQLEN, positions)
    begin = getattr(config.get_text_config(), "bos_token_id", None)
    with threads(machine.workers):
        loaded = load_model(path, dtype=dtype, device=str(machine.device))
        windows = windows_of(
            loaded, samples=samples, seqlen=seqlen, seed=seed, begin=begin if isinstance(begin, int) else None
        )
    partial = out.with_name(f".{out.name}.partial")
    with output_errors(out):
        partial.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in windows.tolist()), encoding="utf-8")
        os.replace(partial, out)
    return Generated(out, samples, seqlen, time.monotonic() - begun)
