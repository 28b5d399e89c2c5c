"""Claims: a source with parts of quantized weights that are not understood is refused by every command before it does
anything, in one line that names the tensor; and nothing that models have otherwise is taken for such a part."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.check.inspect import inspect
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint.dtypes import DTYPE_NAMES
from ptqpipe.checkpoint.layouts import dangling
from ptqpipe.errors import CheckpointError
from tests import tiny
from tests.cli.calls import refused, run
from tests.serving.engine.models import DEMO

Tensors = dict[str, torch.Tensor]

MLP = "model.layers.0.mlp"
UP, DOWN, EXPERTS = f"{MLP}.up_proj", f"{MLP}.down_proj", f"{MLP}.experts"


def codes(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, 0.0078125).to(dtype)


def instead(**parts: torch.Tensor) -> Callable[[Tensors], str]:
    """The parts of a module in the place of its weight; the first is the one that the message names."""

    def change(tensors: Tensors) -> str:
        del tensors[f"{UP}.weight"]
        tensors |= {f"{UP}.{name}": tensor for name, tensor in parts.items()}
        return f"{UP}.{next(iter(parts))}"

    return change


def beside(**parts: torch.Tensor) -> Callable[[Tensors], str]:
    """Parts that are left over beside a plain weight."""

    def change(tensors: Tensors) -> str:
        tensors |= {f"{UP}.{name}": tensor for name, tensor in parts.items()}
        return f"{UP}.{next(iter(parts))}"

    return change


def stack(**parts: torch.Tensor) -> Callable[[Tensors], str]:
    """Stacks of experts in one tensor each."""

    def change(tensors: Tensors) -> str:
        tensors |= {f"{EXPERTS}.{name}": tensor for name, tensor in parts.items()}
        return f"{EXPERTS}.{next(iter(parts))}"

    return change


def cast(dtype: torch.dtype) -> Callable[[Tensors], str]:
    """Every matrix of the MLP in another dtype."""

    def change(tensors: Tensors) -> str:
        tensors |= {name: w.to(dtype) for name, w in tensors.items() if ".mlp." in name}
        return next(name for name in tensors if ".mlp." in name)

    return change


def scaled(tensors: Tensors, suffix: str = "_scale") -> str:
    """FP8 weights with a scale for each row."""
    for name in [name for name in tensors if ".mlp." in name]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 448
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[name + suffix] = scale
    return next(name for name in tensors if ".mlp." in name)


U8, I8, E4M3, E8M0 = torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu
KINDS: dict[str, Callable[[Tensors], str]] = {
    "packed integers of compressed-tensors": instead(
        weight_packed=codes(256, 32), weight_scale=scales(256, 8), weight_shape=torch.tensor([256, 256])
    ),
    "nvfp4 of compressed-tensors": instead(
        weight_packed=codes(256, 128, dtype=U8), weight_scale=scales(256, 16, dtype=E4M3), weight_global_scale=scales(1)
    ),
    "nvfp4 of modelopt": instead(
        weight=codes(256, 128, dtype=U8), weight_scale=scales(256, 16, dtype=E4M3), weight_scale_2=scales()
    ),
    "int8": instead(weight=codes(256, 256, dtype=I8), weight_scale=scales(256, 1)),
    "integers without a scale": instead(weight=codes(256, 64)),
    "mlx": instead(weight=codes(256, 32, dtype=torch.uint32), scales=scales(256, 4), biases=scales(256, 4)),
    "gptq": instead(
        qweight=codes(32, 256), qzeros=codes(2, 32), scales=scales(2, 256), g_idx=codes(256, dtype=torch.int32)
    ),
    "awq": instead(qweight=codes(256, 32), qzeros=codes(2, 32), scales=scales(2, 256)),
    "bitsandbytes": instead(
        **{
            "weight": codes(32768, 1, dtype=U8),
            "weight.absmax": scales(512),
            "weight.quant_map": scales(16),
            "weight.quant_state.bitsandbytes__nf4": codes(80, dtype=U8),
        }
    ),
    "llm.int8": instead(weight=codes(256, 256, dtype=I8), SCB=scales(256), weight_format=codes(1, dtype=U8)[0]),
    "hqq": instead(W_q=codes(256, 128, dtype=U8), scale=scales(1, 1024), zero=scales(1, 1024)),
    "torchao": instead(_weight_qdata=codes(256, 128, dtype=U8), _weight_scale=scales(64, 64, dtype=E4M3)),
    "quanto": instead(**{"weight._data": codes(256, 256, dtype=I8), "weight._scale": scales(256, 1)}),
    "a library that nobody knows": instead(bits=codes(256, 64, dtype=U8), gains=scales(256)),
    "sparse": instead(bitmask=codes(256, 32, dtype=U8), compressed=scales(256, 128), shape=torch.tensor([256, 256])),
    "quark per group": instead(weight=codes(256, 32), weight_scale=scales(256, 2), weight_zero_point=codes(256, 2)),
    "scaled fp8 of image models": instead(weight=scales(256, 256, dtype=E4M3), scale_weight=scales(1)),
    "fp8 with scales": scaled,
    "fp8 with block scales": lambda tensors: scaled(tensors, "_scale_inv"),
    "fp8, cast": cast(E4M3),
    "fp8 E5M2, cast": cast(torch.float8_e5m2),
    "fp8 FNUZ, cast": cast(torch.float8_e4m3fnuz),
    "a scale of a float weight": beside(weight_scale=scales(256, 1)),
    "an inverse scale of a float weight": beside(weight_scale_inv=scales(2, 2)),
    "a second scale of a float weight": beside(weight_scale_2=scales()),
    "E8M0": beside(scale=scales(256, 8, dtype=E8M0)),
    "a zero point": beside(weight_zero_point=codes(256, 1, dtype=I8)),
    "an input scale": beside(input_scale=scales(1)),
    "an input's global scale": beside(input_global_scale=scales(1)),
    "awq of modelopt": beside(pre_quant_scale=scales(256)),
    "fake quantizer": beside(**{"weight_quantizer._amax": scales(256, 1)}),
    "a shape": beside(weight_shape=torch.tensor([256, 256])),
    "kv cache": lambda tensors: (
        tensors.update({"model.layers.0.self_attn.k_scale": scales(1)}) or "model.layers.0.self_attn.k_scale"
    ),
    "packed stacks": stack(gate_up_proj_packed=codes(4, 128, 32), gate_up_proj_scale=scales(4, 128, 8)),
    "blocks of gpt-oss": stack(
        gate_up_proj_blocks=codes(4, 128, 8, 16, dtype=U8), gate_up_proj_scales=codes(4, 128, 8, dtype=U8)
    ),
    "stacks of integers": stack(gate_up_proj=codes(4, 128, 128, dtype=U8), gate_up_proj_scale=scales(4, 128, 8)),
    "fp8 stacks": stack(gate_up_proj=scales(4, 128, 256, dtype=E4M3), gate_up_proj_scale_inv=scales(4, 1, 2)),
    "a stack's lost scale": stack(down_proj_scale=scales(4, 128, 8)),
    "fused experts": stack(w13_weight_scale=scales(4, 128, 8)),
}


def model_of(folder: Path, kind: str, *, config: dict[str, Any] | None = None) -> tuple[Path, str]:
    """The demo's model with parts of this kind, and the tensor that is to be named."""
    shutil.copytree(DEMO, folder)
    tensors = load_file(DEMO / "model.safetensors")
    named = KINDS[kind](tensors)
    save_file({name: w.contiguous() for name, w in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder, named


DATA = ("--data", "text.txt", "--samples", "2", "--seqlen", "32")
COMMANDS: dict[str, tuple[str, ...]] = {
    "convert": ("convert", "bad", "-o", "out"),
    "convert --dry-run": ("convert", "bad", "--dry-run"),
    "convert --data": ("convert", "bad", *DATA, "-o", "out"),
    "convert --budget": ("convert", "bad", *DATA, "--budget", "5bits", "-o", "out"),
    "convert --container ptqpipe": ("convert", "bad", "--container", "ptqpipe", "-o", "out"),
    "calibrate": ("calibrate", "bad", *DATA, "-o", "out"),
    "tune": ("tune", "bad", *DATA, "-o", "out"),
    "transform": ("transform", "bad", "--transforms", "rotate", "-o", "out"),
    "plan": ("plan", "bad", "--budget", "5bits", "-o", "out.yaml"),
    "relayout": ("relayout", "bad", "--container", "modelopt", "-o", "out"),
    "dequantize": ("dequantize", "bad", "-o", "out"),
    "eval": ("eval", "bad", "--data", "text.txt", "-o", "out.json"),
    "eval --source": ("eval", "good", "--source", "bad", "--data", "text.txt", "-o", "out.json"),
    "generate": ("generate", "bad", "--samples", "2", "--seqlen", "16", "-o", "out.jsonl"),
    "serve": ("serve", "bad", "--port", "0"),
    "diff": ("diff", "good", "bad"),
    "report": ("report", "bad", "-o", "out.html"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dangling")
    (folder / "text.txt").write_text((DEMO / "heldout.txt").read_text()[:4000])
    shutil.copytree(DEMO, folder / "good")
    ptqpipe.convert(tiny.save(folder / "plain", tiny.llama(layers=1)), out=folder / "packed")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_refuses_a_source_of_this_kind_before_it_does_anything(
    kind: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, named = model_of(tmp_path / "bad", kind)
    for name in ("text.txt", "good"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    for command, call in COMMANDS.items():
        line = refused(*call)
        assert f"'{named}' (" in line, command
        assert "looks like" in line, command
        assert "start from the model's float checkpoint" in line, command
        assert "rename" not in line, command
        assert "damaged" not in line, command
        assert sorted(tmp_path.iterdir()) == before, command


CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "convert": lambda model, out: ptqpipe.convert(model, out=out),
    "quantize_model": lambda model, out: ptqpipe.quantize_model(model, out=out),
    "calibrate": lambda model, out: ptqpipe.calibrate(model, ["a text"], out=out),
    "transform": lambda model, out: ptqpipe.transform(model, "rotate", out=out),
    "relayout": lambda model, out: ptqpipe.relayout(model, "modelopt", out=out),
    "dequantize": lambda model, out: ptqpipe.dequantize(model, out=out),
    "load_model": lambda model, out: ptqpipe.load_model(model),
    "load_tensors": lambda model, out: ptqpipe.load_tensors(model),
}


@pytest.mark.parametrize("kind", ["gptq", "fp8, cast", "packed stacks"])
@pytest.mark.parametrize("call", CALLS)
def test_so_does_every_function(call: str, kind: str, tmp_path: Path) -> None:
    model, named = model_of(tmp_path / "bad", kind)
    with pytest.raises(CheckpointError, match=rf"'{named}' \(.* looks like") as caught:
        CALLS[call](model, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_model_in_memory_with_codes_is_refused_too(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config)
    packed = torch.nn.Parameter(codes(64, 32, dtype=U8), requires_grad=False)
    model.model.layers[0].mlp.up_proj.weight = packed
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight.* looks like packed codes"):
        ptqpipe.quantize_model(model, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gptq", "awq", "blocks of gpt-oss")])
def test_what_the_description_of_another_layout_leaves_over_is_refused(kind: str, tmp_path: Path) -> None:
    """config.json describes gpt-oss' layout, which knows none of these parts."""
    if kind == "kv cache":
        pytest.skip("the scales of a KV cache belong to a quantization that is described")
    model, named = model_of(tmp_path / "bad", kind, config={"quantization_config": {"quant_method": "mxfp4"}})
    line = refused("convert", model, "-o", tmp_path / "out")
    assert f"'{named}' (" in line
    assert "no weight that config.json describes (gptoss_mxfp4) uses it" in line


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_shows_what_is_not_understood_and_verify_finds_fault(kind: str, place: Path, tmp_path: Path) -> None:
    model, named = model_of(tmp_path / "bad", kind)
    shown = inspect(model).suspicious
    assert any("no weight uses it" in line for line in shown)
    assert run("inspect", model).exit_code == 0
    assert named in {fault.where for fault in verify(model, workers=1).faults}
    faults = verify(place / "packed", source=model, workers=1).faults
    assert named in {fault.where for fault in faults if fault.check == "source"}


def test_the_remedy_for_weights_that_were_only_cast_helps(tmp_path: Path) -> None:
    model, _ = model_of(tmp_path / "bad", "fp8, cast")
    assert "save them as bfloat16 (w.to(torch.bfloat16))" in refused("convert", model, "-o", tmp_path / "out")
    tensors = {name: w.to(torch.bfloat16) for name, w in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    done = ptqpipe.convert(model, out=tmp_path / "out")
    assert f"{UP}.weight" in done.record["weights"]


def test_the_remedy_for_a_lost_description_helps(tmp_path: Path) -> None:
    packed = ptqpipe.convert(DEMO, format="fp8", out=tmp_path / "out").out
    config = json.loads((packed / "config.json").read_text())
    described = config.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(config))
    line = refused("dequantize", packed, "-o", tmp_path / "plain")
    assert "put the quantization_config back" in line
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    assert run("dequantize", packed, "-o", tmp_path / "plain").exit_code == 0


# What models have beside linear layers: names and dtypes of published checkpoints.
PLAIN: dict[str, tuple[str, tuple[int, ...]]] = {
    "h.0.attn.bias": ("U8", (1, 1, 64, 64)),
    "transformer.h.0.attn.masked_bias": ("F32", ()),
    "gpt_neox.layers.0.attention.bias": ("BOOL", (1, 1, 64, 64)),
    "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (32,)),
    "embeddings.position_ids": ("I64", (1, 512)),
    "encoder.layers.0.attention.self.relative_position_index": ("I64", (64, 64)),
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": ("BF16", (32, 8)),
    "logit_scale": ("F32", ()),
    "encoder.layers.0.attention.self.logit_scale": ("F32", (4, 1, 1)),
    "text_model.logit_scale": ("F32", (1,)),
    "model.layers.0.mlp.gate.weight": ("BF16", (8, 64)),
    "model.layers.0.mlp.gate.e_score_correction_bias": ("F32", (8,)),
    "model.layers.0.mlp.gate.tid2eid": ("I32", (96, 8)),
    "model.layers.0.mlp.router.scale": ("BF16", (64,)),
    "model.layers.0.mlp.router.per_expert_scale": ("BF16", (8,)),
    "model.layers.0.layer_scalar": ("BF16", (1,)),
    "model.layers.0.self_attn.k_norm.weight": ("BF16", (64,)),
    "blocks.0.layer_scale_1": ("F32", (64,)),
    "blocks.0.layer_scale_2": ("F32", (64, 1, 1)),
    "blocks.0.ls1.gamma": ("F32", (64,)),
    "norm.scale": ("BF16", (64,)),
    "bn.num_batches_tracked": ("I64", ()),
    "conv.weight_g": ("F32", (1, 1, 128)),
    "conv.weight_v": ("F32", (64, 4, 128)),
    "conv.parametrizations.weight.original0": ("F32", (1, 1, 128)),
    "quantizer.codevectors": ("F32", (1, 640, 128)),
    "quantizer.layers.0.codebook.embed": ("F32", (1024, 128)),
    "model.d2t": ("I64", (96,)),
    "model.token_types": ("I32", (96, 2)),
    "ids.weight": ("I64", (8, 8)),
    "attention.q_weight": ("F32", (64, 64)),
    "mask": ("BOOL", (64, 64)),
}  # fmt: skip


def test_what_models_have_beside_their_linear_layers_is_no_part_of_a_quantized_weight() -> None:
    assert dangling(PLAIN, described=False) == []


FAMILIES = (
    *(
        "llama",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "deepseek_v3",
        "deepseek_v4",
        "gpt_oss",
        "gpt2",
        "gpt_neox",
        "bloom",
    ),
    *("mamba2", "nemotron_h", "falcon_h1", "zamba2", "gemma2", "gemma4_text", "phi3", "mixtral", "granitemoe", "dbrx"),
    *("bert", "t5", "whisper", "clip", "siglip", "swinv2", "convnext", "wav2vec2", "ibert", "sam2", "mimi", "zaya"),
)


def _names(kind: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of the model that a family's default config describes, cut to two layers."""
    config = transformers.AutoConfig.for_model(kind)
    for part in (
        config,
        *(value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig)),
    ):
        for key in ("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_layers"):
            if isinstance(getattr(part, key, None), int):
                setattr(part, key, 2)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    return {name: (DTYPE_NAMES[w.dtype], tuple(w.shape)) for name, w in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_no_family_of_transformers_is_refused(kind: str) -> None:
    try:
        names = _names(kind)
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        pytest.skip(f"its default config gives no model: {type(error).__name__}")
    assert len(names) > 10
    assert dangling(names, described=False) == []
