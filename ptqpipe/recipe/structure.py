"""Facts about model families: which of their modules stay unquantized, why, and which readers fail where they do not.

A table of facts, for every command: the default keep rules of a recipe and the checks of a finished checkpoint are read
from the same rows, so that what is written and what is verified cannot drift apart. Must not know formats or files.
What readers do is their own source: vLLM 0.33, SGLang 0.5.23, TensorRT-LLM of mid-2026.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

# Where a config.json keeps the language model's part, if not at its top.
_TEXT = ("text_config", "language_config", "llm_config")


class Keep(NamedTuple):
    """Modules that stay as they are: a pattern of their names, and why.

    bits  formats of at least this many bits do quantize them; 0: none does
    """

    pattern: str
    reason: str
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A part of models that is not quantized like the rest.

    keep        its modules; ``{layers}`` in the pattern stands for the numbers that ``counted_by`` gives
    counted_by  the key of config.json with the number of layers behind the last of ``num_hidden_layers``; without it
                the row holds for every model
    fails       which readers fail where it is quantized (with fewer bits than ``keep.bits``), and how; empty: none does
    containers  the layouts in which they do; empty: all that other programs read
    unread      no reader gets it right
    """

    keep: Keep
    counted_by: str = ""
    fails: str = ""
    containers: tuple[str, ...] = ()
    unread: bool = False


_UNQUANTIZED = (
    "vLLM, SGLang and TensorRT-LLM build it unquantized and cannot load the model: vLLM stops with a KeyError, the "
    "others with an error of its shape"
)

_SOME = (
    "whether readers take it quantized differs between families and readers; load the result in yours before it is "
    "published"
)

ROWS: tuple[Row, ...] = (
    # An MTP layer that is numbered like a decoder layer: DeepSeek-V3 to V3.2, GLM-4.5 to GLM-5. SGLang builds it
    # unquantized beside ModelOpt's NVFP4 (models/deepseek_nextn.py); transformers drops it, so it cannot be calibrated.
    Row(
        Keep(r"re:(.*\.)?layers\.({layers})\.", "multi-token prediction layer"),
        counted_by="num_nextn_predict_layers",
        fails="SGLang builds it unquantized beside NVFP4 and cannot load it; vLLM reads it",
        containers=("modelopt",),
    ),
    # nn.Linear in vLLM's deepseek_mtp.py and glm4_moe_mtp.py, SGLang's deepseek_nextn.py and glm4_moe_nextn.py. Those
    # of families whose MTP layers are not numbered like decoder layers do take codes (Nemotron-H).
    Row(
        Keep(r"re:((language_)?model\.)*layers\.\d+\.eh_proj$", "projection into the multi-token prediction layer"),
        fails=(
            "vLLM and SGLang build it as a plain linear layer: they stop with a KeyError, or draft with random weights "
            "or with codes for numbers; the model without its speculative decoding loads"
        ),
        unread=True,
    ),
    # DeepSeek's sparse attention (DeepSeek-V3.2, GLM-5). Readers make one bfloat16 matrix of wk and weights_proj; wk in
    # DeepSeek's own FP8 layout is decoded first.
    Row(
        Keep(r"re:(.*\.)?indexer\.wk$", "key projection of the sparse-attention indexer"),
        fails=_UNQUANTIZED,
        containers=("compressed_tensors", "modelopt", "mxfp8_hf", "quark"),
        unread=True,
    ),
    Row(
        Keep(r"re:(.*\.)?indexer\.weights_proj$", "head weights of the sparse-attention indexer"),
        fails=_UNQUANTIZED,
        unread=True,
    ),
    # Multi-head latent attention (DeepSeek, Kimi, GLM-5): absorbed into queries and outputs when a model is loaded.
    Row(
        Keep(r"re:(.*\.)?kv_b_proj$", "readers take it apart when they load it and need at least 8 bits", bits=8),
        fails=(
            "SGLang and TensorRT-LLM take it apart without decoding it when they load the model: SGLang computes with "
            "the packed bytes, TensorRT-LLM stops with an error of its shape; vLLM reads it"
        ),
    ),
    # Their error is the most expensive (heads, embeddings, routers decide discretely), or readers do not look for
    # quantized weights there (towers, MTP heads).
    Row(
        Keep(r"re:(.*\.)?(lm_head|output_head|embed_out)$", "language-model head"),
        fails=(
            "vLLM builds the head of DeepSeek-V4, gpt-oss, Qwen3-Next and Step3 unquantized, SGLang that of gpt-oss "
            "and MiniMax-M2, and neither loads it there; SGLang takes other heads in compressed-tensors only where a "
            "target names them"
        ),
    ),
    Row(
        Keep(r"re:.*(embed|\bwte\b|\bwpe\b|shared_head)", "embedding"),
        fails="readers look up the rows of an embedding as plain numbers and do not find them among the codes",
    ),
    Row(Keep(r"re:.*norm\d*$", "norm")),
    Row(Keep(r"re:.*(\.|_)(gate|router|shared_expert_gate|e_score_correction)$", "router")),
    Row(Keep(r"re:.*router(\.|$)", "router")),
    Row(
        Keep(
            r"re:(.*\.)?(visual|vision_tower|vision_model|vision_encoder|image_newline|vision_embed_tokens)(\.|$)",
            "vision tower",
        ),
        fails=_SOME,
    ),
    Row(
        Keep(
            r"re:(.*\.)?(audio_tower|audio_model|audio_encoder|speech_encoder|talker|token2wav|code2wav)(\.|$)",
            "audio tower",
        ),
        fails=_SOME,
    ),
    Row(
        Keep(
            r"re:(.*\.)?(multi_modal_projector|mm_projector|connector|aligner|merger|projector)(\.|$)",
            "multimodal projector",
        ),
        fails=_SOME,
    ),
    Row(Keep(r"re:(.*\.)?mtp(\.|_|$)", "multi-token-prediction head"), fails=_SOME),
    Row(Keep(r"re:.*conv1d$", "short convolution")),
)

# What a recipe keeps whatever the model is.
DEFAULT_KEEP: tuple[Keep, ...] = tuple(row.keep for row in ROWS if not row.counted_by)

# Weights that runtimes fuse into one matrix and therefore give one global scale: leaf names below one parent.
DEFAULT_FUSE: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("wq_a", "wkv_a"),
)


def rows_of(config: Mapping[str, Any]) -> Iterator[Row]:
    """The rows that hold for the model of a config.json, with the numbers of its layers filled in."""
    for row in ROWS:
        if not row.counted_by:
            yield row
            continue
        numbers = _extra_layers(config, row.counted_by)
        if numbers:
            pattern = row.keep.pattern.replace("{layers}", "|".join(map(str, numbers)))
            yield replace(row, keep=row.keep._replace(pattern=pattern))


def _extra_layers(config: Mapping[str, Any], key: str) -> range:
    """Numbers of the ``key`` layers behind the last of num_hidden_layers; none where the config does not say both."""
    for part in (config, *(config.get(name) for name in _TEXT)):
        if isinstance(part, Mapping):
            count, first = part.get(key), part.get("num_hidden_layers")
            if type(count) is int and type(first) is int and 0 < count <= 1000:
                return range(first, first + count)
    return range(0)
