"""What a rank takes of its machine: a GPU each, and memory within what the container leaves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.cli.serve import _place
from ptqpipe.errors import UsageError
from ptqpipe.pipeline import demo
from ptqpipe.run import machine as machine_facts
from ptqpipe.runtime.memory import available_bytes, cgroup_bytes, room
from ptqpipe.serving import rank_engine, rank_processes as ranks
from ptqpipe.serving.options import ServeOptions
from ptqpipe.serving.rank_processes import RankInfo, parse_place
from ptqpipe.serving.rank_sums import RankSums

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    """A folder with files of a kernel's."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(available: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {available // 1024} kB\nSwapFree: 0 kB\n"}


def v2(folder: str, limit: int | str, used: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup{folder}"
    stat = f"anon 5\nfile 7\ninactive_file {inactive}\nactive_file 9\n"
    return {f"{at}/memory.max": f"{limit}\n", f"{at}/memory.current": f"{used}\n", f"{at}/memory.stat": stat}


def test_each_rank_has_a_gpu_of_its_own() -> None:
    assert [RankInfo(rank, 4, 4, rank).device("cuda") for rank in range(4)] == [f"cuda:{n}" for n in range(4)]
    assert RankInfo().device("cuda:2") == "cuda:2"
    assert RankInfo(1, 2, 2, 1).device("cpu") == "cpu"


def test_one_gpu_for_several_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"device=\"cuda:1\" is one GPU for 2 ranks; use cuda"):
        RankInfo(0, 2, 2).device("cuda:1")


def test_ranks_that_the_command_starts_know_their_place_on_the_machine() -> None:
    assert parse_place("/private/store/3", 4) == RankInfo(3, 4, 4, 3, store="/private/store")


def test_ranks_of_torchrun_take_their_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert _place(None, None) == RankInfo(5, 8, 4, 1, torchrun=True)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert _place(None, None) == RankInfo(5, 8, 8, 5, torchrun=True)


def test_a_machine_with_too_few_gpus_is_refused_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = CliRunner().invoke(main, ["serve", str(demo.MODEL), "--device", "cuda", "--tp", "2"])
    assert found.exit_code == UsageError.exit_code
    assert "device cuda:1 needs a GPU that torch can use; it sees 1" in found.output


def test_the_runner_computes_on_its_own_gpu_with_a_part_of_that_gpu_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load(ckpt: Path, ranks: Any, **options: Any) -> Any:
        asked.update(options)
        return SimpleNamespace()

    def runner(model: Any, cache: Any, **_: Any) -> Any:
        asked["cache"] = cache.max_bytes
        return SimpleNamespace()

    monkeypatch.setattr(rank_engine, "load_rank", load)
    monkeypatch.setattr(rank_engine, "ModelRunner", runner)
    monkeypatch.setattr(rank_engine, "check_model", lambda model: None)
    monkeypatch.setattr(rank_engine, "use_kernels", lambda model: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(current=device))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {"cuda:1": (80 * GIB, 141 * GIB)}[device])
    place = RankInfo(1, 2, 2, 1, store="127.0.0.1:5")
    rank_engine.build_runner(ServeOptions("x", device="cuda"), place, 64, RankSums())
    assert (asked["device"], asked["current"], asked["cache"]) == ("cuda:1", "cuda:1", 20 * GIB)


def test_ranks_on_gpus_sum_in_a_group_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **options: asked.append(options["backend"]) or "group")
    assert RankInfo(1, 2, 2, 1).group_of_sums("cuda:1") == "group"
    assert asked == ["cuda:1", "nccl"]  # the device first: a group belongs to the current one
    assert RankInfo(0, 1).group_of_sums("cuda:0") is None
    assert RankInfo(1, 2, 2, 1).group_of_sums("cpu") is None
    assert len(asked) == 2


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "available_bytes", lambda: 16 * GIB)
    assert RankInfo().cache_bytes("cpu") == 4 * GIB
    assert RankInfo(1, 2, 2, 1).cache_bytes("cpu") == 2 * GIB
    monkeypatch.setattr(ranks, "available_bytes", lambda: 7)
    assert RankInfo().cache_bytes("cpu") == 1


def test_a_core_is_left_to_the_server_and_the_others_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "compute_threads", lambda: 9)
    assert [RankInfo(0, count, count).threads() for count in (1, 2, 4, 16)] == [8, 4, 2, 1]


def test_without_limits_the_host_s_memory_counts(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, meminfo(8 * GIB))) == 8 * GIB
    files = {"proc/self/cgroup": "0::/a\n"} | v2("/a", "max", 3 * GIB)
    assert cgroup_bytes(machine(tmp_path, files)) is None
    assert available_bytes(tmp_path) == 8 * GIB


def test_a_kernel_that_says_nothing_leaves_a_small_default(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 4 * GIB


def test_a_limit_of_the_cgroup_counts_less_what_is_used(tmp_path: Path) -> None:
    files = meminfo(64 * GIB) | {"proc/self/cgroup": "0::/a\n"} | v2("/a", 8 * GIB, 3 * GIB, GIB)
    assert available_bytes(machine(tmp_path, files)) == 6 * GIB  # a gigabyte of the three is files nobody needs


def test_the_host_counts_where_it_has_less_than_the_limit(tmp_path: Path) -> None:
    files = meminfo(2 * GIB) | {"proc/self/cgroup": "0::/a\n"} | v2("/a", 8 * GIB, 0)
    assert available_bytes(machine(tmp_path, files)) == 2 * GIB


def test_the_tightest_of_the_cgroups_above_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n"} | v2("/a/b", "max", GIB) | v2("/a", 4 * GIB, 3 * GIB)
    assert cgroup_bytes(machine(tmp_path, files)) == GIB


def test_a_container_that_sees_its_cgroup_at_the_top_is_limited_by_it(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/17\n"} | v2("", 2 * GIB, GIB)
    assert cgroup_bytes(machine(tmp_path, files)) == GIB


def test_version_1_has_other_names_for_the_same(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/cgroup": "9:name=systemd:/job\n4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
        f"{at}/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{at}/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{at}/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}\n",
    }
    assert cgroup_bytes(machine(tmp_path, files)) == 3 * GIB


def test_what_is_over_its_limit_has_nothing_left() -> None:
    assert room(GIB, 2 * GIB, 0) == 0
    assert room(GIB, GIB // 2, GIB) == GIB
