"""The environment variables of the plugin, read once. vLLM passes the environment on to all its processes.

    PTQPIPE_ALLREDUCE             off (default), or the codec of the quantized all-reduce: int8, int6, int4, fp8, ...
    PTQPIPE_ALLREDUCE_BLOCK       values per scale, 64
    PTQPIPE_ALLREDUCE_MIN_BYTES   messages below stay plain: a number, or auto (default): measured once at start
    PTQPIPE_VLLM_KERNELS          on (default), or off: vLLM's own kernels only
    PTQPIPE_VLLM_UNTESTED         1: install on versions of vLLM that were not tested

An environment is the only thing that reaches all processes of vLLM, so this is the one place below the command line
that reads it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ptqpipe.errors import UsageError


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The user's settings. ``codec`` is None when all-reduces stay plain."""

    codec: str | None = None
    block: int = 64
    min_bytes: int | Literal["auto"] = "auto"
    kernels: bool = True
    untested: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "PluginSettings":
        """Reads ``os.environ`` or ``environment``. UsageError names the variable that cannot be read."""
        variables = os.environ if environment is None else environment
        codec = variables.get("PTQPIPE_ALLREDUCE", "off").strip().lower()
        low = variables.get("PTQPIPE_ALLREDUCE_MIN_BYTES", "auto").strip().lower()
        return cls(
            codec=None if codec in ("", "off", "0", "none") else codec,
            block=_number("PTQPIPE_ALLREDUCE_BLOCK", variables.get("PTQPIPE_ALLREDUCE_BLOCK", "64"), low=1),
            min_bytes="auto" if low == "auto" else _number("PTQPIPE_ALLREDUCE_MIN_BYTES", low, low=0),
            kernels=_flag("PTQPIPE_VLLM_KERNELS", variables.get("PTQPIPE_VLLM_KERNELS", "on")),
            untested=_flag("PTQPIPE_VLLM_UNTESTED", variables.get("PTQPIPE_VLLM_UNTESTED", "off")),
        )

    def fingerprint(self) -> str:
        """The settings that change vLLM's compiled graph, for its cache key."""
        return f"ptqpipe kernels={self.kernels} allreduce={self.codec is not None}"


def _number(name: str, text: str, *, low: int) -> int:
    """A whole number of at least ``low``."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise UsageError(f"{name}={text!r} is not a whole number of at least {low}")
    return value


def _flag(name: str, text: str) -> bool:
    """A flag: on or off, 1 or 0, true or false, yes or no."""
    flags = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}
    value = flags.get(text.strip().lower())
    if value is None:
        raise UsageError(f"{name}={text!r} is neither on nor off")
    return value
