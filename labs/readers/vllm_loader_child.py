"""vLLM's own model classes and weight loaders on a CPU, for vllm_fills.py; see loader_child.py.

The models are built as for a GPU of compute capability 10.0. What comes after loading, repacking for its kernels, needs
a GPU and is left out, and the packages with compiled kernels are replaced by empty ones: none takes part in loading.
"""

import os
from typing import Any
from unittest.mock import MagicMock

from labs.readers.loader_child import CAPABILITY, Empty, mark, pretend_cuda, serve

KERNELS = (
    *(f"vllm._{name}" for name in ("C", "C_stable_libtorch", "moe_C_stable_libtorch", "qutlass_C", "deepselect_C")),
    *("vllm._flashkda_C", "vllm._flashmla_C", "vllm.vllm_flash_attn", "torchvision", "cutlass"),
)
OPERATORS = ("_C", "_moe_C", "_qutlass_C", "_C_cache_ops")


def prepare() -> None:
    """Imports vLLM with a platform that says what CUDA's says, and holds its tensors on the CPU."""
    import sys

    sys.meta_path.insert(0, Empty(KERNELS))
    pretend_cuda(OPERATORS)
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Pretended(CudaPlatformBase):  # type: ignore[misc]  # vLLM has no types here
        device_type, dispatch_key, ray_device_key = "cpu", "CPU", ""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*CAPABILITY)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA B200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 180 << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 148

        @classmethod
        def is_fully_connected(cls, ids: list[int]) -> bool:
            return True

        @classmethod
        def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: int = 0) -> str:
            # The tiny models have head sizes for which no kernel is made; what a layer loads is all the same.
            if attn_selector_config.use_mla:
                name = (
                    "flashmla_sparse.FlashMLASparseBackend"
                    if attn_selector_config.use_sparse
                    else "triton_mla.TritonMLABackend"
                )
                return f"vllm.v1.attention.backends.mla.{name}"
            return "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"

        @classmethod
        def set_device(cls, device: Any) -> None:
            """There is none."""

    platforms._current_platform = Pretended()
    from vllm.model_executor.models import registry
    from vllm.triton_utils import triton
    from vllm.utils import deep_gemm
    from vllm.v1.attention.backends.mla.prefill import selector

    selector._auto_select_mla_prefill_backend = MagicMock()
    triton.set_allocator = deep_gemm.has_deep_gemm = lambda *_: True

    registry._run_in_subprocess = lambda call: call()
    import vllm.engine.arg_utils
    import vllm.model_executor.layers.quantization.modelopt
    import vllm.model_executor.model_loader.default_loader  # noqa: F401

    sys.meta_path.insert(0, Empty(("cuda",)))  # what has been imported looks for its types


def load(ckpt: str) -> Any:
    """vLLM's model of a checkpoint with its parameters as its loader leaves them."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.workspace import init_workspace_manager

    asked = EngineArgs(
        model=ckpt, dtype="bfloat16", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
        load_format="safetensors",
    )  # fmt: skip
    config = asked.create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(1, 0, f"file://{ckpt}.store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        init_workspace_manager(torch.device("cpu"))
        model = initialize_model(config)
        mark(model)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return model


if __name__ == "__main__":
    os.environ |= {"VLLM_TARGET_DEVICE": "empty", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    prepare()
    serve(load)
