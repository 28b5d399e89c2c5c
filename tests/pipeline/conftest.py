"""A small model, a text for it, and runs that nobody stopped."""

from pathlib import Path

import pytest
import torch

from tests.calibration.models import make_model, make_windows, write_windows
from tests.pipeline.runs import LENGTH, files_of, made, work_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small", "llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token rows for 8 windows and one that is held out."""
    return write_windows(tmp_path_factory.mktemp("text") / "text.jsonl", make_windows(samples=9, seqlen=LENGTH))


@pytest.fixture(scope="module")
def undisturbed(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run with the defaults that nobody stopped."""
    return made(model, tmp_path_factory.mktemp("undisturbed") / "out", work_of(text)).out


@pytest.fixture(scope="module")
def whole(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run with all stages gives that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = made(model, out, work_of(text, eval=(str(text),), report=True), "nvfp4_w4a4")
    assert done.report == out.parent / "out.report.html"
    assert done.evaluation is not None
    assert done.evaluation["kl"][0]["mean"] > 0
    assert len(done.evaluation["samples"]) == 3
    assert "## Quality" in (out / "README.md").read_text()
    found = files_of(out)
    card = found["README.md"].decode()
    assert "KL divergence, nats per token" in card
    assert f"--data TEXT --samples 8 --seqlen {LENGTH} --quality best" in card
    assert "codes by tune gptq" in card
    return found
