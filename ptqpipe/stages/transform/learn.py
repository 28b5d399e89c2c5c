"""What rotations are learned from: pairs of inputs and gradients that statistics hold, of all layers in memory at once.

Must not know how matrices are found.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ptqpipe.errors import NumericsError, UsageError
from ptqpipe.formats import Format
from ptqpipe.runtime.activations import GROUP
from ptqpipe.schemes import get_scheme
from ptqpipe.stages.transform.plan import TransformOptions, block_of
from ptqpipe.stages.transform.weights import Weights, input_quantizer
from ptqpipe.statistics import Statistics, of_all_experts
from ptqpipe.transforms import STREAM, Edge, Learned, Matrix, Norm, Reader, Rounding, Structure, learn, turns

ELEMENTS = 1 << 29  # numbers of all pairs together: of more, tokens are left out
LEAST = 256  # tokens that stay whatever they take
COARSE = 0.09  # the floor of local steps of E2M1: its lowest step, 0.5 / 6 of the maximum, against those of E4M3


def learn_rotations(
    names: Sequence[str], structure: Structure, weights: Weights, statistics: Statistics, options: TransformOptions
) -> tuple[dict[str, dict[str, torch.Tensor]], list[dict[str, Any]]]:
    """(transform -> what its ``fold`` takes as ``matrices``, an entry of the record for each that was learned).

    UsageError where the statistics lack pairs, NumericsError where they are not finite.
    """
    scheme = get_scheme(options.format)
    quantize = input_quantizer(scheme.activation)
    assert quantize is not None  # `plan.check_options`
    group = GROUP.get(scheme.activation) or 0
    rounding = Rounding(quantize, group, COARSE if scheme.activation.four_bits else 0.0)
    matrices: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    entries = []
    for name in names:
        block = block_of(name, options, structure)
        for key, edges, count in _units(name, structure, block):
            columns = sum(edge.channels * edge.repeat for edge in edges)
            most = max(LEAST, ELEMENTS // max(1, 2 * columns))
            readers: list[Reader] = []
            for edge in edges:
                readers += _readers(edge, weights, statistics, scheme.fmt, block=block, most=most)
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


def _readers(
    edge: Edge, weights: Weights, statistics: Statistics, fmt: Format, *, block: int, most: int
) -> Iterator[Reader]:
    """What reads an edge, before the rotation and, behind a norm, without its weight; ``most``: tokens of each."""
    gain = torch.ones(edge.channels)
    if isinstance(edge.producer, Norm):
        gain = (weights.whole(edge.producer.weight) + edge.producer.offset).float()
    gain = gain[edge.channel_of()]
    modules = [_module(member, statistics) for member in edge.consumers if member.quantized and fmt.fits(member.shape)]
    for module in {of_all_experts(statistics.key(module)): module for module in reversed(modules)}.values():
        found = statistics.pairs(module)
        if found is None:
            raise UsageError(
                f"{statistics.path} has no pairs of '{module}', which --learn needs; calibrate again with "
                "--moments diagonal,pairs"
            )
        x, h = (each[:: -(-len(each) // most)].float() for each in found)
        if x.shape[1:] != gain.shape or not len(x):
            raise UsageError(
                f"{statistics.path} has pairs {list(x.shape)} of '{module}', expected {len(gain)} columns; calibrate "
                "this model"
            )
        if not bool(torch.isfinite(x).all() and torch.isfinite(h).all()):
            raise NumericsError(f"{statistics.path} has NaN or inf for '{module}'; calibrate again")
        yield Reader(torch.where(gain == 0, 0.0, x / gain), h * gain, turns(edge, block))


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
