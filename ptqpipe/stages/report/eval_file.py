"""The eval file of a checkpoint, as a report shows it: its types checked, its numbers taken as they are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint.files import read_json_object
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.report.content import Divergence, Evaluation, Perplexity, Task

VERSION = 1


def read_evaluation(path: Path, *, run_id: str | None) -> Evaluation:
    """Reads what ``ptqpipe eval -o FILE`` wrote. UsageError where it measured another checkpoint than run ``run_id``;
    CheckpointError for another version and for damage."""
    content = read_json_object(path)
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"eval file {path} has version {content.get('version')!r}, expected {VERSION}; run ptqpipe eval again"
        )
    measured = content.get("checkpoint")
    measured_id = measured.get("run_id") if isinstance(measured, Mapping) else None
    if run_id is not None and measured_id is not None and measured_id != run_id:
        raise UsageError(
            f"eval file {path} measured run {str(measured_id)[:12]}, the checkpoint is run {run_id[:12]}; "
            "give the eval file of this checkpoint, or run ptqpipe eval again"
        )
    try:
        return _parse(content)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"eval file {path} is damaged ({type(error).__name__}: {error})") from None


def _parse(content: Mapping[str, Any]) -> Evaluation:
    baseline = content.get("baseline")
    settings = content.get("settings") or {}
    return Evaluation(
        baseline=str(baseline["name"]) if baseline else "",
        settings=", ".join(f"{key} {_plain(value)}" for key, value in settings.items() if value is not None),
        perplexity=tuple(_perplexity(entry) for entry in content.get("perplexity") or ()),
        divergence=tuple(_divergence(entry) for entry in content.get("kl") or ()),
        tasks=tuple(_task(entry) for entry in content.get("tasks") or ()),
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _interval(entry: Mapping[str, Any]) -> tuple[float | None, float | None]:
    found = entry.get("interval")
    return (None, None) if found is None else (float(found[0]), float(found[1]))


def _perplexity(entry: Mapping[str, Any]) -> Perplexity:
    low, high = _interval(entry)
    window = entry.get("window")
    return Perplexity(
        Path(str(entry["data"])).name,
        int(entry["tokens"]),
        None if window is None else int(window),
        float(entry["checkpoint"]),
        _number(entry.get("baseline")),
        _number(entry.get("difference")),
        low,
        high,
    )


def _divergence(entry: Mapping[str, Any]) -> Divergence:
    low, high = _interval(entry)
    return Divergence(
        Path(str(entry["data"])).name,
        int(entry["tokens"]),
        float(entry["mean"]),
        low,
        high,
        tuple((str(p), float(value)) for p, value in (entry.get("percentiles") or {}).items()),
        _number(entry.get("max")),
        _number(entry.get("top1_agreement")),
    )


def _task(entry: Mapping[str, Any]) -> Task:
    low, high = _interval(entry)
    samples = entry.get("samples")
    return Task(
        str(entry["task"]),
        str(entry["metric"]),
        None if samples is None else int(samples),
        float(entry["checkpoint"]),
        _number(entry.get("stderr")),
        _number(entry.get("baseline")),
        _number(entry.get("recovery")),
        low,
        high,
    )
