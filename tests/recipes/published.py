"""Headers of models as their vendors publish them: names, dtypes and shapes, without a weight.

The widths are those of the published config.json. There are a few layers, which show every kind, and 16 experts where
there are more. Most tensors come from transformers' own model on the meta device, with the names under which it saves
it; what it never holds is added: multi-token prediction layers, FP8 scales. The weights are holes in the files.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from scripts.make_published_layout import DEEPSEEK, GPT_OSS, Tensor, deepseek, gpt_oss, write

_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# Names of image-text models before transformers 4.52, which their published files have.
_OLDER = {
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.vision_model.": "vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


@dataclass(frozen=True)
class Published:
    """A model: its config.json, and its tensors.

    kind     transformers' model_type
    config   the published numbers in which the config differs from transformers' default
    older    whether the files have the names of before transformers 4.52
    fp8      parts of names of matrices that are published in FP8 blocks of 128x128
    further  the tensors that transformers does not hold, from the config and the others
    says     what config.json says besides, or instead
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    older: bool = False
    fp8: tuple[str, ...] = ()
    further: Callable[[dict[str, Any], list[Tensor]], Iterable[Tensor]] = lambda config, tensors: ()
    says: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Saves config.json and the headers to a new folder."""
        config = transformers.AutoConfig.for_model(self.kind, **self.config)
        described = {**json.loads(config.to_json_string(use_diff=False)), **self.says}
        tensors = list(_tensors(config))
        tensors += self.further({**described, **described.get("text_config", {})}, tensors)
        if self.older:
            tensors = [(_older(name), dtype, shape) for name, dtype, shape in tensors]
        if self.fp8:
            tensors = list(_as_fp8(tensors, self.fp8))
            described["quantization_config"] = _FP8
        return save(folder, described, tensors)


def save(folder: Path, config: dict[str, Any], tensors: list[Tensor]) -> Path:
    """One file of headers and its config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "model.safetensors", tensors, None)
    return folder


def _tensors(config: Any) -> Iterator[Tensor]:
    """Those of transformers' model, as it saves them in bfloat16."""
    images = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    state = model.state_dict()
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        state.pop("lm_head.weight", None)
    for name, tensor in revert_weight_conversion(model, state).items():
        yield name, _DTYPES[tensor.dtype], tuple(tensor.shape)


def _older(name: str) -> str:
    return next((new + name.removeprefix(old) for old, new in _OLDER.items() if name.startswith(old)), name)


def _as_fp8(tensors: Iterable[Tensor], parts: tuple[str, ...]) -> Iterator[Tensor]:
    for name, dtype, shape in tensors:
        if len(shape) != 2 or not any(part in name for part in parts):
            yield name, dtype, shape
            continue
        yield name, "F8_E4M3", shape
        yield f"{name}_scale_inv", "F32", tuple(-(-size // 128) for size in shape)


def _joined(config: dict[str, Any], tensors: list[Tensor]) -> Iterator[Tensor]:
    """What makes the last decoder layer one of multi-token prediction: DeepSeek-V3, GLM-4.5 to GLM-5."""
    at, hidden = f"model.layers.{config['num_hidden_layers']}", config["hidden_size"]
    yield f"{at}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
    yield from ((f"{at}.{leaf}.weight", "BF16", (hidden,)) for leaf in ("enorm", "hnorm", "shared_head.norm"))
    for leaf in ("embed_tokens", "shared_head.head"):
        yield f"{at}.{leaf}.weight", "BF16", (config["vocab_size"], hidden)


def _qwen_mtp(config: dict[str, Any], tensors: list[Tensor]) -> Iterator[Tensor]:
    """``mtp``, with a layer like the last: Qwen3-Next and Qwen3.5."""
    hidden = config["hidden_size"]
    last = re.compile(rf"model\.(language_model\.)?layers\.{config['num_hidden_layers'] - 1}\.")
    for name, dtype, shape in tensors:
        if last.match(name):
            yield last.sub("mtp.layers.0.", name), dtype, shape
    yield "mtp.fc.weight", "BF16", (hidden, 2 * hidden)
    for leaf in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{leaf}.weight", "BF16", (hidden,)


def _write_deepseek(folder: Path, **config: Any) -> Path:
    """DeepSeek-V3 and what shares its graph, in FP8; with the indexer of V3.2 where the config has one."""
    config = {**DEEPSEEK, "n_routed_experts": _FEW, **config}
    tensors = list(deepseek(config))
    hidden, heads, head = (config.get(key, 0) for key in ("hidden_size", "index_n_heads", "index_head_dim"))
    for number in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"] if heads else 0):
        at = f"model.layers.{number}.self_attn.indexer"
        indexer: list[Tensor] = [
            (f"{at}.wq_b.weight", "BF16", (heads * head, config["q_lora_rank"])),
            (f"{at}.wk.weight", "BF16", (head, hidden)),
        ]
        tensors += _as_fp8(indexer, (at,))
        tensors += ((f"{at}.k_norm.{leaf}", "F32", (head,)) for leaf in ("weight", "bias"))
        tensors.append((f"{at}.weights_proj.weight", "BF16", (heads, hidden)))
    return save(folder, config, tensors)


_FEW = 16  # experts
_GROUPED = {"num_attention_heads": 32, "num_key_value_heads": 8}
_QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, **_GROUPED, "head_dim": 128, "num_hidden_layers": 2}
_QWEN3_30B = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 2}
_QWEN3_30B |= {"num_experts": _FEW, "moe_intermediate_size": 768}
_GEMMA4 = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
_GDN = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}

