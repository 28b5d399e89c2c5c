"""Claims about rotations of inputs while a model runs: what is written, what is computed, who is refused.

The yardstick is compressed-tensors' own code, which rotates inputs as its transform_config says, and the definition:
Sylvester's matrix as Kronecker products of [[1, 1], [1, -1]].
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.calibration.inputs import Moments
from ptqpipe.cli import main
from ptqpipe.errors import FormatError, PtqError, RecipeError, UsageError
from ptqpipe.numerics.rotation import rotated
from ptqpipe.runtime import load
from tests import families, tiny
from tests.quantization.inputs import inputs_of_llama, second_moment, write_statistics

DOWN = "model.layers.{}.mlp.down_proj.weight"
TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


def hadamard(block: int) -> torch.Tensor:
    """float64 [block, block], orthonormal."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < block:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h / block**0.5


def turned(w: torch.Tensor, block: int) -> torch.Tensor:
    """The columns of a matrix rotated by blocks, float64."""
    return w.double() @ torch.block_diag(*[hadamard(block)] * (w.shape[1] // block))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("source") / "model", tiny.llama())


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "mxfp4"
    ptqpipe.convert(model, format="mxfp4", rotate="down_proj:64", out=out)
    return out


def described(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_a_rotation_is_the_product_with_its_matrix(block: int) -> None:
    x = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0))
    wanted = turned(x.reshape(-1, 256), block).reshape(x.shape)
    assert float((rotated(x, block) - wanted).abs().max()) < 2e-6
    assert torch.allclose(rotated(rotated(x.double(), block), block), x.double(), atol=1e-14)
    assert rotated(x.bfloat16(), block).dtype is torch.bfloat16
    assert rotated(x, 0) is x


def test_moments_of_rotated_inputs_follow_from_the_full_moment() -> None:
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 65)
    held = Moments(second_moment(-x).diagonal(), full_moment=second_moment(-x))
    found = Moments(second_moment(x).diagonal(), full_moment=second_moment(x), held_out=held).rotated(32)
    wanted = second_moment(turned(x, 32))
    for moments in (found, found.held_out):
        assert moments is not None
        assert moments.full_moment is not None
        assert torch.allclose(moments.full_moment, wanted, rtol=1e-5, atol=1e-2)
        assert torch.equal(moments.second_moment, moments.full_moment.diagonal())


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "fp8", "int4_g32"])
def test_codes_are_those_of_the_rotated_weight(fmt: str, model: Path, tmp_path: Path) -> None:
    ptqpipe.convert(model, format=fmt, rotate="down_proj:64", out=tmp_path / "out")
    source = load_file(model / "model.safetensors")
    with ptqpipe.load_tensors(tmp_path / "out") as found:
        for layer in range(2):
            name = DOWN.format(layer)
            wanted = ptqpipe.quantize(turned(source[name], 64).float(), fmt)
            assert torch.equal(found[name].dequantize(), wanted.dequantize())


def test_the_config_names_the_rotated_layers_and_no_others(packed: Path) -> None:
    from compressed_tensors.transform import TransformConfig
    from compressed_tensors.utils import is_match

    (group,) = described(packed)["transform_config"]["config_groups"].values()
    assert (group["type"], group["head_dim"]) == ("hadamard", 64)
    assert [(use["location"], use.get("inverse", False)) for use in group["apply"]] == [
        ("input", False),
        ("weight_input", True),
    ]
    TransformConfig.model_validate(described(packed)["transform_config"])
    names = [name.removesuffix(".weight") for name in tiny.llama() if name.endswith("proj.weight")]
    linear = torch.nn.Linear(1, 1)
    matched = [name for name in names if is_match(name, linear, group["apply"][0]["targets"])]
    assert matched == [DOWN.format(layer).removesuffix(".weight") for layer in range(2)]


def test_logits_are_those_of_compressed_tensors_own_rotation(packed: Path) -> None:
    """transformers loads the codes and leaves the rotation out; compressed-tensors' own function adds it."""
    from compressed_tensors.transform import TransformConfig, apply_transform_config
    from transformers import AutoModelForCausalLM

    from ptqpipe.runtime.hf import register, unregister

    ours = load(packed, packed=False)
    unregister()
    try:
        theirs = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16)
    finally:
        register()
    with torch.no_grad():
        without = theirs(TOKENS).logits
        groups = {
            name: {**group, "apply": [use for use in group["apply"] if use["location"] == "input"]}
            for name, group in described(packed)["transform_config"]["config_groups"].items()
        }
        apply_transform_config(theirs, TransformConfig.model_validate({"config_groups": groups}))
        wanted, found = theirs(TOKENS).logits, ours(TOKENS).logits
    assert torch.equal(found, wanted)
    assert not torch.allclose(found, without, atol=1e-2)


