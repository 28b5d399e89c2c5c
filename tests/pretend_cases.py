"""What a GPU does, on one that is not there (``pretend_gpu.py``): no tensor is left behind on the CPU, and the results
are the CPU's. Run by ``test_pretend_gpu.py`` in a process of its own, since libraries remember what devices there are.
"""

import contextlib
import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ptqpipe
from ptqpipe.runtime import load, load_model
from ptqpipe.runtime.packed import PackedWeight, packed_linear
from ptqpipe.serving.engine import EngineOptions
from ptqpipe.serving.engine.model_runner import ModelRunner
from tests import tiny
from tests.checkpoint.layouts.builders import read_checkpoint
from tests.pretend_gpu import CPU, CUDA, pretended
from tests.runtime.models import save_source
from tests.runtime.test_kv_cache import SCHEME, with_scales
from tests.serving.engine import models, test_architectures, test_states

MEMORY = {"max_memory": "4GiB", "overwrite": True}
WINDOWS = {"samples": 2, "seqlen": 32}
TOKENS = torch.randint(96, (70, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer with the tokenizer of the demo model."""
    tensors = tiny.llama(layers=1, hidden=64, inner=64)
    drawn = torch.Generator().manual_seed(5)
    tensors |= {name: torch.randn(1024, 64, generator=drawn).bfloat16() for name in tensors if "embed" in name}
    tensors["lm_head.weight"] = (torch.randn(1024, 64, generator=drawn) / 8).bfloat16()
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "vocab_size": 1024}
    folder = tiny.save(tmp_path_factory.mktemp("source") / "model", tensors, config=tiny.LLAMA_CONFIG | shape)
    for file in models.DEMO.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def statistics(model: Path) -> Path:
    """Of the model, made on the CPU."""
    out = model.parent / "statistics"
    ptqpipe.calibrate(model, TOKENS, out, **WINDOWS, holdout=1, moments="block,full", **MEMORY)
    return out


@pytest.fixture(scope="module")
def nvfp4(model: Path) -> Path:
    """The model in NVFP4, made on the CPU."""
    return Path(ptqpipe.convert(model, format="nvfp4", out=model.parent / "nvfp4", **MEMORY).path)


def weights(folder: Path) -> dict[str, bytes]:
    """The tensors of every file; times and sums of errors may differ."""
    return {name: content for name, content in tiny.bytes_of(folder).items() if name.endswith(".safetensors")}


def on_both(run: Callable[[str], Any]) -> tuple[Any, Any]:
    """What it gives on the CPU and on the pretended GPU."""
    found = []
    for device in ("cpu", "cuda"):
        with pretended() if device == "cuda" else contextlib.nullcontext():
            found.append(run(device))
    return found[0], found[1]


def test_inputs_in_both_places_are_refused() -> None:
    with pretended():
        there, here = torch.arange(3.0, device="cuda"), torch.arange(3.0)
        assert (there.device, there.is_cuda, here.is_cuda) == (CUDA, True, False)
        for mixed in (
            lambda: there + here, lambda: torch.cat([there, here]), lambda: here.add_(there[0]), lambda: there @ here,
            lambda: torch.stack([there[0], here[0]]), lambda: here.copy_(there).add_(there),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="to be on the same device"):
                mixed()
        with pytest.raises(RuntimeError, match="indices should be"):
            here[there.long()]
        with pytest.raises(TypeError, match="to numpy"):
            there.numpy()
    assert torch.arange(3.0, device="cpu").device == CPU


def test_what_torch_allows_is_allowed() -> None:
    with pretended():
        there, here = torch.arange(3.0, device="cuda", requires_grad=True), torch.arange(3)
        assert (there * torch.tensor(2.0) + 1).device == there[here].device == torch.zeros_like(there).device == CUDA
        assert torch.nn.functional.one_hot(here.to("cuda"), 5).device == CUDA
        assert there.cpu().device == torch.empty(3).copy_(there.detach()).device == CPU
        with torch.inference_mode():
            assert torch.tensor([1, 2], device="cuda").device == CUDA
        (there.cpu() * here).sum().backward()
        assert there.grad is not None
        assert (there.grad.device, there.grad.tolist()) == (CUDA, [0.0, 1.0, 2.0])
        layer = torch.nn.Linear(3, 2).to("cuda")
        assert {x.device for x in layer.parameters()} == {CUDA} == {layer(there).device}


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("nvfp4", {}),
        ("mxfp4", {"scale_search": "ocp_even"}),
        ("fp8_dynamic", {"scale_search": "absmax_pz"}),
        ("int4_g32", {"scale_search": "absmax"}),
        ("nvfp4", {"container": "ptqpipe"}),
    ],
)
def test_convert(model: Path, tmp_path: Path, format: str, options: dict[str, Any]) -> None:
    def run(device: str) -> dict[str, bytes]:
        ptqpipe.convert(model, format=format, out=tmp_path / device, device=device, **MEMORY, **options)
        return weights(tmp_path / device)

    here, there = on_both(run)
    assert there == here


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("nvfp4", {"refine_passes": 1, "ignore": ["*self_attn*"]}),
        ("mxfp4", {"algorithm": "rtn", "objective": "block", "ignore": ["*mlp*"]}),
        ("fp8_tensor", {"algorithm": "rtn"}),
    ],
)
def test_convert_by_statistics(
    model: Path, statistics: Path, tmp_path: Path, format: str, options: dict[str, Any]
) -> None:
    def run(device: str) -> dict[str, bytes]:
        ptqpipe.convert(
            model, format=format, stats=statistics, out=tmp_path / device, device=device, **MEMORY, **options
        )
        return weights(tmp_path / device)

    here, there = on_both(run)
    assert there == here


def test_calibrate(model: Path, tmp_path: Path) -> None:
    def run(device: str) -> dict[str, bytes]:
        out, moments = tmp_path / device, "block,full,kl,pairs"
        ptqpipe.calibrate(model, TOKENS, out, **WINDOWS, holdout=1, moments=moments, device=device, **MEMORY)
        return weights(out)

    here, there = on_both(run)
    assert len(here) > 1
    assert there == here


@pytest.mark.parametrize(
    "options",
    [
        {"format": "mxfp4", "method": "gptq", "samples": 2},
        {"format": "nvfp4", "method": "kl", "steps": 1, "samples": 66, "train": ("norms", "global")},
    ],
)
def test_tune(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    def run(device: str) -> dict[str, bytes]:
        out, more = tmp_path / device, {"seqlen": 32, "ignore": ["*gate*", "*up*", "*self_attn*"]}
        ptqpipe.tune(model, TOKENS, out, device=device, **MEMORY, **more, **options)
        return weights(tmp_path / device)

    here, there = on_both(run)
    assert here
    assert there == here


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluate(model: Path, nvfp4: Path, tmp_path: Path, dtype: str) -> None:
    def run(device: str) -> float:
        found = ptqpipe.evaluate(
            nvfp4, TOKENS, source=model, device=device, dtype=dtype, out=tmp_path / "eval.json", max_tokens=64,
            overwrite=True,
        )  # fmt: skip
        return float(found.record["perplexity"][0]["checkpoint"])

    here, there = on_both(run)
    assert there == pytest.approx(here, rel=1e-2 if dtype == "bfloat16" else 1e-5)


def generated(runner: ModelRunner, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Tokens of requests in steps of 11 tokens, with every way of choosing one."""
    made = models.engine(runner, max_len=64, max_batch_tokens=11)
    ways = [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}, {"presence_penalty": 0.5, "logprobs": 2}]
    requests = [models.ask(prompt, 4, name=str(at), **ways[at]) for at, prompt in enumerate(prompts[:3])]
    found = models.generate(made, requests)
    return [found[str(at)][0] for at in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_engine_with_an_fp8_cache(nvfp4: Path, tmp_path: Path, dtype: str) -> None:
    scales = {f"model.layers.0.self_attn.{kind}_scale": torch.tensor([0.013]) for kind in "kv"}
    path = with_scales(read_checkpoint(nvfp4), scales, SCHEME).save(tmp_path / "q")

    def run(device: str) -> list[list[int]]:
        served = ModelRunner(load(path, dtype=dtype, device=device), EngineOptions(1 << 22, 64, 4, 8))
        assert served.attention.pages[0].keys.device.type == device
        return generated(served, test_states.PROMPTS)

    here, there = on_both(run)
    assert there == here


ARCHITECTURES = ("gemma2, window and soft cap", "gpt-oss, sinks and window", "deepseek v3.2")
STATES = ("qwen3-next",)


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *STATES])
def test_the_engine(kind: str) -> None:
    place = test_architectures if kind in ARCHITECTURES else test_states
    name = next(name for name in place.CONFIGS if name.startswith(kind))
    model = place.build(place.CONFIGS[name]()) if place is test_architectures else place.build(name)

    def run(device: str) -> list[list[int]]:
        served = ModelRunner(copy.deepcopy(model).to(device), EngineOptions(1 << 24, 64, 4, 8))
        return generated(served, place.PROMPTS)

    here, there = on_both(run)
    assert there == here


