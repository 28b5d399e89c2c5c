"""Claims about a model's decoder layers one by one: which models have them."""

from pathlib import Path

import pytest
import torch
import transformers

from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.errors import CheckpointError
from ptqpipe.source import Source


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
    assert said.endswith("convert it without statistics")
