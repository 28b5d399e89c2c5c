"""Claims about the scheduler: who computes how many tokens in a step, who waits, and who gives its pages back."""

import random

import pytest

from ptqpipe.serving.engine.block_manager import BlockManager
from ptqpipe.serving.engine.scheduler import PROMPT_LOGITS, Chunk, Scheduler
from ptqpipe.serving.engine.sequence import SamplingParams, Sequence

BLOCK = 4


def make(*, blocks: int = 1000, max_seqs: int = 8, max_tokens: int = 1000, prefix_caching: bool = False) -> Scheduler:
    manager = BlockManager(blocks, block_size=BLOCK, prefix_caching=prefix_caching)
    return Scheduler(manager, max_seqs=max_seqs, max_tokens=max_tokens)


def sequence(tokens: int, *, params: SamplingParams | None = None, first: int = 0) -> Sequence:
    """A prompt of so many tokens, which count from ``first``."""
    return Sequence("request", 0, list(range(first, first + tokens)), params or SamplingParams())


def compute(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """What an engine does with a step: the chunks are in the cache, and those at an end got one more token."""
    for chunk in chunks:
        samples = chunk.samples
        chunk.seq.computed += chunk.count
        scheduler.blocks.seal(chunk.seq, chunk.start)
        if samples:
            chunk.seq.append(10_000)


def step(scheduler: Scheduler) -> list[tuple[Sequence, int, int]]:
    """One step, done: (sequence, start, count) of its chunks."""
    chunks = scheduler.step()
    found = [(chunk.seq, chunk.start, chunk.count) for chunk in chunks]
    compute(scheduler, chunks)
    return found


# --- pieces of prompts, and the budget


def test_a_prompt_is_computed_at_once_and_then_a_token_a_step() -> None:
    scheduler, a = make(), sequence(10)
    scheduler.add(a)
    assert [step(scheduler) for _ in range(3)] == [[(a, 0, 10)], [(a, 10, 1)], [(a, 11, 1)]]
    assert a.generated == 3


def test_a_prompt_beyond_the_budget_comes_in_pieces_of_which_the_last_samples() -> None:
    scheduler, a = make(max_tokens=10), sequence(25)
    scheduler.add(a)
    found = []
    for _ in range(3):
        (chunk,) = scheduler.step()
        found.append((chunk.start, chunk.count, chunk.samples))
        compute(scheduler, [chunk])
    assert found == [(0, 10, False), (10, 10, False), (20, 5, True)]


def test_those_that_generate_come_first_and_the_rest_of_the_budget_admits() -> None:
    scheduler, a, b, c = make(max_tokens=8), sequence(2), sequence(3), sequence(20)
    scheduler.add(a)
    scheduler.add(b)
    step(scheduler)
    scheduler.add(c)
    assert step(scheduler) == [(a, 2, 1), (b, 3, 1), (c, 0, 6)]


def test_two_prompts_share_a_step_in_the_order_of_their_arrival() -> None:
    scheduler, a, b, c = make(max_tokens=10), sequence(6), sequence(7), sequence(1)
    for seq in (a, b, c):
        scheduler.add(seq)
    assert step(scheduler) == [(a, 0, 6), (b, 0, 4)]
    assert list(scheduler.waiting) == [c]


def test_a_long_one_in_front_leaves_a_token_for_each_that_runs_behind_it() -> None:
    scheduler, a, b, c = make(max_tokens=10), sequence(50), sequence(1), sequence(1)
    scheduler.running = [a, b, c]
    assert step(scheduler) == [(b, 0, 1), (c, 0, 1), (a, 0, 8)]


def test_single_tokens_stand_in_front_of_pieces() -> None:
    scheduler, a, b = make(max_tokens=10), sequence(12), sequence(1)
    scheduler.add(a)
    scheduler.add(b)
    assert step(scheduler) == [(a, 0, 10)]
    assert step(scheduler) == [(b, 0, 1), (a, 10, 2)]


def test_a_prompt_whose_logits_are_asked_comes_in_small_pieces() -> None:
    scheduler, a = make(max_tokens=10_000), sequence(2 * PROMPT_LOGITS + 5, params=SamplingParams(prompt_logprobs=1))
    scheduler.add(a)
    assert [step(scheduler)[0][2] for _ in range(3)] == [PROMPT_LOGITS, PROMPT_LOGITS, 5]


# --- admission


def test_no_more_run_than_may() -> None:
    scheduler, seqs = make(max_seqs=2), [sequence(3) for _ in range(4)]
    for seq in seqs:
        scheduler.add(seq)
    step(scheduler)
    assert scheduler.running == seqs[:2]
    scheduler.remove(seqs[0])
    assert [seq for seq, _, _ in step(scheduler)] == [seqs[1], seqs[2]]
    assert list(scheduler.waiting) == [seqs[3]]


@pytest.mark.parametrize(("blocks", "runs"), [(2, False), (3, True)])
def test_one_that_is_let_in_has_room_for_the_token_that_follows(blocks: int, runs: bool) -> None:
    scheduler, a = make(blocks=blocks), sequence(2 * BLOCK)
    scheduler.add(a)
    assert bool(step(scheduler)) == runs
    assert (scheduler.blocks.free == 0) == runs


def test_nobody_overtakes_the_first_that_waits() -> None:
    scheduler, a, large, small = make(blocks=4), sequence(BLOCK), sequence(3 * BLOCK), sequence(1)
    for seq in (a, large, small):
        scheduler.add(seq)
    step(scheduler)
    assert scheduler.running == [a]
    assert list(scheduler.waiting) == [large, small]
    scheduler.remove(a)
    assert [seq for seq, _, _ in step(scheduler)] == [large]


def test_a_sequence_that_is_to_be_first_waits_in_front_of_all_others() -> None:
    scheduler, a, b = make(max_seqs=1), sequence(1), sequence(1)
    scheduler.add(a)
    scheduler.add(b, first=True)
    assert step(scheduler) == [(b, 0, 1)]


def test_nothing_to_do_is_an_empty_step() -> None:
    assert make().step() == []


def test_a_known_beginning_is_not_computed_again() -> None:
    scheduler, a, b = make(prefix_caching=True), sequence(3 * BLOCK + 1), sequence(3 * BLOCK + 1)
    scheduler.add(a)
    step(scheduler)
    scheduler.add(b)
    assert (b, 3 * BLOCK, 1) in step(scheduler)
    assert (a.cached, b.cached) == (0, 3 * BLOCK)
    assert b.blocks[:3] == a.blocks[:3]


# --- removal


def test_one_that_leaves_gives_its_pages_back_wherever_it_is() -> None:
    scheduler, running, waiting, stranger = make(blocks=10, max_seqs=1), sequence(5), sequence(5), sequence(5)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)
    for seq in (running, waiting, stranger):
        scheduler.remove(seq)
    assert scheduler.blocks.free == 10
    assert (scheduler.running, list(scheduler.waiting), running.blocks) == ([], [], [])


