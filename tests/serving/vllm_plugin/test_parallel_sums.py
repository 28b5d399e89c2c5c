"""Claims about the sums of vLLM's plugin, on groups that have what it asks of vLLM's; no vLLM is needed."""

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ptqpipe.serving.collectives import NEVER, Thresholds
from ptqpipe.serving.vllm_plugin import parallel_sums as allreduce
from ptqpipe.serving.vllm_plugin.parallel_sums import Reducer, checked
from ptqpipe.serving.vllm_plugin.settings import PluginSettings
from tests.serving.collectives.ranks import on_ranks

CLOSE = 0.02  # twice the error of a sum of Gaussians


@dataclass
class Group:
    """What the plugin uses of a GroupCoordinator of vLLM. Its sum is in place, as the CPU's."""

    rank_in_group: int
    world_size: int
    unique_name: str = "tp:0"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sums: list[int] = field(default_factory=list)

    @property
    def device_group(self) -> Any:
        return dist.group.WORLD

    cpu_group = device_group

    def _all_reduce_out_place(self, x: torch.Tensor) -> torch.Tensor:
        self.sums.append(x.nbytes)
        dist.all_reduce(x)
        return x


def partial(rank: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).bfloat16()


def by_given_size(rank: int, world: int) -> dict[str, Any]:
    group = Group(rank, world)
    reducer = checked(group, PluginSettings(codec="int8", min_bytes=4096))
    group.sums.clear()
    small, large = partial(rank, 2047), partial(rank, 2048)
    kept = large.clone()
    found = reducer(small), reducer(large)
    wanted = [sum(partial(peer, x.numel()).float() for peer in range(world)) for x in (small, large)]
    return {
        "small": torch.equal(found[0], wanted[0].bfloat16()),  # type: ignore[union-attr]  # sum says int
        "error": float((found[1].float() - wanted[1]).norm() / wanted[1].norm()),  # type: ignore[union-attr]
        "found": found,
        "untouched": torch.equal(small, partial(rank, 2047)) and torch.equal(large, kept),
        "sums": group.sums,
        "calls": (reducer.calls, reducer.plain_calls),
    }


def test_small_sums_are_vllm_s_own_and_large_ones_quantized() -> None:
    ranks = on_ranks(2, by_given_size)
    for rank in ranks:
        assert rank["small"]
        assert 0 < rank["error"] < CLOSE
        assert all(torch.equal(x, y) for x, y in zip(rank["found"], ranks[0]["found"], strict=True))
        assert rank["untouched"]
        assert rank["sums"] == [4094]
        assert rank["calls"] == (1, 1)


def measured(rank: int, world: int) -> dict[str, Any]:
    group = Group(rank, world)
    reducer = checked(group, PluginSettings(codec="int8", min_bytes="auto"))
    assert reducer.quantized is not None
    tried = set(group.sums)
    reducer.quantized.thresholds = Thresholds(NEVER)
    group.sums.clear()
    reducer(partial(rank, 50))
    return {"tried": tried, "thresholds": reducer.quantized.thresholds, "sums": group.sums}


@pytest.mark.slow
def test_auto_measures_against_vllm_s_own_sum() -> None:
    """Of every size that the gate tries, and that sum is what small messages get."""
    for rank in on_ranks(2, measured):
        assert {1 << 14, 1 << 20, 1 << 24} <= rank["tried"]
        assert rank["sums"] == [100]


def one_cannot(rank: int, world: int) -> Any:
    if rank == 1:
        allreduce._known = lambda settings: (_ for _ in ()).throw(RuntimeError("not here"))
    group = Group(rank, world)
    return checked(group, PluginSettings(codec="int8")).quantized is None, len(group.sums)


def test_where_one_rank_cannot_all_stay_plain_and_nobody_waits() -> None:
    assert on_ranks(2, one_cannot) == [(True, 0), (True, 0)]


def unknown(rank: int, world: int) -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    allreduce.log.addHandler(handler)
    return checked(Group(rank, world), PluginSettings(codec="int9")).quantized is None, lines[-1]


def test_an_unknown_codec_leaves_everything_plain_and_the_log_says_so() -> None:
    for plain, line in on_ranks(2, unknown):
        assert plain
        assert "stays PLAIN" in line
        assert "int9" in line


def wrong(rank: int, world: int) -> Any:
    class Off(Group):
        def _all_reduce_out_place(self, x: torch.Tensor) -> torch.Tensor:
            return super()._all_reduce_out_place(x).mul_(2)

    return checked(Off(rank, world), PluginSettings(codec="int8", min_bytes=0)).quantized is None


def test_sums_that_differ_from_vllm_s_are_not_used() -> None:
    assert on_ranks(2, wrong) == [True, True]


def test_without_a_quantized_sum_everything_is_counted_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(0, 1)
    monkeypatch.setattr(dist, "all_reduce", lambda x: None)
    reducer, x = Reducer(group), torch.ones(4)
    assert reducer(x) is not x
    assert (reducer.calls, reducer.plain_calls, group.sums) == (0, 1, [16])
