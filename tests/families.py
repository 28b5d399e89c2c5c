"""Tiny checkpoints of today's families in their published layout: transformers' own model, and what it drops on load.

MTP layers, indexers and FP8 scales have the names, dtypes and shapes of the vendors' files.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import image_text, tiny

# Those that the loaders of vLLM and SGLang are tried with.
LOADED = ("deepseek_v3", "deepseek_v32", "glm4_moe", "llama4_text", "qwen3_5", "qwen3_vl", "mistral3", "internvl")
# Those whose multi-token prediction layer SGLang's model for drafts is tried with.
DRAFTING = ("deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_next", "qwen3_5_text")

HIDDEN, VOCABULARY, LAYERS = 128, 96, 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 1,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
_INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 4}


def make_config(kind: str) -> Any:
    """The config of a small model of a family."""
    t = transformers
    grouped = {**_COMMON, "num_key_value_heads": 2, "head_dim": 32}
    llama4 = {**grouped, "intermediate_size_mlp": 128, "num_local_experts": 4, "interleave_moe_layer_step": 1}
    hybrid = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
    hybrid |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"shared_expert_intermediate_size": 64}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "depth": 1, "out_hidden_size": HIDDEN}
    makers: dict[str, Any] = {
        "deepseek_v3": lambda: t.DeepseekV3Config(**_COMMON, **_MOE, **_MLA),
        "deepseek_v32": lambda: t.DeepseekV32Config(**_COMMON, **_MOE, **_MLA, **_INDEXER),
        "glm4_moe": lambda: t.Glm4MoeConfig(**grouped, **_MOE),
        "qwen3_next": lambda: t.Qwen3NextConfig(**grouped, **hybrid, **experts),
        "qwen3_5_text": lambda: t.Qwen3_5TextConfig(**grouped, **hybrid, mtp_num_hidden_layers=1),
        "llama4_text": lambda: t.Llama4TextConfig(**llama4, num_experts_per_tok=1),
        "llama4": lambda: t.Llama4Config(
            text_config={**llama4, "num_experts_per_tok": 1},
            vision_config={
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14, "projector_input_dim": 32, "projector_output_dim": 32,
                "vision_output_dim": 32,
            },
        ),
        "qwen3_5": lambda: t.Qwen3_5Config(text_config={**grouped, **hybrid}, vision_config=vision),
        "qwen3_vl": lambda: t.Qwen3VLConfig(
            text_config=grouped, vision_config={**vision, "deepstack_visual_indexes": [0]}
        ),
        "bloom": lambda: t.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2),
        "rwkv": lambda: t.RwkvConfig(
            vocab_size=VOCABULARY, context_length=64, hidden_size=64, num_hidden_layers=LAYERS, intermediate_size=128
        ),
    }  # fmt: skip
    return makers[kind]() if kind in makers else image_text.make_config(kind)


def make_model(folder: Path, kind: str, *, mtp: bool = False, fp8: bool = False, seed: int = 0) -> Path:
    """Saves a random model in bfloat16.

    mtp  with the layer behind the last that the family predicts further tokens with, which transformers never makes
    fp8  its linear layers as the vendors of DeepSeek and GLM publish them: F8_E4M3 with ``weight_scale_inv`` in F32
    """
    torch.manual_seed(seed)
    config = make_config(kind)
    auto = transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or kind in ("qwen3_5", "llama4"):
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "inv_freq" not in name:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(tensor + 0.1 * noise if tensor.dim() == 1 else 0.1 * noise)
    model.to(torch.bfloat16).save_pretrained(folder)
    if kind == "qwen3_5":  # as its vendor's says; SGLang reads it
        text = json.loads((folder / "config.json").read_text())["text_config"]
        _edit_config(folder, text_config={**text, "full_attention_interval": 2})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if mtp:
        tensors |= _mtp_layer(tensors, generator, kind)
    if fp8:
        tensors = _as_fp8(tensors)
        _edit_config(folder, quantization_config={
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        })  # fmt: skip
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def mtp_base(kind: str) -> str:
    """What the names of the decoder layer of a family's multi-token prediction begin with."""
    return "mtp.layers.0." if kind.startswith("qwen") else f"model.layers.{LAYERS}."


