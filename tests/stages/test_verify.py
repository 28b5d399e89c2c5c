"""Claims about verify: what convert writes is sound, and nothing that is damaged passes for sound."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.stages.convert.text import by_role
from ptqpipe.stages.relayout.run import relayout
from ptqpipe.stages.verify.run import verify
from ptqpipe.stages.verify.text import VerifyReport, render, to_json
from tests import tiny
from tests.stages import damage

MOE_CONFIG = {**tiny.LLAMA_CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
GATE, UP, DOWN = (f"model.layers.1.mlp.{leaf}_proj" for leaf in ("gate", "up", "down"))
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


def moe(experts: int = 3, hidden: int = 128, inner: int = 64) -> dict[str, torch.Tensor]:
    """One layer with a weight for each projection of each expert."""
    t = tiny.Tensors(3)
    t.add(EMBEDDING, 96, hidden)
    tiny.attention(t, "model.layers.0.self_attn", hidden=hidden, kv=hidden // 2)
    t.add("model.layers.0.mlp.gate.weight", experts, hidden)
    for expert in range(experts):
        base = f"model.layers.0.mlp.experts.{expert}"
        for leaf, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            t.add(f"{base}.{leaf}.weight", *shape)
    t.ones("model.norm.weight", hidden)
    t.add("lm_head.weight", 96, hidden)
    return t.made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("dense") / "model", tiny.llama())


@pytest.fixture(scope="module")
def good(model: Path) -> Path:
    """An NVFP4 W4A4 conversion in several files, so that every kind of stored tensor and an index are there."""
    out = model.parent / "good"
    ptqpipe.convert(model, format="nvfp4_w4a4", out=out, shard_bytes=60_000, workers=1)
    return out


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("moe")
    source = tiny.save(folder / "model", moe(), config=MOE_CONFIG)
    ptqpipe.convert(source, format="nvfp4", out=folder / "good", workers=1)
    return source, folder / "good"


def check(ckpt: Path, source: Path | None, **options: bool) -> VerifyReport:
    return verify(ckpt, source=source, workers=1, **options)


def found(report: VerifyReport) -> str:
    return "\n".join(f"[{f.check}] {f.where}: {f.message}" for f in report.findings)


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
    out = ptqpipe.convert(model, search=scheme, out=tmp_path / "out", workers=1).out
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


@pytest.fixture(scope="module")
def foreign(model: Path) -> Path:
    """As ModelOpt writes FP8: a scale for each weight, as float32, and those of a kv cache beside k and v."""
    out = ptqpipe.convert(model, format="fp8_static", container="modelopt", out=model.parent / "foreign", workers=1).out
    (out / "ptqpipe.json").unlink()
    for name, keys in (("config.json", ("quantization_config",)), ("hf_quant_config.json", ())):
        content = json.loads((out / name).read_text())
        inner = content[keys[0]] if keys else content
        inner.pop("ptqpipe", None)
        inner["producer"] = {"name": "modelopt", "version": "0.47.0"}
        (out / name).write_text(json.dumps(content))
    tensors = load_file(out / "model.safetensors")
    for layer, leaf in ((0, "k"), (0, "v"), (1, "k"), (1, "v")):
        module = f"model.layers.{layer}.self_attn.{leaf}_proj"
        tensors[f"{module}.weight_scale"] *= 1.5
        tensors[f"{module}.{leaf}_scale"] = torch.tensor(0.5 + layer)
    tensors[f"{Q}.weight_scale"] *= 1.0 + 2.0**-20  # no bfloat16 number
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


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


def test_a_plain_checkpoint_is_no_packed_one(model: Path) -> None:
    assert "describes no quantization" in found(check(model, model))


Damage = Callable[[Path], object]


def drop_from_everywhere(name: str) -> Damage:
    """A tensor and its entry in the index."""

    def act(folder: Path) -> None:
        damage.drop(folder, name)
        damage.edit_json(folder / "model.safetensors.index.json", lambda index: index["weight_map"].pop(name))

    return act


def group(edit: Callable[[dict[str, dict[str, object]]], object]) -> Damage:
    """A change of the one config group."""
    return lambda folder: damage.edit_config(folder, lambda c: edit(c["config_groups"]["group_0"]))


def config(edit: Callable[[dict[str, object]], object]) -> Damage:
    return lambda folder: damage.edit_config(folder, edit)


def record(edit: Callable[[dict[str, dict[str, dict[str, object]]]], object]) -> Damage:
    return lambda folder: damage.edit_json(folder / "ptqpipe.json", edit)


def byte(name: str, index: int, change: Callable[[int], int]) -> Damage:
    return lambda folder: damage.change_byte(folder, name, index, change)


# what is done -> (how, words of a fault, whether it is a fault in another tool's checkpoint too)
DAMAGES: dict[str, tuple[Damage, str, bool]] = {
    "low bit of a code": (byte(f"{Q}.weight_packed", 5, lambda b: b ^ 1), f"{Q}.weight", False),
    "sign bit of a code": (byte(f"{DOWN}.weight_packed", 777, lambda b: b ^ 0x88), f"{DOWN}.weight", True),
    "a scale one code up": (byte(f"{K}.weight_scale", 9, lambda b: b + 1), f"{K}.weight", False),
    "a scale four times as large": (byte(f"{K}.weight_scale", 9, lambda b: b + 16), f"{K}.weight", True),
    "a scale of zero": (byte(f"{K}.weight_scale", 9, lambda _: 0), "scales are zero", True),
    "a scale of NaN": (byte(f"{K}.weight_scale", 9, lambda _: 0x7F), "NaN, infinite or negative", True),
    "a negative scale": (byte(f"{K}.weight_scale", 9, lambda b: b | 0x80), "NaN, infinite or negative", True),
    "the last bit of a global scale": (byte(f"{DOWN}.weight_global_scale", 0, lambda b: b ^ 1), DOWN, False),
    "a global scale twice as large": (byte(f"{DOWN}.weight_global_scale", 2, lambda b: b ^ 0x80), DOWN, True),
    "a global scale of its own in a fused group": (byte(f"{K}.weight_global_scale", 0, lambda b: b ^ 1), K, True),
    "a negative global scale": (byte(f"{Q}.weight_global_scale", 3, lambda b: b | 0x80), "finite positive", True),
    "an input scale of its own": (byte(f"{K}.input_global_scale", 0, lambda b: b ^ 1), "input scale", True),
    "an infinite input scale": (
        lambda f: damage.put(f, f"{DOWN}.input_global_scale", b"\0\0\x80\x7f"),
        "finite positive",
        True,
    ),
    "another input scale": (byte(f"{DOWN}.input_global_scale", 2, lambda b: b ^ 1), "input_global_scale", False),
    "gate and up exchanged": (lambda f: swap_weights(f, GATE, UP), f"{GATE}.weight", True),
    "layers exchanged": (lambda f: swap_weights(f, Q, Q.replace("layers.0", "layers.1")), f"{Q}.weight", True),
    "two rows of codes exchanged": (lambda f: swap_rows(f, f"{Q}.weight_packed", 64), f"{Q}.weight", True),
    "a kept bit": (byte(NORM, 0, lambda b: b ^ 1), NORM, True),
    "a kept tensor of another shape": (lambda f: reshape(f, EMBEDDING, [128, 96]), EMBEDDING, True),
    "a kept tensor of another dtype": (lambda f: damage.retype(f, NORM, "F16"), NORM, True),
    "a renamed weight": (
        lambda f: [damage.rename(f, f"{Q}.{p}", f"{Q}x.{p}") for p in nvfp4_parts()],
        "no weight of this name",
        True,
    ),
    "a renamed part": (lambda f: damage.rename(f, f"{Q}.weight_scale", f"{Q}.weight_scales"), Q, True),
    "a renamed kept tensor": (lambda f: damage.rename(f, NORM, NORM + "2"), NORM, True),
    "a dropped part": (drop_from_everywhere(f"{Q}.weight_global_scale"), Q, True),
    "a dropped kept tensor": (drop_from_everywhere(NORM), NORM, True),
    "a dropped weight": (lambda f: [drop_from_everywhere(f"{DOWN}.{p}")(f) for p in nvfp4_parts()], DOWN, True),
    "scales typed as bytes": (lambda f: damage.retype(f, f"{Q}.weight_scale", "U8"), "weight_scale", True),
    "scales typed as E8M0": (lambda f: damage.retype(f, f"{Q}.weight_scale", "F8_E8M0"), "weight_scale", True),
    "codes typed as E4M3": (lambda f: damage.retype(f, f"{Q}.weight_packed", "F8_E4M3"), "weight_packed", True),
    "a truncated file": (lambda f: truncate(damage.shards(f)[0]), "truncated", True),
    "an empty file": (lambda f: damage.shards(f)[0].write_bytes(b""), "bytes", True),
    "a missing file": (lambda f: damage.shards(f)[1].unlink(), "lacks the shard", True),
    "another format string": (config(lambda c: c.update(format="mxfp4-pack-quantized")), "format", True),
    "another format string in the group": (group(lambda g: g.update(format="float-quantized")), "format", True),
    "another group size": (group(lambda g: g["weights"].update(group_size=32)), "group", True),
    "another strategy": (group(lambda g: g["weights"].update(strategy="channel")), "group", True),
    "another activation": (group(lambda g: g["input_activations"].update(dynamic=False)), "input_", True),
    "no activation": (group(lambda g: g.pop("input_activations")), "input_", True),
    "no scale dtype": (group(lambda g: g["weights"].pop("scale_dtype")), "scale_dtype", True),
    "an unknown key": (group(lambda g: g["weights"].update(group_sizes=16)), "group_sizes", True),
    "no status": (config(lambda c: c.pop("quantization_status")), "quantization_status", True),
    "nothing ignored": (config(lambda c: c.update(ignore=[])), "lm_head", True),
    "a quantized layer ignored": (config(lambda c: c["ignore"].append(Q)), Q, True),
    "other targets": (group(lambda g: g.update(targets=["re:.*mlp.*"])), Q, True),
    "no description": (
        lambda f: damage.edit_json(f / "config.json", lambda c: c.pop("quantization_config")),
        "quantization",
        True,
    ),
    "another model": (
        lambda f: damage.edit_json(f / "config.json", lambda c: c.update(hidden_act="gelu")),
        "gelu",
        True,
    ),
    "a config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json", True),
    "a config that is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json", True),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json", True),
    "groups that are a list": (config(lambda c: c.update(config_groups=[1])), "config_groups", True),
    "targets that are a number": (group(lambda g: g.update(targets=7)), "targets", True),
    "another tokenizer": (lambda f: (f / "tokenizer_config.json").write_text('{"a": 2}'), "tokenizer_config", False),
    "a missing file beside the weights": (lambda f: (f / "chat_template.jinja").unlink(), "chat_template", False),
    "an index with another size": (
        lambda f: damage.edit_json(f / "model.safetensors.index.json", lambda i: i["metadata"].update(total_size=1)),
        "total_size",
        False,
    ),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "loaders find them by it", True),
    "no record": (lambda f: (f / "ptqpipe.json").unlink(), "ptqpipe.json is missing", False),
    "a record that is no JSON": (lambda f: (f / "ptqpipe.json").write_text("nonsense"), "ptqpipe.json", False),
    "a record of nothing": (lambda f: (f / "ptqpipe.json").write_text("{}"), "ptqpipe.json", False),
    "a better error than the true one": (
        record(lambda r: r["weights"][f"{Q}.weight"].update(relative_mse=1e-4)),
        "claims relative_mse",
        False,
    ),
    "a better comparison than the true one": (
        record(lambda r: r["weights"][f"{Q}.weight"].update(versus_absmax=0.5)),
        "claims versus_absmax",
        False,
    ),
    "another recorded global scale": (record(lambda r: r["weights"][f"{Q}.weight"].update(global_scale=1.0)), Q, False),
    "another recorded search": (record(lambda r: r["weights"][f"{Q}.weight"].update(search="absmax")), Q, False),
    "another recorded shape": (record(lambda r: r["weights"][f"{Q}.weight"].update(shape=[1, 2])), Q, False),
    "another recorded hash": (record(lambda r: r["kept"][NORM].update(sha256="0" * 64)), NORM, False),
    "another recorded reason": (record(lambda r: r["kept"][NORM].update(reason="because")), NORM, False),
    "a weight that the record leaves out": (record(lambda r: r["weights"].pop(f"{Q}.weight")), Q, False),
    "a weight that only the record has": (
        record(lambda r: r["weights"].update(x=r["weights"][f"{Q}.weight"])),
        "x",
        False,
    ),
    "another recorded container": (record(lambda r: r.update(container="modelopt")), "container", False),
    "another recorded recipe": (record(lambda r: r["recipe"].update(input_amax=1.0)), "run_id", False),
    "another recorded rule": (record(lambda r: r["recipe"]["rules"][0].update(match="*mlp*")), "recipe", False),
    "another recorded source": (record(lambda r: r["source"].update(fingerprint="0")), "run_id", False),
    "another recorded version": (record(lambda r: r.update(ptqpipe="9.9.9")), "run_id", False),
    "no recorded recipe": (record(lambda r: r.pop("recipe")), "neither a recipe", False),
    "a recipe that is a number": (record(lambda r: r.update(recipe=7)), "neither a recipe", False),
    "a recipe that is none": (record(lambda r: r.update(recipe={"rules": 3})), "recipe", False),
}


# What readers take another model for, or refuse, though every tensor is as it was; seen without a source. The last says
# whether it is a fault of another tool's checkpoint, too.
CHANGED_FILES: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "no number of heads": (
        lambda f: damage.edit_json(f / "config.json", lambda c: c.pop("num_attention_heads")),
        "config.json",
        False,
    ),
    "another rotation": (
        lambda f: damage.edit_json(f / "config.json", lambda c: c.update(rope_theta=5e5)),
        "config.json",
        False,
    ),
    "other spaces in the config": (lambda f: damage.edit_json(f / "config.json", lambda _: None), "config.json", False),
    "exchanged tokens": (
        lambda f: (f / "tokenizer_config.json").write_text('{"b": 1}'),
        "tokenizer_config.json",
        False,
    ),
    "another template": (lambda f: (f / "chat_template.jinja").write_text("{{ x }}"), "chat_template.jinja", False),
    "no template": (lambda f: (f / "chat_template.jinja").unlink(), "chat_template.jinja", False),
    "another order in the index": (
        lambda f: damage.edit_json(f / "model.safetensors.index.json", lambda i: i["metadata"].update(a=1)),
        "model.safetensors.index.json",
        False,
    ),
    "a second description": (lambda f: (f / "hf_quant_config.json").write_text("{}"), "hf_quant_config.json", True),
    "a class that no layer has": (
        group(lambda g: g.update(targets=["NoSuch"])),
        "neither a quantized module nor",
        True,
    ),
    "no target": (group(lambda g: g.update(targets=[])), "no config group targets it", True),
    "one layer, and a class that no layer has": (
        group(lambda g: g.update(targets=[Q, "NoSuch"])),
        "target neither 'model.layers.0.mlp.down_proj' nor its class (13 such modules)",
        True,
    ),
    "sparse weights": (
        config(lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"]})),
        "sparsity_config",
        True,
    ),
    "sparse targets": (
        config(lambda c: c.update(sparsity_config={"format": "dense", "targets": ["Linear"]})),
        "sparsity_config",
        True,
    ),
}


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("what", CHANGED_FILES)
def test_a_config_or_a_tokenizer_that_was_changed_is_named_without_the_source(
    good: Path, tmp_path: Path, what: str, foreign: bool
) -> None:
    act, words, anyone = CHANGED_FILES[what]
    folder = damage.copy(good, tmp_path / "damaged")
    if foreign:
        damage.disown(folder)
    act(folder)
    report = check(folder, None)
    assert report.ok == (foreign and not anyone), found(report)
    assert report.ok or any(words in f"{fault.where}: {fault.message}" for fault in report.faults), found(report)


def test_a_file_that_was_added_is_a_note(good: Path, model: Path, tmp_path: Path) -> None:
    folder = damage.copy(good, tmp_path / "more")
    (folder / "README.md").write_text("what it scores")
    for source in (None, model):
        report = check(folder, source)
        assert report.ok, found(report)
        assert "README.md" in [note.where for note in report.notes if note.check == "files"]


def nvfp4_parts() -> tuple[str, ...]:
    return "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"


def swap_weights(folder: Path, a: str, b: str) -> None:
    for part in nvfp4_parts():
        damage.swap(folder, f"{a}.{part}", f"{b}.{part}")


def swap_rows(folder: Path, name: str, width: int) -> None:
    data = damage.tensor_bytes(folder, name)
    data[:width], data[width : 2 * width] = data[width : 2 * width], data[:width]
    damage.put(folder, name, bytes(data))


def reshape(folder: Path, name: str, shape: list[int]) -> None:
    path, _, _ = damage.place_of(folder, name)

    def edit(header: damage.Header) -> damage.Header:
        header[name]["shape"] = shape
        return header

    damage.edit_header(path, edit)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("what", list(DAMAGES))
def test_damage_is_a_fault_that_names_it(good: Path, model: Path, tmp_path: Path, what: str) -> None:
    act, words, _ = DAMAGES[what]
    folder = damage.copy(good, tmp_path / "damaged")
    act(folder)
    report = check(folder, model)
    assert not report.ok
    assert any(words in f"{fault.where}: {fault.message}" for fault in report.faults), found(report)
    assert all("\n" not in fault.message for fault in report.faults)
    assert "cannot be checked" not in found(report)  # every kind of damage is understood, not only survived


@pytest.mark.parametrize("what", [name for name, (_, _, anyone) in DAMAGES.items() if anyone])
def test_damage_of_another_tools_checkpoint_is_a_fault(good: Path, model: Path, tmp_path: Path, what: str) -> None:
    act, words, _ = DAMAGES[what]
    folder = damage.disown(damage.copy(good, tmp_path / "damaged"))
    act(folder)
    report = check(folder, model)
    assert any(words in f"{fault.where}: {fault.message}" for fault in report.faults), found(report)


@pytest.mark.parametrize("what", ["sign bit of a code", "a scale one code up", "low bit of a code", "a kept bit"])
def test_a_change_of_any_recorded_byte_is_seen_without_a_source(good: Path, tmp_path: Path, what: str) -> None:
    folder = damage.copy(good, tmp_path / "damaged")
    DAMAGES[what][0](folder)
    assert "its sha256 differs" in found(check(folder, None))


def test_a_change_that_the_record_was_made_to_describe_is_seen_against_the_source(
    good: Path, model: Path, tmp_path: Path
) -> None:
    folder = damage.copy(good, tmp_path / "damaged")
    damage.change_byte(folder, f"{Q}.weight_scale", 3, lambda b: b - 1)
    damage.rehash(folder, f"{Q}.weight", "scales", f"{Q}.weight_scale")
    assert check(folder, None).ok
    report = check(folder, model, all_blocks=True)
    assert "not the proven optimum" in found(report)
    assert "re-quantizing with the recorded recipe gives" in found(report)


def test_exchanged_experts_are_seen(experts: tuple[Path, Path], tmp_path: Path) -> None:
    source, good = experts
    assert check(good, source).ok
    folder = damage.disown(damage.copy(good, tmp_path / "damaged"))
    for part in ("weight_packed", "weight_scale", "weight_global_scale"):
        base = "model.layers.0.mlp.experts"
        damage.swap(folder, f"{base}.0.down_proj.{part}", f"{base}.2.down_proj.{part}")
    report = check(folder, source)
    assert {fault.where for fault in report.faults} == {f"{base}.{e}.down_proj.weight" for e in (0, 2)}
    assert all("not the numbers of the source's weight" in fault.message for fault in report.faults)


def test_a_router_that_no_config_lists_is_reported(experts: tuple[Path, Path], tmp_path: Path) -> None:
    source, good = experts
    folder = damage.copy(good, tmp_path / "damaged")
    damage.edit_config(folder, lambda c: c["ignore"].remove("model.layers.0.mlp.gate"))
    assert "model.layers.0.mlp.gate: is not quantized, but no config list says so" in found(check(folder, source))


def test_a_fused_sibling_left_unquantized_is_reported(model: Path, tmp_path: Path) -> None:
    """A recipe with the fuse table taken away quantizes q and keeps k and v; a runtime cannot fuse them."""
    out = ptqpipe.convert(model, ignore=[GATE, UP], out=tmp_path / "out", workers=1).out
    assert check(out, model).ok
    whole = ptqpipe.convert(model, out=tmp_path / "whole", workers=1).out
    folder = damage.disown(damage.copy(whole, tmp_path / "damaged"))
    for part in ("weight_packed", "weight_scale", "weight_global_scale"):
        damage.drop(folder, f"{UP}.{part}")
    report = check(folder, model)
    assert f"{UP}.weight: is in the source, but the checkpoint has neither this tensor" in found(report)


@pytest.mark.parametrize("code", [0, 255])
def test_reserved_e8m0_codes_are_faults(model: Path, tmp_path: Path, code: int) -> None:
    out = ptqpipe.convert(model, format="mxfp4", out=tmp_path / "out", workers=1).out
    damage.change_byte(out, f"{Q}.weight_scale", 0, lambda _: code)
    report = check(damage.disown(out), model)
    assert not report.ok
    assert (code == 255) == ("NaN, infinite or negative" in found(report))


def test_nan_codes_of_fp8_weights_are_faults(model: Path, tmp_path: Path) -> None:
    out = ptqpipe.convert(model, format="fp8_block", out=tmp_path / "out", workers=1).out
    damage.change_byte(out, f"{DOWN}.weight", 99, lambda _: 0xFF)
    assert "1 codes are NaN or infinite in e4m3" in found(check(damage.disown(out), model))


def test_a_folder_that_is_none_is_one_fault(tmp_path: Path, model: Path) -> None:
    report = check(tmp_path / "nowhere", model)
    assert len(report.faults) == 1
    assert "does not exist" in found(report)


def test_a_damaged_source_is_one_fault(good: Path, model: Path, tmp_path: Path) -> None:
    folder = damage.copy(model, tmp_path / "model")
    truncate(damage.shards(folder)[0])
    report = check(good, folder)
    assert [fault.where for fault in report.faults] == ["source"]


def test_another_source_is_not_the_source(good: Path, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", tiny.llama(seed=1))
    report = check(damage.disown(damage.copy(good, tmp_path / "peer")), other)
    wrong = {fault.where for fault in report.faults if fault.check == "error"}
    assert len(wrong) == 14


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
