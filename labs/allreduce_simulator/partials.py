"""Partials of a .safetensors file, in the place of drawn ones."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from labs.allreduce_simulator.inputs import Inputs, given, row_parallel
from ptqpipe.errors import UsageError


def read_partials(path: Path, *, tensor: str | None, weight: str | None) -> Inputs:
    """Partials of a .safetensors file: a tensor ``[ranks, ...]``, or inputs and the weight that multiplies them.

    UsageError for names and shapes that do not fit, SafetensorError for a damaged file.
    """
    tensors = load_file(path)
    if tensor is None:
        if not tensors:
            raise UsageError(f"{path} holds no tensors; give a file with partials")
        if len(tensors) != 1:
            raise UsageError(f"{path} holds {len(tensors)} tensors; name one with --tensor")
        tensor = next(iter(tensors))
    values = _floats(path, tensors, tensor)
    if weight is None:
        if values.ndim < 2 or values.shape[0] < 2 or not values.numel():
            raise UsageError(
                f"{tensor} is {list(values.shape)}, expected [ranks, ...] of 2 ranks or more; give inputs "
                "together with --weight"
            )
        return given(tensor, values.reshape(values.shape[0], -1))
    matrix = _floats(path, tensors, weight)
    if matrix.ndim != 2 or values.shape[-1:] != matrix.shape[1:] or not values.numel() or not matrix.numel():
        raise UsageError(
            f"inputs {tensor} {list(values.shape)} and weight {weight} {list(matrix.shape)} do not multiply; "
            "expected [..., inner] and [outer, inner]"
        )
    return row_parallel(tensor, values.reshape(-1, values.shape[-1]), matrix)


def _floats(path: Path, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """One tensor. UsageError for an unknown name, or numbers that are not finite floats."""
    if name not in tensors:
        raise UsageError(f"{path} has no tensor {name!r}; it has {', '.join(list(tensors)[:8])}")
    tensor = tensors[name]
    if not tensor.is_floating_point():
        raise UsageError(f"tensor {name!r} is {tensor.dtype}, expected floating point; choose another")
    if not bool(torch.isfinite(tensor.float()).all()):
        raise UsageError(f"tensor {name!r} has NaN or inf; an error against them says nothing")
    return tensor
