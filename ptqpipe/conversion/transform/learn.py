"""Rotations that are learned, one unit after another: the residual stream, and the values of each layer.

A unit is learned from pairs of inputs and gradients that statistics hold, those of all its layers in memory at once,
and is kept in the journal as it is found: a run that is continued learns the others. Which units there are, and what
they take, is decided from headers.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.calibration.statistics import Statistics, of_all_experts
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.plan import block_of
from ptqpipe.conversion.transform.weights import Weights, input_quantizer
from ptqpipe.errors import NumericsError, UsageError, arg
from ptqpipe.models.folded import encoded
from ptqpipe.models.folding import STREAM, Edge, Matrix, Norm, Structure, turns
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.kernels import cpu_library
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.quantization.transforms import BATCH, Learned, Reader, Rounding, learn
from ptqpipe.run.machine import BASE_BYTES, WORKER_BYTES, Machine
from ptqpipe.runtime.input_quantizers import GROUP

ELEMENTS = 1 << 29  # numbers of all pairs together: of more, tokens are left out
LEAST = 256  # tokens that stay whatever they take
COARSE = 0.09  # the floor of local steps of E2M1: its lowest step, 0.5 / 6 of the maximum, against those of E4M3
TEMPORARIES = 16  # float32 numbers that a thread holds for each one of a step's inputs: at most 12 were measured
STATES = 16  # float64 numbers that are held for each one of the matrices: gradients, Adam's moments, what is tried


@dataclass(frozen=True, slots=True)
class Input:
    """One input of layers that is rotated: the edge it lies on, and the module by which statistics know it."""

    edge: Edge
    module: str


@dataclass(frozen=True, slots=True)
class LearningUnit:
    """What is learned together.

    transform  the rotation whose matrices these are
    key        theirs among the ``matrices`` that its ``fold`` takes
    inputs     those that have pairs; none where nothing that reads them is quantized
    without    modules whose inputs have no pairs: they are rotated, but do not count
    count      how many matrices there are, of ``block`` rows each
    """

    transform: str
    key: str
    edges: tuple[Edge, ...]
    inputs: tuple[Input, ...]
    without: tuple[str, ...]
    count: int
    block: int

    @property
    def id(self) -> str:
        return f"learn:{self.transform}:{self.key}"

    @property
    def title(self) -> str:
        return "residual stream" if self.key == STREAM else self.key

    @property
    def place(self) -> dict[str, Any]:
        """What is rotated, as entries name it: without an edge the residual stream."""
        edge = {} if self.key == STREAM else {"edge": self.key}
        return {"transform": self.transform, **edge, "block": self.block}

    @property
    def most_tokens(self) -> int:
        """Of how many tokens each input's pairs are taken, at most."""
        columns = sum(edge.channels * edge.repeat for edge in self.edges)
        return max(LEAST, ELEMENTS // max(1, 2 * columns))


def learning_units(
    names: Sequence[str], structure: Structure, statistics: Statistics, options: TransformOptions
) -> tuple[LearningUnit, ...]:
    """What is to be learned, in the order of the transforms and layers.

    UsageError where the statistics lack the pairs of a whole unit, or have those of another model.
    """
    fmt = get_scheme(options.format).fmt
    units = []
    for name in names:
        block = block_of(name, options, structure)
        if name == "rotate_residual":
            edges = tuple(edge for edge in structure.edges if edge.kind == "norm")
            units.append(_unit(name, STREAM, edges, structure.hidden, block, statistics, fmt))
            continue
        for edge in structure.edges:
            if edge.kind == "value" and isinstance(edge.producer, Matrix):
                units.append(_unit(name, edge.id, (edge,), edge.channels, block, statistics, fmt))
    return tuple(units)


def _unit(
    name: str, key: str, edges: tuple[Edge, ...], channels: int, block: int, statistics: Statistics, fmt: Format
) -> LearningUnit:
    inputs, without = [], []
    for edge in edges:
        for module in _modules(edge, statistics, fmt):
            shape, wanted = statistics.pair_shape(module), edge.channels * edge.repeat
            if shape is None:
                without.append(module)
            elif shape[1] != wanted or not shape[0]:
                raise UsageError(
                    f"{statistics.path} has pairs {list(shape)} of '{module}', expected {wanted} columns; calibrate "
                    "this model"
                )
            else:
                inputs.append(Input(edge, module))
    if without and not inputs:
        raise UsageError(
            f"{statistics.path} has no pairs of '{without[0]}', which {arg('learn')} needs; calibrate again with "
            f"{arg('moments', 'diagonal,pairs')}"
        )
    return LearningUnit(name, key, edges, tuple(inputs), tuple(without), channels // block, block)


def _modules(edge: Edge, statistics: Statistics, fmt: Format) -> list[str]:
    """One module for each input that what reads an edge has; experts of a layer have one together."""
    modules = [_module(member, statistics) for member in edge.consumers if member.quantized and fmt.fits(member.shape)]
    return list({of_all_experts(statistics.key(module)): module for module in reversed(modules)}.values())


def _module(member: Matrix, statistics: Statistics) -> str:
    return next((name for name in member.modules if name in statistics.modules), member.modules[0])


def learning_bytes(units: Sequence[LearningUnit], statistics: Statistics) -> tuple[int, int]:
    """(bytes that are held while the largest unit is learned, what each thread needs beside them)."""
    shared, each = 0, WORKER_BYTES
    for unit in units:
        shapes = [shape for one in unit.inputs if (shape := statistics.pair_shape(one.module)) is not None]
        kept = sum(min(tokens, unit.most_tokens) * columns * 2 * 2 for tokens, columns in shapes)
        read = max((tokens * columns * 2 for tokens, columns in shapes), default=0)
        shared = max(shared, kept + 2 * read + unit.count * unit.block**2 * 8 * STATES)
        each = max([each, *(BATCH * columns * 4 * TEMPORARIES for _, columns in shapes)])
    return shared, each


def learn_units(
    units: Sequence[LearningUnit],
    weights: Weights,
    statistics: Statistics,
    options: TransformOptions,
    *,
    machine: Machine,
    advance: Callable[[float, str], None],
    keep: Callable[[LearningUnit, Mapping[str, Any]], None],
) -> None:
    """Learns one unit after another.

    advance  takes of how many inputs a step is done, and of what
    keep     takes each unit with its entry of the journal, as it is found

    NumericsError where pairs are not finite.
    """
    scheme = get_scheme(options.format)
    quantize = input_quantizer(scheme.activation)
    assert quantize is not None  # `plan.check_options`
    rounding = Rounding(quantize, GROUP.get(scheme.activation) or 0, COARSE if scheme.activation.four_bits else 0.0)
    shared, each = learning_bytes(units, statistics)
    threads = max(1, min(machine.workers, (machine.memory_bytes - BASE_BYTES - shared) // each))
    products = torch.bfloat16 if cpu_library.multiplies_bf16() else torch.float32
    for unit in units:
        if not unit.inputs:  # nothing that is quantized
            eye = torch.eye(unit.block, dtype=torch.float64).expand(unit.count, unit.block, unit.block)
            keep(unit, {"matrices": encoded(eye), "record": None})
            continue
        readers = [_reader(one, unit, weights, statistics) for one in unit.inputs]

        def step(unit: LearningUnit = unit) -> None:
            advance(len(unit.inputs), unit.title)

        learned = learn(
            readers, count=unit.count, block=unit.block, rounding=rounding, steps=options.learn, threads=threads,
            products=products, stepped=step,
        )  # fmt: skip
        keep(unit, {"matrices": encoded(learned.matrices), "record": _entry(unit, learned)})


def _reader(one: Input, unit: LearningUnit, weights: Weights, statistics: Statistics) -> Reader:
    """What reads an edge, before the rotation and, behind a norm, without its weight."""
    edge = one.edge
    gain = torch.ones(edge.channels)
    if isinstance(edge.producer, Norm):
        gain = (weights.whole(edge.producer.weight) + edge.producer.offset).float()
    pairs = statistics.pairs(one.module)
    assert pairs is not None  # `_unit`
    stride = -(-len(pairs[0]) // unit.most_tokens)
    x, h = pairs if stride == 1 else (each[::stride].clone() for each in pairs)  # a view keeps all of them in memory
    if not bool(torch.isfinite(x).all() and torch.isfinite(h).all()):
        raise NumericsError(f"{statistics.path} has NaN or inf for '{one.module}'; calibrate again")
    return Reader(x, h, turns(edge, unit.block), gain[edge.channel_of()])


def _entry(unit: LearningUnit, learned: Learned) -> dict[str, Any]:
    """What the record says: the loss (of KL divergence, in nats a token) without, with Hadamard and with these."""
    return {
        **unit.place,
        "plain_error": learned.plain_error,
        "hadamard_error": learned.hadamard_error,
        "error": learned.error,
        "sha256": hashlib.sha256(learned.matrices.contiguous().numpy().tobytes()).hexdigest(),
        **({"without_pairs": list(unit.without)} if unit.without else {}),
    }
