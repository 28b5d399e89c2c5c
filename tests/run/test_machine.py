"""Claims about what a machine decides: workers that wait for disks, threads that only compute, shares of memory."""

import pytest
import torch

from ptqpipe.run import machine
from ptqpipe.run.machine import BASE_BYTES, WORKER_BYTES, Machine, machine_for
from ptqpipe.run.options import MachineOptions

NOWHERE = list(range(100_000, 100_040))  # processors of which the kernel knows no siblings


def test_the_limit_of_workers_that_wait_for_disks_is_none_of_threads_that_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "processors", lambda: NOWHERE)
    assert machine.default_workers() == 16
    assert machine.compute_threads() == 40
    assert machine_for(MachineOptions()).workers == 16
    assert machine_for(MachineOptions(), waits=False).workers == 40
    assert machine_for(MachineOptions(workers=3), waits=False).workers == 3


def test_processors_of_one_core_count_once() -> None:
    """The kernel's own count: distinct pairs of package and core among the processors."""
    cores = set()
    for cpu in machine.processors():
        folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            with open(f"{folder}/physical_package_id") as package, open(f"{folder}/core_id") as core:
                cores.add((package.read().strip(), core.read().strip()))
        except OSError:
            pytest.skip("the kernel says nothing of cores")
    assert machine.compute_threads() == len(cores)


def test_threads_are_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    with machine.threads(len(machine.processors())):
        assert torch.get_num_threads() == len(machine.processors())
        with machine.one_thread_each():
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("workers", [1, 5, 64])
@pytest.mark.parametrize("jobs", [1, 3, 100])
@pytest.mark.parametrize("unit_bytes", [0, 10 << 20, 1 << 30])
@pytest.mark.parametrize("extra", [0, 300 << 20])
def test_what_the_workers_get_adds_up_to_the_memory(workers: int, jobs: int, unit_bytes: int, extra: int) -> None:
    memory = 2 << 30
    share = Machine(workers, memory_bytes=memory).divide_memory(unit_bytes, jobs, reserved_bytes=extra)
    assert 1 <= share.workers <= min(workers, jobs)
    assert share.workers <= share.threads <= min(share.workers + 1, jobs)
    cached = min(share.cache_bytes, unit_bytes)
    assert BASE_BYTES + share.threads * (WORKER_BYTES + cached) + share.pool_bytes == memory
    assert share.pool_bytes >= extra


@pytest.mark.parametrize(("memory_gib", "threads"), [(2, 3), (1, 2)])
def test_a_thread_reads_ahead_where_memory_allows_it(memory_gib: int, threads: int) -> None:
    unit = 234 << 20
    share = Machine(workers=2, memory_bytes=memory_gib << 30).divide_memory(unit, 100)
    assert share.threads == threads
    assert (share.cache_bytes >= unit) == (threads == 3)
    assert Machine(workers=2).divide_memory(unit, 1).threads == 1


def test_more_workers_than_processors_are_so_many_threads_as_processors() -> None:
    with machine.threads(100_000):  # the system may refuse to start them, in the middle of a run
        assert torch.get_num_threads() <= len(machine.processors())
