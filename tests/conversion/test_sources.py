"""Sources below 8 bits: their published layouts are read, and what holds their numbers is written without loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.cli import main
from ptqpipe.conversion.dequantize import dequantize
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.models.source import Source
from ptqpipe.runtime.shard_read import read_part
from tests import families, tiny
from tests.conversion import damage

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
LOSSLESS = "0 weights changed; 0 blocks requantized, largest error 0"


def mxfp4(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed codes [..., K/2] (even columns in the low bits) times power-of-two scales [..., K/32], by hand."""
    codes = data.view(torch.uint8).int()
    values = E2M1[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)]
    return values * torch.exp2(scales.view(torch.uint8).float() - 127).repeat_interleave(32, dim=-1)


def record_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "ptqpipe.json").read_text()))


def converted(model: Path, out: Path, fmt: str, **options: Any) -> str:
    """The certificate of a conversion that verify confirms, of the source as of the output."""
    ptqpipe.convert(model, format=fmt, out=out, workers=1, **options)
    assert verify(out, source=model, workers=1).ok
    return str(record_of(out)["certificate"])


@pytest.mark.parametrize("block", [128, 32])
def test_deepseek_v4_is_read(tmp_path: Path, block: int) -> None:
    model = families.make_v4(tmp_path / "v4", block=block)
    stored = load_file(model / "model.safetensors")
    assert verify(model, workers=1).ok
    said = CliRunner().invoke(main, ["inspect", str(model)]).output
    assert "(deepseek_fp8)" in said
    assert {"mxfp4+unknown", "wkv"} <= set(said.split())
    out = dequantize(model, tmp_path / "float", dtype="fp32").out
    assert verify(out, source=model, workers=1).ok
    found = load_file(out / "model.safetensors")
    assert found.keys() == {name for name in stored if not name.endswith(".scale")}
    expert, linear = "layers.0.ffn.experts.0.w2", "layers.0.attn.wkv"
    assert torch.equal(found[f"{expert}.weight"], mxfp4(stored[f"{expert}.weight"], stored[f"{expert}.scale"]))
    scales = stored[f"{linear}.scale"].float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    assert len(scales.unique()) == (1 if block == 128 else 3)
    assert torch.equal(found[f"{linear}.weight"], stored[f"{linear}.weight"].float() * scales)


def test_a_scale_of_deepseek_v4_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = families.make_v4(tmp_path / "v4")
    tensors = load_file(model / "model.safetensors")
    scale = "layers.0.ffn.experts.0.w1.scale"
    tiny.save(model, {**tensors, scale: tensors[scale][:, :3].contiguous()}, config=config_of(model))
    with pytest.raises(CheckpointError, match=rf"'{scale}' is F8_E8M0 \[128, 3\], but its config says .*\[128, 4\]"):
        ptqpipe.convert(model, out=tmp_path / "out")
    del tensors[scale]
    tiny.save(model, tensors, config=config_of(model))
    with pytest.raises(CheckpointError, match=r"w1.weight' is I8 without"):
        ptqpipe.convert(model, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def config_of(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "config.json").read_text()))


