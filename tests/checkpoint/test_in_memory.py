"""Claims: tensors in memory read as the files that the safetensors library writes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ptqpipe.checkpoint import CheckpointReader, holding, resolve_source
from ptqpipe.checkpoint.dtypes import DTYPES
from ptqpipe.errors import CheckpointError
from ptqpipe.runtime.saving import save_but_weights

BYTES = torch.arange(48, dtype=torch.uint8)


def tensors_of(prefix: str) -> dict[str, torch.Tensor]:
    """One of every dtype, a scalar and an empty one, in an order of their own."""
    found = {
        f"{prefix}.{name.lower()}": BYTES.clone().view(dtype).reshape(2, -1) for name, (dtype, _) in DTYPES.items()
    }
    found[f"{prefix}.bool"] = BYTES.reshape(2, -1) > 7
    return {**found, f"{prefix}.a": torch.tensor(1.5), f"{prefix}.empty": torch.zeros(0, 3)}


def test_held_tensors_have_names_order_bytes_and_fingerprint_of_their_files(tmp_path: Path) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    files = {name: (tensors_of(f"part{i}"), {"format": "pt"}) for i, name in enumerate(names)}
    held, written = tmp_path / "held", tmp_path / "written"
    for folder in (held, written):
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "notes.txt").write_text("carried over")
    for name, (tensors, metadata) in files.items():
        save_file(tensors, written / name, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"expected \.safetensors files"):
        resolve_source(str(held))
    with holding(held, files), CheckpointReader.open(resolve_source(str(held))) as ours:
        theirs = CheckpointReader.open(written)
        assert [(e.name, e.dtype, e.shape, e.offset) for e in ours.entries.values()] == [
            (e.name, e.dtype, e.shape, e.offset) for e in theirs.entries.values()
        ]
        assert ours.fingerprint() == theirs.fingerprint()
        assert [path.name for path in ours.extra_files] == ["notes.txt"]
        for name, entry in theirs.entries.items():
            assert ours.read_bytes(name) == theirs.read_bytes(name)
            start, stop = min(5, entry.nbytes), min(29, entry.nbytes)
            room = torch.zeros(4096 + stop - start, dtype=torch.uint8)
            part = ours.read_raw(name, start=start, stop=stop, memory=lambda n, room=room: room[:n])
            assert bytes(part.tolist()) == theirs.read_bytes(name, start=start, stop=stop)
        ours.check_unchanged()
    with pytest.raises(CheckpointError):
        CheckpointReader.open(held)


def test_what_transformers_would_save_is_not_copied_and_an_index_of_shards_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 96}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    save = type(model).save_pretrained
    monkeypatch.setattr(
        type(model), "save_pretrained", lambda self, folder: save(self, folder, max_shard_size="20KB"), raising=True
    )
    (tmp_path / "held").mkdir()
    files = save_but_weights(model, tmp_path / "held")
    model.save_pretrained(tmp_path / "written")
    assert len(files) > 2
    assert not list((tmp_path / "held").glob("*.safetensors*"))
    places = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for tensors, _ in files.values() for tensor in tensors.values()} == places
    with holding(tmp_path / "held", files), CheckpointReader.open(tmp_path / "held") as ours:
        assert ours.fingerprint() == CheckpointReader.open(tmp_path / "written").fingerprint()
