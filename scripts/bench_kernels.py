"""Speed of the CPU kernels on every instruction set of this machine, beside the pure-torch paths that they equal.

Prints one JSON line a kernel, instruction set and size: millions of weights per second of CPU time (of this process,
all threads), the median over the rounds and the best of them. One thread. "cache" is a matrix of a megaweight (2 MB of
bfloat16), "memory" one beyond the cache, taken in runs of rows as the converter takes it. Sources are bfloat16 unless
the kernel's name says otherwise. The first lines are a copy of the same bytes. Before anything is timed the bytes of
the kernels are compared with the torch reference.

    python scripts/bench_kernels.py [--rounds 7] [--weights 33554432] [--only nvfp4] [--no-torch]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ptqpipe.numerics.formats import Format, get_format
from ptqpipe.numerics.kernels import cpu, reference
from ptqpipe.numerics.qtensor import QTensor, encode
from ptqpipe.numerics.search import get_search
from ptqpipe.quantization.unit import chunks

COLUMNS = 4096
SEARCHES = [
    ("nvfp4", "exact"), ("nvfp4", "absmax"), ("nvfp4", "four_over_six"), ("mxfp4", "exact"), ("mxfp4", "ocp_floor"),
    ("mxfp8", "exact"), ("mxfp6_e2m3", "exact"), ("fp8_channel", "exact"), ("fp8_channel", "absmax"),
    ("fp8_block", "exact"), ("fp8_tensor", "exact"), ("e2m1/8/e4m3/global", "exact"), ("e2m1/32/ue5m3", "exact"),
]  # fmt: skip
WIDE = [
    (name, dtype) for dtype in (torch.float32, torch.float16) for name in ("fp8_channel", "fp8_block", "fp8_tensor")
]

Call = Callable[[torch.Tensor], object]


def speeds(call: Call, parts: list[torch.Tensor], rounds: int) -> list[float]:
    """Mweights per CPU-second of each round over all ``parts``, after one that is not counted."""
    weights = sum(part.numel() for part in parts)
    found = []
    for _ in range(rounds + 1):
        start = time.process_time()
        for part in parts:
            call(part)
        found.append(weights / (time.process_time() - start) / 1e6)
    return found[1:]


def global_scale(w: torch.Tensor, fmt: Format) -> torch.Tensor | None:
    """1.5 times the abs-max one: inside the octave that the converter searches."""
    return w.abs().amax().float() * (1.5 / fmt.max_product) if fmt.has_global else None


def kernel_cases(w: torch.Tensor) -> Iterator[tuple[str, Call]]:
    """(name, call) of every kernel."""
    importance = torch.rand(w.shape[1])
    yield "amax", cpu.amax
    for name, rule in SEARCHES:
        fmt = get_format(name)
        g = global_scale(w, fmt)
        yield f"{name} {rule}", partial(cpu.block_quantize, fmt=fmt, rule=rule, global_scale=g)
    for name in ("nvfp4", "mxfp8"):
        fmt = get_format(name)
        g = global_scale(w, fmt)
        weighted = partial(cpu.block_quantize, fmt=fmt, global_scale=g, importance=importance)
        yield f"{name} exact weighted", weighted
        yield f"{name} score_total", partial(cpu.score_total, fmt=fmt, global_scale=g)
    for name in ("nvfp4", "mxfp8", "fp8_channel"):
        yield from decode_cases(w, get_format(name))


def decode_cases(w: torch.Tensor, fmt: Format) -> Iterator[tuple[str, Call]]:
    """Decoding and its error: the codes of the first rows serve every run of rows of the same height."""
    g = global_scale(w, fmt)
    q = {height: quantized(w[:height], fmt, g) for height in {stop - start for start, stop in runs(w)}}
    yield f"{fmt.name} decode_error", lambda x: cpu.decode_error(q[len(x)].data, q[len(x)].scales, fmt, x, g)
    yield f"{fmt.name} dequantize", lambda x: cpu.dequantize(q[len(x)].data, q[len(x)].scales, fmt, g)
    yield (
        f"{fmt.name} dequantize to bfloat16",
        lambda x: cpu.dequantize(q[len(x)].data, q[len(x)].scales, fmt, g, torch.bfloat16),
    )


def torch_cases(w: torch.Tensor) -> Iterator[tuple[str, Call]]:
    """The references of the same work."""
    yield "amax", lambda x: x.abs().amax()
    for name, rule in SEARCHES:
        fmt = get_format(name)
        g = global_scale(w, fmt)
        yield f"{name} {rule}", partial(searched, fmt=fmt, rule=rule, g=g)


def wide_cases(*, kernels: bool) -> Iterator[tuple[str, Call, torch.dtype]]:
    """(name, call, dtype of the source) of the exact searches that depend on it, by the kernels or in torch."""
    for name, dtype in WIDE:
        fmt, label = get_format(name), f"{name} exact {str(dtype).removeprefix('torch.')}"
        if kernels:
            yield label, partial(cpu.block_quantize, fmt=fmt), dtype
        else:
            yield label, partial(searched, fmt=fmt, rule="exact", g=None), dtype


def copied(x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """A copy of x in the first rows of ``to``."""
    return to[: len(x)].copy_(x)


def searched(x: torch.Tensor, fmt: Format, rule: str, g: torch.Tensor | None) -> QTensor:
    """Search and encode in torch."""
    return encode(x, get_search(rule).search(x, fmt, global_scale=g), fmt=fmt, global_scale=g)


def quantized(w: torch.Tensor, fmt: Format, g: torch.Tensor | None) -> QTensor:
    """By the kernel."""
    done = cpu.block_quantize(w, fmt, global_scale=g)
    assert done is not None
    return QTensor(fmt, (w.shape[0], w.shape[1]), done[0], done[1], g)


def require_equal(w: torch.Tensor) -> None:
    """Ends the run unless every kernel gives the bytes of its reference on the first rows of float32 ``w``."""
    bfloat16 = [(name, rule, torch.bfloat16) for name, rule in SEARCHES]
    for name, rule, dtype in [*bfloat16, *((name, "exact", dtype) for name, dtype in WIDE)]:
        fmt, part = get_format(name), w[:128].to(dtype)
        g = global_scale(part, fmt)
        want = searched(part, fmt, rule, g)
        for isa in cpu.isas():
            cpu.force_isa(isa)
            done = cpu.block_quantize(part, fmt, rule=rule, global_scale=g)
            same = done is not None and torch.equal(done[0], want.data) and torch.equal(done[1], want.scales)
            error = same and cpu.decode_error(want.data, want.scales, fmt, part, g)
            if not same or error != reference.decode_error(want, part):
                sys.exit(f"{name} {rule} on {isa}: the kernel differs from the reference; nothing was timed")


def runs(w: torch.Tensor) -> list[tuple[int, int]]:
    """The runs of rows that the converter would take."""
    return chunks((w.shape[0], w.shape[1]), get_format("nvfp4"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--weights", type=int, default=1 << 25, help="size of the matrix beyond the cache")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--no-torch", action="store_true", help="leave the references out")
    args = parser.parse_args()
    if not cpu.available():
        sys.exit("the CPU kernels are not built: pip install -e . with a C++ compiler")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(args.weights // COLUMNS, COLUMNS, generator=generator) * 0.02
    require_equal(exact)
    w = exact.bfloat16()
    small = w[:256].clone()

    def parts_of(x: torch.Tensor, size: str) -> list[torch.Tensor]:
        return [x[:256].clone()] if size == "cache" else [x[start:stop] for start, stop in runs(x)]

    sizes = {size: parts_of(w, size) for size in ("cache", "memory")}

    def show(kernel: str, isa: str, call: Call, size: str, dtype: torch.dtype = torch.bfloat16) -> None:
        parts = sizes[size] if dtype == torch.bfloat16 else parts_of(exact.to(dtype), size)
        found = speeds(call, parts, args.rounds)
        median, best = round(statistics.median(found), 1), round(max(found), 1)
        print(json.dumps({"kernel": kernel, "isa": isa, "size": size, "mweights_per_cpu_s": median, "best": best}))
        sys.stdout.flush()

    for size, parts in sizes.items():
        target = torch.empty_like(max(parts, key=len))
        show("copy", "torch", partial(copied, to=target), size)
    for isa in cpu.isas():
        cpu.force_isa(isa)
        for size in sizes:
            for kernel, call in kernel_cases(w if size == "memory" else small):
                if args.only in kernel:
                    show(kernel, isa, call, size)
            for kernel, call, dtype in wide_cases(kernels=True):
                if args.only in kernel:
                    show(kernel, isa, call, size, dtype)
    if not args.no_torch:
        for kernel, call in torch_cases(small):
            if args.only in kernel:
                show(kernel, "torch", call, "cache")
        for kernel, call, dtype in wide_cases(kernels=False):
            if args.only in kernel:
                show(kernel, "torch", call, "cache", dtype)


if __name__ == "__main__":
    main()
