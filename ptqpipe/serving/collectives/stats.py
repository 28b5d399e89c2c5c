"""Counters of a quantized all-reduce on this rank, for one call or since it was created."""

from dataclasses import astuple, dataclass


@dataclass(slots=True)
class Stats:
    """Calls, bytes and times; those of one call are filled in as it goes on, and then added to those before.

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
