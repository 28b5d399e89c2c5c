"""R1: rotates the residual stream by a block diagonal matrix R, folded into everything that writes or reads it.

An RMSNorm without weight commutes with an orthogonal matrix, so its weight first moves into the columns of its readers
(and becomes 1); then embeddings E -> E R, readers W -> W R, writers W -> R^T W. Source: QuaRot, section 4, in blocks.
Mean subtraction (LayerNorm) and norms between a sublayer and the stream do not commute: those models are refused.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from ptqpipe.errors import UsageError, arg
from ptqpipe.models.folding.structure import Edge, Matrix, Norm, Structure
from ptqpipe.models.folding.tensors import Folding, Reset, Rotate, on_columns, rotate_columns, rotate_rows

Read = Callable[[str], torch.Tensor]
STREAM = ""  # the name that the matrices of the residual stream have among those of edges


def check(structure: Structure, block: int, *, untie: bool) -> None:
    """UsageError with the reason where the rotation would change the model."""
    kind = structure.model_type
    head = next((name for name in structure.others if structure.tied and name.endswith("lm_head.weight")), None)
    if structure.norms.layer_norm:
        reason = f"{kind} subtracts the mean in its norms, which a rotation changes"
    elif structure.output_norms:
        reason = f"'{structure.output_norms[0]}' stands between a layer and the residual stream"
    elif structure.hidden % block:
        reason = f"hidden size {structure.hidden} is no multiple of the block of {block}"
    elif not any(edge.kind == "final" for edge in structure.edges) or not structure.embeddings:
        reason = "the last norm, the head or the embedding cannot be found"
    elif structure.norms.tied:
        reason = f"readers use the embedding of {kind} as output head, whatever config.json says"
    elif head is not None:
        reason = (
            f"config.json ties the output head to the embedding, but '{head}' is stored, too: delete it, or set "
            "tie_word_embeddings to false if they differ"
        )
    elif structure.others:
        reason = f"it is not known whether '{structure.others[0]}' reads the residual stream"
    elif structure.tied and not untie:
        reason = (
            f"the output head is tied to the embedding; {arg('untie', True)} stores a head of its own, which can be "
            "rotated"
        )
    else:
        return
    raise UsageError(f"rotate_residual is refused: {reason}")


def fold(
    structure: Structure, edges: Sequence[Edge], *, writers: Sequence[Matrix], embeddings: Sequence[str], block: int,
    read: Read, matrices: Mapping[str, torch.Tensor],
) -> list[Folding]:  # fmt: skip
    """The foldings of some edges, writers and embeddings; ``read`` gives a tensor as it is by now, float64.

    matrices  STREAM -> float64 [hidden / block, block, block]; empty: Hadamard matrices
    """
    foldings: list[Folding] = []
    turn = matrices.get(STREAM)
    for edge in edges:
        if not isinstance(edge.producer, Norm):
            continue
        weight = read(edge.producer.weight) + edge.producer.offset
        foldings.append((edge.producer.weight, Reset(1.0 - edge.producer.offset)))
        for consumer in edge.consumers:
            foldings += on_columns(consumer, weight)
            foldings += rotate_columns(consumer, block, turn)
    for writer in writers:
        foldings += rotate_rows(writer, block, turn)
    return foldings + [(name, Rotate(1, block, 0, structure.hidden, matrices=turn)) for name in embeddings]
