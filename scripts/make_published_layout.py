"""Writes a synthetic checkpoint in the layout in which a vendor publishes its model: names, shapes, dtypes and files.

Usage: python scripts/make_published_layout.py OUT --layout deepseek-v3 --sparse
       python scripts/make_published_layout.py OUT --layout gpt-oss [--layers N]

deepseek-v3  671 billion weights, FP8 in blocks of 128x128 with float32 scales, 61 layers and the MTP layer (688 GB)
gpt-oss      gpt-oss-20b's width, experts in MXFP4 (20b: 24 layers, 13 GB; two layers are 1.1 GB and its embeddings 2.3)
gpt-oss-1gb  two such layers and a small vocabulary: what converting the experts takes (1.2 GB)

``--sparse`` writes headers alone: the weights are holes in the files, which read as zeros and take no room on the disk.
Without it they are random: codes of any value, E8M0 scales between 2^-10 and 2^-5. Prints one JSON line.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
SHARD_BYTES = 4_300_000_000
RUN = 1 << 24  # bytes written at once

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False,
    "sliding_window": 128, "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip


def deepseek(config: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors of DeepSeek-V3 as published."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    rank, latent, layers = config["q_lora_rank"], config["kv_lora_rank"], config["num_hidden_layers"]

    def fp8(module: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield f"{module}.weight", "F8_E4M3", (rows, columns)
        yield f"{module}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))

    def mlp(module: str, width: int) -> Iterator[Tensor]:
        for leaf, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            yield from fp8(f"{module}.{leaf}_proj", rows, columns)

    yield "model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden)
    for number in range(layers + config["num_nextn_predict_layers"]):
        at = f"model.layers.{number}"
        yield from ((f"{at}.{leaf}_layernorm.weight", "BF16", (hidden,)) for leaf in ("input", "post_attention"))
        yield from fp8(f"{at}.self_attn.q_a_proj", rank, hidden)
        yield f"{at}.self_attn.q_a_layernorm.weight", "BF16", (rank,)
        yield from fp8(f"{at}.self_attn.q_b_proj", heads * (nope + rope), rank)
        yield from fp8(f"{at}.self_attn.kv_a_proj_with_mqa", latent + rope, hidden)
        yield f"{at}.self_attn.kv_a_layernorm.weight", "BF16", (latent,)
        yield from fp8(f"{at}.self_attn.kv_b_proj", heads * (nope + value), latent)
        yield from fp8(f"{at}.self_attn.o_proj", hidden, heads * value)
        if number < config["first_k_dense_replace"]:
            yield from mlp(f"{at}.mlp", config["intermediate_size"])
        else:
            yield f"{at}.mlp.gate.weight", "BF16", (config["n_routed_experts"], hidden)
            yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (config["n_routed_experts"],)
            for name in ("shared_experts", *(f"experts.{i}" for i in range(config["n_routed_experts"]))):
                yield from mlp(f"{at}.mlp.{name}", config["moe_intermediate_size"])
        if number >= layers:
            yield f"{at}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
            yield from ((f"{at}.{leaf}.weight", "BF16", (hidden,)) for leaf in ("enorm", "hnorm", "shared_head.norm"))
            for leaf in ("embed_tokens", "shared_head.head"):
                yield f"{at}.{leaf}.weight", "BF16", (config["vocab_size"], hidden)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (config["vocab_size"], hidden)


def gpt_oss(config: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors of gpt-oss as published."""
    hidden, width, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, groups = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}"
        yield from ((f"{at}.{leaf}_layernorm.weight", "BF16", (hidden,)) for leaf in ("input", "post_attention"))
        for leaf, rows, columns in (("q", heads, hidden), ("k", groups, hidden), ("v", groups, hidden),
                                    ("o", hidden, heads)):  # fmt: skip
            yield f"{at}.self_attn.{leaf}_proj.weight", "BF16", (rows, columns)
            yield f"{at}.self_attn.{leaf}_proj.bias", "BF16", (rows,)
        yield f"{at}.self_attn.sinks", "BF16", (config["num_attention_heads"],)
        yield f"{at}.mlp.router.weight", "BF16", (experts, hidden)
        yield f"{at}.mlp.router.bias", "BF16", (experts,)
        for leaf, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            yield f"{at}.mlp.experts.{leaf}_blocks", "U8", (experts, rows, columns // 32, 16)
            yield f"{at}.mlp.experts.{leaf}_scales", "U8", (experts, rows, columns // 32)
            yield f"{at}.mlp.experts.{leaf}_bias", "BF16", (experts, rows)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (config["vocab_size"], hidden)


LAYOUTS = {
    "deepseek-v3": (DEEPSEEK, deepseek),
    "gpt-oss": (GPT_OSS, gpt_oss),
    "gpt-oss-1gb": ({**GPT_OSS, "vocab_size": 8192, "num_hidden_layers": 2}, gpt_oss),
}


def size(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return SIZES[tensor[1]] * math.prod(tensor[2])


def numbers(tensor: Tensor, block: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor, uint8, in runs: codes are random, floats about 0.02, scales powers of two."""
    name, dtype, _ = tensor
    if dtype == "U8":
        source = 117 + block % 6 if name.endswith("_scales") else block
    else:
        floats = (block.float() - 127.5) / 4096
        source = floats.to(torch.bfloat16 if dtype == "BF16" else torch.float32).view(torch.uint8)
    left = size(tensor)
    while left:
        yield source[: min(left, len(source))]
        left -= min(left, len(source))


def write(path: Path, tensors: list[Tensor], block: torch.Tensor | None) -> None:
    """One safetensors file; holes for the weights without ``block``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        stop = position + size(tensor)
        header[tensor[0]] = {"dtype": tensor[1], "shape": list(tensor[2]), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if block is not None:
            for run in (run for tensor in tensors for run in numbers(tensor, block)):
                file.write(run.numpy().data)
        file.truncate(8 + len(text) + position)


def make(out: Path, layout: str, *, layers: int | None = None, sparse: bool = False) -> dict[str, int]:
    """Writes the checkpoint to a new folder; its bytes, tensors and files."""
    config, tensors_of = LAYOUTS[layout]
    config = config if layers is None else {**config, "num_hidden_layers": layers}
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors_of(config):
        if sum(map(size, shards[-1])) + size(tensor) > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(tensor)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    block = None if sparse else torch.randint(256, (RUN,), generator=torch.Generator().manual_seed(0)).byte()
    for name, shard in zip(names, shards, strict=True):
        write(out / name, shard, block)
    total = sum(size(tensor) for shard in shards for tensor in shard)
    weight_map = {tensor[0]: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return {"bytes": total, "tensors": len(weight_map), "files": len(shards)}


def main() -> None:
    """Parses the options and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), required=True)
    parser.add_argument("--layers", type=int, help="number of decoder layers [the model's]")
    parser.add_argument("--sparse", action="store_true", help="headers alone, holes for the weights")
    options = parser.parse_args()
    made = make(options.out, options.layout, layers=options.layers, sparse=options.sparse)
    print(json.dumps({"out": str(options.out), "layout": options.layout, "sparse": options.sparse, **made}))


if __name__ == "__main__":
    main()