@pytest.mark.parametrize(
    ("fmt", "exponents", "codes", "lossless"),
    [
        ("nvfp4", (-3, -20), range(16), True),  # E4M3 has the powers of two from 2^-9 to 2^8
        ("nvfp4", (-3, -21), range(16), False),
        ("nvfp4", (-3, -22), (4, 6, 7, 14), True),  # 2, 4 and 6 are .5, 1 and 1.5 at four times the scale
        ("nvfp4", (-3, -23), (4, 6, 7, 14), False),
        ("mxfp8", (100, -110), range(16), True),
        ("fp8_block", (-3, -17), range(16), True),  # 14 octaves between 6 * 2^6 and 0.5 * 2^-8
        ("fp8_block", (-3, -18), range(16), False),
        ("mxfp4", (-3, -60), range(16), True),
    ],
)  # fmt: skip
def test_mxfp4_is_written_without_loss_where_its_exponents_allow_it(
    tmp_path: Path, fmt: str, exponents: tuple[int, ...], codes: Any, lossless: bool
) -> None:
    model = families.make_v4(tmp_path / "v4", exponents=exponents, codes_of_least=tuple(codes))
    found = converted(model, tmp_path / "out", fmt)
    assert (found == LOSSLESS) is lossless
    entries = [entry for name, entry in record_of(tmp_path / "out")["weights"].items() if "experts" in name]
    assert len(entries) == 3
    if lossless:
        assert all(entry["squared_error"] == 0 for entry in entries)
    else:  # as few as possible: no block of the larger numbers
        changes = [entry["changed"] for entry in entries]
        assert all(0 < change["blocks"] <= 128 * 128 // (16 if fmt == "nvfp4" else 128 * 128) for change in changes)
        assert max(change["largest_error"] for change in changes) <= 2.0 ** (min(exponents) + 1)
        assert found.startswith(f"{sum(change['weights'] for change in changes)} weights changed; ")


def test_mxfp4_of_gptoss_and_compressed_tensors_becomes_nvfp4_without_loss(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base, tensors = "model.layers.0.mlp.experts", {"model.embed_tokens.weight": torch.randn(32, 64).bfloat16()}
    for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
        tensors[f"{base}.{name}_blocks"] = torch.randint(0, 256, (2, rows, 2, 16), generator=generator).to(torch.uint8)
        tensors[f"{base}.{name}_scales"] = torch.randint(115, 125, (2, rows, 2), generator=generator).to(torch.uint8)
        tensors[f"{base}.{name}_bias"] = torch.zeros(2, rows).bfloat16()
    config = {"model_type": "gpt_oss", "hidden_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    gptoss = tiny.save(tmp_path / "gptoss", tensors, config=config)
    assert converted(gptoss, tmp_path / "a", "nvfp4", container="ptqpipe") == LOSSLESS
    assert len(record_of(tmp_path / "a")["weights"]) == 4
    packed = ptqpipe.convert(families.make_v4(tmp_path / "v4"), format="mxfp4", out=tmp_path / "ct").out
    assert packed is not None
    assert converted(packed, tmp_path / "b", "nvfp4") == LOSSLESS


def test_a_certificate_that_is_not_true_is_found(tmp_path: Path) -> None:
    model = families.make_v4(tmp_path / "v4", exponents=(-3, -22))
    out = tmp_path / "out"
    assert converted(model, out, "fp8_block") != LOSSLESS
    record = record_of(out)
    for entry in record["weights"].values():
        if "changed" in entry:
            entry["changed"] = {"weights": 0, "blocks": 0, "largest_error": 0.0}
    damage.write_record(out, record)
    said = [str(finding) for finding in verify(out, workers=1).findings]
    assert any("certificate" in line for line in said)
    damage.write_record(out, record | {"certificate": LOSSLESS})
    said = [str(finding) for finding in verify(out, source=model, workers=1).findings]
    assert any("w1" in line and "compared with the source" in line for line in said)


def test_what_only_adds_error_needs_an_option(tmp_path: Path) -> None:
    model = ptqpipe.convert(families.make_v4(tmp_path / "v4"), format="nvfp4", out=tmp_path / "low").out
    assert model is not None
    with pytest.raises(UsageError, match=r"already quantized \(nvfp4, .*to mxfp8 can only add error.*requantize"):
        ptqpipe.convert(model, format="mxfp8", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    found = converted(model, tmp_path / "out", "mxfp8", requantize=True)
    assert not found.startswith("0 weights")


def test_a_budget_chooses_among_formats_that_hold_what_a_source_below_8_bits_has(tmp_path: Path) -> None:
    model = families.make_v4(tmp_path / "v4")
    for bits, expected in (("4.3bits", "mxfp4a16"), ("4.6bits", "nvfp4"), ("9bits", "nvfp4")):
        out = tmp_path / expected / bits
        formats = (expected, "fp8_dynamic")
        ptqpipe.convert(model, budget=bits, formats=formats, out=out, workers=1)
        record = record_of(out)
        assert {weight["scheme"] for name, weight in record["weights"].items() if "experts" in name} == {expected}
        assert record["certificate"] == LOSSLESS
    low = ptqpipe.convert(model, format="nvfp4", out=tmp_path / "low", workers=1).out
    assert low is not None
    again: dict[str, Any] = {"budget": "7bits", "formats": ("mxfp4a16", "fp8_dynamic"), "workers": 1}
    with pytest.raises(UsageError, match=r"already quantized \(nvfp4, .* again can only add error.*the original"):
        ptqpipe.convert(low, out=tmp_path / "out", **again)
    assert not (tmp_path / "out").exists()
    ptqpipe.convert(low, out=tmp_path / "out", requantize=True, **again)


UP = "model.layers.0.mlp.up_proj"
N, K = 64, 128


def integer_source(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    """A checkpoint with these tensors of one layer, an embedding, and this ``quantization_config``."""
    named = {f"{UP}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    named["model.embed_tokens.weight"] = torch.randn(32, K).bfloat16()
    return tiny.save(folder, named, config={"model_type": "llama", "quantization_config": quantization})


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [rows, columns] as int32 [rows, columns*bits/32]: column j of a word at place ``order[j]``, by hand."""
    per = 32 // bits
    places = torch.tensor(order or tuple(range(per)))
    shifted = codes.long().unflatten(1, (-1, per)) << (places * bits)  # type: ignore[no-untyped-call]
    found: torch.Tensor = shifted.sum(dim=-1)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def numbers(bits: int, groups: int, least: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [N, K], zero points [N, groups] from ``least`` on, float16 scales [N, groups])."""
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (N, K), generator=g)
    zeros = torch.randint(least, 1 << bits, (N, groups), generator=g)
    return codes, zeros, (torch.rand(N, groups, generator=g) / 64 + 1e-3).half()


def check(model: Path, expected: torch.Tensor, out: Path) -> None:
    """The source decodes to ``expected``, verifies, is converted with the option that allows it, and can be run."""
    assert verify(model, workers=1).ok
    done = dequantize(model, out / "float", dtype="fp32")
    assert done.record["dropped"] == [] or done.record["dropped"][0].endswith("weight_zero_point")
    assert torch.equal(load_file(done.out / "model.safetensors")[f"{UP}.weight"], expected)
    with Source.open(model) as source:
        stored = source.stored[f"{UP}.weight"]
        assert torch.equal(read_part(source, stored).dequantize(), expected)
        part = read_part(source, stored, rows=[(0, 16), (32, 64)], columns=(64, 128)).dequantize()
        assert torch.equal(part, torch.cat([expected[:16], expected[32:]])[:, 64:])
    ptqpipe.convert(model, format="nvfp4", out=out / "nvfp4", requantize=True, workers=1)
    assert verify(out / "nvfp4", source=model, workers=1).ok


def compressed(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["re:.*embed_tokens"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 0), (8, 0)])
def test_compressed_tensors_packed_integers_are_read(tmp_path: Path, bits: int, group: int) -> None:
    width, half = group or K, 1 << (bits - 1)
    codes, zeros, scales = numbers(bits, K // width)
    spread = scales.float().repeat_interleave(width, dim=1)
    packed = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor([N, K])}
    model = integer_source(tmp_path / "symmetric", packed, compressed(bits, group, True))
    check(model, (codes - half) * spread, tmp_path / "a")
    by_rows = words(zeros.t(), bits).t()
    model = integer_source(tmp_path / "zeros", {**packed, "weight_zero_point": by_rows}, compressed(bits, group, False))
    check(model, (codes - zeros.repeat_interleave(width, dim=1)) * spread, tmp_path / "b")


def test_compressed_tensors_int8_one_to_a_byte_is_read(tmp_path: Path) -> None:
    codes, zeros, scales = numbers(8, 1)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    model = integer_source(tmp_path / "symmetric", tensors, compressed(8, 0, True))
    check(model, (codes - 128) * scales.float(), tmp_path / "a")
    tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    check(
        integer_source(tmp_path / "zeros", tensors, compressed(8, 0, False)),
        (codes - zeros) * scales.float(),
        tmp_path / "b",
    )


def test_awq_is_read(tmp_path: Path) -> None:
    codes, zeros, scales = numbers(4, K // 32)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    tensors = {"qweight": words(codes.t(), 4, order), "qzeros": words(zeros.t(), 4, order), "scales": scales.t()}
    described = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    model = integer_source(tmp_path / "awq", tensors, described)
    expected = (codes - zeros.repeat_interleave(32, dim=1)) * scales.float().repeat_interleave(32, dim=1)
    check(model, expected, tmp_path / "a")
    with pytest.raises(UsageError, match=r"already quantized \(int4_g32_zeros, awq\)"):
        ptqpipe.convert(model, out=tmp_path / "out")
    tensors["qzeros"] = tensors["qzeros"][:2]
    with pytest.raises(CheckpointError, match=r"qzeros' is I32 \[2, 8\], but its config says I32 \[4, 8\]"):
        ptqpipe.convert(integer_source(tmp_path / "damaged", tensors, described), out=tmp_path / "out")


@pytest.mark.parametrize(("bits", "version"), [(4, "gptq"), (8, "gptq"), (4, "gptq_v2")])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq_is_read(tmp_path: Path, bits: int, version: str, shuffled: bool) -> None:
    model, expected, _ = gptq_source(tmp_path / "gptq", bits, version, shuffled)
    check(model, expected, tmp_path / "a")


def gptq_source(
    folder: Path, bits: int, version: str, shuffled: bool, **changed: torch.Tensor
) -> tuple[Path, torch.Tensor, torch.Tensor]:
    least = int(version == "gptq")
    codes, zeros, scales = numbers(bits, K // 32, least)
    groups = torch.arange(K) // 32
    if shuffled:
        groups = groups[torch.randperm(K, generator=torch.Generator().manual_seed(1))]
    tensors = {
        "qweight": words(codes, bits).t(), "qzeros": words(zeros.t() - least, bits), "scales": scales.t(),
        "g_idx": groups.int(), **changed,
    }  # fmt: skip
    described = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": shuffled}
    model = integer_source(folder, tensors, described | {"checkpoint_format": version})
    return model, (codes - zeros[:, groups]) * scales.float()[:, groups], groups


def test_numbers_of_gptq_that_contradict_each_other_are_refused_in_one_line(tmp_path: Path) -> None:
    order, beyond = torch.arange(K).flip(0).int() // 32, torch.arange(K).int() // 16
    damaged: dict[str, dict[str, torch.Tensor]] = {
        r"g_idx' has columns in another order, but config.json says desc_act false": {"g_idx": order},
        r"g_idx' has groups 0 to 7, but there are 4": {"g_idx": beyond},
        r"qzeros' has a zero point 16, beyond 4 bits": {"qzeros": torch.full((4, N // 8), -1).int()},
        r"scales' is F16 \[3, 64\], but its config says F16 \[4, 64\]": {"scales": torch.ones(3, N).half()},
    }
    for number, (message, changed) in enumerate(damaged.items()):
        model = gptq_source(tmp_path / str(number), 4, "gptq", False, **changed)[0]
        with pytest.raises(CheckpointError, match=message):
            ptqpipe.convert(model, out=tmp_path / f"{number}-out", requantize=True)
        assert not (tmp_path / f"{number}-out").exists()


def test_codes_that_a_format_would_make_floats_are_said_to_with_a_remedy(tmp_path: Path) -> None:
    """Its readers build gate and up below each other, so blocks of rows may not be short there."""
    tensors, blocks = tiny.llama(layers=1, hidden=128, inner=320), {}
    for name in [name for name in tensors if ".mlp." in name]:
        shape = tensors[name].shape
        blocks[f"{name}_scale_inv"] = torch.full((-(-shape[0] // 128), -(-shape[1] // 128)), 0.001)
        tensors[name] = (tensors[name].float() * 100).to(torch.float8_e4m3fn)
    described = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = {**tiny.LLAMA_CONFIG, "intermediate_size": 320, "quantization_config": described}
    model = tiny.save(tmp_path / "model", {**tensors, **blocks}, config=config)
    said = CliRunner().invoke(main, ["convert", str(model), "--format", "fp8_block", "--dry-run"]).stdout
    warning = next(line for line in said.splitlines() if "stores quantized" in line)
    assert "3 weights that the source stores quantized become bfloat16, model.layers.0.mlp." in warning
    assert "`ptqpipe relayout` carries codes to another container as they are" in warning
    ignored = ["convert", str(model), "--format", "fp8", "--dry-run", "--ignore", "*down_proj"]
    assert "stores quantized" not in CliRunner().invoke(main, ignored).stdout
    out = ptqpipe.relayout(model, "ptqpipe", out=tmp_path / "out")
    assert set(out.record["weights"]) == {name.removesuffix("_scale_inv") for name in blocks}


def test_a_description_of_the_cache_alone_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    tensors = tiny.llama(layers=1)
    scales = {f"model.layers.0.self_attn.{kind}_scale": torch.ones(1) for kind in "kv"}
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    described = {"quant_method": "compressed-tensors", "kv_cache_scheme": cache, "config_groups": {}}
    config = {**tiny.LLAMA_CONFIG, "quantization_config": described}
    model = tiny.save(tmp_path / "model", {**tensors, **scales}, config=config)
    out = ptqpipe.convert(model, format="fp8", out=tmp_path / "out").out
    kept = json.loads((out / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (kept["num_bits"], kept["strategy"]) == (8, "tensor")
    assert torch.equal(load_file(out / "model.safetensors")["model.layers.0.self_attn.k_scale"], torch.ones(1))


def test_sparse_weights_are_called_so(tmp_path: Path) -> None:
    sparse = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]}
    described = {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": sparse}
    config = {**tiny.LLAMA_CONFIG, "quantization_config": described}
    model = tiny.save(tmp_path / "model", tiny.llama(layers=1), config=config)
    with pytest.raises(
        CheckpointError, match=r"are sparse \('sparse-24-bitmask' .* start from the model's float"
    ) as caught:
        ptqpipe.convert(model, out=tmp_path / "out")
    assert "damaged" not in str(caught.value)
