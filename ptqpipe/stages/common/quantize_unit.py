"""A unit quantized by its rule: what convert writes, tune starts from, verify repeats and a dry run times.

Knows rules, schemes and what is known of inputs; must not know where weights come from or rows go.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ptqpipe.algorithms import calibrated, rtn, stored
from ptqpipe.algorithms.recheck import Recheck
from ptqpipe.errors import NumericsError, one_line
from ptqpipe.plan import Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.rounding import Rounding
from ptqpipe.stages.common import low_rank
from ptqpipe.stages.common.moments import inputs_of, options_of
from ptqpipe.statistics import KnownInputs


@dataclass(frozen=True, slots=True)
class Quantized:
    """What quantizing a unit gave, and what the record says of how each of its weights was."""

    result: rtn.UnitResult
    told: tuple[Mapping[str, Any], ...]


def quantize_unit(
    unit: Unit,
    weights: Sequence[rtn.Weight],
    *,
    statistics: KnownInputs | None = None,
    learned: Sequence[QTensor] | None = None,
    sink: rtn.Sink,
    device: torch.device | None = None,
) -> Quantized:
    """Quantizes a unit by its rule, low-rank parts and all, and finds a sample of its blocks again by brute force.

    statistics  of a rule that needs them; ``moments.open_statistics`` has looked
    learned     codes that were found before, one of each weight: taken as they are

    Raises NumericsError, naming the weight, where weights or moments are unusable or a block is not what was promised.
    """
    with _naming(unit):
        return _quantize(unit, weights, statistics=statistics, learned=learned, sink=sink, device=device)


@contextmanager
def _naming(unit: Unit) -> Iterator[None]:
    """A NumericsError that names none of the unit's weights, since one below knows no names, gets all of them."""
    try:
        yield
    except NumericsError as error:
        names = [member.weight for member in unit.members]
        if any(one_line(name) in str(error) for name in names):
            raise
        raise NumericsError(f"{' and '.join(names)}: {error}") from None


def _quantize(
    unit: Unit,
    weights: Sequence[rtn.Weight],
    *,
    statistics: KnownInputs | None,
    learned: Sequence[QTensor] | None,
    sink: rtn.Sink,
    device: torch.device | None,
) -> Quantized:
    held: low_rank.Chunks = {}

    def hold(member: int, row: int, q: QTensor) -> None:
        held[(member, row)] = q

    simple = unit.scheme.low_rank is None
    keys = [member.key for member in unit.members]
    sample = Recheck(weights, unit.scheme.fmt, names=keys, sink=sink if simple else hold)
    codes = choose_codes(unit, weights, statistics=statistics, learned=learned, sink=sample.take, device=device)
    counts = sample.check(codes.result.promises)
    told = tuple({**outcome, "rechecked": count} for outcome, count in zip(codes.told, counts, strict=True))
    if simple:
        return Quantized(codes.result, told)
    errors, facts = low_rank.correct_unit(unit, weights, held, codes.result.errors, statistics=statistics, sink=sink)
    told = tuple({**outcome, "low_rank": dict(own)} for outcome, own in zip(told, facts, strict=True))
    return Quantized(replace(codes.result, errors=errors), told)


def choose_codes(
    unit: Unit,
    weights: Sequence[rtn.Weight],
    *,
    statistics: KnownInputs | None = None,
    learned: Sequence[QTensor] | None = None,
    sink: rtn.Sink,
    device: torch.device | None = None,
) -> Quantized:
    """`quantize_unit` but for the low-rank parts and the second look."""
    rule, fmt = unit.rule, unit.scheme.fmt
    names = [member.weight for member in unit.members]
    if learned is not None:
        result = stored.quantize(weights, learned, fmt, names=names, sink=sink)
        return Quantized(result, tuple({"algorithm": "learned"} for _ in names))
    search_global = rule.global_scale == "search"
    if not rule.calibrated:
        result = rtn.quantize(
            weights, fmt, names=names, search=rule.search, search_global=search_global, sink=sink, device=device
        )
        return Quantized(result, tuple({} for _ in names))
    assert statistics is not None  # see above
    options = options_of(rule)
    found = calibrated.quantize(
        weights,
        fmt,
        names=names,
        inputs=inputs_of(unit, statistics, options),
        options=options,
        search=rule.search,
        search_global=search_global,
        sink=sink,
        device=device,
    )
    told = {"algorithm": rule.algorithm, "weighting": rule.weighting}
    return Quantized(found.unit, tuple(told | asdict(outcome) for outcome in found.outcomes))


def learned_codes(unit: Unit, rounding: Rounding | None) -> list[QTensor] | None:
    """The learned codes of every weight of a unit; None where there are none."""
    if rounding is None or not rounding.has(unit.members[0].key):
        return None
    return [rounding.of(member.key, unit.scheme.fmt, shape=member.shape) for member in unit.members]
