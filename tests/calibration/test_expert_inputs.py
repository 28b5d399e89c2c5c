"""Claims about what stacked experts are given in two runs of a layer: the rows that two whole models give them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptqpipe.calibration.activations import InMemory
from ptqpipe.calibration.cross_moments import ActivationCache, cached_streams
from ptqpipe.calibration.expert_inputs import StackInputs
from ptqpipe.calibration.experts import LEAST_TOKENS, is_stacked, rows_of_token, second_input
from ptqpipe.calibration.moments import FIRST_WEIGHT
from ptqpipe.calibration.runner import Runner
from ptqpipe.models.source import Source
from ptqpipe.runtime.skeleton import Skeleton
from ptqpipe.runtime.stacked_experts import first_stack
from tests.calibration.models import LAYERS, make_model, make_windows, whole_model_inputs

EXPERTS = 4
ROUNDING = 2.0**-16  # float32 runs of a layer against float64 runs of the model


def same_rows(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two matrices have the same rows, which come in another order where a model goes by places."""
    grams = [(rows.double().t() @ rows.double()) for rows in (found, expected)]
    return len(found) == len(expected) and bool(
        (grams[0] - grams[1]).abs().max() <= ROUNDING * float(grams[1].abs().max())
    )


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "llama4", "deepseek_v3"])
@pytest.mark.parametrize("kept", [False, True], ids=["run again", "kept"])
def test_rows_of_experts_are_those_of_the_whole_model(kind: str, kept: bool, tmp_path: Path) -> None:
    folder, windows = make_model(tmp_path, kind), make_windows()
    expected, _ = whole_model_inputs(folder, windows)
    of_first, _ = whole_model_inputs(folder, windows[:, :1])
    name = f"model.layers.{LAYERS - 1}"
    with (
        Source.open(folder) as source,
        Runner.open(Skeleton.of(source, dtype=torch.float32), windows[:7], held_out=windows[7:]) as runner,
    ):
        for layer in runner.layers():
            if layer.name != name:
                continue
            stack = next(path for path, module in layer.module.named_modules() if is_stacked(module))
            module = layer.module.get_submodule(stack)
            every = range(layer.batches)
            cache = ActivationCache([stack], every if kept else ())
            with torch.no_grad():
                for batch in every:
                    with cache.watching(layer, batch):
                        layer.forward(layer.inputs(batch), batch)
                found = StackInputs.of(
                    layer,
                    stack,
                    batches=every,
                    entering=layer.inputs,
                    parameters={},
                    quantizers={},
                    cache=cache,
                    store=InMemory,
                )
                groups = list(found.groups(every, EXPERTS))
                assert [expert for group in groups for expert in group] == list(range(EXPERTS))
                inputs = {e: rows for group in groups for e, rows in found.inputs(group, every).items()}
                for expert, rows in inputs.items():
                    assert len(rows.weights) >= LEAST_TOKENS
                    assert float(rows.weights.square().mean()) == pytest.approx(1)
                    first = expected[f"{name}.{stack}.{first_stack(module)}", expert]
                    assert same_rows(rows.exact, first)
                    assert same_rows(rows.seen, first)
                    begins = of_first.get((f"{name}.{stack}.{first_stack(module)}", expert), first[:0])
                    assert same_rows(rows.exact[rows.first], begins)
                    weighted, more = rows.weighted(), FIRST_WEIGHT - 1
                    cross = (weighted[0] * (1 + more * rows.first.unsqueeze(1))).t() @ weighted[1]
                    cross /= len(rows.first) + more * int(rows.first.sum())
                    assert torch.allclose(
                        rows.moments("x").cross, cross, rtol=1e-4, atol=1e-6 * float(cross.abs().max())
                    )
                    second = expected[f"{name}.{stack}.down_proj", expert]
                    assert same_rows(second_input(module, expert, rows.exact), second)


def test_experts_with_few_tokens_share_those_of_others() -> None:
    """However many they are: inputs take no more memory than what enters the stack, and a batch."""
    experts, tokens, columns = 64, 512, 32
    layer: Any = SimpleNamespace(device=torch.device("cpu"))
    stack = StackInputs(layer, "experts", InMemory(), InMemory(), {}, {}, {})
    generator = torch.Generator().manual_seed(0)
    batches = range(4)
    for batch in batches:
        stack.exact.put(batch, torch.randn(tokens, columns, generator=generator))
        stack.seen.put(batch, torch.randn(tokens, columns, generator=generator))
        stack.experts[batch] = torch.full((tokens, 1), 3)
        stack.experts[batch][:2, 0] = torch.randint(experts, (2,), generator=generator)
        stack.weights[batch] = torch.rand(tokens, 1, generator=generator)
        stack.first[batch] = torch.arange(tokens) % 64 == 0
    groups = list(stack.groups(batches, experts))
    assert sorted(expert for group in groups for expert in group) == list(range(experts))
    for group in groups:
        found = stack.inputs(group, batches)
        own = {rows.exact.data_ptr(): rows.exact.numel() for rows in found.values()}
        assert sum(own.values()) <= (len(batches) + 1) * tokens * columns
        idle = [rows for expert, rows in found.items() if expert != 3]
        assert all(torch.equal(rows.exact, stack.exact.get(0)) for rows in idle)
        assert all(rows.weights.eq(1).all() for rows in idle)


def test_what_is_kept_of_stacks_counts_a_run_of_rows_for_every_expert(tmp_path: Path) -> None:
    streams = {}
    for kind in ("mixtral", "llama4"):
        with Source.open(make_model(tmp_path / kind, kind)) as source:
            skeleton = Skeleton.of(source, dtype=torch.float32)
            streams[kind] = cached_streams(skeleton)
            stacks = [m for _, layer in skeleton.blocks for m in layer.modules() if is_stacked(m)]
            assert {rows_of_token(module) for module in stacks} == {EXPERTS if kind == "llama4" else 1}
    assert streams["llama4"] > streams["mixtral"]
