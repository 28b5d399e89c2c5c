"""A checkpoint that says so gets a cache of E4M3 codes, with the results of the oracle that rounds keys and values."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ptqpipe.runtime import load_model, simulate
from ptqpipe.serving.engine import EngineOptions, attention
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.model_runner import ModelRunner
from tests.runtime.models import quantized, save_source
from tests.runtime.test_kv_cache import SCHEME, scales_named, with_scales
from tests.serving.engine.models import ask, engine, generate, greedy_of, tokenizer

DTYPES = ("float32", "bfloat16")
PROMPTS = [tuple(torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()) for n in (5, 30)]


@pytest.fixture(scope="module", params=["kv", "k", "v"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVFP4 weights and scales of keys and values, such that some values saturate; ``param``: which have one a head."""
    folder = tmp_path_factory.mktemp("kv")
    found = quantized(save_source("llama", folder / "source"), "compressed_tensors", "nvfp4")
    heads = torch.tensor([1.0, 1.7]).reshape(2, 1, 1)
    scales = {
        kind: scale * (heads if kind in request.param else heads[:1].reshape(1))
        for kind, scale in (("k", 0.013), ("v", 0.0041))
    }
    named = scales_named("model.layers.{layer}.self_attn.{kind}_scale", scales)
    path: Path = with_scales(found, named, SCHEME).save(folder / "q")
    return path


def test_the_engine_looks_for_scales_where_the_runtime_puts_them() -> None:
    """Neither may import the other; under another name the cache would silently be bfloat16."""
    assert attention.KV_SCALES == simulate.KV_SCALES


@pytest.mark.parametrize("max_batch_tokens", [512, 7])
def test_an_fp8_cache_equals_the_simulated_one(checkpoint: Path, max_batch_tokens: int) -> None:
    oracle: Any = load_model(checkpoint)
    run = ModelRunner(load_model(checkpoint), EngineOptions(1 << 22, 64, 4, 8))
    assert run.attention.pages[0].keys.dtype is torch.float8_e4m3fn
    made = engine(run, max_len=64, max_batch_tokens=max_batch_tokens, tokens=tokenizer())
    found = generate(made, [ask(prompt, 16, name=str(at)) for at, prompt in enumerate(PROMPTS)])
    assert [found[str(at)][0] for at in range(2)] == [greedy_of(oracle, prompt, 16) for prompt in PROMPTS]


def test_a_bfloat16_model_reads_its_codes_as_the_pages_of_their_numbers(checkpoint: Path) -> None:
    """By whatever kernel there is: within a rounding or two of float32's logits."""
    runs = {
        dtype: ModelRunner(load_model(checkpoint, dtype=dtype), EngineOptions(1 << 22, 64, 4, 8)) for dtype in DTYPES
    }
    batch = Batch(torch.tensor(PROMPTS[1]), torch.arange(30), (Span(30, 30, (3, 1, 0, 2)),))
    exact, found = (runs[dtype].run(batch) for dtype in DTYPES)
    assert float((found - exact).abs().max()) < 0.05 * float(exact.abs().max())


def test_an_fp8_cache_holds_twice_the_tokens_of_a_bfloat16_one(checkpoint: Path) -> None:
    options = EngineOptions(1 << 20, 64, 1000, 8)
    fp8 = ModelRunner(load_model(checkpoint, dtype="bfloat16"), options)
    plain = ModelRunner(load_model(checkpoint, dtype="bfloat16", activations="none"), options)
    assert plain.scales == {}
    assert fp8.bytes_per_block * 2 == plain.bytes_per_block
