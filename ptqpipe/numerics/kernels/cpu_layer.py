"""Decoder layers of a decode step on a CPU, compiled: norms, products, rotary embedding and attention in one call.

The arithmetic is that of the kernels that ``rms_norm``, ``cpu_linear.py`` and ``cpu_attention.py`` call one by one,
with the roundings to bfloat16 in between that torch's operators make. Knows addresses; must not know modules.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.kernels import cpu_attention, cpu_library as lib
from ptqpipe.numerics.kernels.cpu_attention import PagedQueries, PagedSpans
from ptqpipe.numerics.kernels.cpu_linear import Operand, alike, limit

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_PRODUCTS, _NORMS = lib.Linear * 7, lib.Norm * 2
_Layer = lib.struct(
    "ptq_layer",
    products=_PRODUCTS, norms=_NORMS, prefill=_POINTER, attention=_POINTER, activation=_POINTER, keys=_POINTER,
    values=_POINTER, x=_POINTER, cosine=_POINTER, sine=_POINTER, slots=_POINTER, out=_POINTER, rows=_LONG, dim=_LONG,
    threads=_LONG,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a decoder layer.

    norms       before the attention and before the feed-forward: weight bfloat16 [hidden], epsilon
    products    query, key, value, output, gate, up and down with their biases
    activation  int16 [65536]: the bits of the activation function at each bfloat16 number
    keys, values  pages bfloat16 [blocks, block_size, kv heads, dim] both
    scaling     of the scores
    window      how many tokens a query sees, itself included; None: all
    """

    norms: tuple[tuple[torch.Tensor, float], ...]
    products: tuple[tuple[Operand, torch.Tensor | None], ...]
    activation: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float
    window: int | None


def fits(parts: LayerParts) -> bool:
    """Whether there is a kernel for a layer: bfloat16 that is dense, groups of products that go together."""
    operands = [operand for operand, _ in parts.products]
    tensors = [weight for weight, _ in parts.norms] + [parts.keys, parts.values]
    return (
        cpu_attention.exports("ptq_layers_step")
        and all(x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.is_contiguous() for x in tensors)
        and parts.keys.shape == parts.values.shape
        and parts.keys.shape[3] % 2 == 0
        and all(alike(operands[first], operands[other]) for first, other in ((0, 1), (0, 2), (4, 5)))
        and _chained([operand.shape for operand in operands], parts)
    )


def _chained(shapes: list[tuple[int, int]], parts: LayerParts) -> bool:
    """Whether what each part gives is as wide as what the next one takes."""
    query, key, value, output, gate, up, down = shapes
    hidden, cached, dim = query[1], parts.keys.shape[2] * parts.keys.shape[3], parts.keys.shape[3]
    return (
        key[0] == value[0] == cached
        and query[0] % cached == 0
        and query[0] % dim == 0
        and output == (hidden, query[0])
        and gate == up == (down[1], hidden)
        and down[0] == hidden
        and all(len(weight) == hidden for weight, _ in parts.norms)
    )


class Layer:
    """A layer that `fits`, ready to run."""

    def __init__(self, parts: LayerParts) -> None:
        self._parts, self._dim = parts, parts.keys.shape[3]
        self._heads = parts.products[0][0].shape[0] // self._dim
        self._biases = [None if bias is None else bias.float().contiguous() for _, bias in parts.products]
        self._job = _Layer(
            activation=parts.activation.data_ptr(), keys=parts.keys.data_ptr(), values=parts.values.data_ptr(),
            dim=self._dim,
        )  # fmt: skip
        self._made_for = (0, 0, "")

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of x and of the cosines: layers with the same widths run together."""
        return self._parts.products[0][0].shape[1], self._dim

    def takes(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], rows: int) -> bool:
        """Whether these tensors are what the kernel reads."""
        hidden, dim = self.widths
        cosine, sine = rotary
        return (
            rows <= limit(panels=True)
            and dense(x, rows, hidden)
            and dense(cosine, rows, dim)
            and dense(sine, rows, dim)
        )

    def prepare(self, rows: int, threads: int, where: tuple[PagedQueries, PagedSpans]) -> ctypes.Structure:
        """The job for a number of rows; what changes from step to step is as it was when the rows last changed."""
        made_for = (rows, threads, lib.current_isa())
        if self._made_for != made_for:
            jobs = [operand.job(rows) for operand, _ in self._parts.products]
            for job, bias in zip(jobs, self._biases, strict=True):
                job.bias = None if bias is None else bias.data_ptr()
            norms = [norm_job(rows, weight, eps) for weight, eps in self._parts.norms]
            self._job.products, self._job.norms = _PRODUCTS(*jobs), _NORMS(*norms)
            self._job.rows, self._job.threads = rows, threads
            self.see(rows, where)
            self._made_for = made_for
        return self._job

    def see(self, rows: int, where: tuple[PagedQueries, PagedSpans]) -> None:
        """Makes the job of the attention over these pages, which the layer's job points to and keeps."""
        self._job.kept = self._attention(rows, where)

    def _attention(self, rows: int, where: tuple[PagedQueries, PagedSpans]) -> ctypes.Structure:
        parts = self._parts
        keys, values, scaling, window = parts.keys, parts.values, parts.scaling, parts.window
        shape = (rows, self._heads, self._dim)
        if lib.multiplies_bf16():
            job = cpu_attention.prefill_job(shape, keys, values, where[1], scaling=scaling, window=window)
            self._job.prefill, self._job.attention = ctypes.addressof(job), None
        else:
            job = cpu_attention.attention_job(shape[1:], keys, values, where[0], scaling=scaling, window=window)
            self._job.prefill, self._job.attention = None, ctypes.addressof(job)
        return job


