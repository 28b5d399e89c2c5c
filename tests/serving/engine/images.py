"""Tiny models with their towers, prompts with two images each, and what their processors would make of them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests import families

IMAGE = 90  # the token that stands for each of an image
# Kind -> what its config.json gets, beside what the tests of families make of it.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {},
    "qwen3_5": {},
    "llava": {},
    "mistral3": {},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {},
    "gemma4 whole": {"text_config.use_bidirectional_attention": "vision"},
}
TEXT = (5, 6, 7, 8, 9, 10)


def make(folder: Path, kind: str) -> Path:
    """Saves the model of a kind."""
    families.make_model(folder, kind.partition(" ")[0])

    config = json.loads((folder / "config.json").read_text())
    for name, value in {"image_token_id": IMAGE, **CHANGES[kind]}.items():
        part, _, leaf = name.rpartition(".")
        (config[part] if part else config)[leaf] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def inputs(kind: str, config: Any, *, seed: int = 5) -> tuple[tuple[int, ...], dict[str, Any]]:
    """(prompt, inputs beside it) of two random images; of 6 and 2 tokens where their sizes may differ."""
    kind = kind.partition(" ")[0]
    vision, drawn = config.vision_config, torch.Generator().manual_seed(seed)
    patch = vision.patch_size

    def pixels(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=drawn)

    if kind == "mistral3":
        side = patch * config.spatial_merge_size
        prompt = (5, 6, IMAGE, IMAGE, 20, IMAGE, IMAGE, 21, 7, IMAGE, IMAGE, 21, 8, 9)  # 20: a row ends, 21: an image
        sizes = torch.tensor([[2 * side, 2 * side], [side, 2 * side]])
        return prompt, {"pixel_values": pixels(2, 3, 2 * side, 2 * side), "image_sizes": sizes}
    many = (6, 2) if kind in ("qwen3_vl", "qwen3_5") else (4, 4)
    prompt = (5, 6, 7, *[IMAGE] * many[0], 8, 9, *[IMAGE] * many[1], 10, 11, 12)
    types = torch.tensor([[int(token == IMAGE) for token in prompt]])
    if kind in ("qwen3_vl", "qwen3_5"):
        merge = vision.spatial_merge_size
        grid = torch.tensor([[1, 2 * merge, 3 * merge], [1, 2 * merge, merge]])
        values = pixels(int(grid.prod(dim=1).sum()), 3 * vision.temporal_patch_size * patch * patch)
        return prompt, {"pixel_values": values, "image_grid_thw": grid, "mm_token_type_ids": types}
    if kind == "gemma4":
        side = 2 * vision.pooling_kernel_size
        at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), dim=-1)
        values = pixels(2, side * side, 3 * patch * patch)
        places = at.view(1, -1, 2).expand(2, -1, 2).clone()
        return prompt, {"pixel_values": values, "image_position_ids": places, "mm_token_type_ids": types}
    values = pixels(2, 3, vision.image_size, vision.image_size)
    return prompt, {"pixel_values": values} | ({"token_type_ids": types} if kind == "gemma3" else {})


def reference(folder: Path) -> Any:
    """transformers' whole model in float32."""
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model: Any, prompt: tuple[int, ...], made: dict[str, Any], count: int) -> list[int]:
    """What transformers' model generates, given images."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **made, max_new_tokens=count, min_new_tokens=count,
        do_sample=False, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return [int(token) for token in out[0, len(prompt) :]]
