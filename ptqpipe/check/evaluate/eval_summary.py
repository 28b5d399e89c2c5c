"""Where the eval file of a checkpoint goes, and its tables for a terminal."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptqpipe.check.evaluate.card_section import write_quality
from ptqpipe.check.evaluate.eval_file import is_result
from ptqpipe.check.evaluate.verdict import verdict
from ptqpipe.checkpoint import RECORD_FILE, check_file, name_of, write_file
from ptqpipe.checkpoint.regular_file import read_json
from ptqpipe.errors import OutputExists, PtqError, arg
from ptqpipe.run.quantities import number, table

_NAME = 16  # characters of the name of a text or task


def default_out(ckpt: str) -> Path:
    """The default path of the JSON: next to a checkpoint of ptqpipe; in the working folder for a hub name, and for a
    model of others, whose folder is only read."""
    path = Path(ckpt).expanduser()
    if (path / RECORD_FILE).is_file():
        return (path.resolve() if path.name in ("", "..") else path).parent / f"{name_of(path)}.eval.json"
    name = name_of(path) if path.exists() else ckpt.rpartition("/")[2]
    return Path(f"{name}.eval.json")


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
    former = read_json(out)  # of one that was cut short nothing is lost
    lost = [
        what
        for what, key, again in (("the KL divergence", "kl", compared), ("tasks", "tasks", tasks))
        if not again and isinstance(former, Mapping) and former.get(key)
    ]
    if lost:
        raise OutputExists(
            f"{out} holds {' and '.join(lost)}, which this call does not measure; "
            f"{arg('overwrite', True)} replaces it, or give another {arg('out')}"
        )


def write(result: Mapping[str, Any], out: Path, *, ckpt: Path, warn: Callable[[str], None]) -> None:
    """Writes the JSON in one step, and what it says into the model card of ``ckpt``, where that has a place for it.

    OutputError where the JSON cannot be written. A card that cannot be stays as it is: ``warn`` is called with a line.
    """
    write_file(out, json.dumps(result, indent=1) + "\n")
    try:
        write_quality(ckpt, result)
    except PtqError as error:
        warn(f"the model card stays as it is: {error}")


def render(result: Mapping[str, Any]) -> str:
    """The result for a terminal: the verdict in words first, then tables that fit 80 columns."""
    settings = result["settings"]
    judged = verdict(result)
    lines = [] if judged is None else [str(judged), *([judged.like] if judged.like else []), ""]
    against = "" if result["baseline"] is None else f" against {result['baseline']['name']}"
    lines.append(
        f"{result['checkpoint']['name']}{against} ({settings['dtype']}, activations {settings['activations']})"
    )
    tables = {"perplexity": _perplexity_table, "kl": _kl_tables, "tasks": _task_table, "embeddings": _embedding_table}
    for key, rendered in tables.items():
        if result.get(key):
            lines += ["", rendered(result[key])]
    return "\n".join(lines)


def _perplexity_table(rows: Sequence[Mapping[str, Any]]) -> str:
    compared = rows[0]["baseline"] is not None
    body = [
        [
            short(row["data"]),
            f"{row['tokens']:,}",
            f"{row['window']}" if row["stride"] == row["window"] else f"{row['window']}/{row['stride']}",
            _number(row["checkpoint"], 5),
            *([_number(row["baseline"], 5), _signed(row["difference"])] if compared else []),
            _span(row["interval"]),
        ]
        for row in rows
    ]
    middle = ["source", "change", "95 % of change"] if compared else ["95 %"]
    return table(["perplexity", "tokens", "window", "result", *middle], body)


def _kl_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    means = [
        [short(row["data"]), _number(row["mean"]), _span(row["interval"]), f"{100 * row['top1_agreement']:.2f} %"]
        for row in rows
    ]
    of_tokens = [
        [short(row["data"]), *(_number(row["percentiles"][p], 3) for p in ("50", "99", "99.9")), _number(row["max"], 3)]
        for row in rows
    ]
    head = ["of tokens", "50 %", "99 %", "99.9 %", "most"]
    return f"{table(['KL, nats', 'mean', '95 %', 'same top token'], means)}\n\n{table(head, of_tokens)}"


def _task_table(rows: Sequence[Mapping[str, Any]]) -> str:
    compared = any(row["baseline"] is not None for row in rows)
    body = [
        [
            short(row["task"]),
            row["metric"],
            str(row["samples"]),
            _with_error(row["checkpoint"], row["stderr"]),
            *(_compared(row) if compared else []),
        ]
        for row in rows
    ]
    head = ["task", "metric", "samples", "result", *(["source", "change", "95 % of change"] if compared else [])]
    return table(head, body, left=2)


def _embedding_table(rows: Sequence[Mapping[str, Any]]) -> str:
    measures = (("cosine", "cosine_interval"), ("spearman", "interval"), ("same_nearest", "same_nearest_interval"))
    names = ("cosine with the source's", "rank correlation of pairs", "same nearest sentence")
    body = [
        [short(row["data"]), f"{row['pairs']:,}", name, _number(row[key], 5), _span(row[spread], 5)]
        for row in rows
        for name, (key, spread) in zip(names, measures, strict=True)
    ]
    return table(["embeddings", "pairs", "measure", "result", "95 %"], body)


def _compared(row: Mapping[str, Any]) -> list[str]:
    return [_number(row["baseline"]), _signed(row["difference"]), _span(row["interval"])]


def short(name: str) -> str:
    """A name cut to the width of its column."""
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


def _with_error(value: float | None, error: float | None) -> str:
    return _number(value) + ("" if error is None else f" ± {number(error, 2)}")


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else number(value, digits)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{'+' if value >= 0 else ''}{number(value, 3)}"


def _span(interval: Sequence[float] | None, digits: int = 3) -> str:
    if interval is None or None in interval:
        return "-"
    return f"{number(interval[0], digits)} .. {number(interval[1], digits)}"
