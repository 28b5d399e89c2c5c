"""Collectives: quantized all-reduce, its codecs and transports.

    from ptqpipe.serving.collectives import QuantAllReduce

Needs torch alone, so that it can be imported inside any serving stack.
"""

from ptqpipe.serving.collectives.allreduce import Pending, QuantAllReduce
from ptqpipe.serving.collectives.codecs import CODECS, WireCodec, get_wire_codec
from ptqpipe.serving.collectives.gate import NEVER, Thresholds
from ptqpipe.serving.collectives.symmetric import SymmetricMemory
from ptqpipe.serving.collectives.wire import Stats

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
