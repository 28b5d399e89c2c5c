"""Claims: stacks of experts that compressed-tensors packed into one tensor each are read to the number, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ptqpipe
from ptqpipe.errors import CheckpointError
from tests import tiny

EXPERTS, INNER, HIDDEN, GROUP = 4, 64, 128, 32
BASE = "model.layers.0.mlp.experts"
CONFIG: dict[str, Any] = {
    **{key: value for key, value in tiny.LLAMA_CONFIG.items() if key not in ("architectures", "model_type")},
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
}


def described(**weights: Any) -> dict[str, Any]:
    asked = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": asked, "input_activations": None, "format": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.gate$"],
        "config_groups": {"group_0": group},
    }


def decoded(words: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """[E, N, K]: one code after the other, the lowest bits of a word first, counted from the least integer."""
    experts, rows, count = words.shape
    per_word = 32 // bits
    numbers = torch.empty(experts, rows, count * per_word)
    for place in range(per_word):
        code = (words.long() >> (bits * place)) & ((1 << bits) - 1)
        numbers[:, :, place::per_word] = (code - (1 << (bits - 1))).float()
    width = numbers.shape[2] // scales.shape[2]
    return numbers * scales.float().repeat_interleave(width, dim=2)


def model_of(
    folder: Path, *, bits: int = 4, turned: bool = False, shape: bool = True, dtype: torch.dtype = torch.bfloat16
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model with random codes in every place, and what its stacks decode to. ``turned``: [E, in, out]."""
    generator = torch.Generator().manual_seed(bits)
    tensors = tiny.fused_moe(experts=EXPERTS, hidden=HIDDEN, inner=INNER)
    tensors |= {f"model.layers.0.{n}_layernorm.weight": torch.ones(HIDDEN) for n in ("input", "post_attention")}
    tensors |= {f"model.layers.0.self_attn.{n}_norm.weight": torch.ones(32) for n in "qk"}
    wanted = {}
    for leaf, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        rows, columns = (columns, rows) if turned else (rows, columns)
        del tensors[f"{BASE}.{leaf}"]
        words = torch.randint(-(2**31), 2**31 - 1, (EXPERTS, rows, columns * bits // 32), generator=generator)
        scales = (torch.rand(EXPERTS, rows, columns // GROUP, generator=generator) / 64).to(dtype)
        tensors |= {f"{BASE}.{leaf}_packed": words.int(), f"{BASE}.{leaf}_scale": scales}
        tensors |= {f"{BASE}.{leaf}_shape": torch.tensor([rows, columns])} if shape else {}
        wanted[f"{BASE}.{leaf}"] = decoded(words.int(), scales, bits)
    return tiny.save(folder, tensors, config={**CONFIG, "quantization_config": described(num_bits=bits)}), wanted


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [True, False])
def test_every_number_of_a_packed_stack_is_read(tmp_path: Path, bits: int, dtype: torch.dtype, shape: bool) -> None:
    model, wanted = model_of(tmp_path / "model", bits=bits, dtype=dtype, shape=shape)
    with ptqpipe.load_tensors(model) as loaded:
        for name, w in wanted.items():
            for expert in range(EXPERTS):
                assert torch.equal(loaded[f"{name}[{expert}]"].dequantize(), w[expert])
    plain = ptqpipe.dequantize(model, out=tmp_path / "plain", dtype="fp32")
    assert plain.record["dropped"] == []
    with ptqpipe.load_tensors(plain.out) as loaded:
        assert all(torch.equal(loaded[name], w) for name, w in wanted.items())
        assert not [name for name in loaded if name.endswith(("_packed", "_scale", "_shape"))]


def test_it_is_verified_carried_converted_and_run(tmp_path: Path) -> None:
    model, wanted = model_of(tmp_path / "model")
    assert ptqpipe.verify(model).ok
    carried = ptqpipe.relayout(model, "ptqpipe", out=tmp_path / "carried")
    with ptqpipe.load_tensors(carried.out) as loaded:
        for name, w in wanted.items():
            assert torch.equal(loaded[f"{name}[1]"].dequantize(), w[1])
    plain = ptqpipe.dequantize(model, out=tmp_path / "plain", dtype="fp32").out
    again = ptqpipe.convert(model, format="fp8", requantize=True, out=tmp_path / "again").out
    assert ptqpipe.verify(again, source=model).ok
    of_plain = ptqpipe.convert(plain, format="fp8", out=tmp_path / "of plain").out
    with ptqpipe.load_tensors(again) as a, ptqpipe.load_tensors(of_plain) as b:
        name = f"{BASE}.3.up_proj.weight"
        assert torch.equal(a[name].dequantize(), b[name].dequantize())
    tokens = torch.arange(12)[None]
    packed = ptqpipe.load_model(model, dtype="float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(packed(tokens).logits, reference(tokens).logits, atol=2e-4, rtol=1e-4)


def test_codes_along_the_outputs_are_refused(tmp_path: Path) -> None:
    model, _ = model_of(tmp_path / "model", turned=True)
    with pytest.raises(CheckpointError, match=r"gate_up_proj_packed' is a stack .* start from the model's float"):
        ptqpipe.dequantize(model, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "weights", [{"symmetric": False}, {"num_bits": 8}, {"group_size": 64}, {"type": "float", "group_size": 32}]
)
def test_a_description_that_does_not_fit_the_codes_is_refused(tmp_path: Path, weights: dict[str, Any]) -> None:
    model, _ = model_of(tmp_path / "model")
    config = {**CONFIG, "quantization_config": described(**weights)}
    tiny.save(tmp_path / "other", {"x": torch.ones(1)}, config=config)
    (model / "config.json").write_bytes((tmp_path / "other" / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"experts\.(gate_up|down)_proj") as caught:
        ptqpipe.dequantize(model, out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
