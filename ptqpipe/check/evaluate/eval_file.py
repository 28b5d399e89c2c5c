"""The eval file: what `ptqpipe eval` measures as one JSON object, written, checked and read here. Measures nothing.

Rows are plain mappings, as they stand in the file:

perplexity  data, sha256 (of the tokens), tokens, window, stride; checkpoint and baseline (the perplexities), nll and
            nll_baseline (nats per token), difference, interval (95 %: of the difference, or of the value alone)
kl          data and the fields of ``measures.Divergence``; histogram, positions and worst (``token_divergence.py``)
tasks       task, metric, higher_is_better, samples; checkpoint, stderr, baseline, baseline_stderr; recovery (percent of
            the baseline's value), difference, interval (95 % of the difference)
samples     data, prompt; baseline and checkpoint, the text that each continues it with
embeddings  of a sentence embedder alone: data, sha256, pairs; cosine (mean, of an embedding with the baseline's),
            cosine_interval, cosine_least; spearman (rank correlation of the pairs' similarities with the baseline's)
            and its interval; same_nearest (share of first sentences whose nearest second one is the same) and
            same_nearest_interval

``verdict`` is that of ``verdict.py``, for other readers: ptqpipe takes it from the rows. ``made`` says when, on which
machine and by which command. A number that is not finite is null. A report and a terminal show the same rows.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptqpipe._version import __version__
from ptqpipe.check.evaluate.verdict import verdict
from ptqpipe.checkpoint import read_json_object
from ptqpipe.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from ptqpipe.check.evaluate.harness import TaskMetric
    from ptqpipe.check.evaluate.measures import Divergence, Perplexity
    from ptqpipe.check.evaluate.tokenized_text import Text

VERSION = 1
Row = Mapping[str, Any]


def result_json(
    *,
    checkpoint: Row,
    baseline: Row | None,
    settings: Row,
    perplexity: Sequence[Row] = (),
    kl: Sequence[Row] = (),
    tasks: Sequence[Row] = (),
    samples: Sequence[Row] = (),
    embeddings: Sequence[Row] = (),
    made: Row | None = None,
) -> dict[str, Any]:
    """The content of an eval file. ``checkpoint``: its name and run_id; ``baseline``: its name."""
    content = {
        "version": VERSION,
        "ptqpipe": __version__,
        "checkpoint": checkpoint,
        "baseline": baseline,
        "settings": settings,
        "perplexity": perplexity,
        "kl": kl,
        "tasks": tasks,
        "samples": samples,
        **({"embeddings": embeddings} if embeddings else {}),
        "made": made or {},
    }
    fields = {key: _finite(value) for key, value in content.items()}
    judged = verdict(fields)
    return {**fields, "verdict": None if judged is None else judged._asdict()}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def perplexity_row(text: "Text", perplexity: "Perplexity", *, window: int, stride: int) -> dict[str, Any]:
    return {
        "data": text.name,
        "sha256": text.sha256,
        "tokens": perplexity.tokens,
        "window": window,
        "stride": stride,
        "checkpoint": perplexity.value,
        "baseline": perplexity.reference,
        "nll": perplexity.nll,
        "nll_baseline": perplexity.nll_reference,
        "difference": perplexity.difference,
        "interval": perplexity.interval,
    }


def kl_row(text: "Text", divergence: "Divergence", **tokens: Any) -> dict[str, Any]:
    """The row of a text. ``tokens``: where the divergence lies, by the names of the module's list."""
    return {"data": text.name, **asdict(divergence), **tokens}


def task_row(metric: "TaskMetric", baseline: "TaskMetric | None") -> dict[str, Any]:
    """The row of a metric, compared sample by sample with the baseline's where there is one."""
    from ptqpipe.check.evaluate.harness import compare

    compared = None if baseline is None else compare(metric, baseline)
    return {
        "task": metric.task,
        "metric": metric.name,
        "higher_is_better": metric.higher_is_better,
        "samples": metric.samples,
        "checkpoint": metric.value,
        "stderr": metric.stderr,
        "baseline": None if baseline is None else baseline.value,
        "baseline_stderr": None if baseline is None else baseline.stderr,
        "recovery": None if compared is None else compared.recovery,
        "difference": None if compared is None else compared.difference,
        "interval": None if compared is None else compared.interval,
    }


