"""One loading of a checkpoint by SGLang's own code, for sglang_loads.py. Needs SGLang, torch and safetensors alone.

``python sglang_child.py CKPT OUT`` builds SGLang's model of a checkpoint on the CPU as for a GPU of compute capability
10.0, lets SGLang's loader fill it, and writes every parameter as it then is to OUT, a safetensors file whose metadata
name the classes that SGLang chose. What comes after, repacking for its kernels, needs a GPU and is left out. Packages
of SGLang's that exist for GPUs alone are replaced by empty ones: none of them takes part in loading.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

GPU_ONLY = ("sgl_kernel", "torchaudio", "torchvision")
CAPABILITY = (10, 0)


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module that has every name, for the packages in `GPU_ONLY` and all below them."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in GPU_ONLY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        made = MagicMock(name=spec.name)
        made.__spec__, made.__path__, made.__version__ = spec, [], "0.0"
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to do."""


def load(ckpt: str) -> Any:
    """SGLang's model of a checkpoint with its parameters as its loader leaves them."""
    import torch

    torch.cuda.get_device_capability = lambda *_, **__: CAPABILITY
    from sglang.srt import utils

    for module in (utils, utils.common):
        module.is_blackwell_supported = lambda *_: True
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader import get_model
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    DefaultModelLoader.postprocess_weights = staticmethod(lambda *_: None)
    options = ServerArgs(model_path=ckpt, device="cpu", attention_backend="torch_native", disable_cuda_graph=True)
    publish(options, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    config = ModelConfig.from_server_args(options)
    init_distributed_environment(1, 0, f"file://{sys.argv[2]}.store", 0, "gloo")
    initialize_model_parallel()
    initialize_dp_attention(options)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def main() -> None:
    """The child."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    sys.meta_path.insert(0, _Empty())
    from safetensors.torch import save_file

    model = load(sys.argv[1])
    methods = {
        type(getattr(module, "scheme", None) or module.quant_method).__name__
        for module in model.modules()
        if getattr(module, "quant_method", None) is not None
    }
    tensors = {name: value.detach().contiguous().clone() for name, value in model.named_parameters()}
    save_file(tensors, sys.argv[2], metadata={"methods": json.dumps(sorted(methods))})


if __name__ == "__main__":
    main()
