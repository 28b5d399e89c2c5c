"""Two replicas of a model in one job: each in a process group of its own, which `load` is given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ptqpipe.errors import UsageError
from ptqpipe.runtime import load
from tests.runtime.models import TOKENS, logits
from tests.serving.collectives.ranks import on_ranks


def replica(rank: int, world: int, folder: str) -> dict[str, Any]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # type: ignore[no-untyped-call]
    size, at = 2, rank % 2
    sums: list[int] = []

    def reduce(x: torch.Tensor) -> torch.Tensor:
        sums.append(x.numel())
        dist.all_reduce(x, group=groups[rank // 2])
        return x

    model = load(folder, tp=size, rank=at, group=groups[rank // 2], dtype="float32")
    ours = load(folder, tp=size, rank=at, group=groups[rank // 2], all_reduce=reduce, dtype="float32")
    refused = ""
    try:
        load(folder, tp=size, rank=at)
    except UsageError as error:
        refused = str(error)
    return {"logits": logits(model), "same": torch.equal(logits(ours), logits(model)), "sums": sums, "refused": refused}


def test_a_replica_sums_and_gathers_within_its_own_group(sources: Mapping[str, Path]) -> None:
    folder = sources["llama"]
    found = on_ranks(4, replica, str(folder))
    wanted = logits(load(folder, dtype="float32"))
    for rank in found:
        assert torch.equal(rank["logits"], found[0]["logits"])
        assert rank["logits"] == pytest.approx(wanted, abs=1e-5)  # sums in another order, of numbers of size one
        assert rank["same"]
        assert rank["sums"] == [TOKENS.numel() * 128] * 4  # two a layer, [2, 24, hidden]
        assert "of 4 in the process group" in rank["refused"]
