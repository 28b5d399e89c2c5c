"""The quantized all-reduce over gloo beside the best plain one, on links of a given speed. Linux, root, ip and tc.

Usage: sudo python scripts/bench_allreduce.py [--links 1 5 10 loopback] [--ranks 2 4] [--sizes 64K 1M 16M]
           [--codec int8] [--repeat 15] [--rounds 400] [--seconds 10] [--passes 1] [--soak 0] [--results FILE]

Makes a network namespace a rank, joined by a bridge in one of their own; every port is held to the rate by tc tbf in
both directions. All are removed at the end, however it comes. One JSON line a link, number of ranks and size. Times
are rank 0's, in ms, each after a barrier, in place, the ways of summing in turns of changing order, on links that have
no burst left. Sizes below 4 MiB take --rounds of turns, or as many as --seconds allow (at least --repeat), larger ones
--repeat:

    gloo, two_shot    bfloat16: the backend's all-reduce, and our schedule without a codec; the faster one is ``plain``
    quantized, auto   ours; ``auto`` is what a QuantAllReduce that measured its threshold does with that size
    ratio_min/median  plain over quantized, above 1 is faster; ``ideal`` is the ratio of the bytes, ``of_ideal_*`` how
                      much of it that is
    auto_ratio        plain over auto, medians; ``_low`` and ``_high`` bound 95 % of what it is when the rounds are
                      drawn anew (whole rounds, so that what disturbs one disturbs all its ways)
    auto_way          what auto chose: own, one_shot, two_shot or quantized; ``auto_from`` and ``auto_plain`` are all
                      that it chose, ``auto_start_s`` how long it took
    wire              bytes that left rank 0's interface, headers included, over those of bfloat16 without headers, and
                      that over its ideal
    error             relative L2 error of the sum of Gaussians, float64 being exact; ``identical``: on all ranks alike
    phases            seconds of rank 0's thread a call

--soak N: N calls with random sizes, dtypes and codecs over loopback; one line with the number of results that differed
between ranks.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from ptqpipe.serving.collectives import CODECS, QuantAllReduce

SIZES = ("64K", "256K", "1M", "4M", "16M", "64M")
BURST = {1: "128kb", 5: "256kb", 10: "512kb"}
DRAIN_BYTES = 512 << 10  # what tc lets through at once, at most
SMALL_BYTES = 4 << 20  # of messages that are measured more often: a core that wakes late is much of their time
OFTEN = 8  # rounds between two looks at the clock
DRAWS = 1000  # of rounds, for the interval
PORT = 29650
LIMIT_S = 390
WIRE_CALLS = 4


def bytes_of(size: str) -> int:
    """4M -> 4194304."""
    return int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]


# ---- the network ----


def ip(*words: str) -> None:
    """Runs ip."""
    subprocess.run(["ip", *words], check=True)


def shape(namespace: str, device: str, gbit: float) -> None:
    """What leaves ``device`` is held to ``gbit``."""
    words = f"qdisc add dev {device} root tbf rate {gbit}gbit burst {BURST.get(int(gbit), '1mb')} latency 100ms".split()
    subprocess.run(["ip", "netns", "exec", namespace, "tc", *words], check=True)


@contextmanager
def network(ranks: int, gbit: float) -> Iterator[list[str]]:
    """Namespaces with addresses 10.77.0.1.. on devices called eth0, one a rank."""
    hub = f"ptqar{os.getpid()}h"
    names = [f"ptqar{os.getpid()}n{rank}" for rank in range(ranks)]
    made: list[str] = []
    try:
        for name in (hub, *names):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge0", "up")
        for rank, name in enumerate(names):
            ip("-n", hub, "link", "add", f"port{rank}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", hub, "link", "set", f"port{rank}", "master", "bridge0", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            shape(name, "eth0", gbit)
            shape(hub, f"port{rank}", gbit)
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def launch(ranks: int, link: str, *, limit_s: float, program: Sequence[str] = (__file__,)) -> list[dict[str, object]]:
    """The lines that rank 0 prints. ``program`` is started for each rank, with this command's options and ``--worker
    RANK RANKS LINK``."""
    if link == "loopback":
        return run_ranks(ranks, link, None, limit_s=limit_s, program=program)
    with network(ranks, float(link)) as names:
        return run_ranks(ranks, link, names, limit_s=limit_s, program=program)


def run_ranks(
    ranks: int, link: str, names: list[str] | None, *, limit_s: float, program: Sequence[str]
) -> list[dict[str, object]]:
    """Starts the ranks, waits for them, and reads rank 0's lines. RuntimeError when one fails."""
    children, port = [], PORT + os.getpid() % 1000  # others may be at it over loopback
    for rank in range(ranks):
        command = [] if names is None else ["ip", "netns", "exec", names[rank]]
        command += [sys.executable, *program, *sys.argv[1:], "--worker", str(rank), str(ranks), link]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if names is None else "eth0"}
        environment |= {"MASTER_ADDR": "127.0.0.1" if names is None else "10.77.0.1", "MASTER_PORT": str(port)}
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        children.append(subprocess.Popen(command, stdout=output, text=True, env=environment))
    try:
        text, _ = children[0].communicate(timeout=limit_s)
        codes = [child.wait(timeout=30) for child in children]
    finally:
        for child in children:
            child.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes} on link {link}")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


