"""verify: what convert writes is sound, and so is what other tools wrote."""

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.check.verify.report import render, to_json
from ptqpipe.conversion.convert_summary import by_role
from ptqpipe.conversion.relayout.command import relayout
from tests import tiny
from tests.check.verify.checks import MOE_CONFIG, NORM, Q, check, found
from tests.conversion import damage
from tests.quantization.inputs import inputs_of_llama, write_statistics

CONVERSIONS = [
    ("nvfp4", None),
    ("nvfp4_w4a4", None),
    ("nvfp4_w4a4", "modelopt"),
    ("nvfp4", "modelopt"),
    ("mxfp4", None),
    ("mxfp6", None),
    ("mxfp8", None),
    ("mxfp8", "mxfp8_hf"),
    ("fp8_dynamic", None),
    ("fp8_tensor", None),
    ("fp8_block", None),
    ("fp8_block", "compressed_tensors"),
    ("e2m1/8/ue5m3", None),
    ("nvfp4", "ptqpipe"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "container"), CONVERSIONS)
def test_what_convert_writes_is_sound_and_its_scales_are_proven_again(
    model: Path, tmp_path: Path, scheme: str, container: str | None
) -> None:
    out = ptqpipe.convert(model, format=scheme, container=container, out=tmp_path / "out", workers=1).out
    report = verify(out, source=model, optimal=True, sample_blocks=8 if scheme == "fp8_dynamic" else 64, workers=2)
    assert report.ok, found(report)
    assert report.own
    count = 8 if scheme == "fp8_block" else 14  # k and v have too few rows, and q is kept with them
    assert len(report.weights) == count
    assert all(weight.relative_mse is not None for weight in report.weights)
    proofs = [weight.optimality for weight in report.weights if weight.optimality is not None]
    assert scheme == "fp8_tensor" or (
        len(proofs) == count and all(p.blocks > 0 and not p.worse + p.tied for p in proofs)
    )


@pytest.mark.parametrize("scheme", ["absmax", "exact"])
def test_a_search_that_proves_nothing_is_sound_and_what_it_costs_is_told(
    model: Path, tmp_path: Path, scheme: str
) -> None:
    out = ptqpipe.convert(model, scale_search=scheme, out=tmp_path / "out", workers=1).out
    report = check(out, model, optimal=True)
    assert report.ok, found(report)
    notes = [note for note in report.notes if note.check == "optimal"]
    assert len(notes) == (scheme == "absmax")
    assert not notes or "exact search would save" in notes[0].message


