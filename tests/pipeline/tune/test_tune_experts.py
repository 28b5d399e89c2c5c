"""Claims about GPTQ in order of stacked experts: on what each is given, and as a dense layer would have it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ptqpipe.calibration.activations import InMemory, OnDisk
from ptqpipe.pipeline.tune import command as tune, in_order, layer_loop
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import Machine
from tests.calibration.models import make_model, make_windows, write_windows

ONE = Machine(workers=1)
WINDOWS = 36  # of which four are held out
OPTIONS = TuneOptions(samples=32, seqlen=24, method="gptq")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_windows(tmp_path_factory.mktemp("tokens") / "tokens.jsonl", make_windows(samples=WINDOWS))


def codes_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t.view(torch.uint8) for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def as_mixture(llama: Path, folder: Path) -> Path:
    """A Mixtral with the MLP of each of the Llama's layers as its one expert."""
    config = json.loads((llama / "config.json").read_text())
    own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 1}
    config |= own | {"num_experts_per_tok": 1, "sliding_window": None}
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = {}
    for name, tensor in load_file(llama / "model.safetensors").items():
        for dense, sparse in names.items():
            name = name.replace(f"mlp.{dense}", f"block_sparse_moe.experts.0.{sparse}")
        tensors[name] = tensor
    for layer in range(config["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = torch.zeros(1, config["hidden_size"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_w4a4", "fp8"])
@pytest.mark.parametrize("metric", ["kl", "output"])
def test_a_mixture_of_one_expert_has_the_codes_of_the_dense_model(
    scheme: str, metric: str, tokens: Path, tmp_path: Path
) -> None:
    llama = make_model(tmp_path / "llama", "llama")
    mixture = as_mixture(llama, tmp_path / "mixture")
    recipe = RecipeOptions(scheme)
    found = []
    for model in (llama, mixture):
        out = tmp_path / f"{model.name}-codes"
        options = replace(OPTIONS, metric=metric)
        done = tune.tune(model, [str(tokens)], out, recipe=recipe, options=options, machine=ONE)
        assert any(entry["kept"] for entry in done.content["blocks"].values())
        found.append(codes_of(out))
    dense, sparse = found
    for name, expected in dense.items():
        for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(f"mlp.{old}", f"block_sparse_moe.experts.0.{new}")
        assert torch.equal(sparse.pop(name), expected), name
    assert not sparse


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "llama4", "deepseek_v3"])
def test_experts_are_done_in_order_whatever_their_layout(
    kind: str, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other codes than experts by themselves have; hidden states on disk give the same, and layers that run in
    bfloat16, with labels of their own, give codes near by."""
    losses = itertools.cycle((2.0, 1.0))  # of a layer with its nearest codes, and with what was found: random models
    monkeypatch.setattr(in_order, "_loss", lambda *_: next(losses))
    recipe = RecipeOptions("nvfp4", container="ptqpipe")  # which holds the experts of all
    model, found = make_model(tmp_path / "model", kind), {}
    for name, options in (
        ("gptq", OPTIONS),
        ("layerwise", replace(OPTIONS, method="layerwise")),
        ("on disk", OPTIONS),
        ("bfloat16", OPTIONS),
    ):
        if name == "bfloat16":
            monkeypatch.setattr(layer_loop, "pass_dtype", lambda *_: torch.bfloat16)
        if name == "on disk":
            monkeypatch.setattr(InMemory, "another", lambda self: OnDisk(tmp_path))
        tune.tune(model, [str(tokens)], tmp_path / name, recipe=recipe, options=options, machine=ONE)
        found[name] = codes_of(tmp_path / name)
    experts = [name for name in found["gptq"] if ".experts" in name and name.endswith(".data")]
    assert experts
    same = [torch.equal(found["gptq"][name], found["layerwise"][name]) for name in experts]
    assert sum(same) < len(same) / 4  # those whose few rows that are tried first lose have the nearest codes in both
    assert all(torch.equal(codes, found["on disk"][name]) for name, codes in found["gptq"].items())
    pairs = torch.cat([(found["gptq"][name] == found["bfloat16"][name]).flatten() for name in experts])
    # Of pairs of codes a fifth and more; of codes that have nothing to do with each other it would be a fiftieth.
    assert 0.15 < float(pairs.float().mean()) < 1


def test_an_expert_that_is_left_out_leaves_the_others_to_themselves(tokens: Path, tmp_path: Path) -> None:
    """Its stack has weights that are not quantized, so all of its experts have the codes of layers by themselves."""
    model, found = make_model(tmp_path / "model", "qwen3_moe"), {}
    for method in ("gptq", "layerwise"):
        recipe = RecipeOptions("nvfp4", ignore=("model.layers.0.mlp.experts.0.*",))
        options = replace(OPTIONS, method=method, metric="output")
        tune.tune(model, [str(tokens)], tmp_path / method, recipe=recipe, options=options, machine=ONE)
        found[method] = codes_of(tmp_path / method)
    names = [name for name in found["gptq"] if "layers.0.mlp.experts" in name]
    assert len(names) == 3 * 3 * 3  # experts, matrices, tensors of each
    assert all(torch.equal(found["gptq"][name], found["layerwise"][name]) for name in names)
