"""Compiles every Triton kernel for GPUs that need not be here: what it takes of a multiprocessor, as JSON lines.

    python scripts/compile_triton.py [--capability 90 100] [--only nvfp4 all_reduce ...] [--jobs 16] [--ptx]

The launches are the package's own, on CPU tensors: Triton compiles for each what it would compile on that device, and
launches nothing. What it compiled stays in Triton's cache, where a process on such a device finds it. Exits with 1 if a
kernel does not compile, or keeps anything of a thread in memory (spills).

    registers, local_bytes  of a thread; local_bytes are what does not fit its registers
    shared_bytes, warps     of a program
    seconds                 to compile
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ptqpipe.numerics.formats import Format, get_format
from ptqpipe.numerics.kernels import (
    triton_attention,
    triton_block,
    triton_codecs,
    triton_columns,
    triton_layer,
    triton_linear,
    triton_messages,
    triton_rows,
    triton_symmetric,
)

BLOCK_FORMATS = (
    "nvfp4", "e2m1/16/e4m3", "e2m1/32/e4m3", "e2m1/8/ue5m3", "mxfp4", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2",
)  # fmt: skip
ROW_FORMATS = (*BLOCK_FORMATS, "fp8_channel", "fp8_tensor", "fp8_block")
LINEAR_FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8_channel", "fp8_block")
LINEAR_ROWS = (1, 16, 32, 64)
ATTENTION = ((32, 8, (128, 128)), (64, 8, (64, 64)), (14, 2, (80, 80)), (16, 16, (192, 128)), (8, 2, (256, 256)))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Launch = tuple[str, str, Callable[[], object]]
"""Kernel, what is special about it, and the call that launches it."""


class Absent:
    """What Triton asks a driver before it compiles, for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """The GPU that is compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """Its number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Of the launches that do not happen."""
        return 0


def block_launches() -> Iterator[Launch]:
    """Search and encode of every format, with weights of columns, totals and abs-max scales."""
    for name in BLOCK_FORMATS:
        fmt = get_format(name)
        plan = triton_block.plan_of(fmt)
        assert plan is not None
        g, h = (torch.ones(1) if fmt.has_global else None), torch.ones(4 * plan.block)
        for dtype in DTYPES if name in ("nvfp4", "mxfp4") else DTYPES[:1]:
            w = torch.zeros(256, 4 * plan.block, dtype=dtype)
            call = partial(triton_block.quantize, w, plan, lanes=128, global_scale=g)
            about = f"{name} {str(dtype).removeprefix('torch.')}"
            yield "block_quantize", about, partial(call, absmax=False, importance=None)
            yield "block_quantize", f"{about} weighted", partial(call, absmax=False, importance=h)
            yield "block_quantize", f"{about} absmax", partial(call, absmax=True, importance=None)
            for weights in (None, h):
                totals = partial(
                    triton_block.scores, w, plan, absmax=False, lanes=128, global_scale=g, importance=weights
                )
                yield "block_quantize", f"{about} totals{'' if weights is None else ' weighted'}", totals


def row_launches() -> Iterator[Launch]:
    """Decode, the error of a decode, FP8 codes and the largest magnitude."""
    for name in ROW_FORMATS:
        fmt, shape = get_format(name), (128, 256)
        plan = triton_rows.plan_of(fmt, global_divides=name == "nvfp4")
        assert plan is not None
        geometry, g = triton_rows.Geometry.of(fmt, shape), torch.ones(1)
        data = torch.zeros(shape[0], shape[1] * fmt.element.bits // 8, dtype=torch.uint8)
        scales = torch.zeros(fmt.scale_shape(shape), dtype=fmt.scale.dtype if not fmt.scale.enumerable else torch.uint8)
        given = dict[str, Any](plan=plan, geometry=geometry, lanes=1024)
        for dtype in DTYPES:
            out = torch.zeros(shape, dtype=dtype)
            about = f"{name} {str(dtype).removeprefix('torch.')}"
            yield "dequantize", about, partial(triton_rows.dequantize, out, data, scales, g, **given)
        w = torch.zeros(shape, dtype=torch.bfloat16)
        yield "decode_error", name, partial(triton_rows.decode_error, w, data, scales, g, **given)
        element = triton_codecs.minifloat_of(fmt.element)
        assert element is not None
        if not fmt.scale.enumerable:
            fp8 = partial(triton_rows.fp8_encode, w, scales, element=element, geometry=geometry, lanes=1024)
            yield "fp8_encode", name, fp8
    yield "amax", "bfloat16", partial(triton_rows.amax, torch.zeros(64, 64, dtype=torch.bfloat16), lanes=1024)


def linear_launches() -> Iterator[Launch]:
    """Products by rows of x, of a weight that keeps a device busy and of one that is cut into parts; the decode."""
    for name in LINEAR_FORMATS:
        fmt = get_format(name)
        whole = torch.zeros(4096, 4096, dtype=torch.bfloat16)
        weight = linear_weight(fmt, (4096, 4096), None)
        yield "unpack", name, partial(triton_linear._unpack, whole, weight, triton_linear._UNPACKED)
        for rows in LINEAR_ROWS:
            for dtype in DTYPES[:2]:
                for bias in (None, torch.zeros(4096, dtype=dtype)) if rows in (1, 16) else (None,):
                    weight = linear_weight(fmt, (4096, 4096), bias)
                    words = f"{name} {str(dtype).removeprefix('torch.')} {rows} rows"
                    x = torch.zeros(rows, 4096, dtype=dtype)
                    for parts in (1, 3) if rows in (1, 16) else (1,):
                        tile = triton_linear.tile_of(
                            weight.plan, rows, (4096, 4096), dtype, parts=parts, processors=132
                        )
                        about = words + (" bias" if bias is not None else "") + (" parts" if parts > 1 else "")
                        yield "tiles", about, partial(triton_linear._multiply, x, weight, tile, exact=False)


def linear_weight(fmt: Format, shape: tuple[int, int], bias: torch.Tensor | None) -> triton_linear.LinearWeight:
    """A weight of zeros as the kernels read it."""
    data = torch.zeros(shape[0], shape[1] * fmt.element.bits // 8, dtype=torch.uint8)
    scales = None
    if fmt.name != "fp8_channel":
        dtype = torch.uint8 if fmt.scale.enumerable else torch.bfloat16
        scales = torch.zeros(fmt.scale_shape(shape), dtype=dtype)
    plan = triton_linear.plan_of(fmt, scales)
    assert plan is not None
    factor = torch.ones(1 if fmt.has_global else shape[0]) if fmt.has_global or scales is None else None
    return triton_linear.LinearWeight(data.view(torch.int16), scales, factor, bias, plan)


def attention_launches() -> Iterator[Launch]:
    """Attention over pages: single queries, in one part and in several, and prompts; and their keys stored."""
    for heads, kv_heads, dims in ATTENTION:
        for dtype in DTYPES[: 3 if max(dims) <= 128 else 2]:
            for codes in (False, True):
                held = torch.float8_e4m3fn if codes else dtype
                keys, values = (torch.zeros(4, 16, kv_heads, dim).to(held) for dim in dims)
                scales = (torch.ones(kv_heads, 1), torch.ones(1, 1)) if codes else None
                about = f"{heads}/{kv_heads} heads {dims[0]}/{dims[1]} {str(dtype).removeprefix('torch.')}"
                about += " codes" if codes else ""
                terms: dict[str, Any] = {"softcap": 30.0, "sinks": torch.zeros(heads)} if dims[0] == 64 else {}
                for name, count, total in (("decode", 1, 9), ("parts", 1, 2000), ("prompt", 100, 100)):
                    where = triton_attention.DeviceSpans(
                        torch.zeros(count, dtype=torch.int64), torch.tensor([0, count]), torch.tensor([total]),
                        torch.zeros(1, dtype=torch.int64), torch.zeros(1, 125, dtype=torch.int64),
                        *((1, 1, total, 0) if count == 1 else (0, 0, 0, count)),
                    )  # fmt: skip
                    query = torch.zeros(count, heads, dims[0], dtype=dtype)
                    call = triton_attention._Call(query, keys, values, where, scales, 0.1, **terms)
                    yield f"attention {name}", about, call.run
                key, value = (torch.zeros(1, kv_heads, dim, dtype=dtype) for dim in dims)
                slots = torch.zeros(1, dtype=torch.int64)
                store = partial(triton_attention._store, keys, values, key, value, slots, scales)
                yield "attention store", about, store


def column_launches() -> Iterator[Launch]:
    """Error feedback and refinement of a run of columns, column by column and block by block."""
    for name in ("nvfp4", "mxfp4", "mxfp8"):
        element, block = get_format(name).element, get_format(name).block[1]
        x, codes = torch.zeros(triton_columns.RUN, 256), torch.zeros(triton_columns.RUN, 256, dtype=torch.uint8)
        square, weight, ladder = torch.zeros(triton_columns.RUN, triton_columns.RUN), torch.zeros(128), torch.ones(255)
        places = torch.zeros(triton_columns.RUN // block, 256, dtype=torch.int64)
        parts = torch.zeros(triton_columns.RUN // block, block, block)
        of_blocks = (parts, parts[:, 0].contiguous(), parts, torch.ones(triton_columns.RUN // block, dtype=torch.uint8))
        yield "columns feed", name, partial(triton_columns.feed_forward, x, x, x, square, element)
        yield "columns descend", name, partial(triton_columns.descend, x, x, codes, x, x, square, element)
        enter = partial(triton_columns.enter_rows, x, ladder, square, weight, block, 6, 15, element)
        yield "columns enter", name, enter
        for window in (2, 6):
            sweep = partial(
                triton_columns.sweep_block_rows, x, x, codes, places, ladder, square, of_blocks, (window, 1.0, 1),
                element,
            )  # fmt: skip
            yield "columns sweep", f"{name} {2 * window + 1} scales", sweep


def layer_launches() -> Iterator[Launch]:
    """What a decoder layer does between its products, of parts that are tensors of their own and that are views."""
    for rows, width in ((1, 4096), (16, 5120), (64, 896), (2, 16384)):
        x, weight = torch.zeros(rows, width, dtype=torch.bfloat16), torch.zeros(width, dtype=torch.bfloat16)
        yield "layer norm", f"{rows} of {width}", partial(triton_layer.norm, x, weight, 1e-5)
        yield "layer norm", f"{rows} of {width} added", partial(triton_layer.norm, x, weight, 1e-5, x)
        table, both = torch.zeros(1 << 16, dtype=torch.int16), torch.zeros(rows, 2 * width, dtype=torch.bfloat16)
        yield "layer gate", f"{rows} of {width}", partial(triton_layer.gated, both[:, :width], both[:, width:], table)
    for heads, kv_heads, dim in ((32, 8, 128), (14, 2, 64), (12, 4, 80), (8, 2, 256)):
        parts = torch.zeros(2, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
        q, k, v = parts.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
        angles, slots = torch.zeros(2, dim, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
        pages = torch.zeros(4, 16, kv_heads, dim, dtype=torch.bfloat16)
        for norms in (None, triton_layer.HeadNorms(angles[0], angles[1], 1e-6, 1e-6)):
            about = f"{heads}/{kv_heads} heads {dim}{'' if norms is None else ' norms'}"
            call = partial(triton_layer.rotate_and_store, q, k, v, (angles, angles), (pages, pages), slots, norms)
            yield "layer rotary", about, call


def message_launches() -> Iterator[Launch]:
    """Messages of the all-reduce, and the whole sum over symmetric memory."""
    for dtype in DTYPES:
        about = str(dtype).removeprefix("torch.")
        x, message = torch.zeros(8192, dtype=dtype), torch.zeros(8192 + 256, dtype=torch.uint8)
        yield "encode", about, partial(triton_messages.encode, x, message, 64)
        yield "decode", about, partial(triton_messages.decode, message, x, 64)
        parts = [None, message, message, message]
        yield "reduce", about, partial(triton_messages.reduce, parts, 16384, x, message, x, block=64)
    for world in (2, 4, 8):
        table, x = torch.zeros(world, dtype=torch.int64), torch.zeros(8192, dtype=torch.bfloat16)
        for looks in (0, 1000):
            launch = triton_symmetric.Launch(table, 0, world, 16384, 64, looks)
            call = partial(launch, x, x, stripe=64, begin=0, blocks=64, block=64, own_exact=True)
            yield "all_reduce", f"{world} ranks{' limited' if looks else ''}", call


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of local memory of a thread, as the assembler wrote them into a kernel's code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}
    return {"registers": found["REG"], "local_bytes": found["STACK"] + found["LOCAL"]}


def launches(only: list[str]) -> list[Launch]:
    """Those whose name or case contains one of the words; all of them without any."""
    parts = (
        block_launches,
        row_launches,
        linear_launches,
        attention_launches,
        column_launches,
        layer_launches,
        message_launches,
    )
    found = [launch for part in parts for launch in part()]
    return [one for one in found if not only or any(word in f"{one[0]} {one[1]}" for word in only)]


def compiled_by(launch: Callable[[], object]) -> list[tuple[str, Any]]:
    """(name, what Triton made of it) of the kernels that a call launches, which it compiles only."""
    run, made = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        made.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    return made


def lines_of(capability: int, launch: Launch, *, ptx: bool) -> list[dict[str, Any]]:
    """One line for each kernel of a launch; one with ``error`` where there is none."""
    kind, about, call = launch
    begun = time.perf_counter()
    try:
        made = compiled_by(call)
    except Exception as error:  # of any kind: Triton's errors have no common one
        text = " ".join(str(error).split())[-300:]
        return [{"kernel": kind, "case": about, "capability": capability, "error": f"{type(error).__name__}: {text}"}]
    seconds = round(time.perf_counter() - begun, 2)
    lines = []
    for name, kernel in made:
        line = {"kernel": name, "case": about, "capability": capability, "warps": kernel.metadata.num_warps}
        line |= {"shared_bytes": kernel.metadata.shared} | resources(kernel.asm["cubin"])
        line |= {"seconds": seconds, "triton": triton.__version__}
        lines.append(line | ({"ptx": kernel.asm["ptx"]} if ptx else {}))
    return lines


def share(capability: int, only: list[str], ptx: bool, job: int, jobs: int) -> int:
    """Compiles every ``jobs``-th launch and prints its lines; how many kernels failed or spill."""
    driver.set_active(Absent(capability))
    bad = 0
    for launch in launches(only)[job::jobs]:
        for line in lines_of(capability, launch, ptx=ptx):
            bad += "error" in line or line["local_bytes"] > 0
            print(json.dumps(line), flush=True)
    return bad


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", nargs="+", type=int, default=[90, 100])
    parser.add_argument("--only", nargs="+", default=[], help="launches whose kernel or case contains one of these")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the launches")
    parser.add_argument("--ptx", action="store_true", help="each line has the kernel's PTX, too")
    options = parser.parse_args()
    bad = 0
    for capability in options.capability:
        given = [(capability, options.only, options.ptx, job, options.jobs) for job in range(options.jobs)]
        if options.jobs == 1:
            bad += share(*given[0])
            continue
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            bad += sum(pool.starmap(share, given, chunksize=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
