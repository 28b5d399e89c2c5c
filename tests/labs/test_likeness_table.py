"""Claims about the study that shows what calibrate's warning of unlike text goes by."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ptqpipe.pipeline.demo import MODEL


@pytest.mark.slow
def test_a_model_expects_its_own_kind_of_text_and_not_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    results = tmp_path / "likeness.jsonl"
    monkeypatch.setattr(sys, "argv", ["likeness_table", str(MODEL), f"{MODEL}/heldout.txt", "--results", str(results)])
    import_module("labs.likeness_table.__main__").main()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")] == lines
    own, shuffled, noise = (line["over"] for line in lines)
    assert own < shuffled < noise
    assert lines[2]["warned"]
