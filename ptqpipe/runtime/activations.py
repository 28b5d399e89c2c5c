"""Quantized activations, simulated as the format says."""

from typing import Any

from ptqpipe.errors import UsageError
from ptqpipe.schemes import Activation
from ptqpipe.source import Source


def simulate_activations(model: Any, source: Source) -> None:
    """UsageError for a scheme whose activations are not simulated yet."""
    kinds = {stored.scheme.activation for stored in source.stored.values()} - {Activation.NONE}
    if kinds:
        raise UsageError(f"activations {min(kinds)} cannot be simulated; use --activations none")
