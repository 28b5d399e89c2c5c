"""Claims about running jobs: memory that they wait for, the order they run in, and the end after an error."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from ptqpipe.checkpoint.journal import run_id_of
from ptqpipe.conversion.job import records_of
from ptqpipe.errors import OutputError
from ptqpipe.run.machine import Job, MemoryPool, run_jobs

SECONDS = 30  # far above what any thread takes
SHORT = 0.05  # what a thread that must wait is watched for


def named(name: object) -> Job:
    return Job(str(name), 0, 1)


@contextmanager
def held_elsewhere(pool: MemoryPool, nbytes: int) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A thread that takes ``nbytes`` and holds them: (it has them, it may give them back)."""
    has, may_go = threading.Event(), threading.Event()

    def take() -> None:
        with pool.reserve(nbytes):
            has.set()
            may_go.wait(SECONDS)

    threading.Thread(target=take, daemon=True).start()
    try:
        yield has, may_go
    finally:
        may_go.set()


def test_jobs_that_fit_together_hold_memory_at_the_same_time() -> None:
    pool = MemoryPool(10)
    with held_elsewhere(pool, 6) as (first, _), held_elsewhere(pool, 4) as (second, _):
        assert first.wait(SECONDS)
        assert second.wait(SECONDS)


def test_a_job_waits_until_there_is_room_for_it() -> None:
    pool = MemoryPool(10)
    with pool.reserve(7), held_elsewhere(pool, 4) as (has, _):
        assert not has.wait(SHORT)
        with pool.reserve(3):  # which still fits beside
            assert not has.is_set()
    with pool.reserve(0), held_elsewhere(pool, 4) as (has, _):
        assert has.wait(SECONDS)


def test_a_job_that_waited_goes_on_when_memory_comes_back() -> None:
    pool = MemoryPool(10)
    with held_elsewhere(pool, 8) as (first, may_go):
        assert first.wait(SECONDS)
        with held_elsewhere(pool, 5) as (second, _):
            assert not second.wait(SHORT)
            may_go.set()
            assert second.wait(SECONDS)


def test_a_job_that_needs_more_than_all_has_it_alone() -> None:
    pool = MemoryPool(10)
    with pool.reserve(1000), held_elsewhere(pool, 1) as (has, _):
        assert not has.wait(SHORT)
    with pool.reserve(1), held_elsewhere(pool, 1000) as (has, _):
        assert not has.wait(SHORT)


@pytest.mark.parametrize("total", [0, -5])
def test_without_memory_to_share_nobody_waits(total: int) -> None:
    pool = MemoryPool(total)
    with pool.reserve(100), held_elsewhere(pool, 100) as (has, _):
        assert has.wait(SECONDS)


def test_a_job_that_fails_gives_its_memory_back() -> None:
    pool = MemoryPool(10)
    with pytest.raises(ZeroDivisionError), pool.reserve(10):
        _ = 1 / 0
    with held_elsewhere(pool, 10) as (has, _):
        assert has.wait(SECONDS)


def test_never_more_than_all_is_held() -> None:
    pool, lock = MemoryPool(10), threading.Lock()
    held, most = 0, 0

    def work(nbytes: int) -> None:
        nonlocal held, most
        with pool.reserve(nbytes):
            with lock:
                held += min(nbytes, 10)
                most = max(most, held)
            with lock:
                held -= min(nbytes, 10)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, [index * 7 % 13 for index in range(2000)]))
    assert held == 0
    assert 0 < most <= 10


def test_one_thread_runs_the_jobs_in_order() -> None:
    seen: list[str] = []
    jobs = [named(number) for number in range(20)]
    run_jobs(jobs, lambda job: seen.append(job.id), threads=1)
    assert seen == [job.id for job in jobs]


@pytest.mark.parametrize("threads", [1, 3])
def test_every_job_runs_once_on_no_more_threads_than_asked(threads: int) -> None:
    seen: list[str] = []
    names: set[str] = set()

    def do(job: Job) -> None:
        names.add(threading.current_thread().name)
        seen.append(job.id)

    run_jobs([named(number) for number in range(100)], do, threads=threads)
    assert sorted(seen, key=int) == [str(number) for number in range(100)]
    assert 1 <= len(names) <= threads


def test_the_first_error_ends_the_run_after_the_jobs_in_flight() -> None:
    in_flight, seen = threading.Event(), []

    def do(job: Job) -> None:
        if job.id == "0":
            in_flight.set()
            assert failed.wait(SECONDS)
        elif job.id == "1":
            assert in_flight.wait(SECONDS)
            failed.set()
            raise ValueError("the second job")
        else:
            time.sleep(0.01)
        seen.append(job.id)

    failed = threading.Event()
    with pytest.raises(ValueError, match="the second job"):
        run_jobs([named(number) for number in range(1000)], do, threads=2)
    assert seen[0] == "0"
    assert len(seen) < 500  # as few as begin until the other thread, however busy the machine is, has raised


def test_records_come_in_the_order_of_the_jobs() -> None:
    done = {"b": {"n": 2}, "a": {"n": 1}, "other": {}}
    assert records_of([named("a"), named("b")], done) == [{"n": 1}, {"n": 2}]


def test_a_job_without_a_record_is_named() -> None:
    with pytest.raises(OutputError, match=r"unit 'b' is missing.*resume=True"):
        records_of([named("a"), named("b")], {"a": {}})


def test_a_run_is_known_by_its_parts_whatever_their_order() -> None:
    assert run_id_of({"a": "1", "b": "2"}) == run_id_of({"b": "2", "a": "1"})
    assert len({run_id_of(parts) for parts in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {})}) == 4
