"""A folder to work in."""

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model; what a refused command may leave in it is nothing."""
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model", tiny.llama(layers=1, hidden=32, inner=64), shards=2)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    (tmp_path / "file.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    return tmp_path
