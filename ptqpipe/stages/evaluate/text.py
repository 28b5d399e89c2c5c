"""The result of evaluate: its JSON, where that goes, and tables for a terminal. Measures nothing."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.checkpoint.files import RECORD_FILE
from ptqpipe.checkpoint.single_file import check_file, write_file
from ptqpipe.errors import OutputExists
from ptqpipe.evaluation.harness import Metric, compare
from ptqpipe.evaluation.measures import Divergence, Perplexity
from ptqpipe.regular_file import MAX_JSON_BYTES, read_regular
from ptqpipe.stages.common.identity import name_of
from ptqpipe.stages.common.text import table

VERSION = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """One text, scored."""

    data: str
    sha256: str
    window: int
    stride: int
    perplexity: Perplexity
    divergence: Divergence | None


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One metric of a task, and the baseline's."""

    metric: Metric
    baseline: Metric | None


def result_json(
    path: Path,
    baseline: Path | None,
    *,
    settings: Mapping[str, Any],
    measured: Sequence[Measured],
    tasks: Sequence[TaskRow],
) -> dict[str, Any]:
    """The content of the eval JSON. A number that is not finite is null."""
    content = {
        "version": VERSION,
        "ptqpipe": __version__,
        "checkpoint": {"name": name_of(path), "run_id": _run_id(path)},
        "baseline": None if baseline is None else {"name": name_of(baseline)},
        "settings": dict(settings),
        "perplexity": [_perplexity_row(row) for row in measured],
        "kl": [{"data": row.data, **asdict(row.divergence)} for row in measured if row.divergence is not None],
        "tasks": [_task_row(row) for row in tasks],
    }
    cleaned: dict[str, Any] = _finite(content)
    return cleaned


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _perplexity_row(row: Measured) -> dict[str, Any]:
    found = row.perplexity
    return {
        "data": row.data,
        "sha256": row.sha256,
        "tokens": found.tokens,
        "window": row.window,
        "stride": row.stride,
        "checkpoint": found.value,
        "baseline": found.reference,
        "nll": found.nll,
        "nll_baseline": found.nll_reference,
        "difference": found.difference,
        "interval": found.interval,
    }


def _task_row(row: TaskRow) -> dict[str, Any]:
    compared = None if row.baseline is None else compare(row.metric, row.baseline)
    return {
        "task": row.metric.task,
        "metric": row.metric.name,
        "higher_is_better": row.metric.higher_is_better,
        "samples": row.metric.samples,
        "checkpoint": row.metric.value,
        "stderr": row.metric.stderr,
        "baseline": None if row.baseline is None else row.baseline.value,
        "baseline_stderr": None if row.baseline is None else row.baseline.stderr,
        "recovery": None if compared is None else compared.recovery,
        "difference": None if compared is None else compared.difference,
        "interval": None if compared is None else compared.interval,
    }


def _run_id(path: Path) -> str | None:
    try:
        found = json.loads(read_regular(path / RECORD_FILE, limit=MAX_JSON_BYTES)).get("run_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def default_out(ckpt: str) -> Path:
    """Where the JSON goes unless told: beside the checkpoint, or in the working folder for a hub name."""
    path = Path(ckpt).expanduser()
    if path.exists():
        return (path.resolve() if path.name in ("", "..") else path).parent / f"{name_of(path)}.eval.json"
    return Path(f"{ckpt.rpartition('/')[2]}.eval.json")


def check_target(out: Path, *, overwrite: bool, compared: bool, tasks: bool) -> None:
    """Makes sure that the result can be written to ``out``, before anything is measured.

    compared, tasks  whether this run measures the divergence from a baseline, and tasks
    overwrite        whether an eval file that holds more than this run measures may be replaced

    Raises OutputExists for a file that is no eval file, or holds what this run would lose; OutputError for a place
    where nothing can be written.
    """
    check_file(out, own=_is_evaluation, what="an eval file of ptqpipe")
    if overwrite or not out.is_file():
        return
    try:
        former = json.loads(read_regular(out, limit=MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return  # cut short: nothing is lost
    lost = [
        what
        for what, key, again in (("the KL divergence", "kl", compared), ("tasks", "tasks", tasks))
        if not again and isinstance(former, Mapping) and former.get(key)
    ]
    if lost:
        raise OutputExists(
            f"{out} holds {' and '.join(lost)}, which this call does not measure; --overwrite replaces it, or give "
            "another -o"
        )


def _is_evaluation(head: bytes) -> bool:
    """Whether a file begins as `write` begins one."""
    return re.match(rb'\{\s*"version": \d+,\s*"ptqpipe": ', head) is not None


def write(result: Mapping[str, Any], out: Path) -> None:
    """Writes the JSON in one step. OutputError where it cannot be written."""
    write_file(out, json.dumps(result, indent=1) + "\n")


def render(result: Mapping[str, Any]) -> str:
    """The result as tables for a terminal."""
    settings = result["settings"]
    lines = [f"{result['checkpoint']['name']}  ({settings['dtype']}, activations {settings['activations']})"]
    if result["baseline"] is not None:
        lines.append(f"  against {result['baseline']['name']}")
    for key, rendered in (("perplexity", _perplexity_table), ("kl", _kl_table), ("tasks", _task_table)):
        if result[key]:
            lines += ["", rendered(result[key])]
    return "\n".join(lines)


def _perplexity_table(rows: Sequence[Mapping[str, Any]]) -> str:
    body = [
        [
            row["data"],
            str(row["tokens"]),
            f"{row['window']}/{row['stride']}",
            _number(row["checkpoint"], ".4f"),
            _number(row["baseline"], ".4f"),
            _number(row["difference"], "+.4f"),
            _span(row["interval"], ".4f"),
        ]
        for row in rows
    ]
    spread = "95 % of difference" if rows[0]["baseline"] is not None else "95 %"
    return table(["perplexity", "tokens", "window/stride", "checkpoint", "baseline", "difference", spread], body)


def _kl_table(rows: Sequence[Mapping[str, Any]]) -> str:
    body = [
        [
            row["data"],
            _number(row["mean"], ".6f"),
            _number(row["standard_error"], ".6f"),
            _span(row["interval"], ".6f"),
            *(_number(row["percentiles"][p], ".4f") for p in ("50", "99", "99.9")),
            _number(row["max"], ".4f"),
            f"{100 * row['top1_agreement']:.2f} %",
        ]
        for row in rows
    ]
    return table(["KL, nats", "mean", "std. error", "95 %", "50 %", "99 %", "99.9 %", "max", "same top-1"], body)


def _task_table(rows: Sequence[Mapping[str, Any]]) -> str:
    body = [
        [
            row["task"],
            row["metric"],
            str(row["samples"]),
            _with_error(row["checkpoint"], row["stderr"]),
            _with_error(row["baseline"], row["baseline_stderr"]),
            "-" if row["recovery"] is None else f"{row['recovery']:.2f} %",
            _number(row["difference"], "+.4f"),
            _span(row["interval"], "+.4f"),
        ]
        for row in rows
    ]
    header = ["task", "metric", "samples", "checkpoint", "baseline", "recovery", "difference", "95 %"]
    return table(header, body, left=2)


def _with_error(value: float | None, error: float | None) -> str:
    return _number(value, ".4f") + ("" if error is None else f" ± {error:.4f}")


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _span(interval: Sequence[float] | None, spec: str) -> str:
    if interval is None or None in interval:
        return "-"
    return f"{interval[0]:{spec}} .. {interval[1]:{spec}}"