def _mtp_layer(tensors: dict[str, torch.Tensor], generator: torch.Generator, kind: str) -> dict[str, torch.Tensor]:
    """A decoder layer like the last, and what joins it to the model."""
    last, base = f"model.layers.{LAYERS - 1}.", mtp_base(kind)
    made = {base + name.removeprefix(last): tensors[name].clone() for name in tensors if name.startswith(last)}
    join, norms, offset = f"{base}eh_proj", [f"{base}{norm}" for norm in ("enorm", "hnorm", "shared_head.norm")], 1
    if kind.startswith("qwen"):
        join, offset = "mtp.fc", 0  # their norms multiply by 1 + weight
        norms = [f"mtp.{norm}" for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
    made[f"{join}.weight"] = (torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.1).bfloat16()
    for norm in norms:
        made[f"{norm}.weight"] = torch.full((HIDDEN,), offset, dtype=torch.bfloat16)
    for copied in ("embed_tokens", "shared_head.head") if not kind.startswith("qwen") else ():
        made[f"{base}{copied}.weight"] = tensors["lm_head.weight"].clone()
    return made


_FLOAT = ("lm_head", "embed_tokens", "shared_head", "norm", "mlp.gate.", "eh_proj", "weights_proj")


def _as_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Linear layers in blocks of 128 x 128; what vendors leave in bfloat16 stays."""
    made = {}
    for name, w in tensors.items():
        if w.dim() != 2 or any(part in name for part in _FLOAT):
            made[name] = w
            continue
        rows, cols = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
        scales, codes = torch.empty(rows, cols), torch.empty(w.shape, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(cols):
                at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scales[i, j] = w[at].float().abs().max() / 448
                codes[at] = (w[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
        made[name], made[f"{name}_scale_inv"] = codes, scales
    return made


def make_v4(
    folder: Path,
    *,
    exponents: tuple[int, ...] = (-6, -4),
    codes_of_least: tuple[int, ...] = tuple(range(16)),
    block: int = 128,
) -> Path:
    """The layout of DeepSeek-V4's files: scales called ``.scale``, in E8M0 bytes; experts' codes two to an I8.

    exponents       of the scales of the experts' blocks of 32, in turn
    codes_of_least  the codes in blocks with the least of the exponents
    block           of the linear layers: 128, or the 32 of DeepSeek-V4.1
    """
    grid = 128 // block
    e8m0 = torch.exp2(torch.arange(grid * grid).reshape(grid, grid) % 3 - 4.0).to(torch.float8_e8m0fnu)
    base, generator, floats = "layers.0", torch.Generator().manual_seed(4), torch.Generator().manual_seed(5)
    tensors = {
        "embed.weight": torch.randn(96, 128, generator=floats).bfloat16(),
        f"{base}.attn.wkv.weight": torch.randn(128, 128, generator=floats).to(torch.float8_e4m3fn),
        f"{base}.attn.wkv.scale": e8m0,
        f"{base}.ffn.gate.weight": torch.randn(4, 128, generator=floats).bfloat16(),
        "head.weight": torch.randn(96, 128, generator=floats).bfloat16(),
    }
    for expert in ("0.w1", "0.w2", "0.w3"):
        scales = torch.tensor(exponents).repeat(128 * 4 // len(exponents)).reshape(128, 4)
        codes = torch.randint(0, 16, (128, 128), generator=generator)
        some = torch.tensor(codes_of_least)[codes % len(codes_of_least)]
        codes = torch.where((scales == min(exponents)).repeat_interleave(32, dim=1), some, codes).to(torch.uint8)
        tensors[f"{base}.ffn.experts.{expert}.weight"] = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
        tensors[f"{base}.ffn.experts.{expert}.scale"] = torch.exp2(scales.float()).to(torch.float8_e8m0fnu)
    config = {
        "model_type": "deepseek_v4", "expert_dtype": "fp4", "hidden_size": 128, "num_hidden_layers": 1,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
            "weight_block_size": [block, block],
        },
    }  # fmt: skip
    return tiny.save(folder, tensors, config=config)


def _edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_windows(file: Path, samples: int = 12, seqlen: int = 16) -> Path:
    """Token ids as .jsonl, in which each row is a window."""
    ids = torch.randint(0, VOCABULARY, (samples, seqlen), generator=torch.Generator().manual_seed(5))
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids.tolist()))
    return file
