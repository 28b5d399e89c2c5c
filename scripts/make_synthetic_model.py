"""Writes a synthetic checkpoint of a real architecture: real names and shapes, seeded weights, any size, little memory.

Usage: python scripts/make_synthetic_model.py OUT --shape llama-8b [--layers N] [--seed S] [--shard-size BYTES]

Names and shapes come from transformers' own model on the meta device, so config.json is valid by construction. The
weights are not trained: every matrix is N(0, 0.02) times a spread of its own, with every 512th column or so eight times
as large, as real projections have. All tensors are windows of one block of random numbers, each at other offsets and
scales: a generator would take longer than the disk. Memory: about 250 MB. Prints one JSON line.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

BLOCK = (1 << 24) + 4099  # random numbers, bf16: 32 MB; odd, so that windows do not repeat with any row length
CHUNK = 1 << 22  # elements written at once
OUTLIER_EVERY = 512
OUTLIER_FACTOR = 8.0


@dataclass(frozen=True, slots=True)
class Shape:
    """An architecture by transformers' name, what differs from its default config, and the default shard size."""

    model_type: str
    config: dict[str, Any]
    shard_bytes: int = 5_000_000_000


SHAPES = {
    # Meta-Llama-3-8B: 16.06 GB, published in four files of about 5 GB.
    "llama-8b": Shape(
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "tie_word_embeddings": False,
        },
    ),
    # TinyLlama-1.1B, whole: 2.20 GB.
    "tinyllama-1.1b": Shape(
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    # The same width, nine layers: 1.05 GB.
    "1gb": Shape(
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 9,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        1_000_000_000,
    ),
    # 4.2 and 27.3 M weights.
    "4m": Shape(
        "llama",
        {
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "27m": Shape(
        "llama",
        {
            "vocab_size": 2048,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    # 94.4 M weights, twelve layers: 0.19 GB.
    "94m": Shape(
        "llama",
        {
            "vocab_size": 6144,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
    ),
    # Transformers' default Qwen3.5-MoE text model (256 experts of 512, stacks of 1.07 GB), cut to four layers: 8.7 GB.
    "moe-fused": Shape("qwen3_5_moe_text", {"num_hidden_layers": 4}),
    "moe-fused-small": Shape(
        "qwen3_5_moe_text",
        {"num_hidden_layers": 4, "num_experts": 16, "vocab_size": 8192, "hidden_size": 1024},
        200_000_000,
    ),
    # gpt-oss-20b's width in bf16, stacks stored [E, in, out] with biases, two layers: 5.6 GB.
    "gpt-oss-like": Shape(
        "gpt_oss",
        {
            "num_hidden_layers": 2,
            "num_local_experts": 32,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: its name, shape and number (which seeds it)."""

    name: str
    shape: tuple[int, ...]
    number: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def tensors_of(config: Any) -> list[Tensor]:
    """The tensors of the model, as transformers names them in a checkpoint."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = "lm_head.weight" if config.tie_word_embeddings else ""
    entries = [(name, t) for name, t in model.state_dict().items() if name != tied]
    return [Tensor(name, tuple(t.shape), i) for i, (name, t) in enumerate(entries)]


def values(tensor: Tensor, block: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """The numbers of a tensor in runs of whole rows, bfloat16."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + tensor.number)
    columns = tensor.shape[-1] if tensor.shape else 1
    rows = tensor.elements // columns
    spread = 0.02 * float(torch.rand((), generator=generator) + 0.5)
    if len(tensor.shape) < 2:
        spread, middle = 0.01, 0.0 if tensor.name.endswith(("bias", "A_log")) else 1.0
        offset = int(torch.randint(len(block) - columns, (), generator=generator))
        yield (block[offset : offset + columns] * spread + middle).bfloat16()
        return
    wide = torch.randint(columns, (max(columns // OUTLIER_EVERY, 1),), generator=generator)
    factor = torch.full((columns,), spread)
    factor[wide] *= OUTLIER_FACTOR
    run = max(CHUNK // columns, 1)
    for first in range(0, rows, run):
        count = min(run, rows - first)
        offset = int(torch.randint(len(block) - count * columns, (), generator=generator))
        yield (block[offset : offset + count * columns].reshape(count, columns) * factor).bfloat16()


def shards_of(tensors: list[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """Tensors in order, a new file where the next one would exceed ``shard_bytes``."""
    shards: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        size = 2 * tensor.elements
        if size > room or not shards:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= size
    return shards


def write_shard(path: Path, tensors: list[Tensor], block: torch.Tensor, seed: int) -> None:
    """One safetensors file, its header as the format's description has it: padded to eight bytes with spaces."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        stop = position + 2 * tensor.elements
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    places = [8 + len(text) + header[tensor.name]["data_offsets"][0] for tensor in tensors]
    with open(path, "wb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)

        def write(tensor: Tensor, place: int) -> None:
            for run in values(tensor, block, seed):
                data = memoryview(run.reshape(-1).view(torch.uint8).numpy().data)
                while data:  # a call writes 2 GiB at most, and fewer where it is interrupted
                    written = os.pwrite(file.fileno(), data, place)
                    data, place = data[written:], place + written

        file.flush()
        list(pool.map(write, tensors, places))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make(out: Path, shape: Shape, *, seed: int = 0) -> int:
    """Writes the checkpoint to ``out`` (new or empty); bytes of weights."""
    config = AutoConfig.for_model(shape.model_type, **shape.config)
    config.dtype = torch.bfloat16
    tensors = tensors_of(config)
    total = 2 * sum(t.elements for t in tensors)
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if free < total * 1.02:
        raise SystemExit(f"{out} needs {total} bytes, the disk has {free}; free some, or use --layers")
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(out)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed))
    shards = shards_of(tensors, shape.shard_bytes)
    weight_map = {}
    for i, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_shard(out / name, shard, block, seed)
        weight_map.update({tensor.name: name for tensor in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def main() -> None:
    """Parses the options and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1gb")
    parser.add_argument("--layers", type=int, help="number of layers [the shape's]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size", type=int, help="largest weight file in bytes [the shape's]")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.layers is not None:
        changed = {**shape.config, "num_hidden_layers": options.layers}
        if "layer_types" in changed:
            changed["layer_types"] = (changed["layer_types"] * options.layers)[: options.layers]
        shape = replace(shape, config=changed)
    if options.shard_size is not None:
        shape = replace(shape, shard_bytes=options.shard_size)
    begun = time.monotonic()
    total = make(options.out, shape, seed=options.seed)
    seconds = time.monotonic() - begun
    print(json.dumps({"out": str(options.out), "shape": options.shape, "bytes": total, "seconds": round(seconds, 2)}))


if __name__ == "__main__":
    main()
