"""Claims about a model's own text: it is drawn from what the model predicts, by a seed, and calibrates that model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

from ptqpipe.calibration.generate import generate
from ptqpipe.cli import main
from ptqpipe.errors import NumericsError, UsageError
from tests.calibration.models import VOCABULARY, make_model

SEQLEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_tokens_are_drawn_from_what_the_model_predicts(model: Any) -> None:
    windows = generate(model, samples=96, seqlen=SEQLEN, seed=0, begin=None)
    assert windows.shape == (96, SEQLEN)
    with torch.no_grad():
        log_p = torch.log_softmax(model(windows).logits[:, :-1].double(), -1)
    surprise = -log_p.gather(-1, windows[:, 1:].unsqueeze(-1)).flatten()
    entropy = -(log_p.exp() * log_p).sum(-1).flatten()
    spread = float((surprise - entropy).std()) / len(surprise) ** 0.5
    assert abs(float((surprise - entropy).mean())) < 4 * spread
    # Tokens drawn evenly would surprise the model more than that.
    even = torch.randint(0, VOCABULARY, surprise.shape, generator=torch.Generator().manual_seed(1))
    other = -log_p.flatten(0, 1).gather(-1, even.unsqueeze(-1)).mean()
    assert float(other) > float(surprise.mean()) + 8 * spread


def test_a_seed_chooses_the_text_and_windows_begin_apart(model: Any) -> None:
    one, again, other = (generate(model, samples=8, seqlen=12, seed=seed, begin=3) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one[:, 0].tolist() == [3] * 8
    assert len(set(one[:, 1].tolist())) > 4


def test_what_a_model_cannot_write_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="65 is more than the model's 64 positions"):
        generate(model, samples=1, seqlen=65, seed=0, begin=None)
    with pytest.raises(UsageError, match="--samples 0"):
        generate(model, samples=0, seqlen=8, seed=0, begin=None)
    broken = type(model)(model.config)
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(NumericsError, match="not finite"):
        generate(broken, samples=1, seqlen=8, seed=0, begin=None)


def test_the_file_is_data_for_calibrate(folder: Path, tmp_path: Path) -> None:
    file, stats = tmp_path / "own.jsonl", tmp_path / "stats"
    write = ["generate", str(folder), "--samples", "6", "--seqlen", str(SEQLEN), "--workers", "1", "-o", str(file)]
    assert CliRunner().invoke(main, write).exit_code == 0
    rows = [json.loads(line)["input_ids"] for line in file.read_text().splitlines()]
    assert [len(row) for row in rows] == [SEQLEN] * 6
    read = ["calibrate", str(folder), "--data", str(file), "--samples", "6", "--seqlen", str(SEQLEN), "-o", str(stats)]
    done = CliRunner().invoke(main, [*read, "--workers", "1", "-q"])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(main, write)
    assert again.exit_code != 0
    assert "--overwrite" in again.output
    assert CliRunner().invoke(main, [*write, "--overwrite"]).exit_code == 0
    assert not list(tmp_path.glob(".*.partial"))
