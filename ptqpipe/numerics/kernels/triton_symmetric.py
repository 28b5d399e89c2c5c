"""The kernel behind ``collectives/symmetric.py``: a whole two-shot sum in one launch, over memory that all ranks see.

Every rank has a buffer, mapped into all of them: counters, then one room per rank for the parts of its stripe, then one
per rank for the sums of all stripes. A launch on rank r, the same on all ranks but for r:

    push_parts   encodes r's part of every other stripe into the owner's rooms
    barrier 0    ... of this program with the programs of the same number on the other ranks
    reduce       adds up the parts of r's own stripe in the order of the ranks, requantizes, writes the sum into all
                 other ranks' rooms, and what it says into ``out``
    barrier 1
    decode       writes what the others' sums say into ``out``

Program p touches tiles p, p + programs, ... of every stripe in all three phases, so barriers of equal programs are
enough, and ``out`` may be ``x``. The next launch may come at once, with any other size, into the same rooms:

    parts  are written before barrier 0 of launch n + 1. Its writer has ended launch n, so all its programs passed
           barrier 1 of launch n, which the reader reached after it had read the parts of launch n.
    sums   are written after barrier 0 of launch n + 1, to which the reader came after its launch n had ended, since
           launches on a stream do not overlap.

So neither a third barrier nor two sets of rooms are needed: what is read before a barrier is never written before the
same one. Arrivals are counted, never reset, and compared as a difference, so that they may wrap. Counter 1 of a program
stands at WORLD times its launches when a launch begins (nobody can be at barrier 1 of a launch before all came to
barrier 0), which gives the goal of both counters; nothing is counted on the host, and a captured graph can be replayed.

Numbers are those of ``triton_messages.py``, bit-equal to ``codec_reference.py``: in the interpreter, a process
per rank, and on an H100, a stream per rank. Imports Triton: import it from inside functions. Must not know processes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ptqpipe.numerics.kernels.triton_messages import _RECIPROCAL, load_message, quantize, rounded, store_message

MOST_PROGRAMS = 1024
HEADER = 4 * 2 * MOST_PROGRAMS + 64  # bytes: counters int32 [2, MOST_PROGRAMS], then a word that says that one gave up
_GAVE_UP = tl.constexpr(2 * MOST_PROGRAMS)
_COUNTERS = tl.constexpr(MOST_PROGRAMS)
_HEADER = tl.constexpr(HEADER)

ELEMENTS = 4096  # of a tile
WARPS = 8
REGISTERS = 128  # of a thread, at most
PROGRAMS_A_PROCESSOR = 2  # that have room together on one of 64 Ki registers, whatever else a launch is given


@triton.jit
def room_of(table: tl.tensor, rank: tl.tensor, at: tl.tensor) -> tl.tensor:
    """The bytes from ``at`` on, a multiple of 16, of the buffer of a rank."""
    return tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(tl.uint8)) + at, 16)


@triton.jit
def places(
    tile: tl.tensor, owner: tl.tensor, stripe: tl.tensor, begin: tl.tensor, blocks: tl.tensor, n: tl.tensor,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(block of a message ``[B]``, whether there is such a block, places in the message and in the tensor ``[B, N]``).

    The message is of ``blocks`` blocks of the stripe of ``owner`` (``stripe`` blocks), from ``begin`` on.
    """
    block = tile * LANES + tl.arange(0, LANES)  # int32: rooms are smaller than 2 GiB
    lane = tl.arange(0, BLOCK)[None, :]
    whole = owner.to(tl.int64) * stripe + begin + block
    return block, (block < blocks) & (whole * BLOCK < n), block[:, None] * BLOCK + lane, whole[:, None] * BLOCK + lane


