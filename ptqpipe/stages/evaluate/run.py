"""evaluate: what a checkpoint computes, measured. Perplexity, KL divergence to a baseline, lm-eval tasks; one JSON.

Both models are loaded with true semantics (``runtime/loading.py``). Whatever can be wrong with the call is found before
a weight is read. The baseline goes first, its logits to the cache on disk, and is gone before the checkpoint is loaded;
where they are not cached (no folder, or more than the limit) both models are in memory.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.checkpoint.source import resolve_source
from ptqpipe.errors import UsageError
from ptqpipe.evaluation.cache import DEFAULT_LIMIT, open_cache
from ptqpipe.evaluation.harness import Metric, TaskRequest, check_tasks, run_tasks
from ptqpipe.evaluation.measures import divergence, perplexity
from ptqpipe.evaluation.scores import Window, score, windows
from ptqpipe.evaluation.text import Text, Tokenizer, read_text
from ptqpipe.runtime.loading import check_device, default_length, dtype_of, load_model, positions_of, read_config
from ptqpipe.stages.evaluate.text import Measured, TaskRow, result_json


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure and how.

    data         text files, scored in windows of ``window`` tokens (None: what the model has positions for, at most
                 2048) that begin every ``stride`` (None: ``window``)
    max_tokens   of each file
    tasks        lm-eval's or local ones; with `task_data`, `include_path`, `limit` and `batch_size` as ``TaskRequest``
    dtype        what both models compute in, on ``device``
    activations  whether the inputs of linear layers are quantized as each checkpoint's format says
    cache_dir    where the baseline's logits are kept, at most ``cache_limit`` bytes; None: nowhere
    """

    data: tuple[Path, ...] = ()
    window: int | None = None
    stride: int | None = None
    max_tokens: int | None = None
    tasks: tuple[str, ...] = ()
    task_data: Path | None = None
    include_path: Path | None = None
    limit: int | None = None
    batch_size: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    activations: Literal["simulated", "none"] = "simulated"
    cache_dir: Path | None = None
    cache_limit: int = DEFAULT_LIMIT

    @property
    def request(self) -> TaskRequest:
        """The tasks."""
        return TaskRequest(self.tasks, self.task_data, self.include_path, self.limit, self.batch_size)


class _Model:
    """A model that is loaded when first asked for."""

    def __init__(self, path: Path, options: Options) -> None:
        self.path = path
        self._options = options
        self._model: Any = None

    def get(self) -> Any:
        if self._model is None:
            options = self._options
            self._model = load_model(
                self.path, dtype=options.dtype, activations=options.activations, device=options.device
            )
        return self._model

    def drop(self) -> None:
        self._model = None


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything decided and read but the weights."""

    options: Options
    path: Path
    baseline: Path | None
    texts: tuple[Text, ...]
    window: int
    stride: int
    tokenizer: Tokenizer
    progress: bool

    def windows(self, text: Text) -> list[Window]:
        return windows(len(text.tokens), self.window, stride=self.stride)


def evaluate(
    ckpt: str, *, baseline: str | None = None, options: Options | None = None, progress: bool = False
) -> dict[str, Any]:
    """The content of the eval JSON. UsageError for what cannot be measured, before any weight is read."""
    job = _prepare(ckpt, baseline, options or Options(), progress)
    references: Sequence[Any] = [None] * len(job.texts)
    theirs: list[Metric] = []
    if job.baseline is not None:
        other = _Model(job.baseline, job.options)
        if job.options.tasks:
            theirs = run_tasks(other.get(), job.tokenizer.get(), job.options.request, progress=progress)
        references = [_reference(job, text, other) for text in job.texts]
        other.drop()
    model = _Model(job.path, job.options)
    measured = [_measure(job, text, model, ref) for text, ref in zip(job.texts, references, strict=True)]
    ours: list[Metric] = []
    if job.options.tasks:
        ours = run_tasks(model.get(), job.tokenizer.get(), job.options.request, progress=progress)
    by_key = {(metric.task, metric.name): metric for metric in theirs}
    rows = [TaskRow(metric, by_key.get((metric.task, metric.name))) for metric in ours]
    return result_json(job.path, job.baseline, settings=_settings(job), measured=measured, tasks=rows)


def _prepare(ckpt: str, baseline: str | None, options: Options, progress: bool) -> _Job:
    if not options.data and not options.tasks:
        raise UsageError("nothing to measure; give --data FILE, --tasks NAMES, or both")
    for name in ("max_tokens", "limit", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    path = resolve_source(ckpt)
    other = None if baseline is None else resolve_source(baseline)
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
    window, stride = _protocol(config, options)
    if options.tasks:
        check_tasks(options.request)
    tokenizer = Tokenizer(path if other is None or (path / "tokenizer_config.json").exists() else other)
    texts = tuple(read_text(file, tokenizer, max_tokens=options.max_tokens) for file in options.data)
    for text in texts:
        _check_tokens(text, int(config.get_text_config().vocab_size))
    return _Job(options, path, other, texts, window, stride, tokenizer, progress)


def _check_tokens(text: Text, vocabulary: int) -> None:
    low, high = int(text.tokens.min()), int(text.tokens.max())
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise UsageError(
            f"{text.name} has token {bad}, outside the model's vocabulary of {vocabulary}; use the model's tokenizer"
        )


def _protocol(config: Any, options: Options) -> tuple[int, int]:
    positions = positions_of(config)
    window = default_length(config) if options.window is None else options.window
    stride = window if options.stride is None else options.stride
    if positions is not None and window > positions:
        raise UsageError(f"--window {window} is more than the model's {positions} positions; choose a smaller one")
    if window < 2 or not 1 <= stride <= window:
        raise UsageError(f"--window {window} --stride {stride}: expected a window of 2 or more and 1 <= stride <= it")
    return window, stride


def _reference(job: _Job, text: Text, other: _Model) -> Any:
    """The baseline's logits on a text: a filled store, or the model itself."""
    options = job.options
    if options.cache_dir is None:
        return other.get()
    config = read_config(other.path)
    with CheckpointReader.open(other.path) as reader:
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
        make=other.get,
        limit_bytes=options.cache_limit,
    )
    if store is None:
        return other.get()
    with _bar(text, shown=job.progress, label="baseline") as advance:
        store.fill(job.windows(text), text.tokens, on_batch=advance)
    return store


def _measure(job: _Job, text: Text, model: _Model, reference: Any) -> Measured:
    with _bar(text, shown=job.progress, label=text.name) as advance:
        scores = score(
            model.get(), text.tokens, window=job.window, stride=job.stride, reference=reference, on_batch=advance
        )
    found = None if reference is None else divergence(scores)
    return Measured(text.name, text.sha256, job.window, job.stride, perplexity(scores), found)


@contextmanager
def _bar(text: Text, *, shown: bool, label: str) -> Iterator[Callable[[int], None]]:
    """A bar over scored tokens; gives the function to call with how many are done."""
    bar: Any = tqdm(
        total=len(text.tokens), unit="tok", unit_scale=True, disable=not shown, file=sys.stderr, desc=label[:30]
    )
    try:
        yield lambda done: bar.update(done - bar.n)
    finally:
        bar.close()


def _settings(job: _Job) -> Mapping[str, Any]:
    options = job.options
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
