"""evaluate: what a checkpoint computes, measured. Perplexity, KL divergence to a baseline, lm-eval tasks; of a sentence
embedder its embeddings; one JSON.

Both models are loaded with true semantics (``runtime/loading.py``). Whatever can be wrong with the call is found before
a weight is read. The baseline goes first, its log-probabilities to the cache on disk, and is gone before the checkpoint
is loaded; where they are not cached (no folder, or more than the limit) both models are in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ptqpipe.check.evaluate.cache import not_cached, open_cache, store_bytes
from ptqpipe.check.evaluate.embeddings import EmbedderJob, models_of
from ptqpipe.check.evaluate.eval_file import kl_row, perplexity_row, result_json, task_row
from ptqpipe.check.evaluate.harness import TaskMetric, TaskRequest, check_tasks, run_tasks
from ptqpipe.check.evaluate.measures import divergence, perplexity
from ptqpipe.check.evaluate.scores import Scores, Window, score, windows
from ptqpipe.check.evaluate.token_divergence import (
    Decode,
    beginnings,
    continued,
    kl_by_position,
    kl_histogram,
    worst_tokens,
)
from ptqpipe.check.evaluate.tokenized_text import SAMPLE, SAMPLE_NAME, Text, read_texts
from ptqpipe.check.options import EvalOptions
from ptqpipe.check.report.provenance import run_facts
from ptqpipe.checkpoint import CheckpointReader, completed_run, name_of
from ptqpipe.errors import CheckpointError, UsageError, arg, one_line
from ptqpipe.models.language_model import with_note
from ptqpipe.run.machine import counting_bar
from ptqpipe.runtime.loading import (
    check_device,
    default_length,
    dtype_of,
    load,
    load_tokenizer,
    positions_of,
    read_config,
)


def _request(options: EvalOptions) -> TaskRequest:
    return TaskRequest(options.tasks, options.task_data, options.include_path, options.limit, options.batch_size)


@dataclass(frozen=True, slots=True)
class _Job:
    options: EvalOptions
    path: Path
    baseline: Path | None
    texts: tuple[Text, ...]
    window: int
    stride: int
    tokenizer: Callable[[], Any]
    progress: bool
    log: Callable[[str], None]

    def windows(self, text: Text) -> list[Window]:
        return windows(len(text.tokens), self.window, stride=self.stride, begin=text.begin)


def evaluate(
    ckpt: str,
    *,
    source: str | None = None,
    options: EvalOptions | None = None,
    progress: bool = False,
    log: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The content of the eval JSON; ``source``, the model to compare with, is its baseline.

    progress  with progress bars
    log       called with lines on what is about to be measured and stored, before it is

    UsageError for what cannot be measured, before any weight is read.
    """
    options, log = options or EvalOptions(), log or (lambda line: None)
    path, baseline = models_of(ckpt, source)
    embedder = EmbedderJob.of(path, baseline, options)
    if embedder is not None:
        log(embedder.header)
        return _result(path, baseline, options, embeddings=embedder.rows(progress=progress))
    job = _prepare(path, baseline, options, progress, log)
    job.log(with_note(_header(job), read_config(job.path)))
    references: Sequence[Any] = [None] * len(job.texts)
    theirs: list[TaskMetric] = []
    written: list[list[str]] = []
    if job.baseline is not None:
        other = _loader(job.baseline, job.options)
        theirs = _tasks(job, other)
        references = [_reference(job, text, job.baseline, other) for text in job.texts]
        written.append(_written(job, other))
        other.cache_clear()
    model = _loader(job.path, job.options)
    perplexities, divergences = [], []
    for text, reference in zip(job.texts, references, strict=True):
        scores = _score(job, text, model(), reference)
        perplexities.append(perplexity_row(text, perplexity(scores), window=job.window, stride=job.stride))
        if reference is not None:
            divergences.append(_kl_row(job, text, scores))
    by_key = {(metric.task, metric.name): metric for metric in theirs}
    return _result(
        path,
        baseline,
        options,
        perplexity=perplexities,
        kl=divergences,
        tasks=[task_row(metric, by_key.get((metric.task, metric.name))) for metric in _tasks(job, model)],
        samples=_sample_rows(job, [*written, _written(job, model)]) if written else [],
    )


