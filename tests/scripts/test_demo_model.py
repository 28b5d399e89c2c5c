"""The committed demo model: a standard checkpoint, small, and as good as its README says."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

MODEL = Path(__file__).resolve().parents[2] / "ptqpipe/demo_model"


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(MODEL / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - a safetensors file is not iterable
            yield name, file.get_tensor(name)


def stated(label: str) -> float:
    """The number that the model's README gives in the row ``label`` of its table."""
    match = re.search(rf"^\| {re.escape(label)} \| ([\d.]+)", (MODEL / "README.md").read_text(), re.MULTILINE)
    assert match is not None, label
    return float(match[1])


def test_the_weights_stay_below_three_megabytes() -> None:
    assert (MODEL / "model.safetensors").stat().st_size < 3_000_000


def test_every_weight_is_bfloat16_and_finite() -> None:
    for name, weight in weights():
        assert weight.dtype == torch.bfloat16, name
        assert torch.isfinite(weight).all(), name


def test_every_linear_fits_each_block_size_up_to_128() -> None:
    linears = {name: weight.shape for name, weight in weights() if name.endswith("_proj.weight")}
    layers = json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]
    assert len(linears) == 7 * layers
    assert all(rows % 64 == 0 and columns % 128 == 0 for rows, columns in linears.values()), linears


@pytest.mark.slow
def test_the_held_out_loss_is_what_the_readme_says() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    text = (MODEL / "heldout.txt").read_text()
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    width = model.config.max_position_embeddings + 1
    windows = tokens[: len(tokens) // width * width].view(-1, width)
    with torch.no_grad():
        losses = [model(input_ids=row[None, :-1]).logits[0].log_softmax(-1) for row in windows]
    picked = [-logs.gather(1, row[1:, None]).mean() for logs, row in zip(losses, windows, strict=True)]
    loss = torch.stack(picked).mean().item()
    # The README rounds to three decimals; another CPU sums in another order, which is far below that.
    assert loss == pytest.approx(stated("held-out loss, nats per token"), abs=0.002)
    assert math.exp(loss) == pytest.approx(stated("held-out perplexity"), abs=0.05)
