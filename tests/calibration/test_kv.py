"""Claims about keys and values of models whose layers are of several kinds, and of parts that have no cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.calibration.kv import check_seen
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint.layouts import get_container
from ptqpipe.conversion.kv_cache import cache_specs
from ptqpipe.errors import UsageError
from ptqpipe.models.source import Source
from ptqpipe.runtime.loading import read_config
from tests import family_rows, image_text
from tests.calibration.models import make_model, make_windows

HYBRIDS = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "jamba", "nemotron_h", "lfm2", "lfm2_moe",
    "granitemoehybrid", "falcon_h1", "gemma4_text", "gpt_oss",
)  # fmt: skip
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def write_rows(file: Path, count: int) -> Path:
    file.write_text(
        "".join(json.dumps({"input_ids": row}) + "\n" for row in make_windows(samples=count)[:, :16].tolist())
    )
    return file


def modules_of(model: Path) -> set[str]:
    with Source.open(model) as source:
        container = get_container("compressed_tensors")
        return set(cache_specs(source, "fp8", container, container_name="compressed_tensors"))


def calibrated(model: Path, out: Path) -> Statistics:
    rows = write_rows(out.with_suffix(".jsonl"), 4)
    options: dict[str, Any] = {"moments": ("diagonal",), "samples": 2, "seqlen": 16, "holdout": 1, "progress": False}
    ptqpipe.calibrate(model, rows, out, **options)
    return Statistics.open(out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HYBRIDS)
def test_what_would_have_scales_is_seen(kind: str, tmp_path: Path) -> None:
    model = family_rows.make(tmp_path / "m", kind)
    wanted = modules_of(model)
    check_seen(wanted, read_config(model))
    assert wanted
    assert wanted <= set(calibrated(model, tmp_path / "s").attentions)


@pytest.mark.slow
def test_linear_attention_without_a_cache_of_its_own_runs_as_before(tmp_path: Path) -> None:
    """MiniMax's, whose module is an attention by its name, keeps a state in the cache."""
    torch.manual_seed(0)
    config = transformers.MiniMaxConfig(**SMALL, **LINEAR, num_experts_per_tok=1, num_key_value_heads=2, head_dim=16)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    assert modules_of(tmp_path / "m") == {"model.layers.1.self_attn"}
    assert calibrated(tmp_path / "m", tmp_path / "s").attentions == ("model.layers.1.self_attn",)


def test_keys_and_values_of_a_hybrid_are_those_of_its_own_cache(tmp_path: Path) -> None:
    """As transformers' cache has them after a whole forward of the model."""
    model = family_rows.make(tmp_path / "m", "qwen3_next")
    found = calibrated(model, tmp_path / "s").attention("model.layers.1.self_attn")
    rows = [json.loads(line)["input_ids"] for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    largest = []
    for row in rows:
        with torch.no_grad():
            cache = whole(torch.tensor([row]), use_cache=True).past_key_values.layers[1]
        largest.append(torch.stack([cache.keys.abs().amax(dim=(0, 2, 3)), cache.values.abs().amax(dim=(0, 2, 3))]))
    # Which two of the rows are samples is a question of the seed; each one's maxima are whole numbers of this cache.
    pairs = [torch.maximum(a, b) for at, a in enumerate(largest) for b in largest[:at]]
    assert any(torch.allclose(torch.stack(list(found)), pair, rtol=1e-4, atol=1e-5) for pair in pairs)


def test_towers_and_layers_that_are_not_run_have_no_scales(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = image_text.make_config("llava")
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "m")
    with Source.open(tmp_path / "m") as source:
        assert any("vision" in name and "k_proj" in name for name in source.tensors)
    assert len(modules_of(tmp_path / "m")) == config.text_config.num_hidden_layers
    assert not any("vision" in name for name in modules_of(tmp_path / "m"))


@pytest.mark.parametrize("kind", ["mamba", "deepseek_v3", "gpt2"])
def test_models_without_such_an_attention_are_refused(kind: str, tmp_path: Path) -> None:
    if kind in family_rows.MADE_BY_TRANSFORMERS:
        family_rows.make(tmp_path, kind)
    else:
        make_model(tmp_path, kind)
    with pytest.raises(UsageError, match=r"no attention with k_proj and v_proj side by side.*leave kv_cache out"):
        modules_of(tmp_path)


def test_a_layer_that_caches_more_is_refused_before_any_work(tmp_path: Path) -> None:
    model = family_rows.make(tmp_path / "m", "minimax_m3_vl_text")
    rows = write_rows(tmp_path / "t.jsonl", 12)
    for options in ({"format": "fp8"}, {"budget": "9bits"}):
        with pytest.raises(UsageError, match=r"sees no keys or values of 'model.layers.1.self_attn'.*leave .* out"):
            ptqpipe.convert(model, out=tmp_path / "o", data=rows, kv_cache="fp8", samples=8, seqlen=16, **options)  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {"m", "t.jsonl"}


@pytest.mark.slow
def test_convert_writes_the_scales_of_a_hybrid(tmp_path: Path) -> None:
    model = family_rows.make(tmp_path / "m", "qwen3_next")
    rows = write_rows(tmp_path / "t.jsonl", 12)
    options: dict[str, Any] = {"samples": 8, "seqlen": 16, "quality": "fast", "progress": False}
    ptqpipe.convert(model, out=tmp_path / "o", data=rows, format="fp8", kv_cache="fp8", **options)
    tensors = load_file(tmp_path / "o" / "model.safetensors")
    scales = {name: float(value) for name, value in tensors.items() if name.endswith((".k_scale", ".v_scale"))}
    assert set(scales) == {f"model.layers.1.self_attn.{kind}_scale" for kind in "kv"}
    assert all(value > 0 for value in scales.values())