def test_packed_layers_rotate_too(packed: Path) -> None:
    with torch.no_grad():
        plain = ptqpipe.load_model(packed)(TOKENS).logits
        fast = load(packed, dtype="float32")(TOKENS).logits
        bare = ptqpipe.load_model(packed, activations="none")(TOKENS).logits
    assert torch.allclose(fast, plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(bare, plain, atol=1e-4)


def test_the_engine_says_what_transformers_says(tmp_path: Path) -> None:
    from ptqpipe.serving.engine import EngineOptions
    from ptqpipe.serving.engine.model_runner import ModelRunner
    from tests.serving.engine import models

    ptqpipe.convert(models.DEMO, format="mxfp4", rotate="down_proj:32", out=tmp_path / "out")
    run = ModelRunner(load(tmp_path / "out", dtype="float32"), EngineOptions(1 << 28, 256, 16, 16))
    prompt = models.encoded()[0]
    found = models.generate(models.engine(run), [models.ask(prompt, 16)])["a"][0]
    assert found == models.greedy_of(ptqpipe.load_model(tmp_path / "out"), prompt, 16)


@pytest.mark.slow
@pytest.mark.parametrize("container", ["compressed_tensors", "ptqpipe"])
def test_verify_knows_the_rotation_and_dequantize_takes_it_back(container: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ptqpipe.convert(model, format="mxfp4", container=container, rotate="down_proj:64", out=out)
    assert ptqpipe.verify(out, source=model, optimal=True).ok
    ptqpipe.dequantize(out, dtype="fp32", out=tmp_path / "floats")
    floats, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "floats", model))
    record = json.loads((out / "ptqpipe.json").read_text())["weights"]
    for layer in range(2):
        name = DOWN.format(layer)
        error = float((floats[name].double() - source[name].double()).square().sum())
        assert error == pytest.approx(record[name]["squared_error"], rel=1e-5)
        assert record[name]["rotation"] == 64
    assert "rotation" not in record[DOWN.format(0).replace("down", "up")]
    with torch.no_grad():
        logits = [ptqpipe.load_model(f)(TOKENS).logits for f in (tmp_path / "floats",)]
        bare = ptqpipe.load_model(out, activations="none")(TOKENS).logits
    assert torch.allclose(logits[0], bare, atol=1e-4)


def test_verify_sees_a_rotation_that_config_json_lost(packed: Path, model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]["transform_config"]
    (copy / "config.json").write_text(json.dumps(config))
    messages = [fault.message for fault in ptqpipe.verify(copy).faults]
    assert "has rotation 64 in ptqpipe.json, config.json rotates its inputs by blocks of 0" in messages
    (copy / "ptqpipe.json").unlink()
    assert any("not the numbers of the source" in fault.message for fault in ptqpipe.verify(copy, source=model).faults)


@pytest.mark.slow
def test_statistics_are_rotated_with_the_weights(model: Path, tmp_path: Path) -> None:
    """GPTQ on a rotated layer is GPTQ on the weight and the inputs that somebody else has rotated."""
    inputs = inputs_of_llama(tiny.llama())
    stats = write_statistics(tmp_path / "stats", model, inputs)
    ptqpipe.convert(model, format="mxfp4", rotate="down_proj:64", stats=stats, out=tmp_path / "ours")
    tensors = load_file(model / "model.safetensors")
    for layer in range(2):
        tensors[DOWN.format(layer)] = turned(tensors[DOWN.format(layer)], 64).float()
    other = tiny.save(tmp_path / "other", tensors)
    by_hand = {name: turned(x, 64).float() if "down_proj" in name else x for name, x in inputs.items()}
    ptqpipe.convert(
        other,
        format="mxfp4",
        stats=write_statistics(tmp_path / "stats2", other, by_hand),
        out=tmp_path / "theirs",
    )
    assert ptqpipe.verify(tmp_path / "ours", source=model, stats=stats).ok
    with ptqpipe.load_tensors(tmp_path / "ours") as ours, ptqpipe.load_tensors(tmp_path / "theirs") as theirs:
        for layer in range(2):
            a, b = (found[DOWN.format(layer)].dequantize() for found in (ours, theirs))
            assert float((a != b).float().mean()) < 0.01  # the last bits of the moments


@pytest.mark.slow
def test_gptq_in_order_learns_for_rotated_inputs(model: Path, tmp_path: Path) -> None:
    text = families.write_windows(tmp_path / "text.jsonl", samples=24)
    ptqpipe.convert(model, format="mxfp4", data=text, rotate="down_proj:64", samples=16, seqlen=16, out=tmp_path / "q")
    record = json.loads((tmp_path / "q" / "ptqpipe.json").read_text())
    assert record["weights"][DOWN.format(0)]["rotation"] == 64
    assert ptqpipe.verify(tmp_path / "q").ok
    ptqpipe.dequantize(tmp_path / "q", dtype="fp32", out=tmp_path / "floats")
    floats, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "floats", model))
    for layer in range(2):
        w = source[DOWN.format(layer)].double()
        error = (floats[DOWN.format(layer)].double() - w).square().sum() / w.square().sum()
        assert float(error) < 0.2  # GPTQ's codes are not the nearest ones; a rotation that got lost gives about 2


