"""Claims about cached logits: a hit is a miss to the bit, damage is noticed, the size is bounded."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from ptqpipe.errors import CheckpointError
from ptqpipe.evaluation import divergence, perplexity, score, windows
from ptqpipe.evaluation.cache import CachedLogits, open_cache

VOCABULARY = 40
TOKENS = torch.randint(0, VOCABULARY, (150,), generator=torch.Generator().manual_seed(2))
WINDOWS = windows(150, 32, stride=16)
BYTES = 149 * VOCABULARY * 4


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def never() -> Any:
    raise AssertionError("the model was not needed")


def opened(
    cache: Path, make: Any, *, name: str = "m", limit: int = 10 * BYTES, dtype: torch.dtype = torch.float32
) -> CachedLogits:
    found = open_cache(
        cache,
        key={"model": name},
        windows=WINDOWS,
        vocabulary=VOCABULARY,
        dtype=dtype,
        make=make,
        limit_bytes=limit,
    )
    assert found is not None
    return found


def measured(reference: Any) -> Any:
    scores = score(make_model(1), TOKENS, window=32, stride=16, reference=reference)
    return divergence(scores), perplexity(scores)


def test_a_hit_measures_the_same_bits_without_the_model(tmp_path: Path) -> None:
    straight = measured(make_model())
    missed = measured(opened(tmp_path, make_model))
    assert missed == straight
    assert measured(opened(tmp_path, never)) == straight


def test_filling_stores_every_batch_and_the_bytes_that_a_miss_stores(tmp_path: Path) -> None:
    seen: list[int] = []
    opened(tmp_path / "a", make_model).fill(WINDOWS, TOKENS, on_batch=seen.append)
    assert sum(seen) == 149
    measured(opened(tmp_path / "b", make_model))

    def content(root: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in root.rglob("*") if p.is_file()}

    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert measured(opened(tmp_path / "a", never)) == measured(make_model())


def test_bfloat16_logits_are_stored_as_they_are(tmp_path: Path) -> None:
    def make() -> Any:
        return make_model(dtype=torch.bfloat16)

    straight = measured(make())
    assert measured(opened(tmp_path, make, dtype=torch.bfloat16)) == straight
    assert measured(opened(tmp_path, never, dtype=torch.bfloat16)) == straight
    stored = [p for p in tmp_path.rglob("*-*") if p.is_file()]
    assert sum(p.stat().st_size - 4 for p in stored) == BYTES // 2


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_computed_again(tmp_path: Path, harm: str) -> None:
    straight = measured(opened(tmp_path, make_model))
    victim = next(p for p in tmp_path.rglob("*-*") if p.is_file())
    raw = bytearray(victim.read_bytes())
    if harm == "remove":
        victim.unlink()
    else:
        raw[10] ^= 64
        victim.write_bytes(raw if harm == "flip" else raw[:-9])
    with pytest.raises(AssertionError, match="not needed"):
        measured(opened(tmp_path, never))
    assert measured(opened(tmp_path, make_model)) == straight
    assert measured(opened(tmp_path, never)) == straight


def test_another_key_is_another_store(tmp_path: Path) -> None:
    opened(tmp_path, make_model, name="a").fill(WINDOWS, TOKENS)
    with pytest.raises(AssertionError, match="not needed"):
        measured(opened(tmp_path, never, name="b"))


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    folders = {}
    for age, name in enumerate(["old", "older", "new"]):
        store = opened(tmp_path, make_model, name=name)
        store.fill(WINDOWS, TOKENS)
        folders[name] = store.folder
        used = {"old": 2, "older": 1, "new": 3}[name]
        os.utime(store.folder / "key.json", (used, used))
        assert age < 3
    size = sum(p.stat().st_size for p in folders["new"].iterdir())
    kept = opened(tmp_path, make_model, name="fresh", limit=2 * size + BYTES)
    assert not folders["older"].exists()
    assert folders["old"].exists()
    assert folders["new"].exists()
    assert kept.folder.exists()


def test_what_does_not_fit_is_not_cached(tmp_path: Path) -> None:
    found = open_cache(
        tmp_path, key={}, windows=WINDOWS, vocabulary=VOCABULARY, dtype=torch.float32, make=never, limit_bytes=BYTES - 1
    )
    assert found is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_means_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = open_cache(
        tmp_path / "file", key={}, windows=WINDOWS, vocabulary=VOCABULARY, dtype=torch.float32, make=never
    )
    assert found is None


def test_a_model_of_another_vocabulary_is_noticed(tmp_path: Path) -> None:
    found = open_cache(tmp_path, key={}, windows=WINDOWS, vocabulary=39, dtype=torch.float32, make=make_model)
    assert found is not None
    with pytest.raises(CheckpointError, match="39"):
        found.fill(WINDOWS, TOKENS)
