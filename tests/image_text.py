"""Tiny models of images and text of every family that transformers makes small, with what ptqpipe does with them."""

from typing import Any

import transformers

_TOKENS = {f"{kind}_{end}": 90 for kind in ("image", "video", "audio") for end in ("token_id", "token_index")}
_BOTH: dict[str, Any] = {
    **_TOKENS, "intermediate_size": 64, "num_attention_heads": 4, "num_heads": 2, "depth": 1, "image_size": 28,
    "patch_size": 14, "out_hidden_size": 64, "num_layers": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    **_BOTH, "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 32, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 32, "num_key_value_heads": 2,
}  # fmt: skip
_VISION: dict[str, Any] = {**_BOTH, "hidden_size": 32, "embed_dim": 32, "num_hidden_layers": 1, "head_dim": 8}

# The kinds whose language model runs -> what the engine says of it, "" where it serves it.
RUN: dict[str, str] = {"qwen3_vl": "", "llava": ""}


def make_config(kind: str) -> Any:
    """transformers' own config of a kind, its numbers made small."""
    return _shrunk(transformers.CONFIG_MAPPING[kind](), _TEXT)


def _shrunk(config: Any, sizes: dict[str, Any]) -> Any:
    own = config.to_dict()
    for name, value in sizes.items():
        if isinstance(own.get(name), (int, float)) or (name in own and name.endswith("token_id")):
            setattr(config, name, value)
    kinds = own.get("layer_types") or own.get("mlp_layer_types")
    for name in ("layer_types", "mlp_layer_types"):
        if sizes is _TEXT and kinds and own.get(name):
            kept = sorted(set(own[name]), key=own[name].index)
            setattr(config, name, kept[-2:] if len(kept) > 1 else own[name][:2])
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        rope["mrope_section"] = [2, 3, 3]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            _shrunk(part, _TEXT if "text" in name or "thinker" in name else _VISION)
    return config
