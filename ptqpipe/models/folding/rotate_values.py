"""R2: rotates the values of every head by a block diagonal matrix R, and undoes it in the columns of o_proj.

Attention mixes tokens, never channels of a head, so A V = (A V R) R^T. Source: QuaRot and SpinQuant (R2), in blocks.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from ptqpipe.errors import UsageError, arg
from ptqpipe.models.folding.structure import Edge, Matrix, Structure
from ptqpipe.models.folding.tensors import Folding, rotate_columns, rotate_rows

Read = Callable[[str], torch.Tensor]


def check(structure: Structure, block: int, *, untie: bool) -> None:
    """UsageError where there are no values to rotate, where heads do not divide into blocks, and where a gate for each
    channel is behind attention."""
    edges = [edge for edge in structure.edges if edge.kind == "value"]
    if not edges:
        raise UsageError(
            f"rotate_values is refused: {structure.model_type} has no value projection into which a rotation can be "
            f"folded; {arg('transforms', 'rotate_residual')} rotates the rest"
        )
    gated = next((edge for edge in edges if edge.gated), None)
    if gated is not None:
        raise UsageError(
            f"rotate_values is refused: a gate multiplies each channel behind the attention of {structure.model_type} "
            f"('{gated.id}'), and a rotation mixes channels; {arg('transforms', 'rotate_residual')} rotates the rest"
        )
    wrong = next((edge for edge in edges if edge.head_dim % block or edge.channels % edge.head_dim), None)
    if wrong is not None:
        raise UsageError(
            f"rotate_values cannot rotate blocks of {block}: the heads of '{wrong.id}' have {wrong.head_dim} channels; "
            f"choose a {arg('rotation_size')} that divides them"
        )
    if structure.norms.layer_norm and any(_start(edge) % block for edge in edges):
        raise UsageError(
            f"rotate_values needs values that begin at multiples of {block}; choose a smaller {arg('rotation_size')}"
        )


def fold(
    structure: Structure, edges: Sequence[Edge], *, writers: Sequence[Matrix], embeddings: Sequence[str], block: int,
    read: Read, matrices: Mapping[str, torch.Tensor],
) -> list[Folding]:  # fmt: skip
    """The foldings of some edges; the residual stream and its writers stay as they are.

    matrices  id of an edge -> float64 [channels / block, block, block]; Hadamard matrices where it has none
    """
    foldings: list[Folding] = []
    for edge in edges:
        if edge.kind == "value" and isinstance(edge.producer, Matrix):
            rotations = matrices.get(edge.id)
            foldings += rotate_rows(edge.producer, block, rotations)
            columns = None if rotations is None else rotations[turns(edge, block)]
            for consumer in edge.consumers:
                foldings += rotate_columns(consumer, block, columns)
    return foldings


def turns(edge: Edge, block: int) -> torch.Tensor:
    """int64 [K / block]: the block of channels that each block of input columns of an edge's consumers reads."""
    return edge.channel_of()[::block] // block


def _start(edge: Edge) -> int:
    return edge.producer.start if isinstance(edge.producer, Matrix) else 0
