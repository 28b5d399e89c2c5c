"""Claims about diff: one payload in two layouts is equal, one changed bit is not, and what it changes is measured."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.check.diff import DiffReport, Same, diff, render, to_json
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.errors import CheckpointError
from tests import tiny
from tests.conversion import damage

Q = "model.layers.0.self_attn.q_proj"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("diff") / "model", tiny.llama())


@pytest.fixture(scope="module")
def packed(model: Path) -> Path:
    return ptqpipe.convert(model, format="nvfp4_w4a4", out=model.parent / "packed", workers=1).out


def by_name(report: DiffReport) -> dict[str, Same]:
    return {tensor.name: tensor.same for tensor in report.tensors}


def test_a_checkpoint_is_identical_to_its_copy(packed: Path, tmp_path: Path) -> None:
    report = diff(packed, damage.copy(packed, tmp_path / "copy"))
    assert report.identical
    assert report.equal
    assert render(report).splitlines()[-1] == "identical"


def test_shards_do_not_matter(model: Path, tmp_path: Path) -> None:
    assert diff(model, tiny.save(tmp_path / "sharded", tiny.llama(), shards=3)).identical


def test_one_payload_in_two_layouts_is_equal_and_not_identical(packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "modelopt"
    relayout(packed, other, container="modelopt")
    report = diff(packed, other)
    assert report.equal
    assert not report.identical
    assert by_name(report)[f"{Q}.weight"] is Same.NUMBERS  # a divisor here, a factor there
    assert {key for key, _, _ in report.config} >= {"hf_quant_config.json", "quantization_config.quant_method"}


def test_the_error_of_a_packed_weight_is_that_of_its_record(model: Path, packed: Path) -> None:
    report = diff(model, packed)
    record = json.loads((packed / "ptqpipe.json").read_text())["weights"]
    errors = {t.name: t.relative_mse for t in report.tensors if t.same is Same.NO}
    assert errors == {name: pytest.approx(entry["relative_mse"], rel=1e-9) for name, entry in record.items()}
    assert not report.equal


def test_the_same_numbers_in_another_dtype_are_the_same_numbers(model: Path, tmp_path: Path) -> None:
    wide = tiny.save(tmp_path / "wide", {name: t.float() for name, t in tiny.llama().items()})
    report = diff(model, wide)
    assert set(by_name(report).values()) == {Same.NUMBERS}
    assert report.equal
    assert not report.identical


@pytest.mark.parametrize("tensor", [f"{Q}.weight_packed", f"{Q}.weight_scale", f"{Q}.weight_global_scale"])
def test_one_bit_of_a_packed_weight_is_a_difference(packed: Path, tmp_path: Path, tensor: str) -> None:
    folder = damage.copy(packed, tmp_path / "changed")
    damage.change_byte(folder, tensor, 2, lambda b: b ^ 1)
    report = diff(packed, folder)
    assert [t.name for t in report.tensors if t.same is not Same.BYTES] == [f"{Q}.weight"]
    assert by_name(report)[f"{Q}.weight"] is Same.NO
    assert not report.equal


def test_the_sign_of_zero_is_no_other_number(packed: Path, tmp_path: Path) -> None:
    folder = damage.copy(packed, tmp_path / "changed")
    data = damage.tensor_bytes(folder, f"{Q}.weight_packed")
    index = next(i for i, b in enumerate(data) if b & 7 == 0)
    damage.change_byte(folder, f"{Q}.weight_packed", index, lambda b: b ^ 8)
    report = diff(packed, folder)
    assert by_name(report)[f"{Q}.weight"] is Same.NUMBERS
    assert report.equal
    assert not report.identical


def test_another_input_scale_is_another_model(packed: Path, tmp_path: Path) -> None:
    folder = damage.copy(packed, tmp_path / "changed")
    damage.change_byte(folder, f"{Q}.input_global_scale", 2, lambda b: b ^ 1)
    report = diff(packed, folder)
    assert by_name(report)[f"{Q}.weight"] is Same.INPUT
    assert not report.equal


def test_one_bit_of_a_plain_tensor_is_a_difference(model: Path, tmp_path: Path) -> None:
    folder = damage.copy(model, tmp_path / "changed")
    damage.change_byte(folder, NORM, 0, lambda b: b ^ 1)
    found = next(t for t in diff(model, folder).tensors if t.same is not Same.BYTES)
    assert found.name == NORM
    ones = torch.ones(128, dtype=torch.float64)
    ulp = float(load_file(folder / "model.safetensors")[NORM][0]) - 1
    assert found.relative_mse == pytest.approx(ulp**2 / float(ones.square().sum()), rel=1e-12)


def test_renamed_reshaped_and_dropped_tensors_are_named(model: Path, tmp_path: Path) -> None:
    tensors = tiny.llama()
    tensors["extra.weight"] = tensors.pop(NORM)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    report = diff(model, tiny.save(tmp_path / "other", tensors))
    assert report.only_a == (NORM,)
    assert report.only_b == ("extra.weight",)
    assert report.reshaped == (("model.norm.weight", (128,), (64,)),)
    assert not report.equal


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_cut_out_of_stacks_are_compared_with_their_rows(tmp_path: Path, transposed: bool) -> None:
    model = tiny.save(tmp_path / "model", tiny.fused_moe(transposed=transposed))
    out = ptqpipe.convert(model, format="mxfp8", out=tmp_path / "out", workers=1).out
    record = json.loads((out / "ptqpipe.json").read_text())["weights"]
    for report in (diff(model, out), diff(out, model)):
        assert not report.only_a + report.only_b
        for tensor in report.tensors:
            if tensor.name in record:
                assert tensor.relative_mse == pytest.approx(record[tensor.name]["relative_mse"], rel=1e-2)
    one, two = diff(model, out), diff(out, model)
    assert {t.name for t in one.tensors} == {t.name for t in two.tensors}


def test_stacks_in_both_orientations_of_one_packed_weight_agree(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.fused_moe(transposed=True))
    out = ptqpipe.convert(model, format="mxfp8", container="ptqpipe", out=tmp_path / "out", workers=1).out
    report = diff(model, out)
    errors = [t.relative_mse for t in report.tensors if t.same is Same.NO]
    assert len(errors) == 6
    assert all(error is not None and error < 2e-3 for error in errors)


def test_configs_and_files_are_compared_by_key_and_name(model: Path, tmp_path: Path) -> None:
    folder = damage.copy(model, tmp_path / "changed")
    damage.edit_json(folder / "config.json", lambda config: config.update(vocab_size=97))
    (folder / "chat_template.jinja").write_text("other")
    (folder / "tokenizer_config.json").unlink()
    report = diff(model, folder)
    assert report.config == (("vocab_size", "96", "97"),)
    assert [name for name, _, _ in report.files] == ["chat_template.jinja", "tokenizer_config.json"]
    assert not report.equal
    assert report.same_tensors
    assert "config or files are not" in render(report)
    described = json.loads(json.dumps(to_json(report)))
    assert described["equal"] is False
    assert described["files"][1] == {"file": "tokenizer_config.json", "a": "present", "b": "missing"}


def test_nan_is_equal_to_itself_and_to_nothing_else(tmp_path: Path) -> None:
    tensors = tiny.llama()
    tensors[NORM] = torch.full((128,), float("nan"), dtype=torch.bfloat16)
    one = tiny.save(tmp_path / "one", tensors)
    wide = tiny.save(tmp_path / "wide", {name: t.float() for name, t in tensors.items()})
    assert by_name(diff(one, wide))[NORM] is Same.NUMBERS
    report = diff(one, tiny.save(tmp_path / "two", tiny.llama()))
    assert by_name(report)[NORM] is Same.NO
    described = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert described["tensors"][NORM]["relative_mse"] is None  # infinite: JSON has no word for it


def test_a_damaged_checkpoint_is_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        diff(model, tmp_path / "nowhere")
