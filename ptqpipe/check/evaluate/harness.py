"""lm-eval tasks on a loaded model, and two models' results against each other.

lm-eval's own harness and its own class for Hugging Face models do the work; this file names the tasks, hands over the
model, and compares sample by sample. ``local_*`` tasks (``tasks/*.yaml``) read local files in the format of MosaicML's
evaluation sets, so they need no network.
"""

import difflib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ptqpipe.checkpoint.regular_file import MAX_TEXT_BYTES, read_regular_text
from ptqpipe.errors import PtqWarning, UsageError, arg, first_line, missing_package, read_failure, tokenizer_errors

LOCAL_TASKS = Path(__file__).resolve().parent / "tasks"
RESAMPLES = 1000
SEED = 0


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Which tasks, and how.

    names         lm-eval's names (tasks, groups, tags), ours (``local_piqa``), or those below ``include_path``
    task_data     the folder with the files of local tasks, themselves or one folder down
    include_path  a folder with further task YAMLs
    limit         samples of each task, the first ones
    """

    names: tuple[str, ...]
    task_data: Path | None = None
    include_path: Path | None = None
    limit: int | None = None
    batch_size: int = 8


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """One metric of one task on one model.

    values     one per sample, None where a sample has none; what ``aggregate`` makes ``value`` from
    stderr     lm-eval's
    """

    task: str
    name: str
    higher_is_better: bool
    value: float
    stderr: float | None
    samples: int
    values: Sequence[Any]
    aggregate: Callable[[Sequence[Any]], float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A metric against the baseline's. ``recovery`` in percent, 100: as good; ``interval`` of the difference, 95 %."""

    recovery: float | None
    difference: float
    interval: tuple[float, float] | None


def check_tasks(request: TaskRequest) -> None:
    """UsageError without lm-eval, for an unknown task (with names near it), or local data that is not there."""
    manager = _manager(request)
    if request.task_data is not None and not any(name.startswith("local_") for name in request.names):
        raise UsageError(
            f"{arg('task_data')} is for local_ tasks, and {', '.join(request.names)} is none; leave it out, or ask for "
            f"{', '.join(_local_names())}"
        )
    for name in request.names:
        if name in _local_names():
            _local_config(name, request.task_data)
        elif name not in manager.all_tasks:
            names = [*_local_names(), *manager.all_tasks]
            near = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
            hint = f"; near it are {', '.join(near)}" if near else "; `lm_eval ls tasks` lists all"
            raise UsageError(f"task {name!r} is unknown{hint}")


def run_tasks(model: Any, tokenizer: Any, request: TaskRequest, *, progress: bool = False) -> list[TaskMetric]:
    """Every metric of every task on ``model``, in the order of the tasks.

    UsageError as `check_tasks`, and for data that lm-eval cannot load.
    """
    check_tasks(request)
    from datasets.exceptions import DatasetsError
    from lm_eval import simple_evaluate

    manager = _manager(request)
    specs = [_local_config(n, request.task_data) if n in _local_names() else n for n in request.names]
    with _quiet(progress):
        try:
            tasks = manager.load(specs)["tasks"]
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError, DatasetsError) as error:
            remedy = "local_ tasks need no hub" if isinstance(error, OSError | DatasetsError) else "leave that task out"
            remedy = "install that package" if isinstance(error, ImportError) else remedy
            raise UsageError(
                f"the tasks {', '.join(request.names)} cannot be loaded: {first_line(error)}; {remedy}"
            ) from None
        lm = _language_model()(pretrained=model, tokenizer=tokenizer, batch_size=request.batch_size)
        with _without_git(), _in_one_process(), tokenizer_errors("a text of the tasks"):
            results = simple_evaluate(
                model=lm,
                tasks=list(tasks.values()),
                task_manager=manager,
                limit=request.limit,
                bootstrap_iters=RESAMPLES,
                log_samples=True,
            )
    if lm.cut:
        warnings.warn(
            f"{lm.cut} requests of the tasks are longer than the {lm.max_length} tokens that the model takes: their "
            "beginnings are cut off, as lm-eval does",
            PtqWarning,
            stacklevel=2,
        )
    return [metric for name, task in tasks.items() for metric in _metrics(name, task, results)]


@cache
def _language_model() -> Any:
    """lm-eval's class for Hugging Face models. It looks at lengths before the model runs: UsageError for an answer that
    is longer than what the model takes, which lm-eval asserts; ``cut`` counts requests whose beginning it cuts off."""
    from lm_eval.models.huggingface import HFLM

    class LanguageModel(HFLM):  # type: ignore[misc]
        cut = 0

        def _loglikelihood_tokens(self, requests: list[Any], *rest: Any, **named: Any) -> Any:
            longest = max((len(answer) for _, _, answer in requests), default=0)
            if longest > self.max_length:
                raise UsageError(
                    f"a task has an answer of {longest} tokens, and the model takes {self.max_length}; leave that task "
                    f"out, or its later samples with {arg('limit')}"
                )
            room = self.max_length + 1  # the last token is not read
            self.cut += sum(len(question) + len(answer) > room for _, question, answer in requests)
            return super()._loglikelihood_tokens(requests, *rest, **named)

    return LanguageModel


