"""What a quantized all-reduce has done so far on this rank: a record to print, and the clock of its phases."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """Since it was made.

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


@dataclass(slots=True)
class Phases:
    """Seconds of the calling thread in each phase of one call, and the bytes that this rank sent."""

    encode: float = 0.0
    reduce: float = 0.0
    decode: float = 0.0
    wait: float = 0.0
    sent: int = 0
