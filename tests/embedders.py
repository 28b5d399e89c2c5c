"""A tiny sentence embedder in the folder layout of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import torch

WORDS = [f"w{number}" for number in range(90)]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES: dict[str, Any] = {
    "vocab_size": len(_SPECIAL) + len(WORDS), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 48,
}  # fmt: skip


def make_embedder(
    folder: Path, *, mode: str = "mean_tokens", normalize: bool = True, pooler: bool = True, seed: int = 0
) -> Path:
    """A random BERT with a tokenizer of the words `WORDS`, a pooling ``mode`` and at most 32 tokens a text."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    model = BertModel(BertConfig(**SIZES, initializer_range=0.2), add_pooling_layer=pooler)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
    modules += [("2_Normalize", "sentence_transformers.models.Normalize")] if normalize else []
    rows = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    write(folder / "modules.json", rows)
    modes = dict.fromkeys(("cls_token", "mean_tokens", "max_tokens", "lasttoken"), False) | {mode: True}
    write(
        folder / "1_Pooling/config.json",
        {"word_embedding_dimension": 64} | {f"pooling_mode_{name}": on for name, on in modes.items()},
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": False})
    return folder


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def _write_tokenizer(folder: Path) -> None:
    """Its file asks for padding to 40 tokens, as all-MiniLM-L6-v2's does to 128."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing

    vocabulary = {word: i for i, word in enumerate([*_SPECIAL, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})


def sentences(count: int, *, seed: int = 0) -> list[str]:
    """Random ones of 5 to 12 words, each with a full stop as a token of its own that is unknown."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 13, (count,), generator=generator).tolist()
    picked = (torch.randint(len(WORDS), (length,), generator=generator).tolist() for length in lengths)
    return [" ".join(WORDS[i] for i in row) + " ." for row in picked]


def write_text(file: Path, count: int = 400) -> Path:
    """A text of random sentences, ten to a line."""
    every = sentences(count, seed=1)
    file.write_text("\n".join(" ".join(every[start : start + 10]) for start in range(0, count, 10)) + "\n")
    return file


def write_pairs(file: Path, count: int = 60) -> Path:
    every = sentences(2 * count, seed=2)
    file.write_text("".join(f"{a}\t{b}\n" for a, b in zip(every[::2], every[1::2], strict=True)))
    return file
