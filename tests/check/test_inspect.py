"""Claims about inspect: every byte is in one row, the numbers are those of the files, suspicious scales are named."""

import json
from pathlib import Path

import pytest
import torch

import ptqpipe
from ptqpipe.check.inspect import inspect, render, to_json
from ptqpipe.errors import CheckpointError
from tests import tiny
from tests.conversion import damage

Q = "model.layers.0.self_attn.q_proj"
SOURCE_BYTES = sum(t.nbytes for t in tiny.llama().values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("inspect") / "model", tiny.llama())


@pytest.fixture(scope="module")
def packed(model: Path) -> Path:
    return ptqpipe.convert(model, format="nvfp4_w4a4", objective="none", out=model.parent / "packed", workers=1).out


def stored_bytes(folder: Path) -> int:
    """All bytes of all weight files, their headers aside."""
    return sum(path.stat().st_size - damage.read_header(path)[1] for path in damage.shards(folder))


def test_every_byte_of_the_files_is_in_one_row(packed: Path, model: Path) -> None:
    for folder in (packed, model):
        report = inspect(folder)
        assert report.nbytes == stored_bytes(folder)
        assert report.params == SOURCE_BYTES // 2
        assert report.ratio == report.nbytes / SOURCE_BYTES
        header = damage.read_header(damage.shards(folder)[0])[0]
        assert sum(tensors for _, _, tensors in report.files) == len(header) - 1


def test_rows_are_roles_with_their_scheme_and_bits(packed: Path) -> None:
    rows = {row.role: row for row in inspect(packed).weights}
    assert set(rows) == {f"{leaf}_proj" for leaf in ("q", "k", "v", "o", "gate", "up", "down")}
    q = rows["q_proj"]
    assert (q.scheme, q.format, q.count, q.params) == ("nvfp4_w4a4", "nvfp4", 2, 2 * 128 * 128)
    assert q.nbytes == 2 * (128 * 128 // 2 + 128 * 128 // 16 + 4 + 4)
    assert q.bits_per_weight == pytest.approx(4.5 + 64 / (128 * 128))
    assert q.scales.blocks == 2 * 128 * 8


def test_global_scales_are_shown_as_factors(packed: Path) -> None:
    record = json.loads((packed / "ptqpipe.json").read_text())["weights"]
    claimed = [entry["global_scale"] for name, entry in record.items() if "q_proj" in name]
    row = next(row for row in inspect(packed).weights if row.role == "q_proj")
    assert (row.global_least, row.global_largest) == (min(claimed), max(claimed))


def test_kept_tensors_show_the_reason_of_the_record(packed: Path) -> None:
    rows = {row.role: row for row in inspect(packed).kept}
    assert rows["lm_head"].reason == "language-model head"
    assert rows["embed_tokens"].nbytes == 96 * 128 * 2


def test_the_producer_and_the_recipe_are_shown(packed: Path) -> None:
    report = inspect(packed)
    assert report.producer == f"ptqpipe {ptqpipe.__version__}"
    assert report.record["recipe"] == "* nvfp4_w4a4"
    assert report.record["source"] == "model"


def test_experts_share_a_row(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.fused_moe())
    for container, count in (("compressed_tensors", 3), ("ptqpipe", 3)):
        out = ptqpipe.convert(model, format="mxfp4", container=container, out=tmp_path / container, workers=1).out
        rows = {row.role: row for row in inspect(out).weights}
        assert rows["experts.down_proj"].count == count
        assert rows["experts.down_proj"].params == 3 * 128 * 64


def test_good_scales_are_not_suspicious(packed: Path) -> None:
    assert inspect(packed).suspicious == ()


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (0x00, "are zero"),
        (0x7F, "are NaN, infinite or negative"),
        (0x81, "are NaN, infinite or negative"),
        (0x7E, "are the largest code; the global scale is too small"),
        (0x01, "underflow to the smallest code although their blocks are not zero"),
    ],
)
def test_suspicious_scales_are_named(packed: Path, tmp_path: Path, scale: int, words: str) -> None:
    folder = damage.copy(packed, tmp_path / "changed")
    name = f"{Q}.weight_scale"
    data = damage.tensor_bytes(folder, name)
    data[:100] = bytes([scale]) * 100
    damage.put(folder, name, bytes(data))
    found = inspect(folder).suspicious
    assert len(found) == 1
    assert words in found[0]
    assert "q_proj" in found[0]


def test_blocks_of_zeros_are_no_sign_of_a_bad_global_scale(tmp_path: Path) -> None:
    tensors = tiny.llama()
    tensors[f"{Q}.weight"][:64] = 0
    out = ptqpipe.convert(tiny.save(tmp_path / "model", tensors), objective="none", out=tmp_path / "out", workers=1).out
    report = inspect(out)
    row = next(row for row in report.weights if row.role == "q_proj")
    assert row.scales.empty == 64 * 8
    assert report.suspicious == ("25.0% of 2048 block scales of q_proj (nvfp4) belong to blocks of zeros",)


def test_global_scales_far_apart_are_named(tmp_path: Path) -> None:
    tensors = tiny.llama()
    tensors["model.layers.1.self_attn.o_proj.weight"] *= 2.0**14
    out = ptqpipe.convert(tiny.save(tmp_path / "model", tensors), objective="none", out=tmp_path / "out", workers=1).out
    assert ["global scales of o_proj range" in line for line in inspect(out).suspicious] == [True]


def test_text_fits_a_terminal_and_json_says_the_same(packed: Path) -> None:
    report = inspect(packed)
    text = render(report)
    assert max(len(line) for line in text.splitlines()[1:]) <= 120
    described = json.loads(json.dumps(to_json(report)))
    assert described["bytes"] == report.nbytes
    assert sum(row["count"] for row in described["weights"]) == 14


def test_a_plain_checkpoint_has_tensors_alone(model: Path) -> None:
    report = inspect(model)
    assert report.container == "plain"
    assert report.weights == ()
    assert report.ratio == 1.0
    assert "tensors" in render(report)


def test_float32_scales_that_are_no_numbers_are_named(model: Path, tmp_path: Path) -> None:
    out = ptqpipe.convert(model, format="fp8_block", out=tmp_path / "out", workers=1).out
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    damage.put(out, name, torch.tensor([float("nan"), 0.0]).numpy().tobytes())
    first, second = inspect(out).suspicious
    assert first.startswith("1 of 4 block scales")
    assert "NaN" in first
    assert "zero" in second


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect(tmp_path / "nowhere")


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "producer", "kv"),
    [
        ("ct-nvfp4-kv", "compressed_tensors 0.19.0", 4),
        ("mo-fp8-kvfp8", "modelopt 0.47.0", 4),
        ("ds-fp8-block", "", None),
    ],
)
def test_other_tools_checkpoints_are_read(shared_dir: Path, name: str, producer: str, kv: int | None) -> None:
    report = inspect(shared_dir / "golden" / name)
    assert report.producer == producer
    assert report.suspicious == ()
    assert (None if report.kv_scales is None else report.kv_scales[0]) == kv
    assert sum(row.count for row in report.weights) == 14