def _result(
    path: Path, baseline: Path | None, options: EvalOptions, **rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    return result_json(
        checkpoint={"name": name_of(path), "run_id": completed_run(path)},
        baseline=None if baseline is None else {"name": name_of(baseline)},
        settings=_settings(options),
        made=run_facts(options.command),
        **rows,
    )


def _kl_row(job: _Job, text: Text, scores: Scores) -> dict[str, Any]:
    return kl_row(
        text,
        divergence(scores),
        histogram=kl_histogram(scores),
        positions=kl_by_position(scores, len(text.tokens)),
        worst=worst_tokens(scores, text.tokens, _decode(job)),
    )


def _decode(job: _Job) -> Decode:
    """The text of tokens; their numbers for a model without a tokenizer, which can be scored on files of tokens."""
    try:
        tokenizer = job.tokenizer()
    except CheckpointError:
        return lambda tokens: " ".join(map(str, tokens))
    return lambda tokens: one_line(str(tokenizer.decode(tokens)), limit=1000)


def _begun(job: _Job) -> torch.Tensor:
    return beginnings(job.texts[0].tokens, job.options.samples if job.baseline is not None else 0)


def _written(job: _Job, model: Callable[[], Any]) -> list[str]:
    if not job.texts or not len(begun := _begun(job)):
        return []
    decode = _decode(job)
    return [decode(row) for row in continued(model(), begun, begin=job.texts[0].begin).tolist()]


def _sample_rows(job: _Job, written: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    if not job.texts:
        return []
    decode, name = _decode(job), job.texts[0].name
    return [
        {"data": name, "prompt": decode(begun), "baseline": theirs, "checkpoint": ours}
        for begun, theirs, ours in zip(_begun(job).tolist(), *written, strict=True)
    ]


def _loader(path: Path, options: EvalOptions) -> Any:
    return cache(
        lambda: load(path, packed=False, dtype=options.dtype, activations=options.activations, device=options.device)
    )


def _tasks(job: _Job, model: Callable[[], Any]) -> list[TaskMetric]:
    if not job.options.tasks:
        return []
    return run_tasks(model(), job.tokenizer(), _request(job.options), progress=job.progress)


def _header(job: _Job) -> str:
    """What is measured, line by line: the models, then each text with its tokens and windows, then the tasks."""
    models = name_of(job.path) if job.baseline is None else f"{name_of(job.path)} against {name_of(job.baseline)}"
    lines = [f"{models}, in {job.options.dtype} on {job.options.device}"]
    for text in job.texts:
        stride = "" if job.stride == job.window else f", one every {job.stride}"
        count = len(job.windows(text))
        parts = f"{count} window{'s' * (count != 1)} of {job.window}{stride}"
        lines += [f"{text.name}: {len(text.tokens):,} tokens in {parts}", *text.notes]
    if any(text.name == SAMPLE_NAME for text in job.texts):
        lines.append(f"(the sample text of the package; for a better test give text like yours with {arg('data')})")
    if job.options.tasks:
        lines.append(f"tasks: {', '.join(job.options.tasks)}")
    return "\n".join(lines)


def _prepare(path: Path, other: Path | None, options: EvalOptions, progress: bool, log: Callable[[str], None]) -> _Job:
    for name in ("max_tokens", "limit", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    config = read_config(path)
    dtype_of(options.dtype, config)
    check_device(options.device)
    if other is not None:
        ours, theirs = (int(c.get_text_config().vocab_size) for c in (config, read_config(other)))
        if ours != theirs:
            raise UsageError(
                f"the baseline {other} has a vocabulary of {theirs}, {path} one of {ours}; only models with one "
                "vocabulary can be compared"
            )
    window, stride = _protocol(config, path, options)
    if options.tasks:
        check_tasks(_request(options))
    words = path if other is None or (path / "tokenizer_config.json").exists() else other
    tokenizer = cache(lambda: load_tokenizer(words))  # files of tokens need none
    data = options.data if options.data or options.tasks else (str(SAMPLE),)
    texts = read_texts(data, tokenizer, field=options.text_field, max_tokens=options.max_tokens)
    for text in texts:
        _check_tokens(text, int(config.get_text_config().vocab_size))
    return _Job(options, path, other, texts, window, stride, tokenizer, progress, log)


def _check_tokens(text: Text, vocabulary: int) -> None:
    low, high = int(text.tokens.min()), int(text.tokens.max())
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise UsageError(
            f"{text.name} has token {bad}, outside the model's vocabulary of {vocabulary}; use text and "
            "tokenizer of this model"
        )


def _protocol(config: Any, path: Path, options: EvalOptions) -> tuple[int, int]:
    positions = positions_of(config)
    window = default_length(config, path) if options.seqlen is None else options.seqlen
    stride = window if options.stride is None else options.stride
    if positions is not None and window > positions:
        raise UsageError(
            f"{arg('seqlen', window)} is more than the model's {positions} positions; choose a smaller one"
        )
    if window < 2 or not 1 <= stride <= window:
        raise UsageError(
            f"{arg('seqlen', window)} and {arg('stride', stride)}: expected a window of 2 or more and 1 <= stride <= it"
        )
    return window, stride


def _reference(job: _Job, text: Text, path: Path, other: Callable[[], Any]) -> Any:
    """The baseline's log-probabilities on a text: a filled store, or the model itself."""
    options = job.options
    if options.cache_dir is None:
        return other()
    config = read_config(path)
    with CheckpointReader.open(path) as reader:
        key = {
            "model": reader.fingerprint(),
            "files": reader.file_states(),  # a store is this machine's own: it can be sure of every byte
            "tokens": text.sha256,
            "window": job.window,
            "stride": job.stride,
            "activations": options.activations,
            "device": options.device.partition(":")[0],
            "transformers": _transformers_version(),
        }
    store = open_cache(
        options.cache_dir,
        key=key,
        windows=job.windows(text),
        vocabulary=int(config.get_text_config().vocab_size),
        dtype=dtype_of(options.dtype, config),
        make=other,
        limit_bytes=options.cache_size,
    )
    if store is None:
        nbytes = store_bytes(job.windows(text), int(config.get_text_config().vocab_size))
        job.log(not_cached(nbytes, options))
        return other()
    job.log(store.described())
    with counting_bar(_scored(job, text), "tokens", shown=job.progress, title=f"source, {text.name}") as advance:
        store.fill(job.windows(text), text.tokens, on_batch=lambda tokens: advance(tokens, ""))
    return store


def _score(job: _Job, text: Text, model: Any, reference: Any) -> Scores:
    with counting_bar(_scored(job, text), "tokens", shown=job.progress, title=text.name) as advance:
        return score(
            model,
            text.tokens,
            window=job.window,
            stride=job.stride,
            begin=text.begin,
            reference=reference,
            on_batch=lambda tokens: advance(tokens, ""),
        )


def _scored(job: _Job, text: Text) -> int:
    return sum(window.scored for window in job.windows(text))


def _settings(options: EvalOptions) -> dict[str, Any]:
    return {
        "dtype": options.dtype,
        "device": options.device,
        "activations": options.activations,
        "max_tokens": options.max_tokens,
        "limit": options.limit,
        "transformers": _transformers_version(),
    }


def _transformers_version() -> str:
    from importlib.metadata import version

    return version("transformers")
