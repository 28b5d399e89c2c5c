"""Of what kind a model is, from its folder: whether it continues text, has a tokenizer, is quantized."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint.layouts import HF_QUANT_CONFIG
from ptqpipe.checkpoint.regular_file import read_json
from ptqpipe.models.embedder import is_embedder
from ptqpipe.models.families import language_config

_WORDS = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")
_CAUSAL = re.compile(r"\w*(ForCausalLM|LMHeadModel|ForConditionalGeneration|LMHeadModelV2)")
# Encoder-decoders by their type, for a config.json that leaves transformers' default out.
_SEQUENCES = re.compile(
    r"(mt5|umt5|t5\w*|longt5|m?bart|whisper|marian|pegasus\w*|\w*seq2seq\w*|blenderbot\w*|led|nllb\w*)"
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a file of a tokenizer is in the folder of a model."""
    return any(True for pattern in _WORDS for _ in folder.glob(pattern))


def is_quantized(folder: Path) -> bool:
    raw = read_json(folder / "config.json")
    described = isinstance(raw, dict) and bool(raw.get("quantization_config"))
    return described or (folder / HF_QUANT_CONFIG).is_file()


def continues_text(folder: Path) -> bool:
    """Whether the folder's model continues text by its own tokenizer, as eval, serve and vLLM need: no encoder,
    embedding model, classifier, encoder-decoder or part of a pipeline, and nothing without config.json."""
    raw = read_json(folder / "config.json")
    return isinstance(raw, dict) and has_tokenizer(folder) and may_continue_text(raw) and not is_embedder(folder)


def is_measured(folder: Path) -> bool:
    """Whether eval compares the folder's model with its source: one that continues text, or a sentence embedder."""
    return continues_text(folder) or (has_tokenizer(folder) and is_embedder(folder))


def may_continue_text(raw: Mapping[str, Any]) -> bool:
    """The same of the content of a config.json, whatever tokenizer there is."""
    config = language_config(raw)
    kind, named = config.get("model_type"), raw.get("architectures") or [""]
    if not isinstance(kind, str) or config.get("is_encoder_decoder") is True or _SEQUENCES.fullmatch(kind):
        return False
    first = named[0] if isinstance(named, list) else ""
    return not first or _CAUSAL.fullmatch(str(first)) is not None
