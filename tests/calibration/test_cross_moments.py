"""Claims about moments of two runs of a layer: those of two whole models, of which one has other weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ptqpipe.calibration.cross_moments import (
    ActivationCache,
    cached_batches,
    cached_streams,
    collect_cross_moments,
    quantized_inputs,
)
from ptqpipe.calibration.moments import FIRST_WEIGHT
from ptqpipe.calibration.runner import BATCH_TOKENS, Runner
from ptqpipe.models.source import Source
from ptqpipe.runtime.skeleton import Skeleton
from tests.calibration.models import make_model, make_windows, whole_model_inputs

QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
CALLS = [*QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
ROUNDING = 2.0**-18  # float32 runs of a layer against float64 runs of the model


@dataclass(frozen=True)
class Quantizer:
    """A layer's input is rotated by blocks, then a function makes something of it."""

    quantized: Callable[[torch.Tensor], torch.Tensor]
    rotation: int = 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with other matrices in its first layer."""
    plain, other = (tmp_path_factory.mktemp("models") / name for name in ("plain", "other"))
    make_model(plain, "llama")
    make_model(other, "llama")
    tensors = load_file(other / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, w in tensors.items():
        if ".layers.0." in name and w.dim() == 2:
            tensors[name] = w + 0.05 * torch.randn(w.shape, generator=generator)
    save_file(tensors, str(other / "model.safetensors"), metadata={"format": "pt"})
    return plain, other


def mean_outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean of x y^T over rows of the windows, whose first tokens count FIRST_WEIGHT times."""
    weights = torch.ones(make_windows().shape, dtype=x.dtype)
    weights[:, 0] = FIRST_WEIGHT
    return (x * weights.flatten().unsqueeze(1)).t() @ y / weights.sum()


