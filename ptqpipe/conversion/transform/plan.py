"""What `transform` will do, decided from headers, config and statistics' headers: components, dtypes, the layout.

Everything that cannot be folded exactly is refused here, before anything is read. Knows structure and names; must not
know how factors are found.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ptqpipe.checkpoint import TensorSpec
from ptqpipe.checkpoint.dtypes import FLOAT_DTYPES, FLOATS
from ptqpipe.conversion.dequantize import WriteFloats
from ptqpipe.conversion.job import CopyTensor
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.folding import BLOCKS, ROTATIONS, Edge, Matrix, Structure, get_rotation, grouped, rotated_tensors
from ptqpipe.models.source import Source
from ptqpipe.numerics.schemes import Activation, get_scheme
from ptqpipe.quantization.transforms import SCALINGS, get_scaling, transform_names
from ptqpipe.run.machine import Job

EIGHT_BITS = (
    Activation.MXFP8,
    Activation.FP8_TOKEN,
    Activation.FP8_GROUP,
    Activation.FP8_TENSOR_STATIC,
)  # inputs in E4M3
EDGE_KINDS = ("norm", "latent", "value", "up")


@dataclass(frozen=True, slots=True)
class Component(Job):
    """Tensors that edges join: their factors depend on nothing else, so one worker finds them."""

    edges: tuple[Edge, ...]
    writers: tuple[Matrix, ...]
    embeddings: tuple[str, ...]


def check_options(options: TransformOptions, names: Sequence[str]) -> None:
    """UsageError for an option out of its range, and for scalings after a rotation."""
    if options.dtype is not None and options.dtype not in FLOATS:
        raise UsageError(f"{arg('dtype', options.dtype)} is unknown; use {', '.join(FLOATS)}")
    if options.rotation_size not in (None, *BLOCKS):
        size = arg("rotation_size", options.rotation_size)
        raise UsageError(f"{size} is no size of a rotation; use {', '.join(map(str, BLOCKS))}")
    if options.learn:
        _check_learning(options, names)
    if any(name in SCALINGS and get_scaling(name).NEEDS_QUANTIZER for name in names):
        get_scheme(options.format)
    if options.alpha is not None and not 0.0 <= options.alpha <= 1.0:
        raise UsageError(f"{arg('alpha', options.alpha)} is outside 0 .. 1")
    unknown = next((kind for kind in options.fold_at or () if kind not in EDGE_KINDS), None)
    if unknown is not None:
        raise UsageError(f"{arg('fold_at', unknown)} is unknown; use {', '.join(EDGE_KINDS)}")
    rotated = next((name for name in names if name in ROTATIONS), None)
    late = next((n for n in names if rotated and n in SCALINGS and names.index(n) > names.index(rotated)), None)
    if late is not None:
        raise UsageError(
            f"{late} after {rotated} would use statistics of channels that are rotated away; scale first, or calibrate "
            "the rotated model and transform that"
        )


def _check_learning(options: TransformOptions, names: Sequence[str]) -> None:
    """UsageError where nothing would be learned, or not what the statistics are of."""
    scaling = next((name for name in names if name in SCALINGS), None)
    if options.learn < 0:
        raise UsageError(f"{arg('learn', options.learn)} is no number of steps; expected 0 (Hadamard matrices) or more")
    if scaling is not None:
        raise UsageError(
            f"{arg('learn')} beside {scaling}: rotations are learned on statistics of the model as it is; rotate "
            f"first, then calibrate the rotated model and apply {scaling} to that"
        )
    activation = get_scheme(options.format).activation
    if not (activation.four_bits or activation in EIGHT_BITS):
        raise UsageError(
            f"{arg('learn')} lowers the error of quantized inputs, but {options.format} has none in FP4 or FP8; name "
            f"a {arg('format')} such as mxfp4, nvfp4_w4a4 or fp8"
        )


def foldable_rotations(structure: Structure, options: TransformOptions) -> tuple[list[str], list[str]]:
    """(those rotations of the options that this model allows, why not for each of the others)."""
    names, refused = [], []
    for name in transform_names(options.transforms):
        try:
            get_rotation(name).check(structure, block_of(name, options, structure), untie=options.untie)
        except UsageError as error:
            refused.append(str(error))
        else:
            names.append(name)
    return names, refused


def matrix_bytes(names: Sequence[str], structure: Structure, options: TransformOptions) -> int:
    """What the matrices of some rotations take in a record: base64 of numbers of 8 bytes."""
    values = sum(edge.channels for edge in structure.edges if edge.kind == "value")
    channels = {"rotate_residual": structure.hidden, "rotate_values": values}
    return sum(channels[name] * block_of(name, options, structure) * 8 * 4 // 3 for name in names)


def default_block(options: TransformOptions, structure: Structure) -> int:
    """Of learned rotations the largest block that divides the hidden size: the larger, the better they are. Hadamard
    matrices gain less from it."""
    dividing = [block for block in BLOCKS if structure.hidden % block == 0]
    return max(dividing, default=min(BLOCKS)) if options.learn else 32


def block_of(name: str, options: TransformOptions, structure: Structure) -> int:
    """The channels that one rotation takes together: learned ones of values stay inside a head."""
    block = options.rotation_size if options.rotation_size is not None else default_block(options, structure)
    heads = [edge.head_dim for edge in structure.edges if edge.kind == "value"]
    return math.gcd(block, *heads) if options.learn and name == "rotate_values" else block


def is_exact(names: Sequence[str], options: TransformOptions, structure: Structure) -> bool:
    """Whether every factor is a power of two that only multiplies: no norm of the form (1 + weight)."""
    if any(name in ROTATIONS for name in names):
        return False
    for name in names:
        scaling = get_scaling(name)
        if not options.power_of_two and not scaling.ALWAYS_POWERS_OF_TWO:
            return False
        if structure.norms.offset and {"norm", "latent"} & set(options.fold_at or scaling.EDGES):
            return False
    return True


def _used(structure: Structure, names: Sequence[str], options: TransformOptions) -> list[Edge]:
    kinds: set[str] = set()
    for name in names:
        if name in SCALINGS:
            kinds |= set(options.fold_at or get_scaling(name).EDGES)
        else:
            kinds |= {"value"} if name == "rotate_values" else {"norm", "final"}
    return [edge for edge in structure.edges if edge.kind in kinds]


def make_jobs(
    source: Source, structure: Structure, names: Sequence[str], *, dtype: str | None, options: TransformOptions
) -> tuple[list[WriteFloats | CopyTensor], list[Component], dict[str, str]]:
    """(how every tensor is written, those of a component together; the components; where new tensors come from), in
    the order of the source.

    dtype  of the components' tensors; None: each its own
    """
    edges = _used(structure, names, options)
    residual = "rotate_residual" in names
    writers = structure.writers if residual else ()
    embeddings = structure.embeddings if residual else ()
    sets = rotated_tensors(edges, writers, embeddings)
    tensors = dict(source.tensors)
    origins: dict[str, str] = {}
    if residual and structure.tied:
        tensors["lm_head.weight"] = source.tensors[structure.embeddings[0]]
        origins["lm_head.weight"] = structure.embeddings[0]
    jobs: list[WriteFloats | CopyTensor] = []
    components: list[Component] = []
    for number, (key, group) in enumerate(grouped(tensors, sets).items()):
        sizes = [source.reader.entries[origins.get(name, name)].nbytes for name in group]
        if key.startswith("keep:"):
            jobs.append(CopyTensor(key, number, sizes[0], group[0], _spec(group[0], tensors[group[0]], None)))
            continue
        jobs += [
            WriteFloats(f"write:{name}", number, size, _spec(name, tensors[name], dtype))
            for name, size in zip(group, sizes, strict=True)
        ]
        components.append(
            Component(
                key,
                number,
                sum(sizes),
                tuple(edge for edge in edges if edge.tensors()[0] in group),
                tuple(writer for writer in writers if writer.tensor in group),
                tuple(name for name in embeddings if name in group),
            )
        )
    return jobs, components, origins


def _spec(name: str, entry: tuple[str, tuple[int, ...]], dtype: str | None) -> TensorSpec:
    if dtype is not None and entry[0] not in FLOAT_DTYPES:
        raise UsageError(
            f"'{name}' is {entry[0]}, expected BF16, F16 or F32; factors cannot be folded into it; "
            "convert the model without a transform"
        )
    return TensorSpec(name, entry[0] if dtype is None else FLOATS[dtype][0], entry[1])
