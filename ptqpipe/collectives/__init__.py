"""Collectives: quantized all-reduce, its codecs and transports, and a simulator of both."""
