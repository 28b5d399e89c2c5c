"""Claims about verify on other tools' checkpoints: the sound ones pass, the one that readers cannot load does not."""

from pathlib import Path

import pytest

from ptqpipe.check.verify.command import verify
from ptqpipe.check.verify.report import VerifyReport
from tests.conversion import damage

SOURCES = {"qwen3moe": "bf16-qwen3moe", "mixtral": "bf16-mixtral", "gptoss": "bf16-gptoss"}

# relative MSE of the family, as an independent dequantizer measured it over all weights
SOUND = {
    "ct-fp8": 7.0e-4,
    "ct-fp8-block": 7.0e-4,
    "ct-fp8-dynamic": 6.8e-4,
    "ct-mixed": None,
    "ct-mxfp4": 1.316e-2,
    "ct-mxfp8": 7.1e-4,
    "ct-nvfp4": 9.04e-3,
    "ct-nvfp4-kv": 9.04e-3,
    "ct-nvfp4a16": 9.04e-3,
    "ct-qwen3moe-nvfp4": 9.04e-3,
    "ds-fp8-block": 7.0e-4,
    "gptoss-mxfp4": None,
    "mo-fp8-kvfp8": 7.0e-4,
    "mo-mixed": None,
    "mo-mixtral-nvfp4": 9.04e-3,
    "mo-nvfp4": 9.04e-3,
    "mo-qwen3moe-nvfp4": 9.04e-3,
    "quark-mxfp4": 1.316e-2,
}

pytestmark = pytest.mark.shared


def source_of(golden: Path, name: str) -> Path:
    return golden / next((source for key, source in SOURCES.items() if key in name), "bf16-llama")


def check(golden: Path, name: str, *, optimal: bool = False) -> VerifyReport:
    return verify(golden / name, source=source_of(golden, name), optimal=optimal, sample_blocks=64, workers=1)


@pytest.mark.parametrize("name", SOUND)
def test_sound_checkpoints_of_other_tools_pass(shared_dir: Path, name: str) -> None:
    report = check(shared_dir / "golden", name)
    assert report.ok, report.faults
    assert not report.own
    errors = [weight.relative_mse for weight in report.weights if weight.relative_mse is not None]
    assert len(errors) == len(report.weights) > 0
    expected = SOUND[name]
    assert expected is None or sum(errors) / len(errors) == pytest.approx(expected, rel=0.04)


def test_expert_names_that_readers_cannot_find_are_faults(shared_dir: Path) -> None:
    report = check(shared_dir / "golden", "ct-mixtral-nvfp4")
    stored = {f.where for f in report.faults if "the source has no weight of this name" in f.message}
    missing = {f.where for f in report.faults if "is in the source, but the checkpoint has neither" in f.message}
    experts = [f"model.layers.{layer}.block_sparse_moe.experts.{e}" for layer in range(2) for e in range(4)]
    assert stored == {f"{e}.{leaf}.weight" for e in experts for leaf in ("gate_proj", "up_proj", "down_proj")}
    assert missing == {f"{e}.{leaf}.weight" for e in experts for leaf in ("w1", "w2", "w3")}
    assert len(report.faults) == len(stored) + len(missing)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("ct-nvfp4", 0.20, 0.40), ("ct-mxfp4", 0.001, 0.06), ("mo-nvfp4", 0.2, 0.4)]
)
def test_what_the_exact_search_would_save_is_a_note(shared_dir: Path, name: str, low: float, high: float) -> None:
    """Abs-max scales cost 1.35 times the optimum for NVFP4, the even rule at most a few percent for MXFP4."""
    report = check(shared_dir / "golden", name, optimal=True)
    assert report.ok, report.faults
    proofs = [weight.optimality for weight in report.weights if weight.optimality is not None]
    saved = 1 - sum(p.best for p in proofs) / sum(p.error for p in proofs)
    assert low < saved < high
    assert any("exact search would save" in note.message for note in report.notes)


def test_bfloat16_global_scales_are_a_note(shared_dir: Path) -> None:
    notes = check(shared_dir / "golden", "ct-nvfp4").notes
    assert any("computed in bfloat16" in note.message for note in notes)
    notes = check(shared_dir / "golden", "mo-nvfp4").notes
    assert not any("computed in bfloat16" in note.message for note in notes)


@pytest.mark.parametrize(
    ("name", "tensor", "value"),
    [
        ("ct-nvfp4-kv", "model.layers.0.self_attn.k_scale", b"\0\0"),
        ("mo-fp8-kvfp8", "model.layers.0.self_attn.k_proj.k_scale", b"\0\0\xc0\x7f"),
    ],
)
def test_kv_cache_scales_must_be_positive_numbers(
    shared_dir: Path, tmp_path: Path, name: str, tensor: str, value: bytes
) -> None:
    golden = shared_dir / "golden"
    folder = damage.copy(golden / name, tmp_path / name)
    make_writable(folder)
    value = value.ljust(len(damage.tensor_bytes(folder, tensor)), b"\0")
    damage.put(folder, tensor, value)
    report = verify(folder, source=source_of(golden, name), workers=1)
    assert [fault.where for fault in report.faults] == [tensor]
    damage.rename(folder, tensor, tensor + "x")
    report = verify(folder, source=source_of(golden, name), workers=1)
    module = tensor.partition(".self_attn")[0] + ".self_attn"
    assert {fault.where for fault in report.faults} == {tensor + "x", module, "config.json"}


def make_writable(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_two_exchanged_experts_of_a_stack_are_faults(shared_dir: Path, tmp_path: Path) -> None:
    golden = shared_dir / "golden"
    folder = damage.copy(golden / "gptoss-mxfp4", tmp_path / "gptoss")
    make_writable(folder)
    for name in ("blocks", "scales"):
        tensor = f"model.layers.1.mlp.experts.down_proj_{name}"
        data = damage.tensor_bytes(folder, tensor)
        one = len(data) // 4
        data[:one], data[one : 2 * one] = data[one : 2 * one], data[:one]
        damage.put(folder, tensor, bytes(data))
    report = verify(folder, source=golden / "bf16-gptoss", workers=1)
    assert {fault.where for fault in report.faults} == {f"model.layers.1.mlp.experts.down_proj[{e}]" for e in (0, 1)}
