"""What a decoder layer does between its products on a CUDA device: the Triton kernels behind
``engine/fused_layers.py``, one launch each for what torch's operators take three to nine for.

Results are bfloat16, rounded wherever torch's operators round; so the rotary embedding, the gate and the residual's sum
have torch's bits. A norm's mean square is a float32 sum in another order: its root is off by a few 2^-24 of itself for
every doubling of the width, so a number that lies so close to the middle of two bfloat16 numbers takes the other one.
Under Triton's interpreter CPU tensors are taken, which is how the kernels are tested without a GPU. Must not know
modules. Triton is imported on first use only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.numerics.kernels.triton import available, interpreting

WIDEST = 1 << 14  # numbers of a row that a program keeps in registers
_GATE_LANES = 512  # numbers of a program of gate_kernel


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorms of each head of the queries and of the keys: weights bfloat16 ``[dim]``, contiguous, and epsilons."""

    query: torch.Tensor
    key: torch.Tensor
    query_eps: float
    key_eps: float


def runs_on(device: torch.device) -> bool:
    """Whether there are kernels for tensors of a device: CUDA's, or the CPU's under the interpreter."""
    return available() and (device.type == "cuda") != interpreting()


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of x and ``added`` (x itself without it), and its RMSNorm; bfloat16 ``[rows, width]`` both.

    x, added  bfloat16 ``[rows, width]``, the last stride 1, `WIDEST` numbers in a row at most
    weight    bfloat16 ``[width]``, contiguous; eps is added to the mean square
    """
    from ptqpipe.numerics.kernels import triton_layer_kernels

    rows, width = x.shape
    out, total = torch.empty_like(x, memory_format=torch.contiguous_format), x
    if added is not None:
        total = torch.empty_like(out)
    lanes = _padded(width)
    other = x if added is None else added
    _launch(
        x.device, triton_layer_kernels.norm_kernel, (rows,),
        out.view(torch.int16), total.view(torch.int16), x, other, weight, x.stride(0), other.stride(0), eps,
        WIDTH=width, ADD=added is not None, LANES=lanes, num_warps=max(1, min(16, lanes // 256)),
    )  # fmt: skip
    return total, out


def rotate_and_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    pages: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Turned queries, bfloat16 ``[T, heads, dim]``; turned keys and the values are put into their slots.

    query, key, value  bfloat16 ``[T, heads * dim]``, ``[T, kv heads * dim]`` twice, the last strides 1
    rotary             cosines and sines bfloat16 ``[T, dim]``, contiguous; the first half of a head's numbers is turned
                       with the second, as transformers' ``rotate_half`` does
    pages              keys and values bfloat16 ``[blocks, block_size, kv heads, dim]``, contiguous
    slots              int64 ``[T]``, as all pages' tokens are counted
    norms              that the heads of queries and keys have before
    """
    from ptqpipe.numerics.kernels import triton_layer_kernels

    keys, values = (x.view(torch.int16) for x in pages)
    heads, dim = keys.shape[2:]
    count = query.shape[1] // dim
    out = torch.empty(len(query), count, dim, dtype=torch.bfloat16, device=query.device)
    weights = (query, key) if norms is None else (norms.query, norms.key)
    eps = (0.0, 0.0) if norms is None else (norms.query_eps, norms.key_eps)
    _launch(
        query.device, triton_layer_kernels.rotary_kernel, (len(query), count + 2 * heads),
        out.view(torch.int16), keys, values, query, key, value.view(torch.int16), *rotary, *weights, slots,
        query.stride(0), key.stride(0), value.stride(0), *eps,
        HEADS=count, KV_HEADS=heads, DIM=dim, NORM=norms is not None, LANES=_padded(dim), num_warps=1,
    )  # fmt: skip
    return out


def gated(gate: torch.Tensor, up: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``activation(gate) * up``, bfloat16 ``[rows, width]``, of two such tensors whose last strides are 1.

    table  int16 ``[65536]``: the bits of the activation of each bfloat16 number, by its bits
    """
    from ptqpipe.numerics.kernels import triton_layer_kernels

    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=gate.device)
    lanes = min(_padded(width), _GATE_LANES)
    _launch(
        gate.device, triton_layer_kernels.gate_kernel, (rows, -(-width // lanes)),
        out.view(torch.int16), gate.view(torch.int16), up, table, gate.stride(0), up.stride(0), width,
        LANES=lanes, num_warps=max(1, lanes // 128),
    )  # fmt: skip
    return out


def _launch(device: torch.device, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    call: Callable[..., Any] = kernel[grid]
    if device.type != "cuda":
        call(*arguments, **constants, enable_fp_fusion=False)
        return
    with torch.cuda.device(device):
        call(*arguments, **constants, enable_fp_fusion=False)


def _padded(width: int) -> int:
    return 1 << (width - 1).bit_length()
