"""Where a checkpoint came from, as its record and its files tell: the recipe as it resolved, data, versions, hashes;
and when, where and by which command a result was made."""

import os
import platform
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint import RECORD_FILE, file_sha256, name_of
from ptqpipe.conversion.record import Record, text_data
from ptqpipe.models.source import Source
from ptqpipe.numerics.kernels.cpu_library import processor


def rules(record: Record | None) -> tuple[tuple[str, str, str], ...]:
    """(match, scheme, how) of each rule of the recipe, as it resolved."""
    conversion = record.conversion if record is not None else None
    recipe = conversion.get("recipe") if conversion is not None else None
    listed = recipe.get("rules") if isinstance(recipe, Mapping) else None
    learned = _learned(record.raw) if record is not None else None
    hidden = {"match", "scheme", "low_rank", "low_rank_dtype"} | ({"algorithm"} if learned is not None else set())
    lines = []
    for rule in listed if isinstance(listed, list) else []:
        if isinstance(rule, Mapping):
            how = [f"{key.replace('_', ' ')} {value}" for key, value in rule.items() if key not in hidden]
            how += ["codes of ptqpipe tune instead of its algorithm's"] if learned is not None else []
            lines.append((str(rule.get("match")), str(rule.get("scheme")), ", ".join(how)))
    return tuple(lines)


def provenance(
    opened: Source, original: Source | None, record: Record | None, producer: str
) -> tuple[tuple[str, str], ...]:
    """(what, value) of all that is known about the checkpoint's origin."""
    raw: Mapping[str, Any] = record.raw if record is not None else {}
    made_from = raw.get("source")
    source: Mapping[str, Any] = made_from if isinstance(made_from, Mapping) else {}
    recipe = record.conversion.get("recipe") if record is not None and record.conversion is not None else None
    rows: list[tuple[str, Any]] = [
        ("written by", producer or "unknown"),
        ("layout", opened.container_name),
        ("source", source.get("name") or (name_of(original.reader.path) if original is not None else None)),
        ("source fingerprint", source.get("fingerprint")),
        ("recipe", recipe.get("description") if isinstance(recipe, Mapping) else None),
        ("run id", raw.get("run_id")),
        ("torch", raw.get("torch")),
        ("laid out anew from", raw.get("relayout_of")),
        ("calibration data", _data(raw)),
        ("statistics", _statistics(raw)),
        ("learned codes (ptqpipe tune)", _learned(raw)),
        ("fingerprint of this checkpoint", opened.reader.fingerprint()),
    ]
    files = {name: opened.reader.path / name for name in ("config.json", RECORD_FILE)}
    rows += [(f"sha256 of {name}", file_sha256(path) if path.is_file() else None) for name, path in files.items()]
    return tuple((what, str(value)) for what, value in rows if value)


def _data(raw: Mapping[str, Any]) -> str | None:
    for key in ("statistics", "rounding"):
        if (data := text_data(raw, key)) is None:
            continue
        files = data.get("files")
        names = [
            f"{Path(str(file.get('name'))).name} (sha256 {file.get('sha256')})"
            for file in (files if isinstance(files, list) else [])
            if isinstance(file, Mapping)
        ]
        held = f", {data['held_out']} more held out" if data.get("held_out") else ""
        return f"{', '.join(names)}: {data.get('samples')} samples of {data.get('seqlen')} tokens{held}"
    return None


def _statistics(raw: Mapping[str, Any]) -> str | None:
    entry = raw.get("statistics")
    if isinstance(entry, Mapping):
        return str(entry.get("digest") or "") or None
    return str(entry) if entry else None


def _learned(raw: Mapping[str, Any]) -> str | None:
    entry = raw.get("rounding")
    if not isinstance(entry, Mapping):
        return None
    data = text_data(raw, "rounding")
    parts = [str(entry.get("digest") or ""), str(entry.get("method") or "")]
    parts += [f"{data.get('samples')} samples of {data.get('seqlen')} tokens"] if data else []
    return ", ".join(part for part in parts if part) or None


def run_facts(command: str = "") -> dict[str, str]:
    """When (UTC) and on which machine a result is made, and by which command, its folders left out: it is published."""
    words = [_without_folders(word) for word in shlex.split(command)]
    cores = f"{os.cpu_count()} processors, {platform.system()}"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"date": now, "machine": f"{processor()[0]}, {cores}", "command": shlex.join(words)}


def _without_folders(word: str) -> str:
    """An argument with its path's last part alone; names on the hub stay whole."""
    option, equals, value = word.rpartition("=")
    path = Path(value)
    hidden = path.is_absolute() or value.startswith((".", "~")) or os.path.exists(path.parent)
    return f"{option}{equals}{path.name}" if hidden and path.name else word