# ---- a rank ----


def sent_bytes() -> int:
    """Bytes that have left this namespace's interface."""
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def seconds(run: Callable[[torch.Tensor], object], x: torch.Tensor, given: torch.Tensor, drain: torch.Tensor) -> float:
    """Of one call, from a barrier on. ``drain`` is summed before, so that no call finds what tc's bucket saved up."""
    x.copy_(given)
    if drain.numel():
        dist.all_reduce(drain)
    dist.barrier()
    begun = time.perf_counter()
    run(x)
    return time.perf_counter() - begun


def own_sum(x: torch.Tensor) -> object:
    """The backend's."""
    return dist.all_reduce(x)


def identical(x: torch.Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    mine = torch.tensor([zlib.crc32(x.contiguous().view(torch.uint8).numpy().tobytes())])
    all_of_them = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(mine, other) for other in all_of_them)


def partial(elements: int, rank: int) -> torch.Tensor:
    """bfloat16 Gaussians, other ones for every rank."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(1000 + rank)).bfloat16()


def relative_error(total: torch.Tensor) -> float:
    """Of the sum of all ranks' ``partial``."""
    exact = torch.zeros(total.numel(), dtype=torch.float64)
    for rank in range(dist.get_world_size()):
        exact += partial(total.numel(), rank)
    return float((total.double() - exact).norm() / exact.norm())


