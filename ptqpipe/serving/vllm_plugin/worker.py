"""Counters of the quantized all-reduce from inside vLLM's workers, for scripts and operators:

llm = LLM(..., worker_extension_cls="ptqpipe.serving.vllm_plugin.worker.AllReduceNumbers")
llm.collective_rpc("ptqpipe_allreduce")        one dict per worker
"""

from typing import Any


class AllReduceNumbers:
    """Methods that vLLM adds to each worker."""

    def ptqpipe_allreduce(self) -> dict[str, dict[str, Any]]:
        """By group: quantized and plain calls, and the collective's own numbers."""
        from ptqpipe.serving.vllm_plugin.parallel_sums import numbers

        return numbers()
