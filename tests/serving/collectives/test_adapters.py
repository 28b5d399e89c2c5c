"""The quantized sum inside DTensor and transformers' tensor parallelism: counted, and as close as it should be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from ptqpipe.serving.collectives import QuantAllReduce
from tests.serving.collectives.ranks import on_ranks

CLOSE = 0.02  # twice the error of a sum of Gaussians, of which a layer's output is far from the only part


class Mlp(torch.nn.Module):
    """Two linear layers, the second with a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(64, 256, bias=False)
        self.down = torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def with_dtensor(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from ptqpipe.serving.collectives.dtensor import QuantPartial, QuantRowwise

    mesh = init_device_mesh("cpu", (world,))
    reduce, other = QuantAllReduce(mesh.get_group(), min_bytes=0), QuantAllReduce(mesh.get_group(), min_bytes=0)
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = Mlp()(x)
        found = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": QuantRowwise(reduce)})(x)
        part = torch.randn(500, generator=torch.Generator().manual_seed(rank))
        pending = DTensor.from_local(part, mesh, [QuantPartial(other)], run_check=False)
        direct = pending.redistribute(placements=[Replicate()]).to_local()
    return {
        "error": float((found - wanted).norm() / wanted.norm()),
        "found": found,
        "calls": reduce.stats().calls,
        "direct": torch.equal(direct, other(part)),
        "equal": QuantPartial(reduce) == QuantPartial(reduce) != QuantPartial(other),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_dtensor_sums_row_parallel_outputs_through_it(world: int) -> None:
    results = on_ranks(world, with_dtensor)
    for found in results:
        assert 0 < found["error"] < CLOSE
        assert torch.equal(found["found"], results[0]["found"])
        assert found["calls"] == 1
        assert found["direct"]
        assert found["equal"]


def with_transformers(rank: int, world: int, folder: str) -> dict[str, Any]:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from ptqpipe.runtime.parallel_style import register_rowwise

    ids = torch.arange(40).reshape(2, 20) % 32
    with torch.no_grad():
        wanted = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        reduce = QuantAllReduce(min_bytes=0)
        name = register_rowwise(reduce)
        plan = {"model.layers.*.self_attn.o_proj": name, "model.layers.*.mlp.down_proj": name}
        config = DistributedConfig(tp_size=world, tp_plan=plan)
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)
        found = model(ids).logits
    return {"error": float((found - wanted).norm() / wanted.norm()), "found": found, "calls": reduce.stats().calls}


def test_transformers_sums_row_parallel_outputs_through_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.distributed.tensor_parallel")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    results = on_ranks(2, with_transformers, str(tmp_path))
    for found in results:
        assert 0 < found["error"] < CLOSE
        assert torch.equal(found["found"], results[0]["found"])
        assert found["calls"] == 6  # two a layer
