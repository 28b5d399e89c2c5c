"""What rotations are learned from: the inputs that statistics describe, and how much the model minds errors in them.

For each set of layers with one input, inputs are drawn from its second moments and maxima, and the weights W of the
layers give W^T diag(E[g^2]) W by blocks. In memory for all layers at once: SAMPLES of the first at most, and blocks of
the second, [K, block] of each. Must not know how matrices are found.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.errors import NumericsError, UsageError
from ptqpipe.inputs import InputStatistics
from ptqpipe.runtime.activations import GROUP
from ptqpipe.schemes import Scheme, get_scheme
from ptqpipe.stages.transform.plan import TransformOptions, block_of
from ptqpipe.stages.transform.weights import Weights, input_quantizer, inputs_of
from ptqpipe.statistics import Statistics
from ptqpipe.transforms import STREAM, Edge, Learned, Matrix, Norm, Reader, Rounding, Structure, draw, learn, turns

SAMPLES = 2048  # inputs that are drawn of each
LEAST, ELEMENTS = 256, 1 << 28  # fewer where all of them together would have more elements, but not below the least
EXPERTS = 8  # of a layer that stand for all where each has an input of its own
COARSE = 0.09  # the floor of local steps of E2M1: its lowest step, 0.5 / 6 of the maximum, against those of E4M3


@dataclass(frozen=True, slots=True)
class _Input:
    """One input: what is known of it, the layers of an edge that read it, and how many stand for it."""

    statistics: InputStatistics
    members: list[Matrix]
    share: float


def learn_rotations(
    names: Sequence[str], structure: Structure, weights: Weights, statistics: Statistics, options: TransformOptions
) -> tuple[dict[str, dict[str, torch.Tensor]], list[dict[str, Any]]]:
    """(transform -> what its ``fold`` takes as ``matrices``, an entry of the record for each that was learned).

    UsageError where the statistics lack full moments or gradients, NumericsError where they are not finite.
    """
    scheme = get_scheme(options.format)
    quantize = input_quantizer(scheme.activation)
    assert quantize is not None  # `plan.check_options`
    group = GROUP.get(scheme.activation) or 0
    rounding = Rounding(quantize, group, COARSE if scheme.activation.four_bits else 0.0)
    matrices: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    tokens = _all_tokens(structure, statistics)
    entries = []
    for name in names:
        block = block_of(name, options, structure)
        for key, edges, count in _units(name, structure, block):
            columns = sum(edge.channels * edge.repeat for edge in edges)
            samples = max(LEAST, min(SAMPLES, ELEMENTS // max(1, columns)))
            readers: list[Reader] = []
            for edge in edges:
                readers += _readers(edge, weights, statistics, scheme, block=block, samples=samples, tokens=tokens)
            if not readers:  # nothing that is quantized
                matrices[name][key] = torch.eye(block, dtype=torch.float64).expand(count, block, block)
                continue
            found = learn(readers, count=count, block=block, rounding=rounding, steps=options.learn)
            matrices[name][key] = found.matrices
            entries.append(_entry(name, key, found))
    return matrices, entries


def _units(name: str, structure: Structure, block: int) -> Iterator[tuple[str, list[Edge], int]]:
    """(key among the matrices, edges that read them, how many matrices) of what is learned together."""
    if name == "rotate_residual":
        yield STREAM, [edge for edge in structure.edges if edge.kind == "norm"], structure.hidden // block
        return
    for edge in structure.edges:
        if edge.kind == "value" and isinstance(edge.producer, Matrix):
            yield edge.id, [edge], edge.channels // block


def _all_tokens(structure: Structure, statistics: Statistics) -> int:
    """What layers saw that are no experts: the most that any edge's first layer saw."""
    first = (
        next((name for member in edge.consumers for name in member.modules if name in statistics.modules), None)
        for edge in structure.edges
    )
    return max((statistics.of(name).tokens for name in first if name is not None), default=0) or 1


