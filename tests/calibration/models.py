"""Small random models, and the inputs of their weights seen by another route than ptqpipe's.

The route: transformers' own float64 model is run whole, and every matrix product of the run (``linear``, ``addmm``,
``@``) whose second operand lies in the memory of a parameter is noted with its first operand.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

VOCABULARY = 96
HIDDEN = 64
LAYERS = 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_MOE = {**_COMMON, "num_experts_per_tok": 2}
KINDS = (
    "llama",
    "llama_tied",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "gpt2",
    "deepseek_v3",
    "llama4",
)


def make_config(kind: str) -> Any:
    """The config of a small model."""
    t = transformers
    tied = {**_COMMON, "tie_word_embeddings": True}
    half = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    makers: dict[str, Any] = {
        "llama": lambda: t.LlamaConfig(**_COMMON),
        "llama_tied": lambda: t.LlamaConfig(**tied),
        "qwen2": lambda: t.Qwen2Config(**{k: v for k, v in _COMMON.items() if k != "head_dim"}),
        "qwen3": lambda: t.Qwen3Config(**_COMMON),
        "gemma2": lambda: t.Gemma2Config(**tied, query_pre_attn_scalar=16, **half),
        "gemma3": lambda: t.Gemma3TextConfig(**tied, query_pre_attn_scalar=16, **half),
        "mixtral": lambda: t.MixtralConfig(**_MOE, num_local_experts=4),
        "qwen2_moe": lambda: t.Qwen2MoeConfig(
            **{k: v for k, v in _MOE.items() if k != "head_dim"},
            num_experts=4,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=32,
        ),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**_MOE, num_experts=4, moe_intermediate_size=48),
        "gpt_oss": lambda: t.GptOssConfig(**_MOE, num_local_experts=4, **half),
        "gpt2": lambda: t.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=HIDDEN,
            n_head=4,
            n_layer=LAYERS,
            n_positions=64,
        ),
        "deepseek_v3": lambda: t.DeepseekV3Config(
            **{k: v for k, v in _MOE.items() if k not in ("head_dim", "num_key_value_heads")},
            num_key_value_heads=4,
            moe_intermediate_size=48,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
        "llama4": lambda: t.Llama4TextConfig(
            **{**_MOE, "num_experts_per_tok": 1}, num_local_experts=4, intermediate_size_mlp=96, moe_layers=[1]
        ),
    }
    return makers[kind]()


def make_model(folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Saves a random model with norms, biases and router offsets that are not trivial."""
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(make_config(kind))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "inv_freq" not in name:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(tensor + 0.2 * noise if tensor.dim() == 1 else 0.2 * noise)
    model.to(dtype).save_pretrained(folder)
    return folder


def make_windows(samples: int = 11, seqlen: int = 24, *, seed: int = 5) -> torch.Tensor:
    """int64 [samples, seqlen]."""
    return torch.randint(0, VOCABULARY, (samples, seqlen), generator=torch.Generator().manual_seed(seed))


def write_windows(file: Path, windows: torch.Tensor) -> Path:
    """Token ids as .jsonl, in which each row is a window."""
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in windows.tolist()))
    return file


class _Products(TorchFunctionMode):
    """Notes the first operands of products with parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.rows: dict[tuple[str, int | None], list[torch.Tensor]] = defaultdict(list)
        self._places = [(p.data_ptr(), p.nbytes, name, p) for name, p in model.named_parameters()]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "linear" or name == "matmul" or name == "__matmul__":
            self._note(args[0], args[1])
        elif name == "addmm":
            self._note(args[1], args[2])
        elif name == "bmm" and any(args[1] is parameter for _, _, _, parameter in self._places):
            for x, w in zip(args[0], args[1], strict=True):  # Llama 4: a run of rows an expert, zeros where it has none
                self._note(x[x.any(dim=-1)], w)
        return func(*args, **(kwargs or {}))

    def _note(self, x: torch.Tensor, w: torch.Tensor) -> None:
        for start, nbytes, name, parameter in self._places:
            if start <= w.data_ptr() < start + nbytes and x.numel():
                expert = None if parameter.dim() == 2 else (w.data_ptr() - start) // parameter[0].nbytes
                self.rows[name, expert].append(x.detach().reshape(-1, x.shape[-1]).clone())
                return


def whole_model_inputs(
    folder: Path, windows: torch.Tensor
) -> tuple[dict[tuple[str, int | None], torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """((parameter, expert) -> its input rows [tokens, K] in float64, (keys, values) of every layer)."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    products = _Products(model)
    cache = transformers.DynamicCache()  # without a config every layer keeps all tokens
    with torch.no_grad(), products:
        model(windows, past_key_values=cache, use_cache=True)
    inputs = {key: torch.cat(rows) for key, rows in products.rows.items()}
    return inputs, [(layer.keys, layer.values) for layer in cache.layers]


def checkpoint_names(kind: str, parameter: str, expert: int | None) -> list[str]:
    """The modules in the published files whose input is that of a parameter: a table of each architecture's names."""
    module = parameter.removesuffix(".weight")
    if module in ("model.embed_tokens", "transformer.wte"):  # a product with the embedding is the tied head's
        return ["lm_head"]
    if expert is None:
        return [module.replace("mlp.gate", "block_sparse_moe.gate")] if kind == "mixtral" else [module]
    stem, _, leaf = module.rpartition(".")
    if kind in ("gpt_oss", "llama4"):  # a stack: as it is, and as a converted checkpoint may name its parts
        parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
        return [f"{module}[{expert}]", *(f"{stem}.{expert}.{part}" for part in parts)]
    leaves = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[leaf]
    if kind == "mixtral":
        stem = stem.replace(".mlp.", ".block_sparse_moe.")
        leaves = {"gate_up_proj": ["w1", "w3"], "down_proj": ["w2"]}[leaf]
    return [f"{stem}.{expert}.{leaf}" for leaf in leaves]
