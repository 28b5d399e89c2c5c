"""The phases and the barrier of the symmetric-memory kernel, each alone. Run by ``test_triton_symmetric.py``.

Under the interpreter on CPU tensors, and on a CUDA device where there is one: launches of one phase after another, a
rank at a time, so that nobody waits. ``tests/serving/collectives/symmetric_cases.py`` has the whole kernel, whose ranks
do.
"""

from dataclasses import dataclass, field

import pytest
import torch
import triton
import triton.language as tl

from ptqpipe.numerics.kernels import triton_symmetric as kernels
from ptqpipe.numerics.kernels.triton import interpreting
from ptqpipe.numerics.kernels.triton_messages import _RECIPROCAL
from ptqpipe.serving.collectives import codec_reference as reference
from ptqpipe.serving.collectives.codecs import DTYPES, WireCodec, get_wire_codec
from ptqpipe.serving.collectives.wire import cut
from tests.serving.collectives.test_allreduce import simulated
from tests.serving.collectives.test_kernels import adversarial, same

DEVICE = "cpu" if interpreting() else "cuda"
LANES = 8  # blocks a tile
PROGRAMS = 3


@triton.jit(do_not_specialize=["rank", "stripe", "begin", "blocks"])  # as the whole kernel
def phase_kernel(  # type: ignore[no-untyped-def]
    x, out, table, rank, stripe, begin, blocks, n, room_bytes, RECIPROCAL: tl.constexpr, WORLD: tl.constexpr,
    OWN_EXACT: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    if PHASE == 0:
        kernels.push_parts(
            x, table, rank, stripe, begin, blocks, n, room_bytes, RECIPROCAL, WORLD, OWN_EXACT, BLOCK, LANES
        )
    elif PHASE == 1:
        kernels.reduce(
            x, out, table, rank, stripe, begin, blocks, n, room_bytes, RECIPROCAL, WORLD, OWN_EXACT, BLOCK, LANES
        )
    else:
        kernels.decode(out, table, rank, stripe, begin, blocks, n, room_bytes, WORLD, BLOCK, LANES)


@triton.jit
def meet_kernel(  # type: ignore[no-untyped-def]
    table, rank, WORLD: tl.constexpr, PADDED: tl.constexpr, LIMIT: tl.constexpr
):
    program = tl.program_id(0)
    header = kernels.room_of(table, rank, 0).to(tl.pointer_type(tl.int32))
    goal = tl.load(header + kernels._COUNTERS + program) + WORLD
    kernels.arrive(table, program, WORLD, PADDED)
    kernels.await_all(header, program, goal, LIMIT)


@dataclass(slots=True)
class Ranks:
    """Buffers of ranks in one process, with room for ``blocks`` blocks of 256 elements."""

    world: int
    blocks: int = 16
    room_bytes: int = field(init=False)
    buffers: list[torch.Tensor] = field(init=False)
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.room_bytes = -(-self.blocks * 258 // 64) * 64
        size = kernels.HEADER + 2 * self.world * self.room_bytes
        self.buffers = [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(self.world)]
        self.table = torch.tensor([buffer.data_ptr() for buffer in self.buffers], device=DEVICE)

    def room(self, rank: int, index: int) -> torch.Tensor:
        """A room of a rank: ``index`` below ``world`` for parts, from there on for sums."""
        first = kernels.HEADER + index * self.room_bytes
        return self.buffers[rank][first : first + self.room_bytes]

    def counters(self, rank: int) -> torch.Tensor:
        """int32: what programs count, then the word of those who gave up."""
        return self.buffers[rank][: kernels.HEADER].view(torch.int32)

    def phase(
        self, phase: int, xs: list[torch.Tensor], outs: list[torch.Tensor], codec: WireCodec, exact: bool
    ) -> None:
        """One phase on every rank, the last first."""
        stripe = cut(xs[0].numel(), self.world, unit=codec.unit, chunk_elements=1).stripe
        assert stripe <= self.blocks
        for rank in reversed(range(self.world)):
            phase_kernel[(PROGRAMS,)](
                xs[rank], outs[rank], self.table, rank, stripe, 0, stripe, xs[rank].numel(), self.room_bytes,
                RECIPROCAL=_RECIPROCAL, WORLD=self.world, OWN_EXACT=exact, BLOCK=codec.block, LANES=LANES, PHASE=phase,
                enable_fp_fusion=False,
            )  # fmt: skip

    def meet(self, rank: int, *, programs: int = 1, looks: int = 3) -> None:
        """Barrier 0 on one rank, with an end to the waiting."""
        padded = triton.next_power_of_2(self.world)
        meet_kernel[(programs,)](self.table, rank, WORLD=self.world, PADDED=padded, LIMIT=looks)


@pytest.mark.parametrize(("dtype", "exact"), [*((dtype, True) for dtype in DTYPES), (torch.bfloat16, False)])
@pytest.mark.parametrize(("world", "block", "elements"), [(2, 64, 2000), (3, 32, 1500), (4, 256, 8192), (5, 128, 300)])
def test_phases_one_after_another_give_the_references_bits(
    world: int, block: int, elements: int, dtype: torch.dtype, exact: bool
) -> None:
    """NaN, infinities, zeros of both signs, subnormals and ties among them; in place."""
    codec, ranks = get_wire_codec("int8", block), Ranks(world, 16 if block > 64 else 17)
    xs = [adversarial(elements, dtype, seed) for seed in range(world)]
    outs = [x.clone().to(DEVICE) for x in xs]
    for phase in range(3):
        ranks.phase(phase, outs, outs, codec, exact)
    wanted = simulated(xs, codec, own_exact=exact)
    for rank, out in enumerate(outs):
        assert same(out.cpu(), wanted), rank


def test_a_part_is_the_references_message_in_the_room_of_its_sender_and_nothing_else_is_written() -> None:
    codec, ranks = get_wire_codec("int8"), Ranks(3, 16)
    xs = [adversarial(3 * 16 * 64, torch.bfloat16, seed) for seed in range(3)]
    for buffer in ranks.buffers:
        buffer.fill_(0xA5)
    there = [x.to(DEVICE) for x in xs]
    ranks.phase(0, there, there, codec, True)
    for owner in range(3):
        assert bool((ranks.buffers[owner][: kernels.HEADER] == 0xA5).all())
        for sender in range(3):
            room, length = ranks.room(owner, sender).cpu(), 0
            if sender != owner:
                message = reference.encode(xs[sender][owner * 1024 : (owner + 1) * 1024], codec)
                length = len(message)
                assert torch.equal(room[:length], message)
            assert bool((room[length:] == 0xA5).all())
            assert bool((ranks.room(owner, 3 + sender) == 0xA5).all())


def test_sums_go_to_all_other_ranks_and_say_what_the_owner_has() -> None:
    codec, ranks = get_wire_codec("int8"), Ranks(3, 16)
    xs = [adversarial(3 * 16 * 64, torch.float32, seed) for seed in range(3)]
    outs = [x.clone().to(DEVICE) for x in xs]
    for phase in range(2):
        ranks.phase(phase, outs, outs, codec, True)
    for owner in range(3):
        mine = slice(owner * 1024, (owner + 1) * 1024)
        for other in {0, 1, 2} - {owner}:
            said = reference.decode(ranks.room(other, 3 + owner)[: codec.nbytes(1024)].cpu(), 1024, codec)
            assert same(said, outs[owner][mine].cpu())
            assert same(outs[other][mine].cpu(), xs[other][mine]), "only the last phase writes what others own"


def test_an_arrival_is_counted_by_every_rank_for_its_own_program() -> None:
    ranks = Ranks(3)
    ranks.meet(1, programs=2, looks=1)
    for rank in range(3):
        assert ranks.counters(rank)[:3].tolist() == [1, 1, 0]


@pytest.mark.parametrize("before", [0, 300, 2**31 - 2, -(2**31) + 1])
def test_the_last_one_to_arrive_goes_on_and_any_other_waits(before: int) -> None:
    """Also where the count wraps on the way."""
    ranks, most = Ranks(3), kernels.MOST_PROGRAMS
    for rank in range(3):
        ranks.counters(rank)[0] = ranks.counters(rank)[most] = before
    for rank, waits in ((2, 1), (0, 1), (1, 0)):
        ranks.meet(rank)
        assert int(ranks.counters(rank)[2 * most]) == waits
    assert {(int(ranks.counters(rank)[0]) - before) % 2**32 for rank in range(3)} == {3}


def test_a_rank_that_is_a_launch_ahead_does_not_stop_those_behind() -> None:
    ranks, most = Ranks(2), kernels.MOST_PROGRAMS
    ranks.counters(0)[0] = 2  # rank 1 came to this barrier and, after the whole launch, to the next one's
    ranks.meet(0)
    assert int(ranks.counters(0)[2 * most]) == 0


def test_counters_of_one_program_are_not_those_of_another() -> None:
    ranks, most = Ranks(2), kernels.MOST_PROGRAMS
    ranks.counters(0)[1] = 1  # rank 1's program 1 has come, its program 0 has not
    ranks.meet(0)
    assert int(ranks.counters(0)[2 * most]) == 1


def test_a_launch_over_one_buffer_in_the_place_of_all_waits_for_nobody() -> None:
    """What loads the kernel before ranks of one device wait for each other: it comes in the name of all."""
    ranks = Ranks(3)
    table = ranks.table[:1].expand(3).contiguous()
    launch = kernels.Launch(table, 0, 3, ranks.room_bytes, PROGRAMS)
    x = torch.ones(900, device=DEVICE)
    for turn in range(1, 3):
        launch(x, torch.empty_like(x), stripe=5, begin=0, blocks=5, block=64, own_exact=True)
        assert ranks.counters(0)[:2].tolist() == [3 * turn, 0]
