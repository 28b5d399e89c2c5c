"""Claims about the study that tells what quantized inputs cost apart from quantized weights."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import ptqpipe
from ptqpipe.pipeline.demo import MODEL


@pytest.mark.slow
def test_float_weights_with_float_inputs_lose_nothing_and_each_part_loses_less_than_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of this process, for later tests
    study, found = import_module("labs.input_share.__main__"), {}
    for name in ("mxfp4", "mxfp4a16"):
        ptqpipe.convert(MODEL, format=name, out=tmp_path / name, workers=1)
        results = tmp_path / f"{name}.jsonl"
        words = [MODEL, tmp_path / name, MODEL / "heldout.txt", "--tokens", "1024", "--results", results]
        monkeypatch.setattr(sys, "argv", ["input_share", *map(str, words)])
        study.main()
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        assert [line["format"] for line in lines] == [name] * 3
        found[name] = {line["of"]: line["kl"] for line in lines}
    assert found["mxfp4a16"]["inputs"] == pytest.approx(0, abs=1e-9)
    assert found["mxfp4a16"]["both"] == found["mxfp4a16"]["weights"]
    assert found["mxfp4"]["weights"] == found["mxfp4a16"]["weights"]  # the same codes
    assert max(found["mxfp4"]["weights"], found["mxfp4"]["inputs"]) < found["mxfp4"]["both"]