def compare(metric: TaskMetric, baseline: TaskMetric, *, resamples: int = RESAMPLES, seed: int = SEED) -> Comparison:
    """A metric against the same of the baseline: recovery, difference, paired bootstrap over samples."""
    ratio = (metric.value, baseline.value) if metric.higher_is_better else (baseline.value, metric.value)
    recovery = 100 * ratio[0] / ratio[1] if ratio[1] else None
    difference = metric.value - baseline.value
    count = len(metric.values)
    if count < 2 or len(baseline.values) != count:
        return Comparison(recovery, difference, None)
    generator = np.random.default_rng(seed)
    ours, theirs = _resampler(metric), _resampler(baseline)
    differences = []
    for _ in range(resamples):
        drawn = generator.integers(0, count, count)
        differences.append(ours(drawn) - theirs(drawn))
    low, high = np.quantile(differences, [0.025, 0.975])
    return Comparison(recovery, difference, (float(low), float(high)))


def _resampler(metric: TaskMetric) -> Callable[[np.ndarray], float]:
    if metric.aggregate.__name__ == "mean":
        values = np.asarray(metric.values, dtype=np.float64)
        return lambda drawn: float(values[drawn].mean())
    return lambda drawn: float(metric.aggregate([metric.values[index] for index in drawn]))


def _metrics(name: str, task: Any, content: Any) -> Iterator[TaskMetric]:
    results, aggregations = content["results"][name], task.aggregation()
    better = content["higher_is_better"].get(name, {})
    for key, value in results.items():
        metric, comma, choice = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        samples = [sample for sample in content["samples"][name] if sample.get("filter", choice) == choice]
        values = [sample[metric] for sample in samples if metric in sample]
        stderr = results.get(f"{metric}_stderr,{choice}")
        yield TaskMetric(
            task=name,
            name=metric if choice == "none" else key,
            higher_is_better=better.get(metric) is not False,
            value=float(value),
            stderr=float(stderr) if isinstance(stderr, (int, float)) else None,
            samples=len(samples),
            values=values,
            aggregate=aggregations.get(metric, _mean),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_mean.__name__ = "mean"


def _manager(request: TaskRequest) -> Any:
    """lm-eval's index of tasks; of local ones alone none of its own, since it reads thousands of files for these."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise missing_package(arg("tasks"), "lm-eval", "ptqpipe[eval]") from None
    if request.include_path is not None and not request.include_path.is_dir():
        raise UsageError(f"{arg('include_path', request.include_path)} is no folder; name one with task YAMLs")
    include_path = None if request.include_path is None else str(request.include_path)
    return _index(TaskManager, include_path, not set(_local_names()).issuperset(request.names))


@cache
def _index(manager: Any, include_path: str | None, include_defaults: bool) -> Any:
    """Made once a process."""
    with _quiet(progress=False):
        return manager(include_path=include_path, include_defaults=include_defaults)


@contextmanager
def _without_git() -> Iterator[None]:
    """lm-eval asks git which commit the working folder is at; where it is none, git's complaint is on the terminal."""
    from lm_eval import evaluator

    asks = getattr(evaluator, "get_git_commit_hash", None)
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = asks


@contextmanager
def _in_one_process() -> Iterator[None]:
    """lm-eval forks a pool to resample a metric, which this process must not do: it has threads, and children that
    inherit a handler of SIGTERM do not always end with their pool (the evaluation then waits for them for ever).
    The draws are the same without."""
    switch = "DISABLE_MULTIPROC"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


def _local_names() -> list[str]:
    return sorted(path.stem for path in LOCAL_TASKS.glob("*.yaml"))


def _local_config(name: str, task_data: Path | None) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((LOCAL_TASKS / f"{name}.yaml").read_text(encoding="utf-8"))
    files: Mapping[str, str] = config["dataset_kwargs"]["data_files"]
    if task_data is None:
        raise UsageError(f"task {name!r} reads {', '.join(files.values())}; name its folder with {arg('task_data')}")
    paths = {}
    for split, file in files.items():
        places = [task_data / file, *sorted(task_data.glob(f"*/{file}"))]
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            raise UsageError(f"task {name!r} needs {file} in {task_data} or one folder down; it is not there")
        _check_rows(place, config["metadata"]["fields"])
        paths[split] = str(place.resolve())
    return {**config, "dataset_kwargs": {"data_files": paths}}


def _check_rows(file: Path, fields: Sequence[str]) -> None:
    """UsageError for a line that is no object with ``fields``: lm-eval would fail on it somewhere within."""
    try:
        lines = read_regular_text(file, limit=MAX_TEXT_BYTES).splitlines()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {read_failure(error)}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text (byte {error.start}); expected JSON lines") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else dict.fromkeys(fields)
        except (ValueError, RecursionError):
            raise UsageError(f"{file}, line {number} is not JSON; expected one object per line") from None
        missing = [field for field in fields if not isinstance(row, dict) or field not in row]
        if missing:
            raise UsageError(f"{file}, line {number} has no {missing[0]!r}; expected {', '.join(fields)}")


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """lm-eval logs every step: errors only, and no bars unless asked for."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), nullcontext() if progress else redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
