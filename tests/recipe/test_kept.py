"""Claims about what stays unquantized in models of any kind: heads of tasks, tables of embeddings by any name, gates,
and what lies outside of the layers; and that `verify` finds no fault in what `convert` writes of them."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from transformers.models.auto import modeling_auto

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint.layouts import get_container
from ptqpipe.errors import UsageError
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.recipe.plan import make_plan
from ptqpipe.recipe.recipe import Recipe, Rule

_TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_CAUSAL = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16, "num_labels": 16}
_VISION = {key: _TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
_VISION |= {"image_size": 32, "patch_size": 8, "num_labels": 32}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_T5 = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 16}
_WHISPER = {**_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32}
_CLIP_TEXT = {**_TEXT, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
_MODERN = {**_TEXT, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
# Kind -> (the model, what of it is quantized: all else stays).
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "reranker": (lambda: t.Qwen3ForSequenceClassification(t.Qwen3Config(**_CAUSAL)), r"layers\.\d+\.(self_attn|mlp)\."),
    "reward": (lambda: t.LlamaForSequenceClassification(t.LlamaConfig(**_CAUSAL)), r"layers\.\d+\.(self_attn|mlp)\."),
    "t5": (
        lambda: t.T5ForConditionalGeneration(t.T5Config(**_T5)),
        r"layer\.\d+\.(\w+Attention\.[qkvo]|DenseReluDense)",
    ),
    "vit": (lambda: t.ViTForImageClassification(t.ViTConfig(**_VISION)), r"encoder\.layer\.\d+\."),
    "whisper": (lambda: t.WhisperForConditionalGeneration(t.WhisperConfig(**_WHISPER)), r"coder\.layers\.\d+\."),
}
MORE: dict[str, tuple[Callable[[], Any], str]] = {
    "embedder": (lambda: t.Qwen3Model(t.Qwen3Config(**_CAUSAL)), r"layers\.\d+\."),
    "tokens": (lambda: t.Qwen2ForTokenClassification(t.Qwen2Config(**_CAUSAL)), r"layers\.\d+\."),
    "answers": (lambda: t.LlamaForQuestionAnswering(t.LlamaConfig(**_CAUSAL)), r"layers\.\d+\."),
    "bert": (lambda: t.BertForSequenceClassification(t.BertConfig(**_TEXT)), r"encoder\.layer\.\d+\."),
    "bert, masked": (lambda: t.BertForMaskedLM(t.BertConfig(**_TEXT)), r"encoder\.layer\.\d+\."),
    "roberta": (lambda: t.RobertaForSequenceClassification(t.RobertaConfig(**_TEXT)), r"encoder\.layer\.\d+\."),
    "roberta, masked": (lambda: t.XLMRobertaForMaskedLM(t.XLMRobertaConfig(**_TEXT)), r"encoder\.layer\.\d+\."),
    "modernbert": (lambda: t.ModernBertForSequenceClassification(t.ModernBertConfig(**_MODERN)), r"layers\.\d+\."),
    "deberta": (
        lambda: t.DebertaV2ForSequenceClassification(
            t.DebertaV2Config(**_TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"])
        ), r"encoder\.layer\.\d+\.",
    ),
    "t5, gated": (
        lambda: t.T5EncoderModel(t.T5Config(**_T5, feed_forward_proj="gated-gelu")),
        r"layer\.\d+\.(\w+Attention\.[qkvo]|DenseReluDense)",
    ),
    "bart": (lambda: t.BartForSequenceClassification(t.BartConfig(**_SEQ2SEQ)), r"coder\.layers\.\d+\."),
    "dinov2": (
        lambda: t.Dinov2Model(t.Dinov2Config(**{k: v for k, v in _VISION.items() if k != "intermediate_size"})),
        r"encoder\.layer\.\d+\.",
    ),
    "clip": (
        lambda: t.CLIPModel(t.CLIPConfig(text_config=_CLIP_TEXT, vision_config=_VISION, projection_dim=32)),
        r"text_model\.encoder\.layers\.\d+\.",
    ),
    "xlnet": (
        lambda: t.XLNetForSequenceClassification(
            t.XLNetConfig(vocab_size=96, d_model=64, n_layer=2, n_head=4, d_inner=128)
        ), r"layer\.\d+\.ff\.",
    ),
}  # fmt: skip
FORMATS = ("nvfp4", "fp8_dynamic", "int8_w8a8")


def quantized(tensors: dict[str, tuple[int, ...]], config: dict[str, Any]) -> set[str]:
    """What a plan for NVFP4 quantizes of the tensors of a model."""
    recipe = Recipe((Rule("*", get_scheme("nvfp4")),)).for_model(config)
    shapes = {name: ("BF16", shape) for name, shape in tensors.items()}
    try:
        plan = make_plan(shapes, config, recipe=recipe, capabilities=get_container("compressed_tensors").CAPABILITIES)
    except UsageError:  # nothing would be quantized
        return set()
    return {member.source.tensor for unit in plan.units for member in unit.members}


def check_written(kind: str, folder: Path) -> None:
    make, layers = {**MODELS, **MORE}[kind]
    torch.manual_seed(0)
    make().to(torch.bfloat16).save_pretrained(folder / "model")
    for name in FORMATS:
        search = "absmax" if name == "nvfp4" else None
        done = ptqpipe.convert(folder / "model", out=folder / name, format=name, scale_search=search, workers=1)
        assert all(re.search(layers, weight) for weight in done.record["weights"])
        report = verify(done.out, source=folder / "model", workers=1)
        assert report.ok, [fault.message for fault in report.faults]
        assert not [note.message for note in report.notes if "no config list says so" in note.message]


@pytest.mark.parametrize("kind", MODELS)
def test_heads_and_tables_stay_and_verify_finds_no_fault(kind: str, tmp_path: Path) -> None:
    check_written(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_the_same_of_encoders_and_other_heads(kind: str, tmp_path: Path) -> None:
    check_written(kind, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "score", "score.0", "score.2", "classifier", "classifier.0", "classification_head.dense",
        "cls.predictions.decoder",
        "cls.seq_relationship", "bert.pooler.dense", "qa_outputs", "v_head.summary", "reward_head", "text_projection",
        "shared", "model.shared", "position_table", "model.layers.0.self_attn.rel_pos_bias", "enc_to_dec_proj",
        "block.0.layer.0.SelfAttention.relative_attention_bias", "heads.0.out", "model.layers.1.router_mlp.0",
        "model.layers.1.hyper_connection.up", "model.layers.0.linear_attn.in_proj_ba", "visual_projection",
    ],
)  # fmt: skip
def test_what_is_no_layer_stays_by_its_name(name: str) -> None:
    tensors = {f"{name}.weight": (64, 128), "model.layers.0.mlp.up_proj.weight": (64, 128)}
    assert quantized(tensors, {"model_type": "newest"}) == {"model.layers.0.mlp.up_proj.weight"}


def test_a_rule_that_names_a_head_wins_and_a_model_without_numbers_is_quantized() -> None:
    tensors = {"text_projection.weight": ("BF16", (64, 128)), "layers.0.up_proj.weight": ("BF16", (64, 128))}
    rules = (Rule("text_projection", get_scheme("nvfp4")), Rule("*", get_scheme("nvfp4")))
    plan = make_plan(tensors, {}, recipe=Recipe(rules).for_model({}))
    assert len(plan.units) == 2
    assert quantized({"a.weight": (64, 128), "b.up.weight": (64, 128)}, {}) == {"a.weight", "b.up.weight"}


def test_a_matrix_of_one_output_for_each_head_stays_unless_a_rule_names_it() -> None:
    gate, key = "model.layers.0.self_attn.g_proj", "model.layers.0.self_attn.k_proj"
    tensors = {f"{name}.weight": (48, 128) for name in (gate, key)}
    config = {"model_type": "newest", "text_config": {"num_attention_heads": 48}}
    assert quantized(tensors, config) == {f"{key}.weight"}
    shapes = {name: ("BF16", shape) for name, shape in tensors.items()}
    rules = (Rule(gate, get_scheme("nvfp4")), Rule("*", get_scheme("nvfp4")))
    assert len(make_plan(shapes, config, recipe=Recipe(rules).for_model(config)).units) == 2


def _classes(config: Any) -> Iterator[Any]:
    """transformers' models of a config."""
    known: dict[Any, None] = {}
    for name in dir(modeling_auto):
        if name.startswith("MODEL_") and name.endswith("_MAPPING"):
            try:
                found = getattr(modeling_auto, name).get(type(config), None)
            except ValueError:  # a class that its module does not export
                continue
            known |= dict.fromkeys(found if isinstance(found, tuple | list) else [found] if found else [])
    yield from known


_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")


def _small(kind: str) -> Any:
    """The config of a type as it is, with two layers where it has a count of them."""
    config = t.CONFIG_MAPPING[kind]()
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for count in _COUNTS:
            if type(getattr(part, count, None)) is int:
                setattr(part, count, min(2, getattr(part, count)))
    return config


@pytest.mark.slow
def test_no_embedding_of_any_model_of_transformers_is_quantized() -> None:
    """Of every type that builds as it is, without memory, by the classes of its modules."""
    built, wrong = 0, set()
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    for kind in list(t.CONFIG_MAPPING.keys()):
        try:
            config = _small(kind)
        except Exception:  # a config that needs numbers
            continue
        for model_class in _classes(config):
            try:
                with torch.device("meta"):
                    model = model_class._from_config(config)
            except Exception:  # another package, or numbers that do not go together
                continue
            modules = {name: type(module).__name__ for name, module in model.named_modules()}
            found = quantized({name: tuple(x.shape) for name, x in model.state_dict().items()}, {"model_type": kind})
            built += 1
            wrong |= {
                (kind, name)
                for name in found
                if name.endswith(".weight") and not re.search("Linear|Conv1D", modules[name.removesuffix(".weight")])
            }
    assert built > 500
    assert not wrong
