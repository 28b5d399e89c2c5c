"""Speed of the Triton kernels on a CUDA device, beside a device memory copy measured in the same rounds.

Prints one JSON line a kernel: median Gparam/s over the rounds, bytes moved per weight, and the ratio to the weights per
second that a copy moving as many bytes would reach (1.0 is the memory's limit). Before anything is timed the kernels'
bytes are compared with the torch reference on a slice. Without a device it says so and exits.

    python scripts/bench_triton.py [--rows 16384] [--columns 16384] [--rounds 20]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch

from ptqpipe.formats import Format, get_format
from ptqpipe.kernels import triton as kernels
from ptqpipe.qtensor import encode
from ptqpipe.search import get_search


def seconds(call: Callable[[], object], rounds: int) -> list[float]:
    """Device time of each of ``rounds`` calls, after three that are not counted."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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


def main() -> None:
    """Measures every kernel on one bfloat16 matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=16384, help="a multiple of 1024")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available() or not kernels.available() or kernels.interpreting():
        print("no CUDA device with Triton here: nothing to measure")
        return
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
