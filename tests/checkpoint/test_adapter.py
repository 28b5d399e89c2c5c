"""Claims about ptqpipe.checkpoint.adapter: an adapter is never taken for a model, and one beside a model stays out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from ptqpipe.checkpoint.adapter import are_adapters
from ptqpipe.cli import main
from tests import tiny

WRAPPED = "base_model.model.model.layers.0.self_attn.q_proj"
BASE = "some/base-7b"
PARTS = {
    "LORA": ("lora_A.weight", "lora_B.weight"),
    "dora": ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"),
    "LOHA": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "LOKR": ("lokr_w1", "lokr_w2"),
    "IA3": ("ia3_l",),
    "OFT": ("oft_R.weight",),
    "VERA": ("vera_lambda_b", "vera_lambda_d"),
    "LN_TUNING": ("weight",),
}


def adapter(folder: Path, kind: str, file: str, *, config: bool = True, more: tuple[str, ...] = ()) -> Path:
    """The folder that peft writes, its weights in ``file``."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{WRAPPED}.{part}" for part in PARTS[kind]] if kind in PARTS else ["prompt_embeddings"]
    tensors = {name: torch.ones(16, 128) for name in (*names, *more)}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / file)
    if config:
        told = {"peft_type": kind.upper() if kind != "dora" else "LORA", "base_model_name_or_path": BASE}
        (folder / "adapter_config.json").write_text(json.dumps({**told, "task_type": "CAUSAL_LM"}))
    return folder


def with_config(folder: Path) -> Path:
    """With the config.json of the model copied in, and what a trainer leaves behind."""
    (folder / "config.json").write_text(json.dumps(tiny.LLAMA_CONFIG))
    torch.save({}, folder / "training_args.bin")
    torch.save({}, folder / "optimizer.pt")
    return folder


FOLDERS: dict[str, Callable[[Path], Path]] = {
    **{kind: (lambda at, kind=kind: adapter(at, kind, "adapter_model.safetensors")) for kind in PARTS},
    "with config.json": lambda at: with_config(adapter(at, "LORA", "adapter_model.safetensors")),
    "with a head of its own": lambda at: adapter(
        at, "LORA", "adapter_model.safetensors", more=("base_model.model.lm_head.weight",)
    ),
    "called model.safetensors": lambda at: with_config(adapter(at, "LORA", "model.safetensors")),
    "in two shards": lambda at: adapter(
        adapter(at, "IA3", "adapter_model-00001-of-00002.safetensors"),
        "LORA", "adapter_model-00002-of-00002.safetensors",
    ),
    "pickled": lambda at: with_config(adapter(at, "LORA", "adapter_model.bin")),
}  # fmt: skip
COMMANDS: dict[str, tuple[str, ...]] = {
    "convert": ("convert", "{}", "-o", "out"),
    "dry run": ("convert", "{}", "--dry-run"),
    "verify": ("verify", "{}"),
    "inspect": ("inspect", "{}"),
    "dequantize": ("dequantize", "{}", "-o", "out"),
    "plan": ("plan", "{}", "--budget", "9bits", "-o", "out"),
}


def error_of(*call: str) -> str:
    done = CliRunner().invoke(main, list(call))
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code
    lines = [line for line in done.output.splitlines() if " is an adapter (" in line or line.startswith("Error")]
    assert len(lines) == 1, done.output
    return lines[0]


@pytest.mark.parametrize("kind", FOLDERS)
def test_an_adapter_is_refused_by_name_with_the_command_that_merges_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = FOLDERS[kind](tmp_path / "tuned")
    for command, call in COMMANDS.items():
        line = error_of(*(part.format(folder) for part in call))
        assert f"is an adapter ({'LORA' if kind not in PARTS or kind == 'dora' else kind} of '{BASE}')" in line, command
        assert "from peft import AutoPeftModelForCausalLM as A; A.from_pretrained(" in line
        assert ".merge_and_unload().save_pretrained('tuned-merged')\"" in line
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]


def test_an_adapter_that_is_not_merged_into_weights_has_another_remedy(tmp_path: Path) -> None:
    line = error_of("convert", str(adapter(tmp_path / "a", "PROMPT_TUNING", "adapter_model.safetensors")))
    assert "merge_and_unload" not in line
    assert f"convert '{BASE}', and load the adapter beside the result" in line


@pytest.mark.parametrize("described", [None, {}, {"peft_type": "LORA"}, {"fine_tune_type": "lora", "model": BASE}, []])
def test_an_adapter_that_does_not_name_its_model_is_refused_too(described: Any, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", "LORA", "adapters.safetensors", config=False)
    if described is not None:
        (folder / "adapter_config.json").write_text(json.dumps(described))
    line = error_of("convert", str(folder))
    assert "not a model; merge it into " in line
    assert ("mlx_lm.fuse" in line) == (described not in (None, {}, [], {"peft_type": "LORA"}))


def test_an_adapter_beside_a_model_stays_behind_with_its_config(tmp_path: Path) -> None:
    """transformers would load the model that adapter_config.json names instead of the folder's own weights."""
    folder = tiny.save(tmp_path / "model", tiny.llama(layers=1))
    adapter(folder, "LORA", "adapter_model.safetensors")
    adapter(folder, "LORA", "extra.safetensors", config=False)  # under another name: its tensors say it
    done = CliRunner().invoke(main, ["convert", str(folder), "--scale-search", "absmax", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "adapter_config.json: not carried over, of an adapter, which is not merged into the model" in done.output
    assert not [path.name for path in (tmp_path / "out").iterdir() if "adapter" in path.name]
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "lora" in name]


def test_pickled_weights_beside_an_adapter_are_the_model(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", "LORA", "adapter_model.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    line = error_of("convert", str(folder))
    assert "has 'pytorch_model.bin' but no .safetensors; load it with transformers" in line


def test_no_model_of_these_tests_has_the_names_of_an_adapter() -> None:
    assert not are_adapters(tiny.llama())
    assert not are_adapters([])
    assert not are_adapters(["model.layers.0.self_attn.o_proj.lora_A.vision.weight", "model.norm.weight"])
