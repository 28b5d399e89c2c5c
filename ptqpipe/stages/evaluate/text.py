"""Where the eval file of a checkpoint goes, and its tables for a terminal."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint import check_file, write_file
from ptqpipe.errors import OutputExists
from ptqpipe.evaluation.result import is_result
from ptqpipe.regular_file import MAX_JSON_BYTES, read_regular
from ptqpipe.stages.common import name_of, table


def default_out(ckpt: str) -> Path:
    """The default path of the JSON: next to the checkpoint, or in the working folder for a hub name."""
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
    check_file(out, own=is_result, what="an eval file of ptqpipe")
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
