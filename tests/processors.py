"""Tokenizers and processors for tiny models of images and text: words of one token each, images of a few tokens."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.serving.engine import images

WORDS = [f"w{number}" for number in range(80)]
# Kind -> (what stands for an image in text, further tokens by their names, processor_config.json,
# preprocessor_config.json)
KINDS: dict[str, tuple[str, dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        "<image>",
        {},
        {
            "processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        {
            "image_processor_type": "LlavaImageProcessor", "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        },
    ),
    "gemma3": (
        "<start_of_image>",
        {"image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
    ),
    "qwen3_vl": (
        "<image>",
        {"image_token": "<image>"},
        {"processor_class": "Qwen3VLProcessor"},
        {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2,
            "merge_size": 2, "size": {"shortest_edge": 1 << 11, "longest_edge": 1 << 13},
        },
    ),
}  # fmt: skip


def add(folder: Path, kind: str) -> Path:
    """Gives a model that `tests.serving.engine.images.make` saved a tokenizer, a chat template and a processor."""
    mark, named, processor, preprocessor = KINDS[kind]
    add_tokenizer(folder, mark, named)
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


def add_tokenizer(folder: Path, mark: str = "<image>", named: dict[str, str] | None = None) -> Path:
    """Gives a model a tokenizer and a chat template, in which ``mark`` stands for an image."""
    special = ["<unk>", "<start_of_image>", "<end_of_image>", "user", "assistant"]
    words = [*special, *WORDS]
    vocabulary = {word: at for at, word in enumerate(words)} | {"<image>": images.IMAGE}
    vocabulary |= {f"x{at}": at for at in range(96) if at not in vocabulary.values()}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<image>", "<start_of_image>", "<end_of_image>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }} {% else %}"
        "{% for part in m.content %}{% if part.type == 'image' %}" + mark + " {% else %}{{ part.text }} {% endif %}"
        "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": named or {}}))
    return folder


def picture(seed: int, width: int = 70, height: int = 50) -> Image.Image:
    """A random image."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_uri(raw: bytes) -> str:
    """A file as messages have it."""
    return f"data:image/png;base64,{base64.b64encode(raw).decode()}"
