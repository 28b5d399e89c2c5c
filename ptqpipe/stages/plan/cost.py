"""What each scheme costs each group in accuracy: estimated from the weights, or measured with the model.

*Estimated*: every scheme is tried with the searches that convert runs. For a group g with weights m of roles r (each
role's weights in one group, the experts of an MLP, count as their mean):

    data-free    cost = sum_r mean_m ||W - What||^2 / E_r          E_r: mean ||W||^2 of the weights of that role
    statistics   cost = sum_r mean_m E||(W - What) x||^2 / E||W x||^2

with the expectation from the full, block or diagonal second moment of the input, the richest that all weights have.
Data-free compares weights of one role by their absolute error, since the layers of one role see inputs of one kind.
A format that quantizes the inputs adds what that does to the output: the relative error of normal numbers in that
format, times E||W x||^2 of inputs that do not depend on each other. It counts INPUTS times, since the same input goes
into several weights and all of their rows, and more where codes come by error feedback, which leaves GPTQ_SHARE of the
weights' part and all of the inputs'.

*Measured*: the KL divergence to the float model with that group alone quantized. The model is loaded once, in float32;
a group's weights are replaced by their decode, the text is scored, and the weights are put back. Each number goes to a
JSON-lines file when it is known, so an interrupted run continues. Inputs of linear layers stay as they are: only the
weights' part of the cost is measured.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ptqpipe.algorithms import gathered_bytes, output_error
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.evaluation.kept_logits import KeptLogits
from ptqpipe.evaluation.scores import score
from ptqpipe.evaluation.text import read_text
from ptqpipe.inputs import InputStatistics
from ptqpipe.plan import Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.quantities import option_size, option_size_above
from ptqpipe.regular_file import MAX_JSON_BYTES, read_regular
from ptqpipe.runtime.activations import InputQuantizer
from ptqpipe.runtime.find_weight import find_place
from ptqpipe.runtime.loading import default_length, load_model, load_tokenizer, read_config
from ptqpipe.schemes import Activation, Scheme
from ptqpipe.source import Source, SourceRows
from ptqpipe.stages.common import (
    BASE_BYTES,
    WORKER_BYTES,
    Machine,
    MemoryPool,
    counting_bar,
    one_thread_each,
    role_of,
)
from ptqpipe.stages.plan.units import Group, quantize_as
from ptqpipe.statistics import BLOCK, Statistics

Costs = Mapping[tuple[str, str], float]
"""(group id, option name) -> cost. Keeping costs nothing and is left out."""

CACHE_BYTES = 256 << 20  # of a unit; a larger one is read as often as its passes need it
# KL for each unit of output error by inputs, over that by weights: 2.3 in NVFP4, 3.2 in MXFP4, 3 in FP8 (bench-4m).
INPUTS = 3.0
GPTQ_SHARE = 0.2  # of the KL of nearest codes: 0.18 to 0.21 with data, nvfp4 and mxfp4a16 in docs/quality.md
MOMENTS = ("full_moment", "block_moment", "second_moment")


@dataclass(frozen=True, slots=True)
class _Error:
    """One weight at one scheme: its error and what it is relative to."""

    group: str
    scheme: str
    role: str
    weight: str
    error: float
    signal: float


def choose_moment(stats: Statistics, groups: Iterable[Group]) -> str:
    """The richest moment that every weight has. UsageError where one has no statistics at all."""
    modules = [member.module for group in groups for member in group.members]
    for moment in MOMENTS:
        if all(stats.has(module, moment) for module in modules):
            return moment
    lost = next(module for module in modules if not stats.has(module, "second_moment"))
    raise UsageError(f"{stats.path} has no statistics of '{lost}'; calibrate this model")


def estimate(
    source: Source,
    groups: Sequence[Group],
    *,
    stats: Statistics | None,
    machine: Machine,
    follows: bool = False,
) -> Costs:
    """The cost of every option but keep.

    follows  whether codes will come by error feedback: inputs then count more

    NumericsError for damaged weights, UsageError where one unit alone needs more than the machine's memory.
    """
    moment = "" if stats is None else choose_moment(stats, groups)
    jobs = [(group, unit) for group in groups for unit in group.units]
    if not jobs:
        return {}
    needs = {unit.id: _bytes(group, unit, stats, moment) for group, unit in jobs}
    most = max(needs, key=lambda name: needs[name])
    least = BASE_BYTES + WORKER_BYTES + needs[most]
    if least > machine.memory_bytes:
        raise UsageError(
            f"--max-memory {option_size(machine.memory_bytes)} is too small for {most}; give --max-memory "
            f"{option_size_above(least)}"
        )
    share = machine.divide_memory(0, len(jobs), reserved_bytes=needs[most])
    memory = MemoryPool(share.pool_bytes)

    def work(job: tuple[Group, Unit]) -> list[_Error]:
        with memory.reserve(needs[job[1].id]):
            return _unit_errors(source, *job, stats=stats, moment=moment, share=GPTQ_SHARE if follows else 1.0)

    errors: list[_Error] = []
    with (
        counting_bar(len(jobs), "units", shown=machine.progress, title="errors") as advance,
        one_thread_each(),
        ThreadPoolExecutor(max_workers=share.workers) as pool,
    ):
        for (_, unit), found in zip(jobs, pool.map(work, jobs), strict=True):
            errors += found
            advance(1, unit.id)
    return _sum(errors, relative=stats is not None)


def _bytes(group: Group, unit: Unit, stats: Statistics | None, moment: str) -> int:
    """About how many bytes a unit takes besides what every worker has: its kept weights and its moments."""
    shapes = [member.shape for member in unit.members]
    formats = [option.scheme.fmt for option in group.options if option.scheme is not None]
    whole = [gathered_bytes(shapes, fmt, element_bytes=4) for fmt in formats if fmt.one_scale]
    weights = (unit.elements * 4 if _cached(unit) else 0) + max(whole, default=0)
    if stats is None:
        return weights
    columns = {stats.key(member.module): member.shape[1] for member in unit.members}
    width = {"full_moment": 0, "block_moment": BLOCK, "second_moment": 1}[moment]
    return weights + sum(4 * k * (width or k) for k in columns.values())


def _cached(unit: Unit) -> bool:
    return unit.elements * 4 <= CACHE_BYTES


def _unit_errors(
    source: Source, group: Group, unit: Unit, *, stats: Statistics | None, moment: str, share: float
) -> list[_Error]:
    weights = [SourceRows(source, m.source, shape=m.shape, cache=_cached(unit)) for m in unit.members]
    inputs = _inputs(stats, [member.module for member in unit.members], moment)
    found = []
    for option in group.options:
        if option.scheme is None:
            continue
        noise = INPUTS * input_noise(option.scheme.activation) / share
        for member, error, signal in _scheme_errors(weights, inputs, unit, option.scheme, noise):
            found.append(_Error(group.id, option.name, role_of(member), member, error, signal))
    return found


def _inputs(stats: Statistics | None, modules: Sequence[str], moment: str) -> list[torch.Tensor | None]:
    """Of every module; what several modules share is read once."""
    if stats is None:
        return [None] * len(modules)
    first = {stats.key(module): module for module in reversed(modules)}
    found = {key: _input(stats, module, moment) for key, module in first.items()}
    return [found[stats.key(module)] for module in modules]


def _input(stats: Statistics, module: str, moment: str) -> torch.Tensor:
    found: InputStatistics = stats.of(module, block=moment == "block_moment", full=moment == "full_moment")
    value = getattr(found, moment)
    if not isinstance(value, torch.Tensor) or not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"the {moment} of '{module}' in {stats.path} is not finite; calibrate again")
    return value


def _scheme_errors(
    weights: Sequence[SourceRows],
    inputs: Sequence[torch.Tensor | None],
    unit: Unit,
    scheme: Scheme,
    noise: float,
) -> list[tuple[str, float, float]]:
    """(weight, error, signal) of each member; ``noise`` is the relative squared error of its inputs."""
    sums: dict[tuple[int, int], tuple[float, float]] = {}

    def take(member: int, row: int, q: QTensor) -> None:  # rows that come again replace what they gave before
        h = inputs[member]
        if h is not None:
            w = weights[member].rows(row, row + q.shape[0]).float()
            by_inputs = noise * output_error(w, _diagonal(h)) if noise else 0.0
            sums[(member, row)] = (output_error(q.dequantize() - w, h) + by_inputs, output_error(w, h))

    result = quantize_as(weights, unit, scheme, take)
    if inputs[0] is None:
        errors = [(error.squared_error + noise * error.energy, error.energy) for error in result.errors]
    else:
        errors = []
        for index in range(len(unit.members)):
            rows = [value for (member, _), value in sorted(sums.items()) if member == index]
            errors.append((sum(e for e, _ in rows), sum(s for _, s in rows)))
    return [(m.weight, *pair) for m, pair in zip(unit.members, errors, strict=True)]


def _diagonal(moment: torch.Tensor) -> torch.Tensor:
    """The second moment [K] of each input, from what `output_error` takes."""
    return moment if moment.dim() == 1 else torch.diagonal(moment, dim1=-2, dim2=-1).flatten()


@cache
def input_noise(activation: Activation) -> float:
    """The squared error of normally distributed inputs that are quantized so, relative to their squares: 0 to 1."""
    if activation is Activation.NONE:
        return 0.0
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    largest = {Activation.NVFP4_STATIC_GLOBAL: 6.0 * 448.0, Activation.FP8_TENSOR_STATIC: 448.0}.get(activation)
    quantizer = InputQuantizer(activation, None if largest is None else float(x.abs().amax()) / largest)
    return float((quantizer(x) - x).double().square().sum() / x.double().square().sum())


def _sum(errors: Sequence[_Error], *, relative: bool) -> dict[tuple[str, str], float]:
    """Costs of groups from errors of weights; ``relative``: to each weight's own signal, else to its role's mean."""
    signals: dict[str, dict[str, float]] = defaultdict(dict)
    for e in errors:
        signals[e.role][e.weight] = e.signal
    mean = {role: sum(of.values()) / len(of) for role, of in signals.items()}
    parts: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for e in errors:
        scale = e.signal if relative else mean[e.role]
        parts[(e.group, e.scheme)][e.role].append(max(0.0, e.error) / scale if scale > 0 else 0.0)
    return {key: sum(sum(v) / len(v) for v in roles.values()) for key, roles in parts.items()}


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


def measure(
    source: Source,
    groups: Sequence[Group],
    measurement: Measurement,
    *,
    shown: bool = False,
    begin: Callable[[], None] = lambda: None,
) -> tuple[dict[tuple[str, str], float], str]:
    """(the cost of every option but keep, what the costs are). ``shown``: with a progress bar; ``begin`` is called when
    all is checked.

    UsageError for a text or a record that does not belong here, CheckpointError for a model that cannot be run.
    """
    path = source.reader.path
    if measurement.tokens < 2:
        raise UsageError(f"--max-tokens {measurement.tokens}: expected 2 or more")
    text = read_text(measurement.text, lambda: load_tokenizer(path), max_tokens=measurement.tokens)
    window = measurement.seqlen or min(default_length(read_config(path)), len(text.tokens))
    header = {
        "version": VERSION,
        "model": source.reader.fingerprint(),
        "tokens": text.sha256,
        "window": window,
        "measure": "mean KL, one group at a time",
    }
    known = _read_record(measurement.record, header)
    todo = [(g, o.scheme) for g in groups for o in g.options if o.scheme and (g.id, o.name) not in known]
    begin()
    if todo:
        model = load_model(path, activations="none")
        reference = KeptLogits(model, text.tokens, window)
        bar = counting_bar(len(todo) + len(known), "measurements", shown=shown, done=len(known))
        with open(measurement.record, "a", encoding="utf-8") as file, bar as advance:
            if not known and file.tell() == 0:
                _append(file, header)
            for group, scheme in todo:
                with _quantized(model, source, group, scheme):
                    found = score(model, text.tokens, window=window, reference=reference)
                assert found.kl is not None
                kl = float(found.kl.double().mean())
                known[(group.id, scheme.name)] = max(kl, 0.0)
                _append(file, {"group": group.id, "scheme": scheme.name, "kl": kl})
                advance(1, f"{group.id} in {scheme.name}")
    costs = {(g.id, o.name): known[(g.id, o.name)] for g in groups for o in g.options if o.scheme is not None}
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
        known = {(str(e["group"]), str(e["scheme"])): max(float(e["kl"]), 0.0) for e in lines[1:]}
    except (ValueError, KeyError, TypeError):
        same, known = False, {}
    if not same:
        raise UsageError(f"{path} holds measurements of another model, text or window; remove it, or name another file")
    if whole != raw:
        os.truncate(path, len(whole))
    return known


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
    found = [torch.empty(member.shape) for member in unit.members]

    def take(member: int, row: int, q: QTensor) -> None:
        found[member][row : row + q.shape[0]] = q.dequantize()

    quantize_as(weights, unit, scheme, take)
    return found
