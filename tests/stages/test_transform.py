"""transform end to end: the same logits, the same bits where that is claimed, refusals, resuming."""

from pathlib import Path

import pytest
import torch

from ptqpipe.stages.transform import Transformed, TransformOptions, transform
from tests.transforms.models import logits, make_model, make_statistics, token_ids

pytest.importorskip("transformers")
DEMO = Path(__file__).resolve().parent.parent.parent / "ptqpipe" / "demo_model"


def run(model: Path, out: Path, options: TransformOptions, stats: Path | None) -> Transformed:
    done = transform(model, out, stats=stats, options=options)
    assert done is not None
    return done


def check_same_logits(model: Path, out: Path, ids: torch.Tensor) -> None:
    """float64 runs agree to the rounding of the written dtype, float32 runs to that of float32.

    The bound is measured: how far the original's own float32 run is from its float64 run, times 8 (the folded
    weights are rounded once more, to float32, and the sums see other numbers).
    """
    exact = logits(model, ids, dtype=torch.float64)
    own = (logits(model, ids).double() - exact).abs().max()
    assert 0 < own < 1e-2 * exact.std()
    assert (logits(out, ids).double() - exact).abs().max() <= 8 * own
    assert (logits(out, ids, dtype=torch.float64) - exact).abs().max() <= 8 * own


def test_smoothquant_of_the_demo_model_keeps_its_logits(tmp_path: Path) -> None:
    ids = token_ids(vocabulary=1024)
    stats = make_statistics(DEMO, tmp_path / "stats", ids)
    done = run(DEMO, tmp_path / "out", TransformOptions("smoothquant"), stats)
    assert done.edges == 6
    assert not done.exact
    check_same_logits(DEMO, tmp_path / "out", ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_power_of_two_smoothing_of_the_demo_model_changes_no_bit_of_its_logits(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    ids = token_ids(vocabulary=1024)
    stats = make_statistics(DEMO, tmp_path / "stats", ids)
    done = run(DEMO, tmp_path / "out", TransformOptions("smoothquant", alpha=1.0, powers_of_two=True), stats)
    assert done.exact
    assert done.rounding == 0.0
    assert sum(entry["changed"] for entry in done.record["foldings"]) > 100
    assert torch.equal(logits(tmp_path / "out", ids, dtype=dtype), logits(DEMO, ids, dtype=dtype))


@pytest.mark.parametrize(
    "kind",
    ["llama", "llama_bias", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "mixtral", "qwen2_moe", "qwen3_moe", "gpt2"],
)
def test_smoothing_on_every_edge_keeps_the_logits(tmp_path: Path, kind: str) -> None:
    model, ids = make_model(tmp_path / "model", kind), token_ids()
    stats = make_statistics(model, tmp_path / "stats", ids)
    edges = ("norm", "value") if kind == "gpt2" else ("norm", "value", "up")
    done = run(model, tmp_path / "out", TransformOptions("smoothquant", edges=edges), stats)
    assert {entry["kind"] for entry in done.record["foldings"]} == set(edges)
    assert max(entry["largest"] / entry["least"] for entry in done.record["foldings"]) > 4
    check_same_logits(model, tmp_path / "out", ids)


@pytest.mark.parametrize(
    "kind", ["llama", "llama_bias", "qwen2", "qwen3", "gemma", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_both_rotations_keep_the_logits(tmp_path: Path, kind: str) -> None:
    model, ids = make_model(tmp_path / "model", kind), token_ids()
    run(model, tmp_path / "out", TransformOptions("rotate", block=16, untie=kind == "gemma"), None)
    check_same_logits(model, tmp_path / "out", ids)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_values_rotate_where_the_residual_stream_must_not(tmp_path: Path, kind: str) -> None:
    model, ids = make_model(tmp_path / "model", kind), token_ids()
    run(model, tmp_path / "out", TransformOptions("rotate_values", block=16), None)
    check_same_logits(model, tmp_path / "out", ids)