@triton.jit
def push_parts(
    x: tl.tensor, table: tl.tensor, rank: tl.tensor, stripe: tl.tensor, begin: tl.tensor, blocks: tl.tensor,
    n: tl.tensor, room_bytes: tl.tensor, RECIPROCAL: tl.constexpr, WORLD: tl.constexpr, OWN_EXACT: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Messages of this rank's parts into room ``rank`` of their owners: the next rank's first, so that all differ."""
    for step in range(1 if OWN_EXACT else 0, WORLD):
        owner = (rank + step) % WORLD
        message = room_of(table, owner, _HEADER + rank.to(tl.int64) * room_bytes)
        for tile in range(tl.program_id(0), tl.cdiv(blocks, LANES), tl.num_programs(0)):
            block, live, at, where = places(tile, owner, stripe, begin, blocks, n, BLOCK, LANES)
            v = tl.load(x + where, mask=live[:, None] & (where < n), other=0.0).to(tl.float32)
            q, bits = quantize(v, RECIPROCAL)
            store_message(message, q, bits, at, block, live, live[:, None] & (at >= 0), blocks, BLOCK)


@triton.jit
def reduce(
    x: tl.tensor, out: tl.tensor, table: tl.tensor, rank: tl.tensor, stripe: tl.tensor, begin: tl.tensor,
    blocks: tl.tensor, n: tl.tensor, room_bytes: tl.tensor, RECIPROCAL: tl.constexpr, WORLD: tl.constexpr,
    OWN_EXACT: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Sums the received parts: sends the sum's message to all others and writes its decoded values to ``out``."""
    parts = room_of(table, rank, _HEADER)
    # The rank whose part is added unrounded; negative: none.
    exact = tl.zeros((LANES,), tl.int32) + rank - (0 if OWN_EXACT else WORLD)
    for tile in range(tl.program_id(0), tl.cdiv(blocks, LANES), tl.num_programs(0)):
        block, live, at, where = places(tile, rank, stripe, begin, blocks, n, BLOCK, LANES)
        there = live[:, None] & (at >= 0)
        inside = live[:, None] & (where < n)
        own = tl.load(x + where, mask=inside & (exact >= 0)[:, None], other=0.0).to(tl.float32)
        total = tl.full((LANES, BLOCK), -0.0, tl.float32)  # adds nothing, not even to -0
        for source in tl.range(0, WORLD, loop_unroll_factor=4):
            message = tl.multiple_of(parts + source * room_bytes.to(tl.int64), 16)
            sent = exact != source
            term = load_message(message, at, block, live & sent, there & sent[:, None], blocks, BLOCK)
            total += tl.where(sent[:, None], term, own)
        q, bits = quantize(total, RECIPROCAL)
        v = q * bits.to(tl.float32, bitcast=True)[:, None]
        tl.store(out + where, rounded(v, out.dtype.element_ty), mask=inside)
        for step in range(1, WORLD):
            peer = (rank + step) % WORLD
            message = room_of(table, peer, _HEADER + (WORLD + rank.to(tl.int64)) * room_bytes)
            store_message(message, q, bits, at, block, live, there, blocks, BLOCK)


@triton.jit
def decode(
    out: tl.tensor, table: tl.tensor, rank: tl.tensor, stripe: tl.tensor, begin: tl.tensor, blocks: tl.tensor,
    n: tl.tensor, room_bytes: tl.tensor, WORLD: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the decoded sums of the others' stripes to ``out``."""
    for step in range(1, WORLD):
        owner = (rank + step) % WORLD
        message = room_of(table, rank, _HEADER + (WORLD + owner.to(tl.int64)) * room_bytes)
        for tile in range(tl.program_id(0), tl.cdiv(blocks, LANES), tl.num_programs(0)):
            block, live, at, where = places(tile, owner, stripe, begin, blocks, n, BLOCK, LANES)
            v = load_message(message, at, block, live, live[:, None] & (at >= 0), blocks, BLOCK)
            tl.store(out + where, rounded(v, out.dtype.element_ty), mask=live[:, None] & (where < n))


@triton.jit
def arrive(table: tl.tensor, counter: tl.tensor, WORLD: tl.constexpr, PADDED: tl.constexpr) -> None:
    """Adds one to a counter of every rank, once all threads of this program have written what they had to write."""
    tl.debug_barrier()
    rank = tl.arange(0, PADDED)
    counters = tl.load(table + rank, mask=rank < WORLD, other=0).to(tl.pointer_type(tl.int32)) + counter
    one = tl.full((PADDED,), 1, tl.int32)
    tl.atomic_add(counters, one, mask=rank < WORLD, sem="release", scope="sys")


@triton.jit
def await_all(header: tl.tensor, counter: tl.tensor, goal: tl.tensor, LIMIT: tl.constexpr) -> None:
    """Returns when a counter of this rank has come to ``goal``; with a LIMIT, after that many looks at the latest.

    Then what the others wrote before they arrived can be read by all threads.
    """
    behind = goal - tl.atomic_add(header + counter, 0, sem="acquire", scope="sys")
    if LIMIT:
        looks = 1
        while (behind > 0) & (looks < LIMIT):
            behind = goal - tl.atomic_add(header + counter, 0, sem="acquire", scope="sys")
            looks += 1
        if behind > 0:
            tl.store(header + _GAVE_UP, 1)
    else:
        while behind > 0:
            behind = goal - tl.atomic_add(header + counter, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


# One compiled kernel for all ranks and sizes: where ranks share a device, loading a second one would wait for the first
# to end, which waits for the second.
@triton.jit(do_not_specialize=["rank", "stripe", "begin", "blocks"])
def all_reduce_kernel(
    x: tl.tensor, out: tl.tensor, table: tl.tensor, rank: tl.tensor, stripe: tl.tensor, begin: tl.tensor,
    blocks: tl.tensor, n: tl.tensor, room_bytes: tl.tensor, RECIPROCAL: tl.constexpr, WORLD: tl.constexpr,
    PADDED: tl.constexpr, OWN_EXACT: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """One launch; see the top of this file."""
    program = tl.program_id(0)
    header = room_of(table, rank, 0).to(tl.pointer_type(tl.int32))
    goal = tl.load(header + _COUNTERS + program) + WORLD
    push_parts(x, table, rank, stripe, begin, blocks, n, room_bytes, RECIPROCAL, WORLD, OWN_EXACT, BLOCK, LANES)
    arrive(table, program, WORLD, PADDED)
    await_all(header, program, goal, LIMIT)
    reduce(x, out, table, rank, stripe, begin, blocks, n, room_bytes, RECIPROCAL, WORLD, OWN_EXACT, BLOCK, LANES)
    arrive(table, _COUNTERS + program, WORLD, PADDED)
    await_all(header, _COUNTERS + program, goal, LIMIT)
    decode(out, table, rank, stripe, begin, blocks, n, room_bytes, WORLD, BLOCK, LANES)


@dataclass(frozen=True, slots=True)
class Launch:
    """What is the same for all launches over one set of buffers.

    table       int64 ``[world]``: where this rank sees the buffer of each
    room_bytes  of a room, a multiple of 16
    programs    at most in a launch, the same on all ranks; all of them have to be on the device together
    looks       at a counter before a program gives up, 0 for no end
    """

    table: torch.Tensor
    rank: int
    world: int
    room_bytes: int
    programs: int
    looks: int = 0

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor, *, stripe: int, begin: int, blocks: int, block: int, own_exact: bool
    ) -> None:
        """Sums blocks ``begin .. begin + blocks`` of every stripe (of ``stripe`` blocks of ``block``) of ``x [n]``."""
        lanes = max(1, ELEMENTS // block)
        grid = (min(self.programs, -(-blocks // lanes)),)
        all_reduce_kernel[grid](
            x, out, self.table, self.rank, stripe, begin, blocks, x.numel(), self.room_bytes, RECIPROCAL=_RECIPROCAL,
            WORLD=self.world, PADDED=triton.next_power_of_2(self.world), OWN_EXACT=own_exact, LIMIT=self.looks,
            BLOCK=block, LANES=lanes, enable_fp_fusion=False, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
