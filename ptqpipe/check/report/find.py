"""Finds what belongs to a checkpoint: the model that it was made from, and what `ptqpipe eval` wrote for it."""

import os
from collections.abc import Iterator, Mapping
from glob import escape
from pathlib import Path
from typing import Any

from ptqpipe.check.evaluate.eval_file import read_result
from ptqpipe.check.evaluate.eval_summary import default_out
from ptqpipe.check.evaluate.verdict import Verdict, embedder_thresholds, thresholds, verdict
from ptqpipe.checkpoint import RECORD_FILE, CheckpointReader
from ptqpipe.checkpoint.regular_file import read_json
from ptqpipe.errors import PtqError


def claims_own(ckpt: Path) -> bool:
    return (ckpt / RECORD_FILE).is_file()


def find_source(ckpt: Path) -> Path | None:
    """The model that a checkpoint's record names, if it lies beside the checkpoint, in the working folder, in a folder
    beside one of them (../models/NAME), or in the hub's cache; None for none. A folder of that name counts only if it
    has the record's fingerprint."""
    named = read_source(ckpt)
    if not isinstance(name := named.get("name"), str) or Path(name).name != name:
        return None
    return next((path for path in _places(ckpt, name) if _fingerprint(path) == named.get("fingerprint")), None)


def _places(ckpt: Path, name: str) -> Iterator[Path]:
    for folder in dict.fromkeys((ckpt.parent, ckpt.resolve().parent, Path())):
        yield folder / name
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    for folder in dict.fromkeys((ckpt.resolve().parent, Path().resolve())):
        yield from sorted(folder.parent.glob(f"*/{escape(name)}"))
    for repository in (f"models--*--{name}", f"models--{name}"):
        yield from sorted(cache.glob(f"{repository}/snapshots/*")) if not set("*?[") & set(name) else ()


def _fingerprint(path: Path) -> str | None:
    if not path.is_dir():
        return None
    try:
        with CheckpointReader.open(path) as reader:
            return reader.fingerprint()
    except (PtqError, OSError):
        return None


def find_evaluation(ckpt: Path) -> Path | None:
    """The eval file of a checkpoint, beside it or in the working folder; None for none, and for one of another run."""
    run = _record(ckpt).get("run_id")
    for path in dict.fromkeys((default_out(str(ckpt)), Path(default_out(str(ckpt)).name))):
        measured = _json(path).get("checkpoint")
        if isinstance(measured, dict) and measured.get("run_id") == run:
            return path
    return None


def read_source(ckpt: Path) -> dict[str, Any]:
    """Name and fingerprint of the source model, from a checkpoint's record; empty without one."""
    record = _record(ckpt)
    before = record.get("transformed")  # what was quantized had factors folded in while it was read
    entry = before.get("from") if isinstance(before, dict) and "foldings" in before else record.get("source")
    return entry if isinstance(entry, dict) else {}


def _record(ckpt: Path) -> dict[str, Any]:
    return _json(ckpt / RECORD_FILE)


def _json(path: Path) -> dict[str, Any]:
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def _beside(judged: Verdict, result: Mapping[str, Any]) -> str:
    return embedder_thresholds() if result["embeddings"] else f"{judged.like}. {thresholds()}"


def read_evaluation(path: Path, *, run_id: str | None) -> tuple[dict[str, Any], tuple[str, str, str] | None]:
    """An eval file, and the verdict on it as a report shows it: word, numbers, what they compare with; None where no
    divergence was measured. UsageError where it is of another run than ``run_id``."""
    result = read_result(path, run_id=run_id)
    judged = verdict(result)
    return result, None if judged is None else (judged.level, judged.words, _beside(judged, result))
