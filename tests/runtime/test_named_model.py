"""Claims about the class that `load_model` makes, and about models that give no probabilities of tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ptqpipe
from ptqpipe.errors import CheckpointError, PtqError
from ptqpipe.runtime.loading import check_load
from tests.calibration.models import make_windows

_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
_TEXT: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16}
_T5: dict[str, Any] = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_SPEECH: dict[str, Any] = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 8,
    "max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip
_IMAGES: dict[str, Any] = {**_SIZES, "image_size": 28, "patch_size": 14, "num_labels": 5}
_BART: dict[str, Any] = {**_SPEECH, "max_position_embeddings": 32}
NAMED: dict[str, dict[str, Any]] = {
    "Qwen3Model": _TEXT,
    "Qwen3ForSequenceClassification": {**_TEXT, "num_labels": 1},
    "LlamaForTokenClassification": {**_TEXT, "num_labels": 3},
    "MistralModel": _TEXT,
    "BertModel": _SIZES,
    "BertForMaskedLM": _SIZES,
    "BertForSequenceClassification": {**_SIZES, "num_labels": 3},
    "XLMRobertaForSequenceClassification": {**_SIZES, "num_labels": 1},
    "ModernBertModel": {**_SIZES, "pad_token_id": 0},
    "WhisperForConditionalGeneration": _SPEECH,
    "BartForConditionalGeneration": _BART,
    "T5ForConditionalGeneration": _T5,
    "T5EncoderModel": _T5,
    "ViTForImageClassification": _IMAGES,
    "Qwen3ForCausalLM": _TEXT,
}
NO_TEXT = [name for name in NAMED if not name.startswith(("Qwen3", "Llama", "Mistral"))]


def make(folder: Path, name: str, **more: Any) -> Path:
    """The random model of a class, saved by transformers."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**NAMED[name], **more))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", NAMED)
def test_every_weight_of_the_named_class_is_decoded(name: str, tmp_path: Path) -> None:
    """The expected model: transformers' own of the checkpoint that `dequantize` writes."""
    source = make(tmp_path / "m", name)
    ptqpipe.convert(source, out=tmp_path / "q", format="fp8", progress=False)
    model = ptqpipe.load_model(tmp_path / "q")
    ptqpipe.dequantize(tmp_path / "q", tmp_path / "d", dtype="fp32", progress=False)
    expected = getattr(transformers, name).from_pretrained(tmp_path / "d", dtype=torch.float32).state_dict()
    assert type(model).__name__ == name
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", NO_TEXT)
def test_no_command_takes_it_for_a_causal_model(name: str, tmp_path: Path) -> None:
    source = make(tmp_path / "m", name)
    rows = tmp_path / "t.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in make_windows(samples=4).tolist()))
    calls: list[Any] = [
        lambda: ptqpipe.evaluate(source, rows),
        lambda: ptqpipe.calibrate(source, rows, tmp_path / "s"),
        lambda: ptqpipe.generate(source, tmp_path / "g.jsonl"),
        lambda: ptqpipe.convert(source, out=tmp_path / "o", data=rows),
        lambda: check_load(source),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=r"no causal language model.* convert it without"):
            call()
    assert {path.name for path in tmp_path.iterdir()} == {"m", "t.jsonl"}


@pytest.mark.parametrize("name", ["Qwen3Model", "Qwen3ForSequenceClassification"])
def test_a_decoder_without_a_head_is_refused_where_logits_are_needed(name: str, tmp_path: Path) -> None:
    source = make(tmp_path / "m", name, tie_word_embeddings=False)
    rows = tmp_path / "t.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in make_windows(samples=4).tolist()))
    few: dict[str, Any] = {"samples": 2, "seqlen": 16, "holdout": 1, "progress": False}
    calls: list[Any] = [
        lambda: ptqpipe.evaluate(source, rows, seqlen=16, progress=False),
        lambda: ptqpipe.generate(source, tmp_path / "g.jsonl", samples=1, seqlen=8, progress=False),
        lambda: ptqpipe.calibrate(source, rows, tmp_path / "s", moments=("kl",), **few),
        lambda: check_load(source),
    ]
    for call in calls:
        with pytest.raises(PtqError, match=f"has no language-model head, and its config.json names {name}"):
            call()
    ptqpipe.calibrate(source, rows, tmp_path / "stats", moments=("diagonal",), **few)
    options: dict[str, Any] = {"samples": 2, "seqlen": 16, "quality": "good", "progress": False}
    assert ptqpipe.convert(source, out=tmp_path / "o", data=rows, format="nvfp4", **options).path == tmp_path / "o"


@pytest.mark.parametrize("named", [None, [], ["nosuch"], ["AutoConfig"], ["os"], ["BertModel"]])
def test_a_name_that_is_no_class_of_this_type_leaves_the_causal_model(named: Any, tmp_path: Path) -> None:
    source = make(tmp_path / "m", "Qwen3ForCausalLM")
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": named}))
    assert type(ptqpipe.load_model(source)).__name__ == "Qwen3ForCausalLM"
