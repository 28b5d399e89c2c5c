"""Claims about relayout and dequantize: the same numbers under other names, there and back again, nothing silent.

Expected names and shapes are written out here from the layouts' descriptions, the peers' checkpoints in golden/ and
their recorded hashes decide what a weight decodes to; a checkpoint converted directly is the other independent route.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.checkpoint import TensorSpec
from ptqpipe.cli import main
from ptqpipe.conversion.dequantize import dequantize, round_to
from ptqpipe.conversion.job import WriteResult
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.errors import CheckpointError, FormatError, NumericsError, PtqError, UsageError
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.run.machine import Machine
from tests import tiny

E4M3_VALUES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()

# golden checkpoint -> the layouts that can spell it, besides its own
GOLDEN = {
    "ct-fp8": ("modelopt", "ptqpipe"),
    "ct-fp8-block": ("modelopt", "deepseek_fp8", "ptqpipe"),
    "ct-fp8-dynamic": ("modelopt", "ptqpipe"),
    "ct-mixed": ("modelopt", "ptqpipe"),
    "ct-mxfp4": ("ptqpipe",),
    "ct-mxfp8": ("modelopt", "mxfp8_hf", "ptqpipe"),
    "ct-nvfp4": ("modelopt", "ptqpipe"),
    "ct-nvfp4-kv": ("modelopt", "ptqpipe"),
    "ct-nvfp4a16": ("modelopt", "ptqpipe"),
    "ct-qwen3moe-nvfp4": ("modelopt", "ptqpipe"),
    "ds-fp8-block": ("compressed_tensors", "modelopt", "ptqpipe"),
    "gptoss-mxfp4": ("ptqpipe",),
    "mo-fp8-kvfp8": ("compressed_tensors", "ptqpipe"),
    "mo-mixed": ("compressed_tensors", "ptqpipe"),
    "mo-mixtral-nvfp4": ("compressed_tensors", "ptqpipe"),
    "mo-nvfp4": ("compressed_tensors", "ptqpipe"),
    "mo-qwen3moe-nvfp4": ("compressed_tensors", "ptqpipe"),
    "quark-mxfp4": ("compressed_tensors", "ptqpipe"),
}
DIRECTIONS = [(name, container) for name, containers in GOLDEN.items() for container in containers]
# The layout of a golden checkpoint, to go back to; quark is read only.
OWN = {"ct": "compressed_tensors", "mo": "modelopt", "ds": "deepseek_fp8", "gptoss": "gptoss_mxfp4", "quark": ""}


def run(ckpt: Path, out: Path, container: str, *, workers: int = 2) -> WriteResult:
    done = relayout(ckpt, out, container=container, machine=Machine(workers=workers))
    assert done is not None
    return done


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(raw(a[n]), raw(b[n])) for n in a
    )


def files_but_the_record(folder: Path) -> dict[str, bytes]:
    """All but what tells of the run: the record and the model card."""
    own = ("ptqpipe.json", "README.md")
    return {name: content for name, content in tiny.bytes_of(folder).items() if name not in own}


def sha256(t: torch.Tensor) -> str:
    return hashlib.sha256(raw(t).numpy().tobytes()).hexdigest()


# --- The peers' checkpoints


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(("name", "container"), DIRECTIONS)
def test_golden_weights_decode_to_the_recorded_bytes_in_every_layout(
    shared_dir: Path, tmp_path: Path, name: str, container: str
) -> None:
    done = run(shared_dir / "golden" / name, tmp_path / "out", container)
    expected = json.loads((shared_dir / "golden" / "manifest.json").read_text())
    hashes = expected.get(name, {}).get("dequant_f32_sha256", {})
    with ptqpipe.load_tensors(shared_dir / "golden" / name) as before, ptqpipe.load_tensors(done.out) as after:
        assert set(before) >= {n for n in after if "scale" not in n}
        quantized = [n for n in before if isinstance(before[n], QTensor)]
        assert len(quantized) == len(done.record["weights"]) > 0
        for weight in quantized:
            old, new = before[weight], after[weight]
            assert isinstance(old, QTensor)
            assert isinstance(new, QTensor)
            assert torch.equal(old.data, new.data)
            assert torch.equal(raw(old.scales.float()), raw(new.scales.float()))
            was, now = old.dequantize(), new.dequantize()
            if weight in done.record["decode_rounds_differently"]:
                # the reciprocal, the two scales and the two products are rounded once each: 5 x 2^-24
                assert bool(((was - now).abs() <= was.abs() * (5.001 * 2.0**-24)).all())
            else:
                assert torch.equal(raw(was), raw(now))
                assert weight not in hashes or sha256(now) == hashes[weight]


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(("name", "container"), [d for d in DIRECTIONS if d[0] != "quark-mxfp4"])
def test_golden_there_and_back_gives_every_tensor_that_can_come_back(
    shared_dir: Path, tmp_path: Path, name: str, container: str
) -> None:
    source = shared_dir / "golden" / name
    there = run(source, tmp_path / "there", container)
    back = run(there.out, tmp_path / "back", OWN[name.split("-")[0]])
    before, after = tensors_of(source), tensors_of(back.out)
    lost = set(there.record["reciprocal_is_not_exact"])
    assert before.keys() == after.keys()
    for tensor, t in before.items():
        assert t.dtype == after[tensor].dtype or (t.dtype, after[tensor].dtype) == (torch.float32, torch.bfloat16)
        if not torch.equal(t.float().reshape(-1), after[tensor].float().reshape(-1)):
            assert tensor.endswith(("global_scale", "weight_scale_2", "input_scale"))
            assert lost
            assert torch.allclose(t, after[tensor], rtol=2.0**-23, atol=0)
    again = run(back.out, tmp_path / "again", container)  # the neighbours come back as themselves
    if not back.record["reciprocal_is_not_exact"]:
        assert same_tensors(tensors_of(again.out), tensors_of(there.out))


@pytest.mark.shared
@pytest.mark.parametrize("name", ["ct-nvfp4", "mo-nvfp4", "ct-qwen3moe-nvfp4", "mo-qwen3moe-nvfp4"])
def test_inexact_reciprocals_are_counted(shared_dir: Path, tmp_path: Path, name: str) -> None:
    mine = "compressed_tensors" if name.startswith("ct") else "modelopt"
    other = {"compressed_tensors": "modelopt", "modelopt": "compressed_tensors"}[mine]
    done = run(shared_dir / "golden" / name, tmp_path / "out", other)
    changed, irreversible = 0, 0
    for tensor, x in tensors_of(shared_dir / "golden" / name).items():
        if not tensor.endswith(("global_scale", "weight_scale_2", "input_scale")):
            continue
        inverse = 1.0 / x
        irreversible += int(float(1.0 / inverse) != float(x))
        if tensor.endswith(("weight_global_scale", "weight_scale_2")):
            d, g = (x, inverse) if mine == "compressed_tensors" else (inverse, x)
            changed += int(not torch.equal(E4M3_VALUES / d, E4M3_VALUES * g))
    assert len(done.record["decode_rounds_differently"]) == changed
    assert len(done.record["reciprocal_is_not_exact"]) == irreversible
    assert changed > 0
    record = json.loads((done.out / "ptqpipe.json").read_text())
    assert record["decode_rounds_differently"] == done.record["decode_rounds_differently"]
    assert record["reciprocal_is_not_exact"] == done.record["reciprocal_is_not_exact"]


@pytest.mark.shared
def test_compressed_tensors_becomes_modelopt_by_renaming_and_reciprocals(shared_dir: Path, tmp_path: Path) -> None:
    source = shared_dir / "golden" / "ct-nvfp4-kv"
    out = run(source, tmp_path / "out", "modelopt").out
    before, after = tensors_of(source), tensors_of(out)
    expected: dict[str, torch.Tensor] = {}
    for name, t in before.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            expected[f"{module}.weight"] = t
        elif leaf == "weight_global_scale":
            expected[f"{module}.weight_scale_2"] = (1.0 / t).reshape(())
        elif leaf == "input_global_scale":
            expected[f"{module}.input_scale"] = (1.0 / t).reshape(())
        elif leaf in ("k_scale", "v_scale"):
            expected[f"{module}.{leaf[0]}_proj.{leaf}"] = t.reshape(())
        else:
            expected[name] = t
    assert same_tensors(expected, after)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    nested = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert config["kv_cache_scheme"] == {"num_bits": 8, "type": "float", "dynamic": False}
    assert (config["quant_algo"], nested["quant_algo"], nested["kv_cache_quant_algo"]) == ("NVFP4", "NVFP4", "FP8")
    assert {"lm_head", "model.embed_tokens"} <= set(nested["exclude_modules"])
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.shared
@pytest.mark.parametrize("name", ["ct-nvfp4-kv", "mo-fp8-kvfp8"])
def test_a_quantized_kv_cache_survives_the_way_through_our_own_layout(
    shared_dir: Path, tmp_path: Path, name: str
) -> None:
    own = OWN[name.split("-")[0]]
    other = {"compressed_tensors": "modelopt", "modelopt": "compressed_tensors"}[own]
    first = run(shared_dir / "golden" / name, tmp_path / "first", "ptqpipe")
    second = run(first.out, tmp_path / "second", other)
    kv = {n: t for n, t in tensors_of(shared_dir / "golden" / name).items() if n.endswith(("k_scale", "v_scale"))}
    found = {n: t for n, t in tensors_of(second.out).items() if n.endswith(("k_scale", "v_scale"))}
    assert len(kv) == len(found) == 4
    for tensor, t in found.items():
        parent, leaf = tensor.removesuffix("_scale").rsplit(".", 1)
        modelopt = other == "modelopt"
        assert parent.endswith(f"self_attn.{leaf}_proj" if modelopt else "self_attn")
        assert t.shape == (() if modelopt else (1,))
        before = f"{parent.removesuffix(f'.{leaf}_proj')}{'' if modelopt else f'.{leaf}_proj'}.{leaf}_scale"
        assert torch.equal(raw(kv[before]), raw(t))
    config = json.loads((second.out / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["num_bits"] == 8


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("name", [n for n in GOLDEN if n != "gptoss-mxfp4"])
def test_dequantized_golden_weights_are_the_recorded_bf16_bytes(shared_dir: Path, tmp_path: Path, name: str) -> None:
    done = dequantize(shared_dir / "golden" / name, tmp_path / "out")
    assert done is not None
    expected = json.loads((shared_dir / "golden" / "manifest.json").read_text())[name]["dequant_bf16_sha256"]
    found = tensors_of(done.out)
    assert {n: sha256(found[n]) for n in expected} == expected
    assert not [n for n in found if "scale" in n]
    config = json.loads((done.out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


@pytest.mark.shared
def test_dequantized_gpt_oss_experts_lie_as_the_float_model_holds_them(shared_dir: Path, tmp_path: Path) -> None:
    done = dequantize(shared_dir / "golden" / "gptoss-mxfp4", tmp_path / "out", dtype="fp32")
    assert done is not None
    found = tensors_of(done.out)
    with safe_open(shared_dir / "golden" / "expected" / "gptoss-mxfp4.dequant_f32.safetensors", framework="pt") as file:
        names = list(file.keys())
        assert names
        for name in names:
            assert torch.equal(found[name], file.get_tensor(name))
    assert {n: t.shape for n, t in found.items()} == {
        n: t.shape for n, t in tensors_of(shared_dir / "golden" / "bf16-gptoss").items()
    }


# --- Checkpoints of our own

WAYS = [
    ("nvfp4", "compressed_tensors", "modelopt"),
    ("nvfp4", "compressed_tensors", "ptqpipe"),
    ("nvfp4", "modelopt", "ptqpipe"),
    ("nvfp4_w4a4", "compressed_tensors", "modelopt"),
    ("nvfp4_w4a4", "compressed_tensors", "ptqpipe"),
    ("mxfp4", "compressed_tensors", "ptqpipe"),
    ("mxfp8", "compressed_tensors", "modelopt"),
    ("mxfp8", "compressed_tensors", "mxfp8_hf"),
    ("fp8", "compressed_tensors", "modelopt"),
    ("fp8", "compressed_tensors", "ptqpipe"),
    ("fp8_block", "deepseek_fp8", "compressed_tensors"),
    ("fp8_block", "deepseek_fp8", "modelopt"),
    ("fp8_block", "compressed_tensors", "modelopt"),
]


@pytest.mark.parametrize(("scheme", "container", "other"), WAYS)
def test_relayout_of_a_conversion_is_the_conversion_to_that_layout(
    tmp_path: Path, scheme: str, container: str, other: str
) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama())
    first = ptqpipe.convert(model, format=scheme, container=container, out=tmp_path / "first").out
    direct = ptqpipe.convert(model, format=scheme, container=other, out=tmp_path / "direct").out
    done = run(first, tmp_path / "done", other)
    for key in ("decode_rounds_differently", "reciprocal_is_not_exact", "dropped"):
        assert done.record[key] == []
    assert files_but_the_record(done.out) == files_but_the_record(direct)
    back = run(done.out, tmp_path / "back", container)
    assert files_but_the_record(back.out) == files_but_the_record(first)


def test_shards_keep_their_borders(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama(layers=3))
    first = ptqpipe.convert(model, out=tmp_path / "first", shard_size=60_000).out
    assert len(list(first.glob("*.safetensors"))) > 3
    there = run(first, tmp_path / "there", "modelopt").out
    assert {p.name for p in there.glob("*.safetensors")} == {p.name for p in first.glob("*.safetensors")}
    back = run(there, tmp_path / "back", "compressed_tensors").out
    assert files_but_the_record(back) == files_but_the_record(first)


def test_workers_change_no_byte(tmp_path: Path) -> None:
    first = ptqpipe.convert(tiny.save(tmp_path / "model", tiny.llama()), out=tmp_path / "first").out
    one = run(first, tmp_path / "one", "modelopt", workers=1).out
    four = run(first, tmp_path / "four", "modelopt", workers=4).out
    assert tiny.bytes_of(one) == tiny.bytes_of(four)


@pytest.mark.parametrize("scheme", ["mxfp4", "fp8", "nvfp4"])
@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_split_into_the_experts_that_convert_would_write(tmp_path: Path, scheme: str, transposed: bool) -> None:
    model = tiny.save(tmp_path / "model", tiny.fused_moe(transposed=transposed))
    stacked = ptqpipe.convert(model, format=scheme, container="ptqpipe", out=tmp_path / "stacked").out
    direct = ptqpipe.convert(model, format=scheme, container="compressed_tensors", out=tmp_path / "direct").out
    assert any(".experts.gate_up_proj" in name for name in tensors_of(stacked))
    done = run(stacked, tmp_path / "done", "compressed_tensors")
    assert same_tensors(tensors_of(done.out), tensors_of(direct))
    mine, theirs = (json.loads((f / "config.json").read_text()) for f in (done.out, direct))
    assert mine == theirs


def test_interleaved_rows_of_gate_and_up_are_told_apart(tmp_path: Path) -> None:
    config = {**tiny.LLAMA_CONFIG, "model_type": "gpt_oss"}
    model = tiny.save(tmp_path / "model", tiny.fused_moe(transposed=True), config=config)
    stacked = ptqpipe.convert(model, format="mxfp4a16", container="gptoss_mxfp4", out=tmp_path / "stacked").out
    done = run(stacked, tmp_path / "done", "compressed_tensors")
    source = tiny.fused_moe(transposed=True)["model.layers.0.mlp.experts.gate_up_proj"]  # [E, H, 2I]
    with ptqpipe.load_tensors(done.out) as loaded:
        for index, leaf in enumerate(("gate_proj", "up_proj")):
            for e in range(3):
                q = loaded[f"model.layers.0.mlp.experts.{e}.{leaf}.weight"]
                assert isinstance(q, QTensor)
                w = source[e].t()[index::2].float()
                assert float((q.dequantize() - w).square().sum() / w.square().sum()) < 0.02


def test_experts_with_biases_stay_stacks(tmp_path: Path) -> None:
    tensors = tiny.fused_moe(transposed=True)
    tensors["model.layers.0.mlp.experts.gate_up_proj_bias"] = torch.zeros(3, 128, dtype=torch.bfloat16)
    tensors["model.layers.0.mlp.experts.down_proj_bias"] = torch.zeros(3, 128, dtype=torch.bfloat16)
    model = tiny.save(tmp_path / "model", tensors, config={**tiny.LLAMA_CONFIG, "model_type": "gpt_oss"})
    stacked = ptqpipe.convert(model, format="mxfp4a16", container="gptoss_mxfp4", out=tmp_path / "stacked").out
    with pytest.raises(FormatError, match=r"experts\.\w+: experts with biases"):
        run(stacked, tmp_path / "done", "compressed_tensors")
    there = run(stacked, tmp_path / "there", "ptqpipe")
    back = run(there.out, tmp_path / "back", "gptoss_mxfp4")
    assert files_but_the_record(back.out) == files_but_the_record(stacked)


def test_the_record_says_what_it_was_and_verify_accepts_it(tmp_path: Path) -> None:
    from ptqpipe.check.verify.command import verify

    model = tiny.save(tmp_path / "model", tiny.llama())
    first = ptqpipe.convert(model, out=tmp_path / "first")
    done = run(first.out, tmp_path / "done", "modelopt")
    record = json.loads((done.out / "ptqpipe.json").read_text())
    assert record == done.record
    assert record["relayout_of"] == first.record["run_id"] != record["run_id"]
    assert record["container"] == "modelopt"
    for name, entry in record["weights"].items():
        old = first.record["weights"][name]
        assert entry["sha256"]["data"] == old["sha256"]["data"]
        assert entry["sha256"]["scales"] == old["sha256"]["scales"]
        assert {k: v for k, v in entry.items() if k != "sha256"} == {k: v for k, v in old.items() if k != "sha256"}
    assert record["kept"] == first.record["kept"]
    assert list(verify(done.out, source=model).faults) == []


# --- What is refused


def test_what_cannot_be_spelled_is_named(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama())
    packed = ptqpipe.convert(model, format="mxfp4", out=tmp_path / "packed").out
    first = "model.layers.0.mlp.down_proj.weight"
    cases: list[tuple[Path, str, type[PtqError], str]] = [
        (packed, "modelopt", FormatError, f"^{first}: "),
        (packed, "deepseek_fp8", FormatError, f"^{first}: "),
        (packed, "quark", FormatError, "read only"),
        (packed, "compressed-tensors", UsageError, "already"),
        (packed, "hqq", UsageError, "unknown container 'hqq'"),
        (model, "modelopt", UsageError, "not quantized"),
    ]
    for ckpt, container, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            run(ckpt, tmp_path / "out", container)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_a_payload_that_its_record_does_not_describe_is_refused(tmp_path: Path) -> None:
    packed = ptqpipe.convert(tiny.save(tmp_path / "model", tiny.llama()), out=tmp_path / "packed").out
    file = packed / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"does not have the bytes that ptqpipe\.json"):
        run(packed, tmp_path / "out", "modelopt")
    assert not (tmp_path / "out").exists()


def test_kv_scales_of_each_head_have_no_modelopt_spelling(tmp_path: Path) -> None:
    packed = ptqpipe.convert(tiny.save(tmp_path / "model", tiny.llama()), out=tmp_path / "packed").out
    tensors = tensors_of(packed)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(2, 1, 1)
    save_file(tensors, packed / "model.safetensors")
    (packed / "ptqpipe.json").unlink()
    with pytest.raises(FormatError, match=r"self_attn\.k_scale"):
        run(packed, tmp_path / "out", "modelopt")


def test_fp16_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    tensors = tiny.llama()
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e7
    packed = ptqpipe.convert(tiny.save(tmp_path / "model", tensors), format="fp8", out=tmp_path / "packed").out
    with pytest.raises(NumericsError, match=r"down_proj\.weight' has numbers that F16 cannot hold; use"):
        dequantize(packed, tmp_path / "half", dtype="fp16")
    assert dequantize(packed, tmp_path / "full", dtype="fp32") is not None
    with pytest.raises(NumericsError, match="'w' has NaN or inf; the checkpoint is damaged"):
        round_to(torch.tensor([[1.0, float("nan")]]), TensorSpec("w", "F16", (1, 2)))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_dequantized_checkpoint_is_plain_and_holds_the_decode(tmp_path: Path, dtype: str) -> None:
    packed = ptqpipe.convert(tiny.save(tmp_path / "model", tiny.llama()), out=tmp_path / "packed").out
    done = dequantize(packed, tmp_path / "plain", dtype=dtype)
    assert done is not None
    found = tensors_of(done.out)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    with ptqpipe.load_tensors(packed) as loaded:
        assert set(found) == set(loaded)
        for name, t in found.items():
            stored = loaded[name]
            expected = stored.dequantize().to(kinds[dtype]) if isinstance(stored, QTensor) else stored
            assert t.dtype == expected.dtype
            assert torch.equal(raw(t), raw(expected))
    assert json.loads((done.out / "config.json").read_text())["dtype"] == str(kinds[dtype]).removeprefix("torch.")
    assert ptqpipe.convert(done.out, out=tmp_path / "again").out.is_dir()


def test_the_commands_do_it_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = ptqpipe.convert(tiny.save(tmp_path / "model", tiny.llama()), out=tmp_path / "packed").out
    out = tmp_path / "mo"
    main(["relayout", str(packed), "--container", "ModelOpt", "-o", str(out), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["weights"] == 14
    with pytest.raises(SystemExit):
        main(["relayout", str(packed), "--container", "modelopt", "-o", str(out)], standalone_mode=False)
    assert "exists" in capsys.readouterr().err
    shutil.rmtree(out)
    main(["relayout", str(packed), "--container", "modelopt", "-o", str(out)], standalone_mode=False)
    assert "codes and block scales have the same bytes" in capsys.readouterr().out
    main(["dequantize", str(out), "-o", str(tmp_path / "plain")], standalone_mode=False)
    assert "14 weights decoded" in capsys.readouterr().out
