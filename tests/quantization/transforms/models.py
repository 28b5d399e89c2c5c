"""Small random models of each architecture, their logits, and statistics of their inputs taken by hooks.

The statistics folder is written here with the safetensors library alone, as `ptqpipe/calibration/statistics.py`
describes it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ptqpipe.checkpoint.reader import CheckpointReader

VOCABULARY = 96
HIDDEN = 64
TOKENS = 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_MOE = {**_COMMON, "num_experts_per_tok": 2}


def _config(kind: str) -> Any:
    import transformers as t

    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**_COMMON),
        "llama_bias": lambda: t.LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True),
        "llama_tied": lambda: t.LlamaConfig(**{**_COMMON, "tie_word_embeddings": True}),
        "llama_heads_of_24": lambda: t.LlamaConfig(**{**_COMMON, "head_dim": 24}),  # rotated by blocks of 8
        "mistral": lambda: t.MistralConfig(**_COMMON, sliding_window=None),
        "qwen2": lambda: t.Qwen2Config(**{**_COMMON, "head_dim": 16}),
        "qwen3": lambda: t.Qwen3Config(**_COMMON),
        "gemma": lambda: t.GemmaConfig(**{**_COMMON, "tie_word_embeddings": True}, hidden_activation="gelu"),
        "gemma2": lambda: t.Gemma2Config(**{**_COMMON, "tie_word_embeddings": True}, query_pre_attn_scalar=32),
        "mixtral": lambda: t.MixtralConfig(**_MOE, num_local_experts=3),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**_MOE, num_experts=3, moe_intermediate_size=48),
        "qwen2_moe": lambda: t.Qwen2MoeConfig(
            **{**_MOE, "head_dim": 16}, num_experts=3, moe_intermediate_size=48, shared_expert_intermediate_size=64
        ),
        "gpt2": lambda: t.GPT2Config(
            vocab_size=VOCABULARY, n_embd=HIDDEN, n_head=4, n_layer=2, n_positions=64, attn_pdrop=0, embd_pdrop=0,
            resid_pdrop=0,
        ),
    }  # fmt: skip
    return makers[kind]()


def make_model(folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A random model whose norms and biases are not trivial, with channels of very different sizes."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(_config(kind))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise * 0.15)
        for parameter in (p for n, p in model.named_parameters() if "norm" in n or "ln_" in n):
            parameter[::7] *= 6  # outlying channels: what smoothing is for
    model.to(dtype).save_pretrained(folder)
    return folder


def token_ids(seed: int = 5, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """int64 [3, TOKENS]."""
    return torch.randint(0, vocabulary, (3, TOKENS), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(folder: Path, ids: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of a checkpoint that transformers loads and computes in ``dtype``."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    found: torch.Tensor = model(ids).logits
    return found


class _Seen:
    """Running statistics of the inputs of one module."""

    def __init__(self) -> None:
        self.x: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> None:
        self.x.append(x.detach().float().reshape(-1, x.shape[-1]))

    def tensors(self, *, blocks: bool) -> dict[str, torch.Tensor]:
        x = torch.cat(self.x)
        found = {"amax": x.abs().amax(0), "mean": x.mean(0), "second_moment": (x * x).mean(0)}
        found["full_moment"] = moment = x.T @ x / x.shape[0]
        if blocks:
            runs = range(0, x.shape[1], 16)
            found["block_moment"] = torch.stack([moment[i : i + 16, i : i + 16] for i in runs])
        return found


@torch.no_grad()
def make_statistics(model_folder: Path, out: Path, ids: torch.Tensor, *, blocks: bool = True) -> Path:
    """Runs the model over ``ids`` and writes the statistics of every linear layer and expert."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    names = set(CheckpointReader.open(model_folder).entries)
    seen: dict[str, _Seen] = {}

    def watch(module_name: str) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            seen.setdefault(module_name, _Seen()).add(inputs[0])

        return hook

    def watch_experts(base: str) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            for e in range(module.gate_up_proj.shape[0]):
                stem, up, gate, down = _expert_names(base, e, names)
                seen.setdefault(f"{stem}.{gate}", _Seen()).add(inputs[0])
                seen.setdefault(f"{stem}.{up}", _Seen()).add(inputs[0])
                g, u = (inputs[0].float() @ module.gate_up_proj[e].T).chunk(2, dim=-1)
                seen.setdefault(f"{stem}.{down}", _Seen()).add(torch.nn.functional.silu(g) * u)

        return hook

    for name, module in model.named_modules():
        if f"{name}.weight" in names and getattr(module, "weight", torch.empty(0)).dim() == 2:
            if not isinstance(module, torch.nn.Embedding):
                module.register_forward_pre_hook(watch(name))
        elif name.endswith("mlp.experts"):
            module.register_forward_pre_hook(watch_experts(name))
    model(ids)
    return write_statistics(
        model_folder, out, {n: s.tensors(blocks=blocks) for n, s in seen.items()}, tokens=ids.numel()
    )


def write_statistics(
    model_folder: Path, out: Path, modules: dict[str, dict[str, torch.Tensor]], *, tokens: int
) -> Path:
    """Writes a statistics folder with the given tensors by module."""
    out.mkdir(parents=True)
    tensors = {f"{name}.{moment}": t for name, found in modules.items() for moment, t in found.items()}
    save_file(tensors, out / "block.safetensors")
    quantiles = {"0.99": 1.0, "0.999": 1.0, "0.9999": 1.0}
    content = {
        "version": 1,
        "digest": "0" * 64,
        "model": {"name": model_folder.name, "fingerprint": CheckpointReader.open(model_folder).fingerprint()},
        "modules": {n: {"key": n, "tokens": tokens, "measured": True, "quantiles": quantiles} for n in modules},
        "attention": {},
    }
    (out / "stats.json").write_text(json.dumps(content))
    return out


def _expert_names(base: str, e: int, names: set[str]) -> tuple[str, str, str, str]:
    """(stem, up, gate, down) as the checkpoint names the weights of expert ``e``."""
    mixtral = f"{base.removesuffix('.mlp.experts')}.block_sparse_moe.experts.{e}"
    if f"{mixtral}.w1.weight" in names:
        return mixtral, "w3", "w1", "w2"
    return f"{base}.{e}", "up_proj", "gate_proj", "down_proj"