def run(
    layers: Sequence[Layer],
    x: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    where: tuple[PagedQueries, PagedSpans],
) -> torch.Tensor | None:
    """What each layer gives, ``[layers, ..., hidden]``: the first of ``x [..., hidden]`` bfloat16, a row for each
    sequence's last token, the others each of what the one before gives.

    layers  of equal `Layer.widths`
    rotary  cosines and sines bfloat16 [..., dim]
    slots   int64 [rows]: where the new keys and values go, as all pages' tokens are counted
    where   the pages that each sees, in both forms
    None for what has no kernel: other shapes and dtypes, another instruction set.
    """
    rows, threads = slots.shape[0], torch.get_num_threads()
    if not layers[0].takes(x, rotary, rows):
        return None
    outs = torch.empty((len(layers), *x.shape), dtype=torch.bfloat16)
    jobs = [layer.prepare(rows, threads, where) for layer in layers]
    layers[0].see(rows, where)  # the call gives the others what the first has, and their x and out
    first = jobs[0]
    first.x, first.out, first.slots = x.data_ptr(), outs.data_ptr(), slots.data_ptr()
    first.cosine, first.sine = rotary[0].data_ptr(), rotary[1].data_ptr()
    addresses = (ctypes.c_void_p * len(jobs))(*map(ctypes.addressof, jobs))
    status = lib.call("ptq_layers_step", addresses, ctypes.c_int64(len(jobs)))
    return outs if status == lib.OK else None


def dense(x: torch.Tensor, rows: int, width: int) -> bool:
    """Whether a tensor is contiguous bfloat16 ``[rows, width]``."""
    return x.dtype == torch.bfloat16 and x.shape[-1] == width and x.numel() == rows * width and x.is_contiguous()


_WORTH_A_THREAD = 1 << 16  # numbers, below which waking another thread costs more than it brings


def norms_available() -> bool:
    """Whether the kernels were built for this machine."""
    return bool(lib.known_isas())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * (x / sqrt(mean(x^2) + eps))`` over the last dimension, bfloat16 ``[..., N]`` and ``[N]``.

    The quotient is rounded to bfloat16 before the product, as modules that compute the mean in float32 do. FormatError
    for an input of another width or dtype.
    """
    x, n = x.contiguous(), len(weight)
    if x.shape[-1] != n or x.dtype != torch.bfloat16:
        raise FormatError(f"an input of {x.shape[-1]} {x.dtype} for a norm of {n} bfloat16")
    out = torch.empty_like(x)
    if out.numel():
        job = norm_job(x.numel() // n, weight, eps)
        job.x, job.out = x.data_ptr(), out.data_ptr()
        status = lib.call("ptq_rms_norm", ctypes.byref(job))
        assert status == lib.OK
    return out


def norm_job(rows: int, weight: torch.Tensor, eps: float) -> ctypes.Structure:
    """The job for ``rows`` but for x and out; it points to the weight, bfloat16 ``[N]``."""
    n = len(weight)
    threads = min(torch.get_num_threads(), 1 + rows * n // _WORTH_A_THREAD)
    return lib.Norm(weight=weight.data_ptr(), rows=rows, n=n, threads=threads, eps=eps)
