"""A source on the grid of its own format: abs-max scales find it again, and codes that data chose leave it."""

from pathlib import Path

import pytest
import torch
import transformers

import ptqpipe
from tests.calibration.models import write_windows


@pytest.mark.slow
def test_codes_that_leave_the_grid_of_the_source_are_sound(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    source = ptqpipe.convert(tmp_path / "model", out=tmp_path / "fp8", format="fp8_block", workers=1).out
    rows = write_windows(tmp_path / "rows.jsonl", torch.randint(0, 96, (32, 24)))
    out = tmp_path / "out"
    ptqpipe.quantize_model(source, "fp8_block", data=rows, out=out, quality="best", samples=24, seqlen=24, workers=1)
    report = ptqpipe.verify(out, source=source, workers=1)
    assert report.ok, [fault.message for fault in report.faults]
    assert max(weight.relative_mse for weight in report.weights if weight.relative_mse is not None) > 1e-5