# Recipe -> the models that it is tried with.
PUBLISHED: dict[str, tuple[Published | Callable[[Path], Path], ...]] = {
    "llama3": (
        Published("llama", {
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, **_GROUPED, "num_hidden_layers": 2,
        }),
    ),
    "llama4": (
        Published(
            "llama4",
            {
                "text_config": {"num_hidden_layers": 2, "intermediate_size_mlp": 16384, "num_local_experts": 16},
                "vision_config": {
                    "hidden_size": 1408, "num_hidden_layers": 1, "projector_input_dim": 4096,
                    "projector_output_dim": 4096, "vision_output_dim": 4096,
                },
            },
            older=True,
        ),
    ),
    "qwen2_5": (
        Published("qwen2", {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
            "num_key_value_heads": 4, "num_hidden_layers": 2,
        }),
    ),
    "qwen3": (Published("qwen3", _QWEN3_8B),),
    "qwen3_moe": (Published("qwen3_moe", _QWEN3_30B),),
    "qwen3_next": (Published("qwen3_next", {**_GDN, "num_experts": _FEW}, further=_qwen_mtp),),
    "qwen3_5": (
        Published("qwen3_5", {"text_config": _GDN, "vision_config": {"depth": 1}}, further=_qwen_mtp),
        Published(
            "qwen3_5_moe",
            {"text_config": {**_GDN, "num_experts": _FEW}, "vision_config": {"depth": 1}},
            further=_qwen_mtp,
        ),
    ),
    "qwen3_vl": (
        Published("qwen3_vl", {
            "text_config": _QWEN3_8B,
            "vision_config": {"depth": 1, "out_hidden_size": 4096, "deepstack_visual_indexes": [0]},
        }),
        Published("qwen3_vl_moe", {
            "text_config": _QWEN3_30B,
            "vision_config": {"depth": 1, "out_hidden_size": 2048, "deepstack_visual_indexes": [0]},
        }),
    ),
    "mistral3": (
        Published(
            "mistral3",
            {
                "text_config": {
                    "model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768,
                    **_GROUPED, "head_dim": 128, "num_hidden_layers": 2,
                },
                "vision_config": {"model_type": "pixtral", "num_hidden_layers": 1},
            },
            older=True,
        ),
        Published(
            "mistral3",
            {
                "text_config": {"model_type": "ministral3", "num_hidden_layers": 2},
                "vision_config": {"model_type": "pixtral", "num_hidden_layers": 1},
            },
            older=True,
        ),
    ),
    "mixtral": (Published("mixtral", {"num_hidden_layers": 2}),),
    "deepseek_v3": (lambda folder: _write_deepseek(folder, num_hidden_layers=4),),
    "deepseek_v3_2": (
        lambda folder: _write_deepseek(
            folder, model_type="deepseek_v32", architectures=["DeepseekV32ForCausalLM"], num_hidden_layers=4,
            index_n_heads=64, index_head_dim=128, index_topk=2048,
        ),
    ),
    "kimi_k2": (
        lambda folder: _write_deepseek(
            folder, model_type="kimi_k2", vocab_size=163840, num_attention_heads=64, num_key_value_heads=64,
            first_k_dense_replace=1, num_hidden_layers=2, num_nextn_predict_layers=0,
        ),
    ),
    "glm4_5": (
        Published(
            "glm4_moe",
            {
                "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
                "n_routed_experts": _FEW, "head_dim": 128, "attention_bias": True, "use_qk_norm": True,
                "first_k_dense_replace": 1, "num_hidden_layers": 3,
            },
            further=lambda config, tensors: _joined({**config, "num_hidden_layers": 2}, tensors),
            says={"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
        ),
    ),
    "glm5": (
        Published(
            "glm_moe_dsa",
            {
                "mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 1, "num_hidden_layers": 3,
                "n_routed_experts": _FEW,
            },
            further=lambda config, tensors: _joined({**config, "num_hidden_layers": 2}, tensors),
            says={"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
        ),
    ),
    "gpt_oss": (
        lambda folder: save(folder, GPT_OSS | {"num_hidden_layers": 2}, [*gpt_oss(GPT_OSS | {"num_hidden_layers": 2})]),
        Published("gpt_oss", {"num_hidden_layers": 2, "num_local_experts": 32}),  # as it is fine-tuned
    ),
    "gemma3": (
        Published(
            "gemma3",
            {
                "text_config": {
                    "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
                    "num_key_value_heads": 16, "head_dim": 128, "num_hidden_layers": 2,
                },
                "vision_config": {
                    "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 1,
                    "vision_use_head": False,
                },
            },
            older=True,
        ),
    ),
    "gemma4": (
        Published("gemma4", {"text_config": _GEMMA4, "vision_config": {"num_hidden_layers": 1}}),
        Published(
            "gemma4",
            {
                "text_config": {
                    **_GEMMA4, "enable_moe_block": True, "num_experts": _FEW, "top_k_experts": 8,
                    "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0,
                },
                "vision_config": {"num_hidden_layers": 1},
            },
        ),
    ),
    "phi4": (
        Published("phi3", {
            "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40,
            "num_key_value_heads": 10, "num_hidden_layers": 2,
        }),
    ),
    "granite4": (
        Published("granitemoehybrid", {
            "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 768, **_GROUPED, "num_local_experts": _FEW,
            "num_experts_per_tok": 10, "shared_intermediate_size": 1536, "mamba_n_heads": 128, "mamba_d_head": 64,
            "mamba_d_state": 128, "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
            "tie_word_embeddings": True,
        }),
    ),
    "nemotron3": (
        Published("nemotron_h", {
            "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64,
            "n_routed_experts": _FEW, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
            "num_experts_per_tok": 6, "layers_block_type": ["linear_attention", "moe", "full_attention"],
        }),
    ),
    "minimax_m2": (
        Published(
            "minimax_m2", {"num_hidden_layers": 2, "num_local_experts": _FEW}, fp8=("_proj.weight", ".experts.")
        ),
    ),
    "ernie4_5": (Published("ernie4_5_moe", {"num_hidden_layers": 2, "moe_num_experts": _FEW}),),
    "hunyuan_a13b": (
        Published("hunyuan_v1_moe", {
            "vocab_size": 128167, "intermediate_size": 3072, **_GROUPED, "head_dim": 128, "num_experts": _FEW,
            "moe_topk": 8, "num_hidden_layers": 2,
        }),
    ),
    "olmo3": (
        Published("olmo3", {
            "vocab_size": 100278, "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40,
            "num_key_value_heads": 8, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        }),
    ),
    "seed_oss": (Published("seed_oss", {"hidden_size": 5120, "num_hidden_layers": 2}),),
    "exaone4": (
        Published("exaone4", {
            "hidden_size": 5120, "intermediate_size": 27392, "num_attention_heads": 40, "num_key_value_heads": 8,
            "head_dim": 128, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        }),
    ),
    "smollm3": (Published("smollm3", {"num_hidden_layers": 2, "tie_word_embeddings": True}),),
    "command_a": (
        Published("cohere2", {
            "hidden_size": 12288, "intermediate_size": 36864, "num_attention_heads": 96, "num_key_value_heads": 8,
            "head_dim": 128, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        }),
    ),
}  # fmt: skip