def is_result(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is an eval file."""
    return re.match(rb'\{\s*"version": \d+,\s*"ptqpipe": ', head) is not None


def _maybe(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _file_name(value: Any) -> str:
    """Without its folder: what is read here goes to others."""
    return Path(str(value)).name


def _real(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} where a number was expected")
    return number


def _interval(value: Any) -> tuple[float, float]:
    return _real(value[0]), _real(value[1])


def _percentiles(value: Any) -> dict[str, float]:
    return {str(percent): float(number) for percent, number in (value or {}).items()}


def _histogram(value: Any) -> dict[str, Any]:
    counts = [int(count) for count in value["counts"]]
    first, per_decade = _real(value["first"]), int(value["per_decade"])
    if not (first > 0 and 0 < per_decade <= 100 and 2 < len(counts) <= 1000 and min(counts) >= 0):
        raise ValueError("histogram")
    return {"first": first, "per_decade": per_decade, "counts": counts}


def _rows_of(kinds: Mapping[str, Callable[[Any], Any]], most: int) -> Callable[[Any], list[Row]]:
    return lambda rows: [{key: kind(row[key]) for key, kind in kinds.items()} for row in (rows or ())[:most]]


_POSITIONS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("first", "last", "tokens"), int),
    "mean": _real,
    "standard_error": _maybe(_real),
}
_WORST: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("kl", "checkpoint", "baseline"), _real),
    "context": int,
    **dict.fromkeys(("before", "token", "checkpoint_top", "baseline_top"), str),
}

# What a reader shows of each kind of rows, and its types: what a row must have, then what it may leave out.
_MUST: dict[str, dict[str, Callable[[Any], Any]]] = {
    "perplexity": {"data": _file_name, "tokens": int, "checkpoint": float},
    "kl": {"data": _file_name, "tokens": int, "mean": _real},
    "tasks": {"task": str, "metric": str, "checkpoint": float},
    "samples": {"data": _file_name, "prompt": str, "baseline": str, "checkpoint": str},
    "embeddings": {"data": _file_name, "pairs": int, "cosine": _real, "spearman": _maybe(float), "same_nearest": float},
}
_MAY: dict[str, dict[str, Callable[[Any], Any]]] = {
    "perplexity": {"window": _maybe(int), "sha256": _maybe(str)}
    | dict.fromkeys(("baseline", "difference"), _maybe(float)),
    "kl": {"percentiles": _percentiles, "histogram": _maybe(_histogram)}
    | {"positions": _rows_of(_POSITIONS, 64), "worst": _rows_of(_WORST, 100)}
    | dict.fromkeys(("max", "top1_agreement"), _maybe(float)),
    "tasks": {"samples": _maybe(int)} | dict.fromkeys(("stderr", "baseline", "recovery"), _maybe(float)),
    "samples": {},
    "embeddings": dict.fromkeys(("cosine_interval", "same_nearest_interval"), _maybe(_interval))
    | {"cosine_least": _maybe(float), "sha256": _maybe(str)},
}


def read_result(path: Path, *, run_id: str | None) -> dict[str, Any]:
    """An eval file: ``baseline`` (its name, "" without one), ``settings`` as text, ``made`` as (what, text), the rows
    with types checked.

    UsageError where it measured another checkpoint than run ``run_id``; CheckpointError for another version and for
    damage.
    """
    content = read_json_object(path)
    if "version" not in content:
        raise CheckpointError(f"{path} is no result of ptqpipe eval; give a file that ptqpipe eval wrote")
    if content["version"] != VERSION:
        raise CheckpointError(
            f"eval file {path} has version {content['version']!r}, expected {VERSION}; run ptqpipe eval again"
        )
    measured = content.get("checkpoint")
    measured_id = measured.get("run_id") if isinstance(measured, Mapping) else None
    if run_id is not None and measured_id is not None and measured_id != run_id:
        raise UsageError(
            f"eval file {path} measured run {str(measured_id)[:12]}, the checkpoint is run {run_id[:12]}; "
            "give the eval file of this checkpoint, or run ptqpipe eval again"
        )
    try:
        baseline, settings = content.get("baseline"), content.get("settings") or {}
        rows = {kind: [_checked(row, kind) for row in content.get(kind) or ()] for kind in _MUST}
        values = {key: value for key, value in settings.items() if value is not None}
        words = (f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items())
        provenance = tuple((str(what), str(value)) for what, value in (content.get("made") or {}).items() if value)
        names = {
            "baseline": str(baseline["name"]) if baseline else "",
            "settings": ", ".join(words),
            "made": provenance,
        }
        return {**names, **rows}
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"eval file {path} is damaged ({type(error).__name__}: {error}); run ptqpipe eval again"
        ) from None


def _checked(row: Row, kind: str) -> dict[str, Any]:
    must = {key: convert(row[key]) for key, convert in _MUST[kind].items()}
    may = {key: convert(row.get(key)) for key, convert in _MAY[kind].items()}
    return must | may | {"interval": _maybe(_interval)(row.get("interval"))}