# --- preemption


def test_the_latest_arrival_gives_way_and_starts_again_from_its_tokens() -> None:
    scheduler, a, b = make(blocks=4), sequence(BLOCK), sequence(BLOCK)
    scheduler.add(a)
    scheduler.add(b)
    for _ in range(4):  # each gets to the end of its second page
        step(scheduler)
    assert scheduler.blocks.free == 0
    assert step(scheduler) == [(a, 7, 1), (b, 7, 1)]
    assert step(scheduler) == [(a, 8, 1)]
    assert (b.computed, b.blocks, b.preemptions, scheduler.preemptions) == (0, [], 1, 1)
    assert list(scheduler.waiting) == [b]
    scheduler.remove(a)
    tokens = list(b.tokens)
    assert step(scheduler) == [(b, 0, len(tokens))]
    assert b.tokens[:-1] == tokens


def test_one_that_gave_way_is_let_in_before_those_that_never_ran() -> None:
    scheduler, a, b, c = make(blocks=4, max_seqs=2), sequence(BLOCK), sequence(BLOCK), sequence(1)
    for seq in (a, b, c):
        scheduler.add(seq)
    while not scheduler.preemptions:
        step(scheduler)
    assert list(scheduler.waiting) == [b, c]


def test_the_only_one_leaves_when_the_cache_cannot_hold_it() -> None:
    scheduler, a = make(blocks=2), sequence(BLOCK)
    scheduler.add(a)
    for _ in range(5):
        assert step(scheduler)
    assert step(scheduler) == []
    assert list(scheduler.waiting) == [a]
    assert scheduler.blocks.free == 2


# --- all of it


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_whatever_arrives_everyone_ends_and_every_step_is_within_its_limits(seed: int, prefix_caching: bool) -> None:
    rng = random.Random(seed)
    max_seqs, max_tokens = rng.randint(1, 5), rng.randint(5, 24)
    scheduler = make(blocks=16, max_seqs=max_seqs, max_tokens=max_tokens, prefix_caching=prefix_caching)
    arrivals = [sequence(rng.randint(1, 40), first=rng.choice([0, 0, 50])) for _ in range(12)]
    wanted = {id(seq): rng.randint(1, 16) for seq in arrivals}
    coming, ended, steps = list(arrivals), [], 0
    while len(ended) < len(arrivals):
        steps += 1
        assert steps < 5000
        if coming and rng.random() < 0.3:
            scheduler.add(coming.pop(0))
        first = scheduler.running[0] if scheduler.running else None
        chunks = scheduler.step()
        assert len(chunks) <= max_seqs
        assert sum(chunk.count for chunk in chunks) <= max_tokens
        assert {id(chunk.seq) for chunk in chunks} == {id(seq) for seq in scheduler.running}
        assert first is None or any(chunk.seq is first for chunk in chunks)  # the first arrival always advances
        for chunk in chunks:
            assert chunk.count >= 1
            assert chunk.start == chunk.seq.computed
            assert len(chunk.seq.blocks) * BLOCK >= chunk.start + chunk.count
        compute(scheduler, chunks)
        for chunk in chunks:
            if chunk.seq.generated == wanted[id(chunk.seq)]:
                scheduler.remove(chunk.seq)
                ended.append(chunk.seq)
    assert scheduler.blocks.free == 16
    assert [len(seq.tokens) for seq in arrivals] == [seq.prompt_len + wanted[id(seq)] for seq in arrivals]