def test_packed_experts(tmp_path: Path) -> None:
    source = save_source("gpt_oss", tmp_path / "source")
    path = Path(ptqpipe.convert(source, format="mxfp4", out=tmp_path / "mxfp4", **MEMORY).path)

    def run(device: str) -> list[list[int]]:
        served = ModelRunner(load(path, dtype="float32", device=device), EngineOptions(1 << 24, 64, 4, 8))
        return generated(served, test_states.PROMPTS)

    here, there = on_both(run)
    assert there == here


@pytest.mark.parametrize("format", ["nvfp4", "fp8_block", "fp8_dynamic"])
def test_products_with_packed_weights(format: str) -> None:
    drawn = torch.Generator().manual_seed(0)
    w, x = torch.randn(128, 128, generator=drawn), torch.randn(300, 128, generator=drawn)

    def run(device: str) -> torch.Tensor:
        weight = PackedWeight.from_qtensor(ptqpipe.quantize(w.to(device), format))
        assert weight.device.type == device
        calls = [(rows, dtype) for dtype in (torch.float32, torch.bfloat16) for rows in (1, 20, 300)]
        made = [packed_linear(x[:rows].to(device, dtype), weight, x[0].to(device, dtype)) for rows, dtype in calls]
        return torch.cat([y.float().cpu() for y in made])

    here, there = on_both(run)
    torch.testing.assert_close(there, here, rtol=2e-2, atol=2e-1)


def test_a_model_is_whole_on_the_gpu(nvfp4: Path) -> None:
    with pretended():
        loaded = load_model(nvfp4, device="cuda")
        assert {x.device for x in (*loaded.parameters(), *loaded.buffers())} == {CUDA}
