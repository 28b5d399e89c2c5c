"""Compiled messages of the quantized all-reduce on CPU tensors, bit-equal to ``collectives/codec_reference.py``.

Each function walks its tensors once, on the caller's thread, without the interpreter lock; False where there is no
kernel. Knows addresses and codecs; must not know processes.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from ptqpipe.numerics.kernels import cpu_library as lib

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_ELEMENTS = {"int8": 0, "int6": 1, "int4": 2, "e4m3": 3, "e2m1": 4}
_SCALES = {"bf16": 0, "e8m0": 1, "e4m3": 2}
_ENCODE, _DECODE, _REDUCE, _SUM = 0, 1, 2, 3


class Wire(Protocol):
    """A codec as ``collectives/codecs.py`` has it."""

    @property
    def element(self) -> str:
        """int8, int6, int4, e4m3 or e2m1."""

    @property
    def scale(self) -> str:
        """bf16, e8m0 or e4m3."""

    @property
    def block(self) -> int:
        """Elements a scale."""

    @property
    def hadamard(self) -> int:
        """Elements that are rotated together, or 0."""

    @property
    def group(self) -> int:
        """Elements an exponent, or 0."""


def encode(x: torch.Tensor, message: torch.Tensor, codec: Wire) -> bool:
    """Writes the uint8 message of ``x [n]``; whether it did."""
    if not _plain(x, message):
        return False
    job = _job(_ENCODE, x, codec)
    job.x, job.message = x.data_ptr(), message.data_ptr()
    return _run(job)


def decode(message: torch.Tensor, out: torch.Tensor, codec: Wire) -> bool:
    """Decodes a message into ``out [n]``; False where no kernel can."""
    if not _plain(out, message):
        return False
    job = _job(_DECODE, out, codec)
    job.message, job.out = message.data_ptr(), out.data_ptr()
    return _run(job)


def reduce(
    messages: Sequence[torch.Tensor | None],
    own: torch.Tensor,
    message: torch.Tensor | None,
    out: torch.Tensor,
    codec: Wire,
) -> bool:
    """Sums messages in their order, None standing for ``own [n]``; whether it did.

    Writes the sum's message, and to ``out`` (which may be ``own``) what that says; without a message, the sum itself.
    """
    present = [part for part in (*messages, message) if part is not None]
    if own.dtype != out.dtype or not _plain(own, out, *present):
        return False
    parts = (ctypes.c_void_p * len(messages))(*(None if part is None else part.data_ptr() for part in messages))
    job = _job(_REDUCE, out, codec)
    job.x, job.out, job.ranks, job.messages = own.data_ptr(), out.data_ptr(), len(messages), ctypes.addressof(parts)
    job.message = None if message is None else message.data_ptr()
    return _run(job)


def add(messages: Sequence[torch.Tensor | None], own: torch.Tensor, out: torch.Tensor) -> bool:
    """Sums tensors of ``own``'s dtype (as bytes or not), None standing for ``own``, to ``out``; whether it did.

    float32, in their order, rounded once; ``out`` may be ``own``.
    """
    present = [part for part in messages if part is not None]
    if own.dtype != out.dtype or not _plain(own, out, *present):
        return False
    parts = (ctypes.c_void_p * len(messages))(*(None if part is None else part.data_ptr() for part in messages))
    return _run(
        lib.Collective(
            step=_SUM,
            dtype=_DTYPES[own.dtype],
            elements=own.numel(),
            ranks=len(messages),
            x=own.data_ptr(),
            messages=ctypes.addressof(parts),
            out=out.data_ptr(),
        )
    )


def _plain(values: torch.Tensor, *others: torch.Tensor) -> bool:
    fits = all(t.device.type == "cpu" and t.is_contiguous() for t in (values, *others))
    return fits and values.dtype in _DTYPES and bool(lib.known_isas())


def _job(step: int, values: torch.Tensor, codec: Wire) -> ctypes.Structure:
    return lib.Collective(
        step=step,
        dtype=_DTYPES[values.dtype],
        element=_ELEMENTS[codec.element],
        scale=_SCALES[codec.scale],
        block=codec.block,
        hadamard=codec.hadamard,
        group=codec.group,
        elements=values.numel(),
    )


def _run(job: ctypes.Structure) -> bool:
    return lib.call("ptq_collective_step", ctypes.byref(job)) == lib.OK
