"""The messages of a transport: bytes of a part, the sum of parts, the values of a sum. Quantized or not.

A transport moves byte tensors and never looks into them. `Quantized` is a codec of this package, `Plain` the tensor's
own dtype: the same schedule without a codec, which is also the baseline that a codec has to beat. Sums are float32, in
the order of the ranks, in both. Must not know processes.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from ptqpipe.numerics.kernels import cpu_collective, triton_collective
from ptqpipe.serving.collectives import codec_reference as reference
from ptqpipe.serving.collectives.codecs import WireCodec

PLAIN_UNIT = 64  # elements


@dataclass(frozen=True, slots=True)
class Quantized:
    """Messages of a codec. Tensors of values are contiguous, 1-d and of one dtype; messages are uint8."""

    codec: WireCodec

    @property
    def unit(self) -> int:
        """Stripes and chunks are whole numbers of this many elements."""
        return self.codec.unit

    def nbytes(self, elements: int, dtype: torch.dtype) -> int:
        """Bytes of the message of a part."""
        return self.codec.nbytes(elements)

    def encode(self, x: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """The message of ``x``: in ``room``, or a view of ``x``."""
        if not (cpu_collective.encode(x, room, self.codec) or triton_collective.encode(x, room, self.codec)):
            room.copy_(reference.encode(x, self.codec))
        return room

    def landing(self, out: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """The receive buffer of a sum's message: ``room``, or ``out`` itself when a message is its values."""
        return room

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Writes a message's values to ``out``."""
        if not (cpu_collective.decode(message, out, self.codec) or triton_collective.decode(message, out, self.codec)):
            out.copy_(reference.decode(message, out.numel(), self.codec))

    def reduce(
        self, messages: Sequence[torch.Tensor | None], own: torch.Tensor, room: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """The message of the sum, in ``room`` or ``out``, and its decoded values in ``out``. None stands for ``own``.

        ``out`` may be ``own``. With an empty ``room`` the sum goes to ``out`` alone, unrounded but for its dtype.
        """
        wanted = room if room.numel() else None
        done = cpu_collective.reduce(messages, own, wanted, out, self.codec)
        if not done and not triton_collective.reduce(messages, own, wanted, out, self.codec):
            message, values = reference.reduce(messages, own, self.codec, requantize=wanted is not None)
            out.copy_(values)
            room.copy_(message)
        return room


@dataclass(frozen=True, slots=True)
class Plain:
    """Messages are the values' own bytes, sent from and received into the tensors; methods as in `Quantized`."""

    unit: int = PLAIN_UNIT

    def nbytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def encode(self, x: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        return x.view(torch.uint8)

    def landing(self, out: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        return out.view(torch.uint8)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """As in `Quantized`: nothing, since the message arrived in ``out``."""

    def reduce(
        self, messages: Sequence[torch.Tensor | None], own: torch.Tensor, room: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        if not cpu_collective.add(messages, own, out):
            total: torch.Tensor | None = None
            for message in messages:
                term = own if message is None else message.view(own.dtype)
                total = term.float() if total is None else total + term
            assert total is not None, "there is a rank"
            out.copy_(total)
        return out.view(torch.uint8)


Wire = Quantized | Plain


# How a message is divided among ranks: one stripe per rank, and the chunks in which stripes are sent. Stripes are equal
# runs of units, the last ones shorter or empty, so every size and number of ranks works. Chunk j takes the same part of
# every stripe. Stripes decide results (the owner's own partial is exact); chunks decide time alone.


@dataclass(frozen=True, slots=True)
class Layout:
    """How ``elements`` are cut.

    ranks, unit  as they say
    stripe       units of a stripe
    chunk        units of a stripe in a chunk
    """

    elements: int
    ranks: int
    unit: int
    stripe: int
    chunk: int

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-self.stripe // self.chunk)

    def span(self, rank: int, chunk: int) -> range:
        """The elements that chunk ``chunk`` of the stripe of ``rank`` covers; may be empty."""
        begin = rank * self.stripe + chunk * self.chunk
        end = rank * self.stripe + min((chunk + 1) * self.chunk, self.stripe)
        return range(min(begin * self.unit, self.elements), min(end * self.unit, self.elements))


def cut(elements: int, ranks: int, *, unit: int, chunk_elements: int, least_chunks: int = 1, least: int = 1) -> Layout:
    """Chunks of ``chunk_elements`` over all stripes together, and ``least_chunks`` of them if each has ``least``."""
    stripe = max(1, -(-elements // (unit * ranks)))
    wanted = max(min(chunk_elements, elements // least_chunks), least)
    chunk = max(1, wanted // (unit * ranks))
    return Layout(elements, ranks, unit, stripe, min(chunk, stripe))


@dataclass(slots=True)
class Stats:
    """Calls, bytes and times of this rank; those of one call are filled in as it goes on, and then added to those
    before.

    calls, plain_calls  quantized sums, and those that stayed plain
    value_bytes         of the tensors of the quantized sums
    wire_bytes          sent by this rank for them, transport headers aside
    encode_s ... wait_s seconds of the calling thread (or its stream's), for them
    """

    calls: int = 0
    plain_calls: int = 0
    value_bytes: int = 0
    wire_bytes: int = 0
    encode_s: float = 0.0
    reduce_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
