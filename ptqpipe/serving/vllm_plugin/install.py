"""Installs the parts of the plugin, each on its own: one that does not fit leaves the others alone."""

import logging
from collections.abc import Callable
from typing import Any

from ptqpipe.serving.vllm_plugin.settings import PluginSettings

log = logging.getLogger("vllm.ptqpipe")


def install(settings: PluginSettings) -> None:
    """Kernels on a CPU, the quantized all-reduce where it is asked for, and a mark in the key of vLLM's graph cache."""
    from vllm.platforms import current_platform

    placed = []
    if settings.kernels and current_platform.is_cpu():
        placed.append(_try("kernels for the CPU", _kernels))
        placed.append(_try("experts for the CPU", lambda: _experts(current_platform.dispatch_key)))
    if settings.codec is not None:
        placed.append(_try(f"{settings.codec} all-reduce", lambda: _all_reduce(settings)))
    if any(placed):
        _mark_compiled_graphs(settings)


def _kernels() -> None:
    from ptqpipe.serving.vllm_plugin import linear_methods as linear

    linear.register_all()


def _experts(dispatch_key: str) -> None:
    from ptqpipe.serving.vllm_plugin import fused_experts as experts

    experts.register_all(dispatch_key)


def _all_reduce(settings: PluginSettings) -> None:
    from ptqpipe.serving.vllm_plugin import parallel_sums as allreduce

    allreduce.install(settings)


def _try(what: str, step: Callable[[], None]) -> bool:
    """Whether ``step`` went through; if not, the log names what is missing."""
    try:
        step()
    except Exception as error:
        log.exception("ptqpipe: NOT installed: %s (%s: %s)", what, type(error).__name__, error)
        return False
    return True


def _mark_compiled_graphs(settings: PluginSettings) -> None:
    """vLLM keeps compiled graphs on disk under a hash of its configuration. The graphs with our operators in them
    must not be taken for those without, so the hash has to know of them."""
    from vllm.config import VllmConfig

    original = VllmConfig.compute_hash

    def compute_hash(self: Any, *args: Any, **kwargs: Any) -> str:
        import hashlib

        text = f"{original(self, *args, **kwargs)} {settings.fingerprint()}"
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    VllmConfig.compute_hash = compute_hash