def _readers(
    edge: Edge, weights: Weights, statistics: Statistics, scheme: Scheme, *, block: int, samples: int, tokens: int
) -> Iterator[Reader]:
    """What reads an edge, before the rotation and, behind a norm, without its weight. Each counts by its share of
    ``tokens``."""
    gain = torch.ones(edge.channels, dtype=torch.float64)
    if isinstance(edge.producer, Norm):
        gain = weights.whole(edge.producer.weight) + edge.producer.offset
    gain = gain[edge.channel_of()]
    for one in _inputs(edge, statistics, scheme, tokens):
        x = draw(one.statistics, samples).double()
        x = torch.where(gain == 0, 0.0, x / gain).float()
        minds = sum(_minds(member, gain, weights, statistics, block) for member in one.members)
        assert isinstance(minds, torch.Tensor)
        yield Reader(x, minds.float(), turns(edge, block), one.share)


def _inputs(edge: Edge, statistics: Statistics, scheme: Scheme, tokens: int) -> Iterator[_Input]:
    sets: dict[str, list[Matrix]] = {}
    for member in edge.consumers:
        if member.quantized and scheme.fmt.fits(member.shape):
            sets.setdefault(statistics.key(_module(member, statistics)), []).append(member)
    if not sets:
        return
    ones = torch.ones(next(iter(sets.values()))[0].shape[1], dtype=torch.float64)
    keys = list(sets)
    chosen = keys if len(keys) <= EXPERTS else [keys[i * len(keys) // EXPERTS] for i in range(EXPERTS)]
    for key in chosen:
        members = sets[key]
        if not statistics.has(_module(members[0], statistics), "full_moment"):
            raise UsageError(
                f"{statistics.path} has no full moment of '{members[0].modules[0]}', which --learn needs; calibrate "
                "again with --moments full,kl"
            )
        found = inputs_of(members[0], statistics, ones, full=True, block=False)
        yield _Input(found, members, len(keys) / len(chosen) * found.tokens / tokens)


def _minds(member: Matrix, gain: torch.Tensor, weights: Weights, statistics: Statistics, block: int) -> torch.Tensor:
    """float64 [K / block, block, block]: W^T diag(E[g^2]) W of one weight, on its diagonal of blocks."""
    module = _module(member, statistics)
    shape = weights.reader.entries[weights.origins.get(member.tensor, member.tensor)].shape[-2:]
    outputs = statistics.output_moment(module, shape[1 if member.transposed else 0])
    if outputs is None:
        raise UsageError(
            f"{statistics.path} has no gradients of '{member.modules[0]}', which --learn needs; calibrate again with "
            "--moments full,kl"
        )
    if not bool(torch.isfinite(outputs).all()):
        raise NumericsError(f"{statistics.path} has NaN or inf for '{module}'; calibrate again")
    outputs = outputs[member.start : member.start + member.shape[0]].double()
    found = torch.zeros(member.shape[1] // block, block, block, dtype=torch.float64)
    for first, rows in weights.rows(member):
        blocks = (rows * gain).reshape(len(rows), -1, block).transpose(0, 1)  # [n, rows, block]
        found += (blocks * outputs[first : first + rows.shape[0], None]).mT @ blocks
    return found


def _module(member: Matrix, statistics: Statistics) -> str:
    return next((name for name in member.modules if name in statistics.modules), member.modules[0])


def _entry(name: str, key: str, found: Learned) -> dict[str, Any]:
    """What the record says: the loss (of KL divergence, in nats a token) without, with Hadamard and with these."""
    return {
        "transform": name,
        **({"edge": key} if key != STREAM else {}),
        "block": found.matrices.shape[-1],
        "plain_error": found.plain_error,
        "hadamard_error": found.hadamard_error,
        "error": found.error,
        "sha256": hashlib.sha256(found.matrices.contiguous().numpy().tobytes()).hexdigest(),
    }