@pytest.mark.slow
def test_tune_rotates_every_layer_that_it_is_asked_for(model: Path, tmp_path: Path) -> None:
    text, codes = families.write_windows(tmp_path / "text.jsonl", samples=24), tmp_path / "codes"
    what = ["--data", str(text), "--samples", "16", "--seqlen", "16", "--format", "mxfp4", "--rotate", "down_proj:64"]
    done = CliRunner().invoke(main, ["tune", str(model), *what, "-o", str(codes)])
    assert done.exit_code == 0, done.output
    blocks = json.loads((codes / "rounding.json").read_text())["blocks"]
    assert [block["not_learned"] for block in blocks.values()] == [[], []]
    assert "skipped" not in done.output
    ptqpipe.convert(model, codes=codes, out=tmp_path / "q")  # the codes bring the rotation
    assert "transform_config" in described(tmp_path / "q")


def refuse(kind: type[PtqError], says: str, model: Path, tmp_path: Path, **options: Any) -> None:
    with pytest.raises(kind, match=says) as caught:
        ptqpipe.convert(model, out=tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rotate", "says"),
    [
        ("down_proj", "is no list of ROLE:BLOCK"),
        ("down_proj:48", "with a block of 16, 32, 64, 128"),
        ("down_proj:64,down_proj:32", "each role once"),
        (":64", "is no list of ROLE:BLOCK"),
        ("mlp.down_proj:64", "is no list of ROLE:BLOCK"),
        ("q_proj:64", "and its fused siblings get two rules"),
    ],
)
def test_a_list_of_roles_is_checked(rotate: str, says: str, model: Path, tmp_path: Path) -> None:
    refuse(RecipeError, says, model, tmp_path, format="mxfp4", rotate=rotate)


def test_what_cannot_be_rotated_is_refused(model: Path, tmp_path: Path) -> None:
    refuse(
        UsageError, "no layer 'dwn_proj' is quantized; did you mean down_proj", model, tmp_path, rotate="dwn_proj:64"
    )
    refuse(RecipeError, "static scale of each input", model, tmp_path, format="nvfp4_w4a4", rotate="down_proj:64")
    refuse(FormatError, "no reader of modelopt rotates", model, tmp_path, container="modelopt", rotate="down_proj:64")
    odd = tiny.save(tmp_path / "odd", tiny.llama(inner=288))
    refuse(RecipeError, "288 columns, which blocks of 64 do not divide", odd, tmp_path, rotate="down_proj:64")
    stacks = families.make_model(tmp_path / "moe", "glm4_moe")
    refuse(FormatError, "rotate no inputs of experts", stacks, tmp_path, format="mxfp4", rotate="down_proj:64")


@pytest.mark.parametrize("reader", ["sglang", "trtllm", "transformers"])
def test_readers_that_do_not_rotate_are_refused(reader: str, model: Path, tmp_path: Path) -> None:
    refuse(UsageError, "rotates no inputs", model, tmp_path, format="fp8", rotate="down_proj:64", reader=reader,
           container="compressed_tensors")  # fmt: skip


def test_vllm_takes_layers_without_bias(model: Path, tmp_path: Path) -> None:
    ptqpipe.convert(model, format="mxfp4", rotate="down_proj:64", reader="vllm", out=tmp_path / "yes")
    tensors = tiny.llama()
    tensors["model.layers.1.mlp.down_proj.bias"] = torch.zeros(128, dtype=torch.bfloat16)
    biased = tiny.save(tmp_path / "biased", tensors)
    refuse(UsageError, "layers with a bias", biased, tmp_path, format="mxfp4", rotate="down_proj:64", reader="vllm")


def test_statistics_without_full_moments_say_so(model: Path, tmp_path: Path) -> None:
    stats = write_statistics(tmp_path / "stats", model, inputs_of_llama(tiny.llama()), moments=())
    options = {"format": "mxfp4", "rotate": "down_proj:64", "stats": stats}
    refuse(UsageError, "has no full_moment of 'model.layers.0.mlp.down_proj'", model, tmp_path, **options)


def test_a_layout_without_rotations_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"has rotated inputs \(blocks of 64\), which no reader of gptoss_mxfp4"):
        ptqpipe.relayout(packed, container="gptoss_mxfp4", out=tmp_path / "out")
    done = CliRunner().invoke(main, ["relayout", str(packed), "--container", "ptqpipe", "-o", str(tmp_path / "own")])
    assert done.exit_code == 0, done.output
    with torch.no_grad():
        assert torch.equal(
            ptqpipe.load_model(tmp_path / "own")(TOKENS).logits, ptqpipe.load_model(packed)(TOKENS).logits
        )
