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
_VISION: dict[str, Any] = {
    **_BOTH,
    "text_hidden_size": 64,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_hidden_layers": 1,
    "head_dim": 8,
}

# The kinds whose language model runs -> what the engine says of it, "" where it serves it.
RUN: dict[str, str] = dict.fromkeys(
    (
        "qwen3_vl", "llava", "mistral3", "internvl", "idefics3", "gemma3", "gemma4", "kimi_k25",
        "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "glm46v", "glm_ocr", "aria", "aya_vision",
        "cohere2_vision", "cosmos3_edge", "exaone4_5", "fuyu", "got_ocr2", "granite_docling", "hyperclovax_vision_v2",
        "lighton_ocr", "llava_onevision", "ovis2", "paddleocr_vl", "qianfan_ocr", "smolvlm",
        "video_llama_3", "video_llava", "vipllava",
    ),
    "",
) | {
    "paligemma": "does not compute the tokens",
    "inkling2": "brings its own attention mask or bias",
    "lfm2_vl": "",
    "deepseek_vl": "does not use transformers' attention interface",
    "minicpmv4_6": "",
    "unlimited_ocr": "has reference_sliding_attention layers",
}  # fmt: skip


# Shares of the rotary dimensions that time, height and width have, where the family's own are too many.
_SECTIONS = {name: [2, 3, 3] for name in ("glm46v", "glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")}
_SECTIONS["glm4v_moe"] = [1, 1, 2]


def make_config(kind: str) -> Any:
    """transformers' own config of a kind, its numbers made small."""
    if kind == "gemma4":  # its layers' own numbers follow from the others when it is made
        vision = _shrunk(transformers.Gemma4VisionConfig(position_embedding_size=64, num_key_value_heads=4), _VISION)
        layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16}
        sizes = {name: value for name, value in _TEXT.items() if name in transformers.Gemma4TextConfig().to_dict()}
        layers |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
        text = {**sizes, **layers, "global_head_dim": 16, "vocab_size_per_layer_input": 96}
        return transformers.Gemma4Config(text_config=text, vision_config=vision.to_dict())
    config = _shrunk(transformers.CONFIG_MAPPING[kind](), _TEXT)
    if kind in _SECTIONS:
        text = config.get_text_config()
        text.rope_parameters = {**text.rope_parameters, "mrope_section": _SECTIONS[kind]}
    if kind == "step3p7":
        text = config.get_text_config()
        text.sliding_window, text.num_sliding_attention_heads, text.share_expert_dim = 8, 4, 32
        text.layer_types = ["sliding_attention", "full_attention"]
        text.rope_parameters = {name: {"rope_type": "default", "rope_theta": 1e4} for name in text.layer_types}
    if kind == "lfm2_vl":
        config.get_text_config().layer_types = ["conv", "full_attention"]
    return config


def _shrunk(config: Any, sizes: dict[str, Any]) -> Any:
    own = config.to_dict()
    for name, value in sizes.items():
        if isinstance(own.get(name), (int, float)) or (name in own and name.endswith("token_id")):
            setattr(config, name, value)
    if "qk_rope_head_dim" in own and "head_dim" in own:
        config.head_dim, config.num_key_value_heads = config.qk_rope_head_dim, config.num_attention_heads
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
