"""evaluate: what a checkpoint computes, measured. Perplexity, KL divergence to a baseline, lm-eval tasks; one JSON.

Both models are loaded with true semantics (``runtime/load.py``). The baseline goes first, its logits to the cache on
disk, and is gone before the checkpoint is loaded; without a cache both are in memory.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from ptqpipe._version import __version__
from ptqpipe.checkpoint.source import resolve_source
from ptqpipe.errors import UsageError
from ptqpipe.evaluation.measures import Divergence, Perplexity, divergence, perplexity
from ptqpipe.evaluation.scores import score
from ptqpipe.evaluation.text import Text, load_tokenizer, read_text
from ptqpipe.runtime.load import load_model, read_config
from ptqpipe.stages.jobs import RECORD_FILE
from ptqpipe.stages.tables import table

VERSION = 1
DEFAULT_WINDOW = 2048


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure and how.

    data        text files, scored in windows of ``window`` tokens (None: what the model has positions for, at most
                2048) that begin every ``stride`` (None: ``window``)
    max_tokens  of each file
    dtype       what both models compute in
    activations  whether the inputs of the checkpoint's linear layers are quantized as its format says
    """

    data: tuple[Path, ...] = ()
    window: int | None = None
    stride: int | None = None
    max_tokens: int | None = None
    dtype: str = "float32"
    activations: Literal["simulated", "none"] = "simulated"


@dataclass(frozen=True, slots=True)
class Measured:
    """One text."""

    text: Text
    window: int
    stride: int
    perplexity: Perplexity
    divergence: Divergence | None


def evaluate(
    ckpt: str, *, baseline: str | None = None, options: Options | None = None, progress: bool = False
) -> dict[str, Any]:
    """The content of the eval JSON. UsageError for what cannot be measured, before any weight is read."""
    options = options or Options()
    if not options.data:
        raise UsageError("nothing to measure; give --data FILE")
    path = resolve_source(ckpt)
    other = None if baseline is None else resolve_source(baseline)
    window, stride = _protocol(path, options)
    texts = _texts(path, other, options)
    model = load_model(path, dtype=options.dtype, activations=options.activations)
    reference = None if other is None else load_model(other, dtype=options.dtype, activations=options.activations)
    measured = []
    for text in texts:
        with _bar(text, shown=progress) as advance:
            scores = score(model, text.tokens, window=window, stride=stride, reference=reference, on_batch=advance)
        found = None if reference is None else divergence(scores)
        measured.append(Measured(text, window, stride, perplexity(scores), found))
    return _json(path, other, options, measured)


def _protocol(path: Path, options: Options) -> tuple[int, int]:
    positions = getattr(read_config(path).get_text_config(), "max_position_embeddings", None) or DEFAULT_WINDOW
    window = options.window or min(DEFAULT_WINDOW, positions)
    stride = options.stride or window
    if window > positions:
        raise UsageError(f"--window {window} is more than the model's {positions} positions; choose a smaller one")
    if window < 2 or not 1 <= stride <= window:
        raise UsageError(f"--window {window} --stride {stride}: expected a window of 2 or more and 1 <= stride <= it")
    return window, stride


def _texts(path: Path, other: Path | None, options: Options) -> list[Text]:
    tokenizer = load_tokenizer(path if (path / "tokenizer.json").exists() or other is None else other)
    return [read_text(file, tokenizer, max_tokens=options.max_tokens) for file in options.data]


class _bar:
    """A bar over scored tokens, as a context that gives the function to call."""

    def __init__(self, text: Text, *, shown: bool) -> None:
        self._bar: Any = tqdm(
            total=len(text.tokens),
            unit="tok",
            unit_scale=True,
            disable=not shown,
            file=sys.stderr,
            desc=Path(text.name).name,
        )

    def __enter__(self) -> Callable[[int], None]:
        def advance(done: int) -> None:
            self._bar.update(done - self._bar.n)

        return advance

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _json(path: Path, other: Path | None, options: Options, measured: Sequence[Measured]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "ptqpipe": __version__,
        "checkpoint": {"name": path.resolve().name, "path": str(path), "run_id": _run_id(path)},
        "baseline": None if other is None else {"name": other.resolve().name, "path": str(other)},
        "settings": {"dtype": options.dtype, "activations": options.activations, "max_tokens": options.max_tokens},
        "perplexity": [_perplexity_row(m) for m in measured],
        "kl": [{"data": m.text.name, **asdict(m.divergence)} for m in measured if m.divergence is not None],
        "tasks": [],
    }


def _perplexity_row(measured: Measured) -> dict[str, Any]:
    found = measured.perplexity
    return {
        "data": measured.text.name,
        "sha256": measured.text.sha256,
        "tokens": found.tokens,
        "window": measured.window,
        "stride": measured.stride,
        "checkpoint": found.value,
        "baseline": found.reference,
        "nll": found.nll,
        "nll_baseline": found.nll_reference,
        "difference": found.difference,
        "interval": found.interval,
    }


def _run_id(path: Path) -> str | None:
    try:
        found = json.loads((path / RECORD_FILE).read_bytes()).get("run_id")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def default_out(ckpt: str) -> Path:
    """Where the JSON goes unless told: beside the checkpoint, or in the working folder for a hub name."""
    path = Path(ckpt)
    name = path.resolve().name if path.exists() else ckpt.rpartition("/")[2]
    return (path.resolve().parent if path.exists() else Path()) / f"{name}.eval.json"


def write(result: Mapping[str, Any], out: Path) -> None:
    """Writes the JSON in one step."""
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
        os.replace(name, out)
    except BaseException:
        os.unlink(name)
        raise


def render(result: Mapping[str, Any]) -> str:
    """The result as tables for a terminal."""
    settings = result["settings"]
    lines = [f"{result['checkpoint']['name']}  ({settings['dtype']}, activations {settings['activations']})"]
    if result["baseline"] is not None:
        lines.append(f"  against {result['baseline']['name']}")
    if result["perplexity"]:
        lines += ["", _perplexity_table(result["perplexity"])]
    if result["kl"]:
        lines += ["", _kl_table(result["kl"])]
    return "\n".join(lines)


def _perplexity_table(rows: Sequence[Mapping[str, Any]]) -> str:
    body = [
        [
            Path(row["data"]).name,
            str(row["tokens"]),
            f"{row['window']}/{row['stride']}",
            f"{row['checkpoint']:.4f}",
            _number(row["baseline"], ".4f"),
            _number(row["difference"], "+.4f"),
            _span(row["interval"], ".4f"),
        ]
        for row in rows
    ]
    return table(["perplexity", "tokens", "window/stride", "checkpoint", "baseline", "difference", "95 %"], body)


def _kl_table(rows: Sequence[Mapping[str, Any]]) -> str:
    body = [
        [
            Path(row["data"]).name,
            f"{row['mean']:.6f}",
            _number(row["standard_error"], ".6f"),
            _span(row["interval"], ".6f"),
            *(f"{row['percentiles'][p]:.4f}" for p in ("50", "99", "99.9")),
            f"{row['max']:.4f}",
            f"{100 * row['top1_agreement']:.2f} %",
        ]
        for row in rows
    ]
    return table(["KL, nats", "mean", "std. error", "95 %", "50 %", "99 %", "99.9 %", "max", "same top-1"], body)


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _span(interval: Sequence[float] | None, spec: str) -> str:
    return "-" if interval is None else f"{interval[0]:{spec}} .. {interval[1]:{spec}}"
