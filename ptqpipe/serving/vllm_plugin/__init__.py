"""The entry point that vLLM loads: ``ptqpipe`` of the group ``vllm.general_plugins``.

    linear_methods.py   kernels that vLLM's CPU build lacks (NVFP4, MXFP4, MXFP8) or has slower or broken (FP8)
    fused_experts.py    the same for mixtures of experts
    parallel_sums.py    PTQPIPE_ALLREDUCE=int8: the sums after row-parallel layers are sent quantized
    settings.py         the environment variables, all of them

vLLM calls `register` in each of its processes, in some more than once. It never raises: problems are reported
in vLLM's log, and vLLM continues as without ptqpipe. Importing this module imports neither torch nor vLLM, and
nothing here imports transformers, whose version vLLM pins.
"""

import logging

from ptqpipe.serving.vllm_plugin.settings import PluginSettings

# Minor versions of vLLM on which the hooks were run. They lean on names that vLLM does not promise to keep.
TESTED_FROM, TESTED_BELOW = (0, 32), (0, 33)

log = logging.getLogger("vllm.ptqpipe")  # below vLLM's own logger, so that its handlers print it
_done = False


def register() -> None:
    """Installs what the environment variables ask for. Repeated calls do nothing."""
    global _done
    if _done:
        return
    _done = True
    try:
        settings = PluginSettings.from_environment()
        if not _version_is_tested(settings):
            return
        from ptqpipe.serving.vllm_plugin.install import install

        install(settings)
    except Exception as error:  # a plugin that raises ends vLLM
        log.exception("ptqpipe: the plugin is off, vLLM runs as it would without it: %s", error)


def _version_is_tested(settings: PluginSettings) -> bool:
    """Whether the hooks were run on this version of vLLM, or the user wants them anyway."""
    import vllm

    version = tuple(vllm.__version_tuple__[:2])
    if TESTED_FROM <= version < TESTED_BELOW:
        return True
    span = f"vLLM {TESTED_FROM[0]}.{TESTED_FROM[1]} up to below {TESTED_BELOW[0]}.{TESTED_BELOW[1]}"
    if settings.untested:
        log.warning("ptqpipe: tested with %s, this is %s; installed because PTQPIPE_VLLM_UNTESTED=1", span, version)
        return True
    log.error(
        "ptqpipe: tested with %s, this is %s: the plugin is OFF (no kernels, no quantized all-reduce); "
        "PTQPIPE_VLLM_UNTESTED=1 installs it anyway",
        span,
        vllm.__version__,
    )
    return False
