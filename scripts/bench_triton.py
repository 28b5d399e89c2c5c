"""Speed of the Triton kernels on a CUDA device, beside a device memory copy measured in the same rounds.

Prints one JSON line a kernel: median Gparam/s over the rounds, bytes moved per weight, and the ratio to the weights per
second that a copy moving as many bytes would reach (1.0 is the memory's limit). Before anything is timed the kernels'
bytes are compared with the torch reference on a slice. Without a device it says so and exits.

    python scripts/bench_triton.py [--only quantize|linear] [--rows 16384] [--columns 16384] [--rounds 20]
        [--formats nvfp4 ...] [--shapes 4096x4096 ...] [--batches 1 8 ...]

Then, for every format, shape ``[N, K]`` and batch, packed linear layers beside torch's bfloat16 linear, alternating:
microseconds a call of `packed_linear` (what models run), of the Triton kernel alone, of decoding and torch's product
(the way of many rows), of FP8 by FP8 where the device has it, each with its ratio (bfloat16's time / its time: above 1
is faster). Every call takes the next of COPIES_BYTES of weights, so that none is in a cache. Times are of CUDA graphs,
which leave the launches on the host out of account. Products are compared with float64's first.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ptqpipe.api.matrices import quantize
from ptqpipe.formats import Format, get_format
from ptqpipe.kernels import cuda_fp8, triton as kernels, triton_linear
from ptqpipe.qtensor import encode
from ptqpipe.runtime import packed as runtime
from ptqpipe.runtime.activations import InputQuantizer
from ptqpipe.runtime.packed import PackedWeight, packed_linear
from ptqpipe.schemes import Activation
from ptqpipe.search import get_search

FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8_channel", "fp8_block")
SHAPES = ("4096x4096", "1024x4096", "14336x4096", "4096x14336")
BATCHES = (1, 2, 4, 8, 16, 64, 512, 2048)
COPIES_BYTES = 512 << 20  # of packed weights that a measurement goes through: more than a second-level cache


def seconds(call: Callable[[], object], rounds: int) -> list[float]:
    """Device time of each of ``rounds`` calls, after three that are not counted."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return times


def require_equal(w: torch.Tensor, fmt: Format, rule: str, g: torch.Tensor | None) -> None:
    """Ends the run unless the kernel gives the reference's bytes on the first rows of ``w``."""
    part = w[:8, :1024].contiguous()
    done = kernels.block_quantize(part, fmt, rule=rule, global_scale=g)
    cpu = part.cpu()
    at = None if g is None else g.cpu()
    search = get_search("brute_force" if rule == "exact" else rule)
    scales = search.search(cpu, fmt, global_scale=at)
    want = encode(cpu, scales, fmt=fmt, global_scale=at)
    if done is None or not torch.equal(done[1].cpu(), scales) or not torch.equal(done[0].cpu(), want.data):
        sys.exit(f"{fmt.name} {rule}: the kernel differs from the reference; nothing was timed")


def cases(w: torch.Tensor) -> list[tuple[str, float, Callable[[], object]]]:
    """(name, bytes moved per weight, call) of every kernel on ``w``."""
    found: list[tuple[str, float, Callable[[], object]]] = []
    importance = torch.rand(w.shape[1], device=w.device)
    for name in ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8"):
        fmt = get_format(name)
        g = w.abs().amax().float() / fmt.max_product if fmt.has_global else None
        stored = fmt.bits_per_weight((w.shape[0], w.shape[1])) / 8
        for rule in ("exact", "absmax"):
            require_equal(w, fmt, rule, g)
            call = _quantize(w, fmt, rule, g, None)
            found.append((f"{name} {rule}", 2 + stored, call))
        found.append((f"{name} exact weighted", 2 + stored, _quantize(w, fmt, "exact", g, importance)))
        done = kernels.block_quantize(w, fmt, global_scale=g)
        if done is not None:
            found.append((f"{name} dequantize", 2 + stored, _dequantize(done, fmt, g)))
            found.append((f"{name} decode_error", 2 + stored, _decode_error(done, fmt, w, g)))
    scales = torch.full((w.shape[0], 1), 0.001, dtype=torch.bfloat16, device=w.device)
    found.append(("fp8_channel encode", 3, lambda: kernels.fp8_encode(w, scales, get_format("fp8_channel"))))
    found.append(("amax", 2, lambda: kernels.amax(w)))
    return found


def _quantize(
    w: torch.Tensor, fmt: Format, rule: str, g: torch.Tensor | None, importance: torch.Tensor | None
) -> Callable[[], object]:
    return lambda: kernels.block_quantize(w, fmt, rule=rule, global_scale=g, importance=importance)


def _dequantize(done: tuple[torch.Tensor, torch.Tensor], fmt: Format, g: torch.Tensor | None) -> Callable[[], object]:
    return lambda: kernels.dequantize(*done, fmt, g, torch.bfloat16)


def _decode_error(
    done: tuple[torch.Tensor, torch.Tensor], fmt: Format, w: torch.Tensor, g: torch.Tensor | None
) -> Callable[[], object]:
    return lambda: kernels.decode_error(*done, fmt, w, g)


