"""generate: a model's own text as rows of token ids, which `calibrate` and `tune` read like any other data."""

import json
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

from ptqpipe.calibration.data import HELD_SHARE, check_seed, sample_length
from ptqpipe.calibration.generate import Texts, check_windows, generate as windows_of, threads_for
from ptqpipe.calibration.options import GenerateOptions
from ptqpipe.calibration.rows import Notes, files_of, read_rows, row_tokens
from ptqpipe.checkpoint import Finished, check_file, resolve_source, write_file
from ptqpipe.errors import OutputExists, UsageError, arg
from ptqpipe.models.language_model import with_note
from ptqpipe.models.source import Source
from ptqpipe.run.machine import Machine, compute_threads, counting_bar, peak_bytes, threads
from ptqpipe.runtime.loading import check_device, dtype_of, load, load_tokenizer, read_config

HOTTEST = 2.0
TOKEN_BYTES = 8  # of a token and its comma in the file, at most, but for vocabularies of millions


def generate(
    model: str | Path,
    out: Path,
    *,
    options: GenerateOptions,
    overwrite: bool = False,
    machine: Machine | None = None,
    log: Callable[[str], None] | None = None,
) -> Finished:
    """Writes ``out``, one {"input_ids": [...]} a line; the content says how many. The whole model is loaded.

    machine  its workers are the most threads; a small model uses fewer
    log      called with a line when everything has been checked and the model is about to be loaded

    Raises UsageError for settings that do not fit the model, OutputError for a file that exists or cannot be written:
    both before a weight is read.
    """
    begun = time.monotonic()
    machine = machine or Machine(compute_threads())
    path = resolve_source(str(model))
    Source.open(path).close()  # which refuses what cannot be read
    config = read_config(path)
    samples, seqlen = options.samples, sample_length(config, path) if options.seqlen is None else options.seqlen
    held_out = samples // HELD_SHARE
    count = samples + held_out
    check_windows(config, samples=samples, seqlen=seqlen)
    _check_texts(options, seqlen)
    check_seed(options.seed)
    dtype_of(options.dtype, config)
    check_device(str(machine.device))
    check_file(out, nbytes=count * (seqlen * TOKEN_BYTES + 20))
    if out.suffix != ".jsonl":  # calibrate goes by the ending, and would take rows of tokens for words
        raise UsageError(
            f"{arg('out', out)} does not end in .jsonl, which says that it holds rows; give {out.stem}.jsonl"
        )
    if out.exists() and not overwrite:
        raise OutputExists(f"{out} exists; {arg('overwrite', True)} replaces it, or give another {arg('out')}")
    notes = Notes()
    texts = Texts(options.temperature, options.length, _begins(options.prompts, path, notes))
    if log is not None:
        header = f"{model} generates {samples} windows of {seqlen} tokens and {held_out} to hold out; loading the model"
        log("\n".join([with_note(header, config), *notes.lines()]))
    begin = getattr(config.get_text_config(), "bos_token_id", None)
    loaded = load(path, packed=False, dtype=options.dtype, device=str(machine.device))
    most = threads_for(loaded, samples=count, seqlen=seqlen, most=machine.workers)
    with counting_bar(count * seqlen, "tokens", shown=machine.progress) as advance, threads(most):
        windows = windows_of(
            loaded,
            samples=count,
            seqlen=seqlen,
            seed=options.seed,
            begin=begin if isinstance(begin, int) else None,
            texts=texts,
            on_tokens=lambda tokens: advance(tokens, ""),
        )
    write_file(out, "".join(json.dumps({"input_ids": row}) + "\n" for row in windows.tolist()))
    content = {"samples": samples, "held_out": held_out, "seqlen": seqlen}
    return Finished(out, content, time.monotonic() - begun, peak_bytes())


def _check_texts(options: GenerateOptions, seqlen: int) -> None:
    for heat in options.temperature or (0.0,):
        if not 0.0 < heat <= HOTTEST:
            raise UsageError(f"{arg('temperature', heat)}: expected a number above 0, at most {HOTTEST:g}")
    for tokens in options.length:
        if not 2 <= tokens <= seqlen:
            raise UsageError(
                f"{arg('length', tokens)}: expected 2 or more, and at most the {seqlen} tokens of a window"
            )


def _begins(names: Sequence[str], model: Path, notes: Notes) -> list[list[int]]:
    """The tokens of all rows of files. UsageError for rows that are none, and where there are none."""
    tokenizer = cache(lambda: load_tokenizer(model))
    rows = (row for name in files_of(names, option="prompts") for row in read_rows(name, notes=notes))
    return [list(chain.from_iterable(row_tokens(tokenizer, value, where, notes=notes))) for where, value in rows]
