"""Seeded tiny checkpoints, written with the safetensors library alone: the shapes of real architectures, small."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ptqpipe.models.families import is_plain_decoder

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


class Tensors:
    """Makes seeded weights by name."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.made: dict[str, torch.Tensor] = {}

    def add(self, name: str, *shape: int, std: float = 0.02) -> None:
        """One normal tensor; its spread differs by name, so that fused groups must share scales."""
        factor = 1.0 + (sum(name.encode()) % 7) / 4
        self.made[name] = (torch.randn(shape, generator=self.generator) * (std * factor)).to(self.dtype)

    def ones(self, name: str, *shape: int) -> None:
        """A norm's weight."""
        self.made[name] = torch.ones(shape, dtype=self.dtype)


def attention(t: Tensors, prefix: str, *, hidden: int, kv: int) -> None:
    """q, k, v and o projections."""
    t.add(f"{prefix}.q_proj.weight", hidden, hidden)
    t.add(f"{prefix}.k_proj.weight", kv, hidden)
    t.add(f"{prefix}.v_proj.weight", kv, hidden)
    t.add(f"{prefix}.o_proj.weight", hidden, hidden)


def llama(
    *, seed: int = 0, layers: int = 2, hidden: int = 128, inner: int = 256, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """The tensors of a dense Llama."""
    t = Tensors(seed, dtype)
    t.add("model.embed_tokens.weight", 96, hidden)
    for layer in range(layers):
        base = f"model.layers.{layer}"
        attention(t, f"{base}.self_attn", hidden=hidden, kv=hidden // 2)
        for name, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            t.add(f"{base}.mlp.{name}.weight", *shape)
        t.ones(f"{base}.input_layernorm.weight", hidden)
        t.ones(f"{base}.post_attention_layernorm.weight", hidden)
    t.ones("model.norm.weight", hidden)
    t.add("lm_head.weight", 96, hidden)
    return t.made


def fused_moe(
    *, experts: int = 3, hidden: int = 128, inner: int = 64, transposed: bool = False
) -> dict[str, torch.Tensor]:
    """One layer whose experts are 3-D stacks: [E, 2I, H] and [E, H, I], or both transposed."""
    t = Tensors(1)
    t.add("model.embed_tokens.weight", 96, hidden)
    attention(t, "model.layers.0.self_attn", hidden=hidden, kv=hidden // 2)
    t.add("model.layers.0.mlp.gate.weight", experts, hidden)
    t.add("model.layers.0.mlp.experts.gate_up_proj", experts, 2 * inner, hidden)
    t.add("model.layers.0.mlp.experts.down_proj", experts, hidden, inner)
    if transposed:
        for name in list(t.made):
            if ".experts." in name:
                t.made[name] = t.made[name].transpose(1, 2).contiguous()
    t.ones("model.norm.weight", hidden)
    t.add("lm_head.weight", 96, hidden)
    return t.made


def config_of(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of a dense Llama with as many layers as there are, and without its class where the tensors are not those
    of such a model."""
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    further = int(config.get("num_nextn_predict_layers", 0))
    found = {**config, "num_hidden_layers": len(layers) - further if layers else config["num_hidden_layers"]}
    if not is_plain_decoder(found, {name: ("BF16", tuple(x.shape)) for name, x in tensors.items()}):
        found.pop("architectures", None)
    return found


def save(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, config: Mapping[str, Any] | None = None, shards: int = 1
) -> Path:
    """Writes a checkpoint folder, with tokenizer-like extra files, in one file or in ``shards`` with an index.

    config  with ``LLAMA_CONFIG``'s numbers it becomes that of these tensors (`config_of`)
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = dict(config or LLAMA_CONFIG)
    if described.get("architectures") == LLAMA_CONFIG["architectures"]:
        described = config_of(tensors, described)
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    names = list(tensors)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by relative name."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
