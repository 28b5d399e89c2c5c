"""Claims about ptqpipe.checkpoint.layout: sizes to the byte, groups kept whole, shards divided among ranks."""

import itertools
import json
import random

import pytest
from safetensors import deserialize

from ptqpipe.checkpoint.header import tensor_bytes
from ptqpipe.checkpoint.layout import MAX_SHARD_BYTES, MIN_SHARD_BYTES, ShardLayout, TensorSpec, default_shard_bytes
from ptqpipe.errors import OutputError


def u8(name: str, nbytes: int) -> TensorSpec:
    return TensorSpec(name, "U8", (nbytes,))


def names(layout: ShardLayout) -> list[list[str]]:
    return [[t.name for t in shard.tensors] for shard in layout.shards]


def test_one_shard_is_a_single_file_without_index() -> None:
    layout = ShardLayout.plan([[u8("b", 3)], [u8("a", 5)]])
    assert [s.file for s in layout.shards] == ["model.safetensors"]
    assert layout.index_json() is None
    assert layout.weight_files == ("model.safetensors",)
    assert names(layout) == [["b", "a"]]


def test_groups_fill_shards_whole_and_in_order() -> None:
    groups = [[u8("a", 4), u8("b", 4)], [u8("c", 3)], [u8("d", 8)], [], [u8("e", 2)]]
    layout = ShardLayout.plan(groups, shard_bytes=10)
    assert names(layout) == [["a", "b"], ["c"], ["d", "e"]]
    assert layout.group_shards == ((0,), (1,), (2,), (), (2,))
    assert [s.file for s in layout.shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_a_group_larger_than_a_shard_gets_shards_of_its_own() -> None:
    groups = [[u8("a", 1)], [u8("b", 6), u8("c", 6), u8("d", 30), u8("e", 4)], [u8("f", 0)], [u8("g", 1)]]
    layout = ShardLayout.plan(groups, shard_bytes=10)
    assert names(layout) == [["a"], ["b"], ["c"], ["d"], ["e"], ["f", "g"]]
    assert layout.group_shards[1] == (1, 2, 3, 4)
    for world in (1, 2, 3):
        ranks = layout.assign(world)
        assert sum({1, 2, 3, 4} <= set(shards) for shards in ranks) == 1


def test_what_is_planned_is_a_file_of_exactly_that_size_with_tensors_at_those_places() -> None:
    rng = random.Random(0)
    for _ in range(50):
        dtypes = ["U8", "BF16", "F32", "F8_E4M3", "I64", "F4", "BOOL"]
        specs = [
            TensorSpec(f"t.{i}", rng.choice(dtypes), tuple(2 * rng.randint(0, 3) for _ in range(rng.randint(1, 3))))
            for i in range(rng.randint(1, 20))
        ]
        groups = [list(g) for _, g in itertools.groupby(specs, key=lambda s: rng.random() < 0.5)]
        layout = ShardLayout.plan(groups, shard_bytes=rng.choice([1, 50, 1000]))
        seen = {}
        for shard in layout.shards:
            data = bytes(rng.randrange(2) for _ in range(shard.file_bytes - len(shard.header)))
            for name, info in deserialize(shard.header + data):  # the library refuses holes, overlaps, trailing bytes
                place = layout.entries[name]
                file = shard.header + data
                assert place.file.name == shard.file
                assert bytes(info["data"]) == file[place.offset : place.offset + place.nbytes]
                seen[name] = (info["dtype"], tuple(info["shape"]))
        assert seen == {s.name: (s.dtype, s.shape) for s in specs}
        index = layout.index_json()
        assert layout.file_bytes == sum(s.file_bytes for s in layout.shards) + len((index or "").encode())
        assert layout.total_bytes == sum(tensor_bytes(s.dtype, s.shape) for s in specs)


def test_the_index_is_sorted_and_totals_the_weights() -> None:
    layout = ShardLayout.plan([[u8("z", 4)], [u8("a", 4)]], shard_bytes=4)
    index = json.loads(layout.index_json() or "")
    assert index == {
        "metadata": {"total_size": 8},
        "weight_map": {"a": "model-00002-of-00002.safetensors", "z": "model-00001-of-00002.safetensors"},
    }
    assert list(index["weight_map"]) == ["a", "z"]
    assert layout.weight_files[-1] == "model.safetensors.index.json"


def test_aligned_tensors_keep_their_order_and_others_go_by_element_size() -> None:
    kept = [TensorSpec("p", "U8", (4, 8)), TensorSpec("s", "F8_E4M3", (4, 4)), TensorSpec("g", "F32", (1,))]
    assert names(ShardLayout.plan([kept])) == [["p", "s", "g"]]
    odd = [
        u8("x", 3),
        TensorSpec("h", "BF16", (1,)),
        u8("y", 1),
        TensorSpec("f", "F32", (1,)),
        TensorSpec("i", "I16", (1,)),
    ]
    layout = ShardLayout.plan([odd])
    assert names(layout) == [["f", "h", "i", "x", "y"]]
    assert layout.entries["f"].offset % 8 == 0


@pytest.mark.parametrize(
    ("groups", "fragment"),
    [
        ([], "no tensors"),
        ([[]], "no tensors"),
        ([[u8("a", 1)], [u8("a", 1)]], "'a' would be written twice"),
        ([[TensorSpec("a", "FP4", (1,))]], "dtype 'FP4' is unknown"),
        ([[TensorSpec("a", "F4", (3,))]], "whole byte"),
        ([[TensorSpec("a", "U8", (-3,))]], "negative"),
        ([[TensorSpec("__metadata__", "U8", (3,))]], "reserved"),
        ([[TensorSpec("\ud800", "U8", (3,))]], "cannot be written"),
    ],
)
def test_plans_that_nobody_could_read_are_refused(groups: list[list[TensorSpec]], fragment: str) -> None:
    with pytest.raises(OutputError) as caught:
        ShardLayout.plan(groups)
    assert fragment in str(caught.value)


def test_default_shards_are_between_256_mib_and_4_gib() -> None:
    assert default_shard_bytes(1) == MIN_SHARD_BYTES
    assert default_shard_bytes(32 * MIN_SHARD_BYTES + 1) == MIN_SHARD_BYTES + 1
    assert default_shard_bytes(2**50) == MAX_SHARD_BYTES


def test_every_shard_has_one_rank_and_the_loads_are_balanced() -> None:
    rng = random.Random(1)
    layout = ShardLayout.plan([[u8(f"t{i}", rng.randint(500, 1000))] for i in range(64)], shard_bytes=1000)
    for world in (1, 2, 3, 7, 200):
        ranks = layout.assign(world)
        assert sorted(i for shards in ranks for i in shards) == list(range(len(layout.shards)))
        loads = [sum(layout.shards[i].file_bytes for i in shards) for shards in ranks]
        assert max(loads) - min(loads) <= max(s.file_bytes for s in layout.shards)
        owners = layout.group_ranks(world)
        assert all(layout.group_shards[g][0] in ranks[r] for g, r in enumerate(owners))
        assert layout.assign(world) == ranks


def test_the_largest_shard_has_a_rank_to_itself_where_the_others_are_no_more() -> None:
    layout = ShardLayout.plan([[u8("large", 900)], *([u8(f"t{i}", 8)] for i in range(3))], shard_bytes=8)
    assert layout.assign(2) == [[0], [1, 2, 3]]
    with pytest.raises(ValueError, match="4 shards among 0 ranks"):
        layout.assign(0)


def test_the_digest_is_of_the_bytes_that_will_be_written() -> None:
    a = ShardLayout.plan([[u8("a", 4)], [u8("b", 4)]], shard_bytes=4)
    assert a.digest == ShardLayout.plan([[u8("a", 4)], [u8("b", 4)]], shard_bytes=7).digest
    assert a.digest != ShardLayout.plan([[u8("a", 4)], [u8("b", 4)]], shard_bytes=8).digest
    assert a.digest != ShardLayout.plan([[u8("a", 4)], [u8("c", 4)]], shard_bytes=4).digest
