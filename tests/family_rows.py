"""Tiny models of the rows of the table of families, in the layout in which their vendors publish them.

Where transformers makes the family, the model is its own and it computes; else it is names and shapes of the files.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import tiny

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA: dict[str, Any] = {
    **_HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_GEMMA: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 96,
}
_INDEXER: dict[str, Any] = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 8}

# model_type -> the numbers in which its config differs from the others'.
MADE_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": {**_GEMMA, "num_kv_shared_layers": 0, "laurel_rank": 16, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4_text": {**_GEMMA, "global_head_dim": 32},
    "deepseek_v4": {
        **_INDEXER, "num_key_value_heads": 1, "moe_intermediate_size": 64, "q_lora_rank": 64, "o_lora_rank": 32,
        "o_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["hash_moe", "moe"],
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "qwen4_exp_text": {
        **_DELTA, **_EXPERTS, "layer_types": ["linear_attention", "indexed_attention"], "hc_count": 2, "hc_lowrank": 16,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "ple_layer_ids": [1], "ple_embed_dim": 64, "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64, "split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 8,
    },
    "olmo_hybrid": _DELTA,
    "kimi_linear": {
        **_HYBRID, "mlp_layer_types": ["dense", "sparse"], "moe_intermediate_size": 64, "num_experts": 4,
        "num_experts_per_token": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 32, "linear_head_dim": 32, "linear_num_heads": 4, "num_key_value_heads": 4,
    },
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m3_vl_text": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 128,
        "shared_intermediate_size": 64, "intermediate_size": 64, "rotary_dim": 16, "index_n_heads": 2,
        "index_head_dim": 32, "index_block_size": 8, "index_topk_blocks": 2, "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "ssm_state_size": 16,
        "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1, "n_routed_experts": 4, "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64, "moe_latent_size": 32,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "num_dense_layers": 1,
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "granitemoehybrid": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16,
        "mamba_n_groups": 1, "position_embedding_type": "rope",
    },
    "falcon_h1": {
        "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"], "mamba_d_state": 16, "n_mamba_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "use_shared_attention_adapter": True,
    },
}  # fmt: skip

# model_type -> what vendors' config.json says and transformers' does not need, for readers that do.
_TIED = {"tie_word_embeddings": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in MADE_BY_TRANSFORMERS if not kind.endswith("_text")},
    "minimax_m3_vl_text": {},
    "zamba2": _TIED,
    "gemma": _TIED,
    "gemma2": {**_TIED, "head_dim": 64, "hidden_act": "gelu_pytorch_tanh"},
    "gemma3n_text": _TIED,
    "gemma4_text": _TIED,
    "lfm2": {**_TIED, "block_dim": 128, "conv_dim": 128, "conv_dim_out": 128},
    "lfm2_moe": _TIED,
    "deepseek_v4": {
        "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "compress_ratios": [4, 128],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "q_lora_rank": 128, "o_lora_rank": 64, "topk_method": "noaux_tc", "num_hash_layers": 1,
        "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        },
    },
    "qwen3_next": {"full_attention_interval": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "kimi_linear": {
        "first_k_dense_replace": 1, "mla_use_nope": True, "linear_attn_config": {
            "kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4,
        },
    },
    "nemotron_h": {"hybrid_override_pattern": "ME*-", "mamba_n_groups": 1},
    "hunyuan_v1_moe": {
        "moe_intermediate_size": 128, "use_mixed_mlp_moe": True, "num_shared_expert": 1, "use_qk_norm": True,
        "head_dim": 64,
    },
}  # fmt: skip
# Keys of its own config.json that vendors' have not.
_OF_TRANSFORMERS = {"nemotron_h": "layers_block_type", "deepseek_v4": "rope_parameters"}
# What transformers calls otherwise than vendors when it saves: it renames the dense layer with the others.
_RENAMED = {"kimi_linear": (".layers.0.block_sparse_moe.", ".layers.0.mlp.")}

_LAYER = "model.layers.0."
_BLOCK = "model.layers.0.self_attn."
# model_type -> names and shapes of a layer, as published.
NAMES_AND_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "step3p5": {
        **{f"{_BLOCK}{leaf}_proj.weight": (64, 128) for leaf in "qkv"},
        f"{_BLOCK}o_proj.weight": (128, 64),
        f"{_BLOCK}g_proj.weight": (4, 128),
        f"{_LAYER}moe.gate.weight": (4, 128),
        **{f"{_LAYER}moe.{leaf}_proj.weight": (4, 64, 128) for leaf in ("gate", "up")},
        f"{_LAYER}moe.down_proj.weight": (4, 128, 64),
        f"{_LAYER}share_expert.up_proj.weight": (64, 128),
    },
    "glm5_next_text": {
        **{f"{_BLOCK}{leaf}_proj.weight": (64, 128) for leaf in "qkv"},
        **{f"{_BLOCK}{leaf}_proj.weight": (4 if leaf == "b" else 32, 128) for leaf in ("b", "f_a", "g_a")},
        f"{_BLOCK}o_proj.weight": (128, 64),
    },
    "internvl_chat": {
        f"language_model.{_BLOCK}o_proj.weight": (128, 64),
        "mlp1.1.weight": (128, 128),
        "mlp1.3.weight": (128, 128),
        "vision_model.encoder.layers.0.attn.qkv.weight": (96, 32),
    },
    "phi4mm": {
        f"{_BLOCK}o_proj.base_layer.weight": (128, 64),
        f"{_BLOCK}o_proj.lora_A.vision.weight": (32, 64),
        "model.embed_tokens_extend.image_embed.img_projection.0.weight": (128, 128),
        "model.embed_tokens_extend.audio_embed.audio_projection.speech.0.weight": (128, 128),
    },
    "lighton_ocr": {
        "model.language_model.layers.0.self_attn.o_proj.weight": (128, 64),
        "model.vision_projection.linear_1.weight": (128, 128),
    },
    "gpt2": {
        "h.0.attn.c_attn.weight": (128, 384),
        "h.0.attn.c_attn.bias": (384,),
    },
}  # fmt: skip


def make(folder: Path, kind: str, *, published: bool = False) -> Path:
    """Saves the tiny model of a ``model_type`` in bfloat16.

    published  with the config.json of its vendor, and experts that blocks of 128 x 128 divide
    """
    extra = PUBLISHED[kind] if published else {}
    torch.manual_seed(0)
    if kind in NAMES_AND_SHAPES:
        tensors = {name: torch.randn(shape).bfloat16() * 0.1 for name, shape in NAMES_AND_SHAPES[kind].items()}
        return tiny.save(folder, tensors, config={"model_type": kind, "hidden_size": 128})
    given = {**_COMMON, **MADE_BY_TRANSFORMERS[kind]}
    if published:
        given |= {key: value for key, value in extra.items() if key in (*given, "qk_rope_head_dim")}
        given |= {key: 128 for key in given if key.endswith("intermediate_size")}
    config = transformers.AutoConfig.for_model(kind, **given)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    if published:
        file = folder / "config.json"
        written = {**json.loads(file.read_text()), **extra}
        written.pop(_OF_TRANSFORMERS.get(kind, ""), None)
        file.write_text(json.dumps(written))
    if published and kind in _RENAMED:
        weights = folder / "model.safetensors"
        tensors = {name.replace(*_RENAMED[kind]): tensor for name, tensor in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
    return folder
