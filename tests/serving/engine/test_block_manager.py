"""Pages are never in two hands unless they hold the same tokens, and none is lost."""

import random

import pytest

from ptqpipe.serving.engine.block_manager import BlockManager
from ptqpipe.serving.engine.sequence import SamplingParams, Sequence

SIZE = 4


def sequence(tokens: list[int]) -> Sequence:
    return Sequence("r", 0, list(tokens), SamplingParams())


def compute(blocks: BlockManager, seq: Sequence) -> None:
    """As the engine does after a step."""
    start, seq.computed = seq.computed, len(seq.tokens)
    blocks.seal(seq, start)


def test_growing_takes_what_is_needed_or_nothing() -> None:
    blocks = BlockManager(3, block_size=SIZE)
    seq = sequence(list(range(9)))
    assert blocks.grow(seq, 8)
    assert (len(seq.blocks), blocks.free) == (2, 1)
    assert not blocks.grow(seq, 17)
    assert (len(seq.blocks), blocks.free) == (2, 1)
    assert blocks.grow(seq, 8)
    assert len(seq.blocks) == 2


def test_a_prefix_is_shared_in_full_blocks_and_one_token_is_left() -> None:
    blocks = BlockManager(10, block_size=SIZE)
    first = sequence(list(range(8)))
    assert blocks.grow(first, 8)
    compute(blocks, first)
    same = sequence(list(range(8)))
    blocks.share(same)
    assert (same.blocks, same.computed) == (first.blocks[:1], 4)  # not all eight: the last logits are needed
    longer = sequence([*range(8), 99])
    blocks.share(longer)
    assert (longer.blocks, longer.computed) == (first.blocks, 8)
    other = sequence([0, 1, 2, 98, *range(4, 9)])
    blocks.share(other)
    assert other.blocks == []


def test_equal_blocks_after_different_ones_are_not_the_same() -> None:
    blocks = BlockManager(10, block_size=SIZE)
    first = sequence([1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert blocks.grow(first, 9)
    compute(blocks, first)
    second = sequence([5, 5, 5, 5, 0])
    blocks.share(second)
    assert second.blocks == []


def test_released_blocks_are_found_until_they_are_needed_least_recent_first() -> None:
    blocks = BlockManager(4, block_size=SIZE)
    old, new = sequence([1] * 8), sequence([2] * 8)
    for seq in (old, new):
        assert blocks.grow(seq, 8)
        compute(blocks, seq)
    blocks.release(old)
    blocks.release(new)
    assert blocks.free == 4
    third = sequence([3] * 4)
    assert blocks.grow(third, 4)  # evicts the end of the older one
    again = sequence([1] * 9)
    blocks.share(again)
    assert again.computed == 4
    kept = sequence([2] * 9)
    blocks.share(kept)
    assert kept.computed == 8


def test_without_caching_nothing_is_shared() -> None:
    blocks = BlockManager(4, block_size=SIZE, prefix_caching=False)
    first, second = sequence([1] * 8), sequence([1] * 8)
    assert blocks.grow(first, 8)
    compute(blocks, first)
    blocks.share(second)
    assert second.blocks == []


@pytest.mark.parametrize("seed", range(5))
def test_random_work_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(24, block_size=SIZE)
    content: dict[int, list[tuple[int, ...]]] = {}
    live: list[Sequence] = []
    for _ in range(600):
        if live and rng.random() < 0.4:
            seq = live.pop(rng.randrange(len(live)))
            blocks.release(seq)
        else:
            seq = sequence([rng.randrange(2) for _ in range(rng.randrange(1, 25))])
            blocks.share(seq)
            for at in range(len(seq.blocks)):  # what it got holds what it wants, with all that came before
                assert content[seq.blocks[at]] == [tuple(seq.tokens[: (at + 1) * SIZE])]
            if not blocks.grow(seq, len(seq.tokens)):
                blocks.release(seq)
                continue
            for at in range(seq.computed // SIZE, len(seq.blocks)):
                content[seq.blocks[at]] = [tuple(seq.tokens[: (at + 1) * SIZE])]
            compute(blocks, seq)
            live.append(seq)
        held = {block for seq in live for block in seq.blocks}
        assert blocks.free == 24 - len(held)
    for seq in live:
        blocks.release(seq)
    assert blocks.free == 24