def ways(x: torch.Tensor, weights: list[PackedWeight]) -> dict[str, list[Callable[[], object]]]:
    """Calls of each way to multiply x by packed weights, one a weight."""
    found: dict[str, list[Callable[[], object]]] = {
        "packed": [partial(packed_linear, x, w) for w in weights],
        "kernel": [partial(triton_linear.linear, x, w.data, w.scales, w.factor, w.fmt, w.shape) for w in weights],
        "decoded": [partial(runtime._tiles, x, w, None) for w in weights],
    }
    if weights[0].scales is None and cuda_fp8.fits(x.device, weights[0].shape):
        token = InputQuantizer(Activation.FP8_TOKEN)
        found["fp8"] = [partial(packed_linear, x, w, quantizer=token) for w in weights]
    return found


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """All the calls, one after the other, as one graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        calls[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def require_close(x: torch.Tensor, weight: PackedWeight) -> None:
    """Ends the run unless the kernel's product is float64's: two float32 roundings a product and sum, one bfloat16."""
    y = triton_linear.linear(x, weight.data, weight.scales, weight.factor, weight.fmt, weight.shape)
    w = weight.dequantize().double()
    exact, sums = x.double() @ w.t(), x.double().abs() @ w.abs().t()
    limit = sums * (2 * w.shape[1] * 2.0**-24) + 2.0**-8 * exact.abs() + 1e-30
    if y is None or not bool(((y.double() - exact).abs() <= limit).all()):
        sys.exit(f"{weight.fmt.name} {weight.shape} {x.shape[0]} rows: the product is not float64's; nothing was timed")


def linear_line(fmt: str, shape: tuple[int, int], batch: int, *, rounds: int) -> dict[str, object]:
    """One line."""
    n, k = shape
    gen = torch.Generator(device="cuda").manual_seed(0)
    w = (torch.randn(n, k, device="cuda", generator=gen) * 0.02).bfloat16()
    first = PackedWeight.from_qtensor(quantize(w.cpu(), fmt)).to("cuda")
    x = torch.randn(batch, k, device="cuda", generator=gen).bfloat16()
    require_close(x, first)
    copies = max(2, COPIES_BYTES // first.nbytes) if batch <= 64 else 2
    weights = [first, *(_copy(first) for _ in range(copies - 1))]
    floats = [w.clone() for _ in range(max(2, copies // 3))]
    theirs = graph_of([partial(torch.nn.functional.linear, x, f) for f in floats])
    line: dict[str, object] = {
        "linear": fmt, "device": torch.cuda.get_device_name(), "shape": f"{n}x{k}", "batch": batch,
    }  # fmt: skip
    for name, calls in ways(x, weights).items():
        ours = graph_of(calls)
        pairs = [(seconds(theirs.replay, 1)[0], seconds(ours.replay, 1)[0]) for _ in range(rounds)]
        bf16_us, us = (statistics.median(pair[i] for pair in pairs) * 1e6 for i in (0, 1))
        bf16_us, us = bf16_us / len(floats), us / len(calls)
        line |= {f"{name}_us": round(us, 2), f"{name}_ratio": round(bf16_us / us, 3), "bf16_us": round(bf16_us, 2)}
    return line


def _copy(weight: PackedWeight) -> PackedWeight:
    scales = None if weight.scales is None else weight.scales.clone()
    return replace(weight, data=weight.data.clone(), scales=scales)


def measure_linear(args: argparse.Namespace) -> None:
    """Prints the lines of linear layers."""
    for shape in args.shapes:
        n, k = (int(part) for part in shape.split("x"))
        for fmt in args.formats:
            for batch in args.batches:
                print(json.dumps(linear_line(fmt, (n, k), batch, rounds=args.rounds)), flush=True)


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=16384, help="a multiple of 1024")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=("quantize", "linear"))
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    args = parser.parse_args()
    if not torch.cuda.is_available() or not kernels.available() or kernels.interpreting():
        print("no CUDA device with Triton here: nothing to measure")
        return
    if args.only != "linear":
        measure_quantize(args)
    if args.only != "quantize":
        measure_linear(args)


def measure_quantize(args: argparse.Namespace) -> None:
    """Prints the lines of the kernels that quantize, on one bfloat16 matrix."""
    gen = torch.Generator(device="cuda").manual_seed(0)
    w = (torch.randn(args.rows, args.columns, device="cuda", generator=gen) * 0.02).bfloat16()
    target = torch.empty_like(w)
    device = torch.cuda.get_device_name()
    for name, moved, call in cases(w):
        copy = statistics.median(seconds(lambda: target.copy_(w), args.rounds))
        median = statistics.median(seconds(call, args.rounds))
        bytes_per_second = 2 * w.nbytes / copy
        line = {
            "kernel": name,
            "device": device,
            "shape": [args.rows, args.columns],
            "gparam_per_s": round(w.numel() / median / 1e9, 2),
            "bytes_per_weight": round(moved, 4),
            "copy_gb_per_s": round(bytes_per_second / 1e9, 1),
            "ratio_to_copy": round(w.numel() / median / (bytes_per_second / moved), 4),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
