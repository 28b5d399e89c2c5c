"""Claims about moments of two runs of a block: those of two whole models, of which one has other weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ptqpipe.calibration.paired import call_order, paired_moments, quantized_inputs
from ptqpipe.calibration.runner import Runner
from ptqpipe.calibration.skeleton import Skeleton
from ptqpipe.source import Source
from tests.calibration.models import make_model, make_windows, whole_model_inputs

QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
CALLS = [*QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
ROUNDING = 2.0**-18  # float32 runs of a block against float64 runs of the model


@dataclass(frozen=True)
class Quantizer:
    """A layer's input is rotated by blocks, then a function makes something of it."""

    quantized: Callable[[torch.Tensor], torch.Tensor]
    rotation: int = 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with other matrices in its first block."""
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


@pytest.mark.parametrize("modules", [QKV, ["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]])
def test_moments_are_those_of_two_whole_models(folders: tuple[Path, Path], modules: list[str]) -> None:
    windows = make_windows()
    exact, changed = (whole_model_inputs(folder, windows)[0] for folder in folders)
    stored = load_file(folders[1] / "model.safetensors")
    prefix = "model.layers.0."
    with Source.open(folders[0]) as source:
        runner = Runner.open(Skeleton.of(source, dtype=torch.float32), windows)
        with runner:
            block = next(runner.blocks())
            assert call_order(block, list(reversed(CALLS))) == CALLS
            found = paired_moments(
                block,
                modules,
                batches=range(block.batches),
                given=block.inputs,
                parameters={
                    name.removeprefix(prefix): stored[name]
                    for name in stored
                    if name.startswith(prefix) and "proj" in name
                },
                quantizers={modules[0]: Quantizer(torch.neg)} if len(modules) == 1 else {},
            )
    sign = -1.0 if len(modules) == 1 else 1.0  # of what the quantizer makes of x'
    for module in modules:
        x, seen = (inputs[f"{prefix}{module}.weight", None] for inputs in (exact, changed))
        for got, expected in (
            (found[module].moment, seen.t() @ seen / len(seen)),
            (found[module].cross, sign * x.t() @ seen / len(seen)),
        ):
            assert float((got - expected).abs().max()) < ROUNDING * float(expected.abs().max())
        assert found[module] is found[modules[0]]


def test_an_input_that_modules_share_is_quantized_once(folders: tuple[Path, Path]) -> None:
    calls: list[int] = []

    def quantizer(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.round()

    with (
        Source.open(folders[0]) as source,
        Runner.open(Skeleton.of(source, dtype=torch.float32), make_windows()) as runner,
    ):
        block = next(runner.blocks())
        with torch.no_grad(), quantized_inputs(block.module, dict.fromkeys(CALLS, Quantizer(quantizer))):
            out = block.forward(block.inputs(0), 0)
        assert len(calls) == 4
        with torch.no_grad(), quantized_inputs(block.module, {name: Quantizer(lambda x: x.round()) for name in CALLS}):
            assert torch.equal(block.forward(block.inputs(0), 0), out)


def test_moments_of_rotated_inputs_are_rotated_on_both_sides(folders: tuple[Path, Path]) -> None:
    name, h = "mlp.down_proj", torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    x = whole_model_inputs(folders[0], make_windows())[0][f"model.layers.0.{name}.weight", None].double()
    x = (x.reshape(-1, 16) @ h / 4).reshape(x.shape)
    expected = x.t() @ x / len(x)
    with (
        Source.open(folders[0]) as source,
        Runner.open(Skeleton.of(source, dtype=torch.float32), make_windows()) as runner,
    ):
        block = next(runner.blocks())
        found = paired_moments(
            block,
            [name],
            batches=range(block.batches),
            given=block.inputs,
            parameters={},
            quantizers={name: Quantizer(lambda x: x, rotation=16)},
        )[name]
    for got in (found.moment, found.cross):
        assert float((got - expected).abs().max()) < ROUNDING * float(expected.abs().max())
