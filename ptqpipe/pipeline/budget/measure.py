"""What each scheme costs each group, measured: the KL divergence to the float model with that group alone quantized.

The model is loaded once, in float32; a group's weights are replaced by their decode, the text is scored, and the
weights are put back. Each number goes to a JSON-lines file when it is known, so an interrupted run continues. Inputs of
linear layers stay as they are: only the weights' part of the cost is measured.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe.check.evaluate.cache import KeptLogits
from ptqpipe.check.evaluate.scores import score
from ptqpipe.check.evaluate.tokenized_text import read_text
from ptqpipe.checkpoint.regular_file import MAX_JSON_BYTES, read_regular
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.source import Source, SourceRows
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import Scheme
from ptqpipe.pipeline.budget.plan_units import Group, quantize_as
from ptqpipe.recipe.plan import Unit
from ptqpipe.run.machine import counting_bar
from ptqpipe.runtime.find_weight import find_place
from ptqpipe.runtime.loading import check_length, default_length, load, load_tokenizer, read_config

VERSION = 1
DEFAULT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to measure on, and where the numbers are kept.

    text     a .txt, .jsonl or .parquet file
    record   the JSON-lines file: continued where it is of the same run
    """

    text: Path
    record: Path
    tokens: int = DEFAULT_TOKENS
    seqlen: int | None = None


def sensitivity(
    stats: Path | None, text: Path | None, out: Path, *, tokens: int | None = None, seqlen: int | None = None
) -> Path | Measurement | None:
    """Where costs come from: the folder of statistics, a measurement on ``text`` that is kept beside ``out``, or None.

    UsageError for both, and for the options of a measurement (``tokens``, ``seqlen``) without its text.
    """
    if text is None:
        if tokens is not None or seqlen is not None:
            raise UsageError(f"{arg('max_tokens')} and {arg('seqlen')} belong to {arg('measure')}; add it")
        return stats
    if stats is not None:
        raise UsageError(f"{arg('stats')} and {arg('measure')} are two kinds of sensitivity; give one of them")
    record = out.with_name(f"{out.name}.measured.jsonl")
    return Measurement(text, record, DEFAULT_TOKENS if tokens is None else tokens, seqlen)


def measure(
    source: Source,
    groups: Sequence[Group],
    measurement: Measurement,
    *,
    shown: bool = False,
    begin: Callable[[Sequence[str]], None] = lambda notes: None,
) -> tuple[dict[tuple[str, str], float], str]:
    """(the cost of every option but keep, what the costs are). ``shown``: with a progress bar; ``begin`` is called when
    all is checked, with lines about the text's rows.

    UsageError for a text or a record that does not belong here, CheckpointError for a model that cannot be run.
    """
    path = source.reader.path
    if measurement.tokens < 2:
        raise UsageError(f"{arg('max_tokens', measurement.tokens)}: expected 2 or more")
    config = read_config(path)
    if measurement.seqlen is not None:
        if measurement.seqlen < 2:
            raise UsageError(f"{arg('seqlen', measurement.seqlen)}: expected 2 or more")
        check_length(config, measurement.seqlen)
    text = read_text(measurement.text, lambda: load_tokenizer(path), max_tokens=measurement.tokens)
    window = measurement.seqlen or min(default_length(config, path), len(text.tokens))
    header = {
        "version": VERSION,
        "model": source.reader.fingerprint(),
        "tokens": text.sha256,
        "window": window,
        "begin": text.begin,
        "measure": "mean KL, one group at a time",
    }
    measured = _read_record(measurement.record, header)
    todo = [(g, o.scheme) for g in groups for o in g.options if o.scheme and (g.id, o.name) not in measured]
    begin(text.notes)
    if todo:
        model = load(path, packed=False, dtype=torch.float32, activations="none")
        reference = KeptLogits(model, text.tokens, window, begin=text.begin)
        bar = counting_bar(len(todo) + len(measured), "measurements", shown=shown, done=len(measured))
        with open(measurement.record, "a", encoding="utf-8") as file, bar as advance:
            if not measured and file.tell() == 0:
                _append(file, header)
            for group, scheme in todo:
                with _quantized(model, source, group, scheme):
                    scores = score(model, text.tokens, window=window, begin=text.begin, reference=reference)
                assert scores.kl is not None
                kl = float(scores.kl.double().mean())
                measured[(group.id, scheme.name)] = max(kl, 0.0)
                _append(file, {"group": group.id, "scheme": scheme.name, "kl": kl})
                advance(1, f"{group.id} in {scheme.name}")
    costs = {(g.id, o.name): measured[(g.id, o.name)] for g in groups for o in g.options if o.scheme is not None}
    name = measurement.text.name
    return costs, f"mean KL to the float model on {len(text.tokens)} tokens of {name}, one group at a time (measured)"


def _append(file: Any, entry: Mapping[str, Any]) -> None:
    file.write(json.dumps(entry) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _read_record(path: Path, header: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The measurements of an earlier run; a torn last line is cut off. UsageError where the file is of another run."""
    if not path.exists():
        return {}
    try:
        raw = read_regular(path, limit=MAX_JSON_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; name another file") from None
    whole = raw[: raw.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        same = not lines or lines[0] == header
        measured = {(str(e["group"]), str(e["scheme"])): max(float(e["kl"]), 0.0) for e in lines[1:]}
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{path} is no record of measurements, or damaged; move it away, or name another file"
        ) from None
    if not same:
        raise UsageError(f"{path} holds measurements of another model, text or window; remove it, or name another file")
    if whole != raw:
        os.truncate(path, len(whole))
    return measured


@contextmanager
def _quantized(model: Any, source: Source, group: Group, scheme: Scheme) -> Iterator[None]:
    """Meanwhile the group's weights in the model are those that the scheme decodes to."""
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        try:
            for unit in group.units:
                weights = [SourceRows(source, m.source, shape=m.shape, cache=True) for m in unit.members]
                for member, weight, decoded in zip(unit.members, weights, _decoded(weights, unit, scheme), strict=True):
                    original = weight.rows(0, member.shape[0]).float()
                    place = find_place(model, member, original)
                    saved.append((place, original))
                    place.copy_(decoded)
            yield
        finally:
            for place, original in saved:
                place.copy_(original)


def _decoded(weights: Sequence[SourceRows], unit: Unit, scheme: Scheme) -> list[torch.Tensor]:
    weights_decoded = [torch.empty(member.shape) for member in unit.members]

    def write_rows(member: int, row: int, q: QTensor) -> None:
        weights_decoded[member][row : row + q.shape[0]] = q.dequantize()

    quantize_as(weights, unit, scheme, write_rows)
    return weights_decoded
