"""generate: a model's own text as rows of token ids, which `calibrate` and `tune` read like any other data."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from ptqpipe.calibration.data import HELD_SHARE, check_seed
from ptqpipe.calibration.generate import check_windows, generate as windows_of, threads_for
from ptqpipe.checkpoint import Finished, check_file, resolve_source, write_file
from ptqpipe.errors import OutputExists, UsageError
from ptqpipe.machine import Machine, compute_threads, counting_bar, peak_bytes, threads
from ptqpipe.runtime.language_model import with_note
from ptqpipe.runtime.loading import check_device, default_length, dtype_of, load_model, read_config

TOKEN_BYTES = 8  # of a token and its comma in the file, at most, but for vocabularies of millions


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
    log: Callable[[str], None] | None = None,
) -> Finished:
    """Writes ``out``, one {"input_ids": [...]} a line; the content says how many. The whole model is loaded.

    samples  what `calibrate` will be asked for: one window more for every eight is written, which it holds out
    seqlen   None: 2048, or the positions of the model where they are fewer
    machine  its workers are the most threads; a small model uses fewer
    log      called with a line when everything has been checked and the model is about to be loaded

    Raises UsageError for settings that do not fit the model, OutputError for a file that exists or cannot be written:
    both before a weight is read.
    """
    begun = time.monotonic()
    machine = machine or Machine(compute_threads())
    path = resolve_source(str(model))
    config = read_config(path)
    if seqlen is None:
        seqlen = default_length(config)
    held_out = samples // HELD_SHARE
    count = samples + held_out
    check_windows(config, samples=samples, seqlen=seqlen)
    check_seed(seed)
    dtype_of(dtype, config)
    check_device(str(machine.device))
    check_file(out, nbytes=count * (seqlen * TOKEN_BYTES + 20))
    if out.suffix != ".jsonl":  # calibrate goes by the ending, and would take rows of tokens for words
        raise UsageError(f"-o {out} does not end in .jsonl, which says that it holds rows; give {out.stem}.jsonl")
    if out.exists() and not overwrite:
        raise OutputExists(f"{out} exists; --overwrite replaces it, or give another -o")
    if log is not None:
        header = f"{model} writes {samples} windows of {seqlen} tokens and {held_out} to hold out; it is loaded first"
        log(with_note(header, config))
    begin = getattr(config.get_text_config(), "bos_token_id", None)
    loaded = load_model(path, dtype=dtype, device=str(machine.device))
    most = threads_for(loaded, samples=count, seqlen=seqlen, most=machine.workers)
    with counting_bar(count * seqlen, "tokens", shown=machine.progress) as advance, threads(most):
        windows = windows_of(
            loaded,
            samples=count,
            seqlen=seqlen,
            seed=seed,
            begin=begin if isinstance(begin, int) else None,
            on_tokens=lambda tokens: advance(tokens, ""),
        )
    write_file(out, "".join(json.dumps({"input_ids": row}) + "\n" for row in windows.tolist()))
    content = {"samples": samples, "held_out": held_out, "seqlen": seqlen}
    return Finished(out, content, time.monotonic() - begun, peak_bytes())