@pytest.mark.parametrize("container", ["deepseek_fp8", "compressed_tensors"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_constant_weight_is_judged_beside_scales_that_are_bfloat16_like_its_own(
    tmp_path: Path, dtype: torch.dtype, container: str
) -> None:
    """float32 abs-max scales would store it exactly; the bfloat16 numbers that readers have cannot."""
    tensors = tiny.llama(dtype=dtype)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.full((128, 256), 0.37, dtype=dtype)
    model = tiny.save(tmp_path / "model", tensors)
    out = ptqpipe.convert(model, format="fp8_block", container=container, out=tmp_path / "out", workers=1).out
    report = check(out, model, optimal=True)
    assert report.ok, found(report)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_cut_out_of_stacks_are_sound(tmp_path: Path, transposed: bool) -> None:
    model = tiny.save(tmp_path / "model", tiny.fused_moe(transposed=transposed), config=MOE_CONFIG)
    out = ptqpipe.convert(model, out=tmp_path / "out", workers=1).out
    report = check(out, model)
    assert report.ok, found(report)
    assert any("loads NVFP4 experts wrong" in note.message for note in report.notes)


def test_experts_with_biases_that_stay_float_are_sound(tmp_path: Path) -> None:
    """gpt-oss: the stacks are kept, and so are their two-dimensional biases, which no reader takes for a layer."""
    tensors = tiny.fused_moe(transposed=True)
    tensors["model.layers.0.mlp.experts.gate_up_proj_bias"] = torch.zeros(3, 128, dtype=torch.bfloat16)
    tensors["model.layers.0.mlp.experts.down_proj_bias"] = torch.zeros(3, 128, dtype=torch.bfloat16)
    model = tiny.save(tmp_path / "model", tensors, config={**tiny.LLAMA_CONFIG, "model_type": "gpt_oss"})
    for container in ("compressed_tensors", "gptoss_mxfp4"):
        out = ptqpipe.convert(model, format="mxfp4", container=container, out=tmp_path / container, workers=1).out
        report = check(out, model)
        assert report.ok, found(report)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_that_stay_stacks_are_sound(tmp_path: Path, transposed: bool) -> None:
    model = tiny.save(tmp_path / "model", tiny.fused_moe(transposed=transposed), config=MOE_CONFIG)
    out = ptqpipe.convert(model, format="mxfp4", container="ptqpipe", out=tmp_path / "out", workers=1).out
    report = check(out, model, optimal=True)
    assert report.ok, found(report)
    assert sum("[" in weight.name for weight in report.weights) == 6


@pytest.mark.parametrize(
    ("scheme", "first", "second"),
    [
        ("nvfp4_w4a4", "compressed_tensors", "modelopt"),
        ("nvfp4", "modelopt", "compressed_tensors"),
        ("nvfp4", "compressed_tensors", "ptqpipe"),
        ("fp8_block", "deepseek_fp8", "compressed_tensors"),
        ("mxfp8", "mxfp8_hf", "compressed_tensors"),
    ],
)
def test_another_layout_of_a_sound_checkpoint_is_sound(
    model: Path, tmp_path: Path, scheme: str, first: str, second: str
) -> None:
    out = ptqpipe.convert(model, format=scheme, container=first, out=tmp_path / "out", workers=1).out
    relayout(out, tmp_path / "other", container=second)
    report = verify(tmp_path / "other", source=model, optimal=True, sample_blocks=8, workers=1)
    assert report.ok, found(report)
    assert report.container == second
    assert report.own
    damage.change_byte(tmp_path / "other", NORM, 1, lambda b: b ^ 1)
    assert not check(tmp_path / "other", model).ok


@pytest.mark.parametrize("container", ["compressed_tensors", "ptqpipe"])
def test_another_layout_of_a_foreign_checkpoint_is_as_sound_as_that(
    foreign: Path, tmp_path: Path, container: str
) -> None:
    """relayout cannot give fused weights one scale; what is a note about another tool's choice stays a note."""
    before = check(foreign, None)
    assert before.ok, found(before)
    assert not before.own
    relayout(foreign, tmp_path / "other", container=container)
    after = check(tmp_path / "other", None)
    assert after.ok, found(after)
    assert after.own
    fused = [[note.where for note in report.notes if note.check == "groups"] for report in (before, after)]
    assert fused[0] == fused[1] != []


@pytest.mark.parametrize("container", ["compressed_tensors", "ptqpipe"])
def test_a_kv_cache_scale_that_another_layout_calls_otherwise_is_not_lost(
    foreign: Path, tmp_path: Path, container: str
) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    relayout(foreign, there, container=container)
    relayout(there, back, container="modelopt")
    for folder in (there, back):
        report = check(folder, foreign)
        assert report.ok, found(report)
    scale = "model.layers.1.self_attn." + ("k_scale" if container == "compressed_tensors" else "k_proj.k_scale")
    other = damage.copy(foreign, tmp_path / "source")
    damage.put(other, "model.layers.1.self_attn.k_proj.k_scale", bytes.fromhex("0000403f"))
    assert [fault.where for fault in check(there, other).faults] == [scale]
    damage.rename(there, scale, "model.layers.1.self_attn.scale")
    assert "k_proj.k_scale: is in the source, but the checkpoint has neither" in found(check(there, foreign))


@pytest.mark.slow
def test_a_sequence_of_random_bit_flips_is_never_accepted(good: Path, model: Path, tmp_path: Path) -> None:
    """Any bit of the weight files, their index, the config and what is carried along; the record has its own claims."""
    folder = damage.copy(good, tmp_path / "damaged")
    random = Random(20)
    pages = ("ptqpipe.json", "README.md")  # a model card that was changed is a note
    files = [path for path in sorted(folder.iterdir()) if path.name not in pages]
    for _ in range(60):
        path = random.choice(files)
        before = path.read_bytes()
        index = random.randrange(min(len(before), random.choice([200, 10**9])))  # half of them among the headers
        after = bytearray(before)
        after[index] ^= 1 << random.randrange(8)
        path.write_bytes(after)
        report = check(folder, model)
        assert not report.ok, f"bit of byte {index} of {path.name}"
        path.write_bytes(before)
    assert check(folder, model).ok


@pytest.mark.slow
def test_the_report_is_the_same_for_any_number_of_workers(good: Path, model: Path) -> None:
    one, four = (verify(good, source=model, optimal=True, workers=n) for n in (1, 4))
    assert one.ok, found(one)
    assert one.weights == four.weights
    assert one.findings == four.findings


def test_the_report_says_what_was_checked_in_text_and_in_json(good: Path, model: Path) -> None:
    report = check(good, model, optimal=True)
    text = render(report)
    assert "q_proj" in text
    assert "sound" in text.splitlines()[-1]
    assert max(map(len, text.splitlines())) <= 160
    described = json.loads(json.dumps(to_json(report)))
    assert described["ok"] is True
    assert described["weights"][f"{Q}.weight"]["optimality"]["worse"] == 0


def test_a_proof_has_a_column_where_it_was_asked_for_and_what_it_leaves_out_is_said(good: Path, model: Path) -> None:
    assert " optimal" not in render(check(good, model))
    report = check(good, model, optimal=True)
    assert " optimal\n" in render(report)
    assert "optimal:" not in render(report)
    missing = replace(report.weights[0], optimality=None)
    partly = render(replace(report, weights=(missing, *report.weights[1:])))
    assert f"optimal: 1 of {len(report.weights)} weights are left out: their scales are not chosen by" in partly
    assert "optimal: not proven; the proof needs" in render(verify(good, optimal=True, workers=1))


def test_json_has_null_for_what_is_infinite(good: Path, model: Path) -> None:
    report = check(good, model)
    infinite = replace(report.weights[0], relative_mse=math.inf, versus_absmax=math.inf, versus_rtn=math.inf)
    described = json.loads(json.dumps(to_json(replace(report, weights=(infinite,))), allow_nan=False))
    weight = described["weights"][infinite.name]
    assert [weight[key] for key in ("relative_mse", "versus_absmax", "versus_rtn")] == [None] * 3


@pytest.mark.slow
def test_every_block_is_proven_on_request(good: Path, model: Path) -> None:
    report = check(good, model, all_blocks=True)
    assert report.ok, found(report)
    for weight in report.weights:
        assert weight.optimality is not None
        assert weight.optimality.blocks == weight.optimality.total == weight.shape[0] * weight.shape[1] // 16


def test_without_a_source_what_the_checkpoint_says_of_itself_is_checked(good: Path) -> None:
    report = check(good, None)
    assert report.ok, found(report)
    assert all(weight.relative_mse is None for weight in report.weights)


def test_a_moved_source_is_still_the_source(good: Path, model: Path, tmp_path: Path) -> None:
    report = check(good, damage.copy(model, tmp_path / "elsewhere"))
    assert report.ok, found(report)


def test_another_tools_checkpoint_is_sound_too(good: Path, model: Path, tmp_path: Path) -> None:
    report = check(damage.disown(damage.copy(good, tmp_path / "peer")), model, optimal=True)
    assert report.ok, found(report)
    assert not report.own


def test_statistics_beside_another_tools_checkpoint_are_said_to_prove_nothing(
    good: Path, model: Path, tmp_path: Path
) -> None:
    stats = write_statistics(tmp_path / "stats", model, inputs_of_llama(tiny.llama()))
    peer = damage.disown(damage.copy(good, tmp_path / "peer"))
    report = verify(peer, source=model, statistics=stats, workers=1)
    assert report.ok, found(report)
    assert "no ptqpipe.json that says what the checkpoint was made with: its weights are not repeated" in found(report)


def test_a_plain_checkpoint_is_no_packed_one(model: Path) -> None:
    assert "describes no quantization" in found(check(model, model))


def test_modelopts_two_configs_must_agree(model: Path, tmp_path: Path) -> None:
    out = ptqpipe.convert(model, format="nvfp4_w4a4", container="modelopt", out=tmp_path / "out", workers=1).out
    for path, edit in (
        ("exclude_modules", lambda q: q.update(exclude_modules=[])),
        ("quant_algo", lambda q: q.update(quant_algo="FP8")),
        ("group_size", lambda q: q.update(group_size=32)),
    ):
        for own in (True, False):
            folder = damage.copy(out, tmp_path / f"{path}-{own}")
            if not own:
                damage.disown(folder)
            damage.edit_json(folder / "hf_quant_config.json", lambda c, edit=edit: edit(c["quantization"]))
            report = check(folder, model)
            assert any(path in fault.message for fault in report.faults), found(report)


def test_errors_by_role_are_those_that_convert_prints(tmp_path: Path) -> None:
    tensors = tiny.llama()
    loud = next(name for name in tensors if name.endswith("1.mlp.down_proj.weight"))
    tensors[loud] = torch.full_like(tensors[loud], 1.5)  # much energy and no error, beside a layer with little and some
    source, out = tiny.save(tmp_path / "model", tensors), tmp_path / "out"
    done = ptqpipe.convert(source, format="nvfp4", out=out, workers=1)
    told = {row["role"]: row for row in by_role(done.record["weights"])}
    rows = [line.split() for line in render(check(out, source)).splitlines()]
    found = {row[0]: row for row in rows if row and row[0] in told}
    assert found.keys() == told.keys()
    for role, row in found.items():
        assert row[3] == f"{told[role]['sqnr_db']:.2f}"
        assert float(row[5]) == pytest.approx(told[role]["versus_absmax"], abs=0.01)
