"""SGLang's own model classes and weight loaders on a CPU, for sglang_loads.py; see loader_child.py.

The models are built as for a GPU of compute capability 10.0. What comes after loading, repacking for its kernels, needs
a GPU and is left out. Packages of SGLang's that exist for GPUs alone are replaced by empty ones: none of them takes
part in loading.
"""

import json
import os
from pathlib import Path
from typing import Any

from labs.readers.loader_child import Empty, mark, pretend_cuda, serve

GPU_ONLY = ("sgl_kernel", "torchaudio", "torchvision")


def prepare() -> None:
    """Imports SGLang, which then takes the CPU for a GPU."""
    import sys
    from types import SimpleNamespace

    import torch

    sys.meta_path.insert(0, Empty(GPU_ONLY))
    pretend_cuda(("sgl_kernel",))
    properties = SimpleNamespace(multi_processor_count=148, major=10, minor=0)
    vars(torch.cuda)["get_device_properties"] = lambda *_: properties
    from sglang.srt import utils

    for module in (utils, utils.common):
        module.is_blackwell_supported = lambda *_: True
    import sglang.srt.server_args
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention.mamba import mamba
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_loader import loader

    factory.get_rope_cpu = lambda *args: factory.get_rope(*args[:8])  # the ninth is the device
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda *_: True
    loader.DefaultModelLoader.postprocess_weights = staticmethod(lambda *_: None)
    make = loader._initialize_model

    def marked(*args: Any, **options: Any) -> Any:
        model = make(*args, **options)
        mark(model)
        return model

    loader._initialize_model = marked
    for kernel in ("causal_conv1d_fn", "causal_conv1d_update"):  # imported where SGLang sees a GPU
        vars(mamba).setdefault(kernel, None)
        vars(mamba).setdefault(f"{kernel}_triton", None)
    # All model classes, here once: each copy of this process would import them again.
    import sglang.srt.models.registry  # noqa: F401
    from sglang.srt.models import deepseek_v4

    deepseek_v4.DeepseekV4ForCausalLM._prewarm_mhc_kernels = lambda *_: None  # what its loader runs at its end


def load(ckpt: str) -> Any:
    """SGLang's model of a checkpoint with its parameters as its loader leaves them."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    kind = json.loads((Path(ckpt) / "config.json").read_text())["model_type"]
    backend = "triton" if kind.startswith(("gemma4", "gpt_oss")) else "torch_native"  # what SGLang takes on a CPU
    options = ServerArgs(model_path=ckpt, device="cpu", attention_backend=backend, disable_cuda_graph=True)
    publish(options, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    config = ModelConfig.from_server_args(options, is_draft_model=bool(os.environ.get("LOADS_DRAFTS")))
    for part in {id(one): one for one in (config.hf_config, config.hf_text_config)}.values():
        adjust_tp_num_heads_if_necessary(part, 1, True)  # what its models read on a CPU
    init_distributed_environment(1, 0, f"file://{ckpt}.store", 0, "gloo")
    initialize_model_parallel()
    initialize_dp_attention(options)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


if __name__ == "__main__":
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTORCH_JIT": "0"}
    prepare()
    serve(load)
