"""What each scheme costs each group, measured: the KL divergence to the float model with that group alone quantized.

The model is loaded once, in float32; a group's weights are replaced by their decode, the text is scored, and the
weights are put back. Each number goes to a JSON-lines file when it is known, so an interrupted run continues. Inputs of
linear layers stay as they are: the weights' share of the cost is measured.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptqpipe.algorithms import rtn
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.evaluation.scores import ModelLogits, Window, batches, score, vocabulary_of, windows
from ptqpipe.evaluation.text import read_text
from ptqpipe.plan import Member, Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.regular_file import MAX_JSON_BYTES, read_regular
from ptqpipe.runtime.loading import default_length, load_model, load_tokenizer, read_config
from ptqpipe.schemes import Scheme
from ptqpipe.source import Source, SourceRows
from ptqpipe.stages.plan.units import Group

VERSION = 1
DEFAULT_TOKENS = 4096
MAX_REFERENCE_BYTES = 8 << 30  # of the float model's logits, which stay in memory


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to measure on, and where the numbers are kept.

    text     a .txt, .jsonl or .parquet file
    record   the JSON-lines file: continued where it is of the same run
    """

    text: Path
    record: Path
    tokens: int = DEFAULT_TOKENS
    window: int | None = None
    on_measured: Callable[[int, int], None] | None = None  # (done, of)


def measure(
    source: Source, groups: Sequence[Group], measurement: Measurement
) -> tuple[dict[tuple[str, str], float], str]:
    """(the cost of every option but keep, what the costs are).

    UsageError for a text or a record that does not belong here, CheckpointError for a model that cannot be run.
    """
    path = source.reader.path
    if measurement.tokens < 2:
        raise UsageError(f"--max-tokens {measurement.tokens}: expected 2 or more")
    text = read_text(measurement.text, lambda: load_tokenizer(path), max_tokens=measurement.tokens)
    window = measurement.window or min(default_length(read_config(path)), len(text.tokens))
    header = {
        "version": VERSION,
        "model": source.reader.fingerprint(),
        "tokens": text.sha256,
        "window": window,
        "measure": "mean KL, one group at a time",
    }
    known = _read_record(measurement.record, header)
    todo = [(g, o.scheme) for g in groups for o in g.options if o.scheme and (g.id, o.name) not in known]
    if todo:
        model = load_model(path, activations="none")
        reference = _Reference(model, text.tokens, window)
        with open(measurement.record, "a", encoding="utf-8") as file:
            if not known and file.tell() == 0:
                _append(file, header)
            for done, (group, scheme) in enumerate(todo):
                with _Quantized(model, source, group, scheme):
                    found = score(model, text.tokens, window=window, reference=reference)
                assert found.kl is not None
                kl = float(found.kl.double().mean())
                known[(group.id, scheme.name)] = max(kl, 0.0)
                _append(file, {"group": group.id, "scheme": scheme.name, "kl": kl})
                if measurement.on_measured is not None:
                    measurement.on_measured(done + 1, len(todo))
    costs = {(g.id, o.name): known[(g.id, o.name)] for g in groups for o in g.options if o.scheme is not None}
    name = measurement.text.name
    return costs, f"mean KL to the float model on {len(text.tokens)} tokens of {name}, one group at a time (measured)"


def _append(file: Any, entry: Mapping[str, Any]) -> None:
    file.write(json.dumps(entry) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _read_record(path: Path, header: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """What is known already; a torn last line is cut off. UsageError where the file is of another run."""
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
        known = {(str(e["group"]), str(e["scheme"])): max(float(e["kl"]), 0.0) for e in lines[1:]}
    except (ValueError, KeyError, TypeError):
        same, known = False, {}
    if not same:
        raise UsageError(f"{path} holds measurements of another model, text or window; remove it, or name another file")
    if whole != raw:
        os.truncate(path, len(whole))
    return known


class _Reference:
    """The float model's logits, computed once and kept: what `score` compares with."""

    def __init__(self, model: Any, tokens: torch.Tensor, window: int) -> None:
        self.vocabulary = vocabulary_of(model) or 0
        needed = 4 * self.vocabulary * len(tokens)
        if needed > MAX_REFERENCE_BYTES:
            most = MAX_REFERENCE_BYTES // (4 * self.vocabulary)
            raise UsageError(f"logits of {len(tokens)} tokens take {needed >> 30} GiB; use --max-tokens {most} or less")
        give = ModelLogits(model)
        found = windows(len(tokens), window)
        self._kept = {batch[0].start: give(batch, tokens) for batch in batches(found, vocabulary=self.vocabulary)}

    def __call__(self, batch: Sequence[Window], tokens: torch.Tensor, /) -> torch.Tensor:
        return self._kept[batch[0].start]


class _Quantized:
    """While entered, the group's weights in the model are those that the scheme decodes to."""

    def __init__(self, model: Any, source: Source, group: Group, scheme: Scheme) -> None:
        self._model, self._source, self._group, self._scheme = model, source, group, scheme
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> None:
        for unit in self._group.units:
            weights = [SourceRows(self._source, m.source, shape=m.shape, cache=True) for m in unit.members]
            for member, weight, decoded in zip(
                unit.members, weights, _decoded(weights, unit, self._scheme), strict=True
            ):
                original = weight.rows(0, member.shape[0]).float()
                place = find_place(self._model, member, original)
                self._saved.append((place, original))
                with torch.no_grad():
                    place.copy_(decoded)

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for place, original in self._saved:
                place.copy_(original)


def _decoded(weights: Sequence[SourceRows], unit: Unit, scheme: Scheme) -> list[torch.Tensor]:
    found = [torch.empty(member.shape) for member in unit.members]

    def take(member: int, row: int, q: QTensor) -> None:
        found[member][row : row + q.shape[0]] = q.dequantize()

    rtn.quantize(
        weights,
        scheme.fmt,
        names=[member.weight for member in unit.members],
        search="exact",
        search_global=True,
        sink=take,
    )
    return found


def find_place(model: Any, member: Member, w: torch.Tensor) -> torch.Tensor:
    """The view of the model's parameter that holds this weight, found by its values: models merge experts in their own
    ways. CheckpointError where none does."""
    for name, parameter in _near(model, member.module):
        for view in _views(name, parameter.detach(), w.shape, member):
            if view.shape == w.shape and torch.equal(view, w):
                return view
    raise CheckpointError(
        f"the model has no parameter that equals {member.weight}; measure is not possible, use --stats"
    )


def _near(model: Any, module: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters below the longest prefix of the module's name that the model knows."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = model.get_submodule(".".join(parts[:end]))
        except AttributeError:
            continue
        yield from found.named_parameters()
        return


def _views(name: str, p: torch.Tensor, shape: torch.Size, member: Member) -> Iterator[torch.Tensor]:
    """Where [out, in] weights may lie in a parameter: whole, an expert, half of its rows or every other one; either
    orientation."""
    planes = [p]
    if p.dim() == 3:
        numbers = [int(part) for part in member.module.split(".") if part.isdigit()]
        planes = [p[e] for e in dict.fromkeys(reversed(numbers)) if e < p.shape[0]]
    for plane in planes:
        if plane.dim() != 2:
            continue
        for matrix in (plane, plane.t()):
            n = shape[0]
            yield matrix
            if matrix.shape[0] == 2 * n:
                yield from (matrix[:n], matrix[n:], matrix[::2], matrix[1::2])
