"""Collectives: quantized all-reduce, its codecs and transports.

    from ptqpipe.collectives import QuantAllReduce

Needs torch alone, so that it can be imported inside any serving stack.
"""

from ptqpipe.collectives.allreduce import Pending, QuantAllReduce
from ptqpipe.collectives.codecs import CODECS, WireCodec, get_wire_codec
from ptqpipe.collectives.gate import NEVER, Thresholds
from ptqpipe.collectives.stats import Stats
from ptqpipe.collectives.symmetric import SymmetricMemory

__all__ = [
    "CODECS",
    "NEVER",
    "Pending",
    "QuantAllReduce",
    "Stats",
    "SymmetricMemory",
    "Thresholds",
    "WireCodec",
    "get_wire_codec",
]
