"""Small seeded models as transformers saves them, quantized by hand in every layout: what the runtime tests load."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from ptqpipe.runtime.linear import PackedLinear
from tests.checkpoint.layouts.builders import Checkpoint, quantize, read_checkpoint

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=256),
    "tied": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=256, tie_word_embeddings=True),
    "biased": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=256, attention_bias=True, mlp_bias=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=256, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, intermediate_size=256, num_local_experts=4, num_experts_per_tok=2
    ),
    # A norm of each head; sliding windows and tied embeddings; fused projections; stacked, transposed experts.
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, intermediate_size=256),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, intermediate_size=256, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: transformers.Phi3Config(
        **{key: value for key, value in SIZES.items() if key != "head_dim"}, intermediate_size=256
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    ),
}


def save_source(name: str, folder: Path) -> Path:
    """A seeded bfloat16 model of ``CONFIGS``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0 if parameter.dim() > 1 else 1, 0.05)
    model.save_pretrained(folder)
    return folder


def linear_layers(scheme: str) -> Callable[[str], str | None]:
    """``scheme`` for attention, MLPs and experts; routers, embeddings and heads are kept."""

    def pick(module: str) -> str | None:
        routed = module.endswith((".mlp.gate", ".block_sparse_moe.gate"))
        inside = any(part in module for part in (".self_attn.", ".mlp.", ".experts."))
        return scheme if inside and not routed else None

    return pick


def quantized(source: Path, container: str, scheme: str | Callable[[str], str | None]) -> Checkpoint:
    """The source with its linear layers in ``scheme``, abs-max scales."""
    pick = linear_layers(scheme) if isinstance(scheme, str) else scheme
    made = quantize(read_checkpoint(source), container, pick, fused=FUSED)
    return Checkpoint(made.configs, {name: tensor.clone() for name, tensor in made.tensors.items()})


def float_twin(source: Path, values: Mapping[str, torch.Tensor], folder: Path) -> Any:
    """transformers' own float32 model of the source, with ``values`` in the place of the quantized weights."""
    original = read_checkpoint(source)
    assert values.keys() <= original.tensors.keys()
    path = Checkpoint(original.configs, {**original.tensors, **values}).save(folder)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """float32 logits of ``TOKENS``."""
    out: torch.Tensor = model(TOKENS).logits.float()
    return out


def packed_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """(bytes of the packed weights of a model, bytes of the same weights in bfloat16)."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(x.packed.nbytes for x in layers), sum(2 * x.in_features * x.out_features for x in layers)


def local_kv_heads(model: torch.nn.Module) -> dict[str, int]:
    """Key-value heads of each attention module of a model, by its name: those of this rank."""
    return {
        name: int(module.k_proj.out_features) // int(module.head_dim)
        for name, module in model.named_modules()
        if hasattr(module, "head_dim") and hasattr(module, "k_proj") and hasattr(module.k_proj, "out_features")
    }
