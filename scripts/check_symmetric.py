"""Runs the symmetric-memory all-reduce on one GPU, its ranks on streams, and times it: the first thing to do on a GPU.

    python scripts/check_symmetric.py                        # 100 000 sums for each number of ranks, then times
    python scripts/check_symmetric.py --ranks 4 --calls 2000

Every rank has a buffer and a stream of the same device, and the launches of a sum wait for one another as they would on
as many GPUs; each has the programs that leave room for the others'. Sums of changing sizes follow one another without a
pause, some ranks held up at random, and every result is compared with the definition (``codec_reference.py``, on
the CPU). Prints JSON lines; exits with 1 at the first difference, and where there is no CUDA device. Times are those of
one device's memory, which all ranks share: what links cost is not in them. Under Triton's interpreter
(TRITON_INTERPRET=1) a rank is a process of this machine, to see that all of it runs: these times mean nothing.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.multiprocessing.spawn import start_processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ptqpipe.numerics.kernels.triton import interpreting
from ptqpipe.serving.collectives import codec_reference as reference
from ptqpipe.serving.collectives.codecs import WireCodec, get_wire_codec
from ptqpipe.serving.collectives.symmetric import SymmetricExchange, SymmetricMemory, buffer_bytes
from ptqpipe.serving.collectives.wire import Stats, cut

GPU = not interpreting()
DEVICE = "cuda" if GPU else "cpu"
SIZES = (70, 4096, 100_003, 1 << 18, 999_999) if GPU else (70, 4096)  # elements of the sums that are checked
SEEDS = 2  # inputs a size
KEPT = 32  # sums between two comparisons
ALIGNED = 64  # elements: Triton compiles another kernel for tensors that begin elsewhere, which `warm_up` has not seen
DELAY_CYCLES = 400_000  # at most, by which a rank is held up: some 200 us
TIMED = tuple(1 << power for power in range(17, 26, 2)) if GPU else (1 << 13,)  # elements
BATCHES, BATCH = (9, 20) if GPU else (1, 1)


@dataclass(frozen=True, slots=True)
class VirtualRanks:
    """All ranks of a group, as streams of one device; as processes where Triton is interpreted, without streams."""

    memories: tuple[SymmetricMemory, ...]
    streams: tuple[torch.cuda.Stream, ...]

    @classmethod
    def of(cls, world: int) -> "VirtualRanks":
        """Ranks whose programs have a processor each."""
        buffers = tuple(torch.zeros(buffer_bytes(world), dtype=torch.uint8, device=DEVICE) for _ in range(world))
        if not GPU:
            shared = tuple(buffer.share_memory_() for buffer in buffers)
            return cls(tuple(SymmetricMemory(shared, rank, 2) for rank in range(world)), ())
        programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count // world
        memories = tuple(SymmetricMemory(buffers, rank, programs) for rank in range(world))
        streams = tuple(torch.cuda.Stream() for _ in range(world))
        wait()
        return cls(memories, streams)

    def sum(self, xs: list[torch.Tensor], outs: list[torch.Tensor], codec: WireCodec, *, cycles: list[int]) -> None:
        """Queues one sum, that of rank r into ``outs[r]``, each rank held up for its cycles first."""
        layout = cut(xs[0].numel(), len(xs), unit=codec.unit, chunk_elements=xs[0].numel())
        sums = [
            SymmetricExchange(memory, codec, layout, x, out, Stats())
            for memory, x, out in zip(self.memories, xs, outs, strict=True)
        ]
        if not GPU:
            start_processes(lambda rank: sums[rank].two_shot(), nprocs=len(sums), start_method="fork")
            return
        for exchange, stream, held in zip(sums, self.streams, cycles, strict=True):
            with torch.cuda.stream(stream):
                if held:
                    torch.cuda._sleep(held)
                exchange.two_shot()

    def warm_up(self, xs: list[torch.Tensor], codec: WireCodec) -> None:
        """Compiles and loads the kernel for such tensors: once ranks wait for each other, loading would wait for them.

        All ranks of this memory are one and the same, so that a single launch is everybody who has to come.
        """
        if not GPU:
            return
        world, first = len(xs), self.memories[0]
        alone = SymmetricMemory((torch.zeros_like(first.buffers[0]),) * world, 0, first.programs)
        layout = cut(xs[0].numel(), world, unit=codec.unit, chunk_elements=xs[0].numel())
        SymmetricExchange(alone, codec, layout, xs[0], torch.empty_like(xs[0]), Stats()).two_shot()
        torch.cuda._sleep(1)
        wait()


def wait() -> None:
    """Until everything that was queued is done."""
    if GPU:
        torch.cuda.synchronize()


def empty(*shape: int) -> torch.Tensor:
    """bfloat16 that all ranks can write to."""
    room = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    return room if GPU else room.share_memory_()


def by_definition(xs: list[torch.Tensor], codec: WireCodec) -> torch.Tensor:
    """The sum of CPU tensors as ``reference.py`` has it, stripe by stripe."""
    layout = cut(xs[0].numel(), len(xs), unit=codec.unit, chunk_elements=xs[0].numel())
    stripes = []
    for owner in range(len(xs)):
        first, last = owner * layout.stripe * codec.unit, (owner + 1) * layout.stripe * codec.unit
        parts = [x[first:last] for x in xs]
        messages = [None if rank == owner else reference.encode(part, codec) for rank, part in enumerate(parts)]
        stripes.append(reference.reduce(messages, parts[owner], codec)[1])
    return torch.cat(stripes)


def inputs(world: int, elements: int, seed: int) -> list[torch.Tensor]:
    """A bfloat16 tensor a rank, of very different magnitudes, on the CPU."""
    g = torch.Generator().manual_seed(seed)
    powers = torch.randint(-20, 20, (world, elements), generator=g).float().exp2()
    return list((torch.randn(world, elements, generator=g) * powers).bfloat16())


def check(world: int, calls: int, codec: WireCodec) -> bool:
    """Whether all sums of all ranks have the right bits; prints the first that has not."""
    ranks, draw = VirtualRanks.of(world), random.Random(world)
    cases = []
    for size in SIZES:
        for seed in range(SEEDS):
            xs = inputs(world, size, seed)
            cases.append(([x.to(DEVICE) for x in xs], by_definition(xs, codec).to(DEVICE)))
            ranks.warm_up(cases[-1][0], codec)
    rooms = empty(min(KEPT, calls), world, -(-max(SIZES) // ALIGNED) * ALIGNED)
    begun = time.perf_counter()
    for first in range(0, calls, KEPT):
        picked = [draw.choice(cases) for _ in range(min(KEPT, calls - first))]
        rooms.fill_(float("nan"))
        wait()
        results = []
        for room, (xs, _) in zip(rooms, picked, strict=False):
            outs = [row[: len(x)] for row, x in zip(room, xs, strict=True)]
            held = [draw.randrange(DELAY_CYCLES) if draw.random() < 0.3 else 0 for _ in range(world)]
            ranks.sum(xs, outs, codec, cycles=held)
            results.append(outs)
        wait()
        for at, (outs, (_, wanted)) in enumerate(zip(results, picked, strict=True)):
            wrong = [rank for rank, out in enumerate(outs) if not torch.equal(out, wanted)]
            if wrong:
                say(check="bits", ranks=world, call=first + at, elements=len(wanted), wrong_ranks=wrong)
                return False
    say(check="bits", ranks=world, calls=calls, differences=0, seconds=round(time.perf_counter() - begun, 1))
    return True


def times(world: int, codec: WireCodec) -> None:
    """Microseconds of a sum, and of a copy of one rank's tensor: medians of batches that are queued without a pause."""
    ranks = VirtualRanks.of(world)
    for elements in TIMED:
        xs = [torch.randn(elements, device=DEVICE).bfloat16() for _ in range(world)]
        outs = [empty(elements) for _ in xs]
        ranks.warm_up(xs, codec)
        sums, copies = [], []
        for _ in range(BATCHES):
            begun = time.perf_counter()
            for _ in range(BATCH):
                ranks.sum(xs, outs, codec, cycles=[0] * world)
            wait()
            middle = time.perf_counter()
            for _ in range(BATCH):
                outs[0].copy_(xs[0])
            wait()
            sums.append((middle - begun) / BATCH * 1e6)
            copies.append((time.perf_counter() - middle) / BATCH * 1e6)
        say(
            check="time", ranks=world, bytes=2 * elements, sum_us=round(statistics.median(sums), 1),
            copy_us=round(statistics.median(copies), 1), device=torch.cuda.get_device_name() if GPU else "interpreter",
        )  # fmt: skip


def say(**fields: object) -> None:
    """One JSON line."""
    print(json.dumps(fields), flush=True)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks")
    parser.add_argument("--calls", type=int, default=100_000, help="sums to check for each")
    options = parser.parse_args()
    # Streams that share a hardware queue run one after another: ranks that wait for each other must not.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    if GPU and not torch.cuda.is_available():
        print("check_symmetric.py needs a CUDA device, and torch finds none", file=sys.stderr)
        return 1
    codec, worlds = get_wire_codec("int8"), [int(world) for world in options.ranks.split(",")]
    if not all(check(world, options.calls, codec) for world in worlds):
        return 1
    for world in worlds:
        times(world, codec)
    return 0


if __name__ == "__main__":
    sys.exit(main())
