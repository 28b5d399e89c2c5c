"""Claims about a model's decoder layers one by one: which models have them."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from ptqpipe.calibration import runner
from ptqpipe.calibration.runner import Runner
from ptqpipe.errors import CheckpointError
from ptqpipe.models.source import Source
from ptqpipe.runtime.skeleton import Skeleton
from tests import family_rows
from tests.calibration.models import make_model, make_windows


def test_a_model_that_was_trained_with_a_loss_of_its_routers_runs_layer_by_layer(tmp_path: Path) -> None:
    make_model(tmp_path, "mixtral")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    windows = make_windows(samples=2)
    with Source.open(tmp_path) as source, Runner.open(Skeleton.of(source, dtype=torch.float32), windows) as runner:
        for block in runner.layers():
            block.advance()
        with runner.head(), torch.no_grad():
            found = runner.logits(windows, runner.activations.get(0))
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_router_logits=False)
    with torch.no_grad():
        torch.testing.assert_close(found, whole(windows).logits, rtol=1e-4, atol=1e-4)


def test_layers_that_read_the_tokens_get_those_of_their_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 embeds tokens once more for every layer."""
    monkeypatch.setattr(runner, "BATCH_TOKENS", 48)
    family_rows.make(tmp_path, "gemma4_text")
    windows = make_windows(samples=5)
    with Source.open(tmp_path) as source, Runner.open(Skeleton.of(source, dtype=torch.float32), windows) as opened:
        assert opened.of_tokens
        for block in opened.layers():
            block.advance()
        batches = enumerate(torch.split(windows, 2))
        with opened.head(), torch.no_grad():
            found = [opened.logits(ids, opened.activations.get(batch)) for batch, ids in batches]
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found), whole(windows).logits, rtol=1e-4, atol=1e-4)


def test_batches_share_what_depends_on_their_size_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BATCH_TOKENS", 48)
    make_model(tmp_path, "gemma3")
    with (
        Source.open(tmp_path) as source,
        Runner.open(Skeleton.of(source, dtype=torch.float32), make_windows(samples=5)) as opened,
    ):
        assert not opened.of_tokens
        assert opened.arguments[0] is opened.arguments[1]
        assert opened.arguments[0] is not opened.arguments[2]


def test_layers_that_share_weights_are_refused_with_what_works(tmp_path: Path) -> None:
    config = transformers.ZambaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, n_mamba_heads=2, mamba_dt_rank=16, use_mamba_kernels=False, max_position_embeddings=64,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with Source.open(tmp_path) as source, pytest.raises(CheckpointError) as caught:
        Skeleton.of(source, dtype=torch.float32)
    said = str(caught.value)
    assert "one weight in several decoder layers" in said
    assert "layers.3.shared_transf" in said
    assert said.endswith("convert it without data and stats, which does not run the model")