def measure(
    options: argparse.Namespace, size: str, link: str, reduces: tuple[QuantAllReduce, QuantAllReduce], start_s: float
) -> None:
    """One size, all ways in turns; rank 0 prints a line. ``start_s``: how long the second all-reduce took to make."""
    forced, auto = reduces
    given = partial(bytes_of(size) // 2, dist.get_rank())
    x = torch.empty_like(given)
    before = forced.stats()
    times = turns(options, given, x, reduces, link)
    spent = phases(before, forced, len(times["quantized"]) + 1)
    sent = wire_bytes(forced, x)
    forced.quantized(x.copy_(given), x)
    error, same = relative_error(x), identical(x)
    same = identical(auto(x.copy_(given), x)) and same
    if dist.get_rank() == 0:
        line: dict[str, object] = {"link": link, "ranks": dist.get_world_size(), "size": size, "codec": options.codec}
        line |= summary(forced, times, nbytes=given.nbytes, sent=sent)
        line |= interval(times)
        line |= {"auto_way": auto.method_for(given.numel(), given.dtype), "auto_from": auto.min_bytes}
        line |= {"auto_plain": auto.thresholds.plain, "auto_start_s": round(start_s, 2)}
        line |= {"error": round(error, 5), "identical": same, "phases": spent}
        print(json.dumps(line))
        sys.stdout.flush()


def turns(
    options: argparse.Namespace,
    given: torch.Tensor,
    x: torch.Tensor,
    reduces: tuple[QuantAllReduce, QuantAllReduce],
    link: str,
) -> dict[str, list[float]]:
    """Milliseconds by way, after one round to warm up; the same place in each is the same round."""
    forced, auto = reduces
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "gloo": own_sum,
        "two_shot": forced.plain_two_shot,
        "quantized": lambda v: forced.quantized(v, v),
        "auto": lambda v: auto(v, v),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    drain = torch.zeros(0 if link == "loopback" else 2 * DRAIN_BYTES // 4)
    rounds = options.rounds if given.nbytes < SMALL_BYTES else options.repeat
    order, draw, begun = list(ways), random.Random(0), time.perf_counter()
    for turn in range(rounds + 1):
        draw.shuffle(order)
        for name in order:
            took = seconds(ways[name], x, given, drain)
            if turn:
                times[name].append(took * 1e3)
        if turn >= options.repeat and turn % OFTEN == 0:
            late = torch.tensor([time.perf_counter() - begun > options.seconds])
            dist.broadcast(late, 0)
            if bool(late.item()):
                break
    return times


def wire_bytes(reduce: QuantAllReduce, x: torch.Tensor) -> float:
    """Bytes that leave rank 0's interface for one quantized sum. A barrier comes after all that was sent before it.

    All ranks share the loopback interface, and its bytes.
    """
    x.zero_()
    dist.barrier()
    before = sent_bytes()
    for _ in range(WIRE_CALLS):
        reduce.quantized(x, x)
    dist.barrier()
    sharing = reduce.world if os.environ["GLOO_SOCKET_IFNAME"] == "lo" else 1
    return (sent_bytes() - before) / WIRE_CALLS / sharing


def summary(reduce: QuantAllReduce, times: dict[str, list[float]], *, nbytes: int, sent: float) -> dict[str, object]:
    """Minima, medians, ratios and shares of the ideal."""
    least = {name: min(values) for name, values in times.items()}
    middle = {name: statistics.median(values) for name, values in times.items()}
    plain = (min(least["gloo"], least["two_shot"]), min(middle["gloo"], middle["two_shot"]))
    ideal, ranks = 16 / reduce.codec.bits, reduce.world
    ratio = (plain[0] / least["quantized"], plain[1] / middle["quantized"])
    of_bf16 = sent / (2 * (ranks - 1) / ranks * nbytes)
    return {
        "ms_min": {name: round(value, 3) for name, value in least.items()},
        "ms_median": {name: round(value, 3) for name, value in middle.items()},
        "ratio_min": round(ratio[0], 3),
        "ratio_median": round(ratio[1], 3),
        "ideal": round(ideal, 3),
        "of_ideal_min": round(ratio[0] / ideal, 3),
        "of_ideal_median": round(ratio[1] / ideal, 3),
        "rounds": len(times["auto"]),
        "auto_ratio_min": round(plain[0] / least["auto"], 3),
        "wire": round(of_bf16, 4),
        "wire_of_ideal": round(of_bf16 * ideal, 4),
    }


def interval(times: dict[str, list[float]]) -> dict[str, float]:
    """The better plain median over that of auto, and where it lies when the rounds are drawn anew."""
    ways = torch.tensor([times["gloo"], times["two_shot"], times["auto"]], dtype=torch.float64)
    rounds = ways.shape[1]
    chosen = torch.randint(rounds, (DRAWS, rounds), generator=torch.Generator().manual_seed(0))

    def ratio(drawn: torch.Tensor) -> torch.Tensor:
        """[3, draws, rounds] to [draws]."""
        middle = drawn.quantile(0.5, dim=2)
        return middle[:2].amin(0) / middle[2]

    low, high = ratio(ways[:, chosen]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    middle = float(ratio(ways[:, None]))
    return {"auto_ratio": round(middle, 3), "auto_ratio_low": round(low, 3), "auto_ratio_high": round(high, 3)}


def phases(before: object, reduce: QuantAllReduce, calls: int) -> dict[str, float]:
    """Milliseconds a call in each phase."""
    old, new = asdict(before), asdict(reduce.stats())  # type: ignore[call-overload]
    return {name: round((new[name] - old[name]) / calls * 1e3, 3) for name in new if name.endswith("_s")}


def soak(calls: int) -> None:
    """Random sizes, dtypes, codecs, in place or not, alternating; rank 0 prints how many results differed."""
    draw = random.Random(0)
    reduces = [QuantAllReduce(codec=codec, min_bytes=0, chunk_bytes=1 << draw.randint(10, 18)) for codec in CODECS]
    reduces.append(QuantAllReduce(min_bytes=0, hadamard=64, own_exact=False))
    begun, wrong = time.perf_counter(), 0
    for call in range(calls):
        reduce = draw.choice(reduces)
        elements = draw.choice((draw.randint(1, 300), draw.randint(1, 20_000), draw.randint(1, 400_000)))
        dtype = draw.choice((torch.bfloat16, torch.float32, torch.float16))
        x = torch.randn(elements, generator=torch.Generator().manual_seed(call * 8 + dist.get_rank())).to(dtype)
        y = reduce(x, x if draw.random() < 0.3 else None)
        wrong += not identical(y)
    if dist.get_rank() == 0:
        took = time.perf_counter() - begun
        print(
            json.dumps({"soak": calls, "ranks": dist.get_world_size(), "differing": wrong, "seconds": round(took, 1)})
        )


def worker(options: argparse.Namespace) -> None:
    """One rank."""
    rank, ranks, link = int(options.worker[0]), int(options.worker[1]), options.worker[2]
    torch.set_num_threads(1)
    if options.pin:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    if options.soak:
        soak(options.soak)
    else:
        forced = QuantAllReduce(
            codec=options.codec, block=options.block, hadamard=options.hadamard, min_bytes=0,
            chunk_bytes=bytes_of(options.chunk), one_shot=options.one_shot,
        )  # fmt: skip
        begun = time.perf_counter()
        auto = QuantAllReduce(codec=options.codec, block=options.block, hadamard=options.hadamard)
        start_s = time.perf_counter() - begun
        for size in options.sizes:
            measure(options, size, link, (forced, auto), start_s)
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["1", "5", "10", "loopback"], help="Gbit/s, or loopback")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--codec", default="int8", choices=CODECS)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--hadamard", type=int, default=0)
    parser.add_argument("--chunk", default="4M")
    parser.add_argument("--one-shot", action="store_true")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=400, help="of sizes below 4 MiB")
    parser.add_argument("--seconds", type=float, default=10, help="after which these take no more rounds")
    parser.add_argument("--passes", type=int, default=1, help="times that everything is done")
    parser.add_argument("--pin", action="store_true", help="each rank on a core of its own")
    parser.add_argument("--soak", type=int, default=0)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Prints the lines, and adds them to --results."""
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    links = ["loopback"] if options.soak else options.links
    for _ in range(options.passes):
        for ranks in options.ranks:
            for link in links:
                for line in launch(ranks, link, limit_s=LIMIT_S * len(options.sizes)):
                    print(json.dumps(line), flush=True)
                    if options.results:
                        with options.results.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