@pytest.mark.parametrize("modules", [QKV, ["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]])
def test_moments_are_those_of_two_whole_models(folders: tuple[Path, Path], modules: list[str]) -> None:
    windows = make_windows()
    exact, changed = (whole_model_inputs(folder, windows)[0] for folder in folders)
    stored = load_file(folders[1] / "model.safetensors")
    prefix = "model.layers.0."
    with Source.open(folders[0]) as source:
        runner = Runner.open(Skeleton.of(source, dtype=torch.float32), windows)
        with runner:
            layer = next(runner.layers())
            cache = ActivationCache(reversed(CALLS), ())
            with cache.watching(layer, 0):
                layer.forward(layer.inputs(0), 0)
            assert cache.order == CALLS
            found = collect_cross_moments(
                layer,
                modules,
                batches=range(layer.batches),
                entering=layer.inputs,
                parameters={
                    name.removeprefix(prefix): stored[name]
                    for name in stored
                    if name.startswith(prefix) and "proj" in name
                },
                quantizers={modules[0]: Quantizer(torch.neg)} if len(modules) == 1 else {},
                cache=cache,
            )
    sign = -1.0 if len(modules) == 1 else 1.0  # of what the quantizer makes of x'
    for module in modules:
        x, seen = (inputs[f"{prefix}{module}.weight", None] for inputs in (exact, changed))
        for got, expected in (
            (found[module].moment, mean_outer(seen, seen)),
            (found[module].cross, sign * mean_outer(x, seen)),
        ):
            assert float((got - expected).abs().max()) < ROUNDING * float(expected.abs().max())
        assert found[module] is found[modules[0]]


def test_a_layer_that_has_run_runs_no_more_and_every_bit_stays(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load_file(folders[1] / "model.safetensors")
    changed = {f"{name}.weight": stored[f"model.layers.0.{name}.weight"] for name in CALLS}
    calls: list[int] = []
    real = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: (calls.append(1), real(*args))[1])
    found, computed = [], []
    for kept in ((), (0,), (0, 1, 2)):
        with (
            Source.open(folders[0]) as source,
            Runner.open(Skeleton.of(source, dtype=torch.float32), make_windows(2 * (BATCH_TOKENS // 24) + 1)) as runner,
        ):
            layer = next(runner.layers())
            assert layer.batches == 3
            cache = ActivationCache(CALLS, kept)
            for batch in range(layer.batches):
                with torch.no_grad(), cache.watching(layer, batch):
                    layer.forward(layer.inputs(batch), batch)
            calls.clear()
            done: list[str] = []
            for unit in (QKV, ["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]):
                cache.settle(done)
                moments = collect_cross_moments(
                    layer,
                    unit,
                    batches=range(layer.batches),
                    entering=lambda batch, layer=layer: layer.inputs(batch) * 1.01,
                    parameters=changed,
                    quantizers=dict.fromkeys(CALLS, Quantizer(torch.round)),
                    cache=cache,
                )
                found += [tensor for name in unit for tensor in (moments[name].moment, moments[name].cross)]
                done += unit
            computed.append(len(calls))
    # Everything before each group in both models, and in the first batch two of q, k and v and one of gate and up to
    # see that they share an input; or every layer once.
    every, once = 2 * (3 + 4 + 6), 3 + 1 + 2
    assert computed == [3 * every + 2 + 1, once + 2 * every, 3 * once]
    first, *others = (found[start : start + 14] for start in range(0, 42, 14))
    assert all(torch.equal(one, other) for each in others for one, other in zip(first, each, strict=True))


def test_tensors_are_kept_of_as_many_batches_as_memory_has_room_for(folders: tuple[Path, Path]) -> None:
    with Source.open(folders[0]) as source:
        skeleton = Skeleton.of(source, dtype=torch.float32)
        with Runner.open(skeleton, make_windows(2 * (BATCH_TOKENS // 24) + 1)) as runner:
            token = 4 * skeleton.model.config.hidden_size
            weights = max(4 * sum(p.numel() for p in module.parameters()) for _, module in skeleton.blocks)
            beside = weights + 2 * runner.tokens * token
            each = cached_streams(skeleton) * (BATCH_TOKENS // 24) * 24
            for batches in range(3):
                more = -(-batches * each * 4 // 3) * token  # a quarter is not for them
                assert cached_batches(runner, [1, 0], beside + more, streams=2) == [1, 0][:batches]
                assert cached_batches(runner, [1, 0], beside + more - 1, streams=2) == [1, 0][: max(0, batches - 1)]
            more = -(-(each + cached_streams(skeleton) * 24) * 4 // 3) * token
            assert cached_batches(runner, range(3), beside + more, streams=2) == [0, 2]  # the last has one window


def test_a_tensor_that_the_model_overwrites_is_not_kept_for_the_next_run(folders: tuple[Path, Path]) -> None:
    with (
        Source.open(folders[0]) as source,
        Runner.open(Skeleton.of(source, dtype=torch.float32), make_windows()) as runner,
    ):
        layer = next(runner.layers())
        cache = ActivationCache(CALLS, [0])
        with torch.no_grad(), cache.watching(layer, 0):
            layer.forward(layer.inputs(0), 0)
        x = cache.inputs(0, QKV)
        assert x is not None
        x[QKV[0]].add_(1)
        assert cache.inputs(0, QKV) is None
        assert cache.inputs(0, ["mlp.down_proj"]) is not None
        assert cache.inputs(0, ["mlp.down_proj"]) is None  # was given, so it is not kept any more
        # of every matrix its input or its output
        assert cached_streams(runner.skeleton) * x[QKV[0]].shape[-1] >= sum(
            max(layer.module.get_submodule(name).weight.shape) for name in CALLS
        )


def test_an_input_that_modules_share_is_quantized_once(folders: tuple[Path, Path]) -> None:
    calls: list[int] = []

    def quantizer(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.round()

    with (
        Source.open(folders[0]) as source,
        Runner.open(Skeleton.of(source, dtype=torch.float32), make_windows()) as runner,
    ):
        layer = next(runner.layers())
        with torch.no_grad(), quantized_inputs(layer.module, dict.fromkeys(CALLS, Quantizer(quantizer))):
            out = layer.forward(layer.inputs(0), 0)
        assert len(calls) == 4
        with torch.no_grad(), quantized_inputs(layer.module, {name: Quantizer(lambda x: x.round()) for name in CALLS}):
            assert torch.equal(layer.forward(layer.inputs(0), 0), out)


def test_moments_of_rotated_inputs_are_rotated_on_both_sides(folders: tuple[Path, Path]) -> None:
    name, h = "mlp.down_proj", torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    x = whole_model_inputs(folders[0], make_windows())[0][f"model.layers.0.{name}.weight", None].double()
    x = (x.reshape(-1, 16) @ h / 4).reshape(x.shape)
    expected = mean_outer(x, x)
    with (
        Source.open(folders[0]) as source,
        Runner.open(Skeleton.of(source, dtype=torch.float32), make_windows()) as runner,
    ):
        layer = next(runner.layers())
        found = collect_cross_moments(
            layer,
            [name],
            batches=range(layer.batches),
            entering=layer.inputs,
            parameters={},
            quantizers={name: Quantizer(lambda x: x, rotation=16)},
            cache=ActivationCache([name], ()),
        )[name]
    for got in (found.moment, found.cross):
        assert float((got - expected).abs().max()) < ROUNDING * float(expected.abs().max())
