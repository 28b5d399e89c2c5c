"""Speed of the Triton kernels on a CUDA device, beside a device memory copy measured in the same rounds.

Prints one JSON line a kernel: median Gparam/s over the rounds, bytes moved per weight, and the ratio to the weights per
second that a copy moving as many bytes would reach (1.0 is the memory's limit). Before anything is timed the kernels'
bytes are compared with the torch reference on a slice ("equal"). ModelOpt's kernel for NVFP4's scales is timed with
ours where ModelOpt is installed. Without a device it says so and exits with 1; under Triton's interpreter
(TRITON_INTERPRET=1) the same runs on CPU tensors, to see that it runs: its times mean nothing.

    python scripts/bench_triton.py [--only quantize|linear|attention|columns] [--rows 16384] [--columns 16384]
        [--rounds 20] [--formats nvfp4 ...] [--shapes 4096x4096 ...] [--batches 1 8 ...]

Then, for every format, shape ``[N, K]`` and batch, packed linear layers beside torch's bfloat16 linear, alternating:
microseconds a call of `packed_linear` (what models run: up to 64 rows a Triton kernel), of decoding and torch's product
(the way of many rows), of FP8 inputs by FP8 weights and of torch's `_scaled_mm` alone where the device has it, each
with its ratio (bfloat16's time / its time: above 1 is faster), and the largest error of `packed_linear` as a share of
what float32 sums may have ("error"). Every call takes the next of COPIES_BYTES of weights, so that none is in a cache.
Times are of CUDA graphs, which leave the launches on the host out of account.

Then attention over pages, of decode steps and of whole prompts ("queries" of each sequence): microseconds a layer,
those of torch's attention sequence by sequence, and for decode steps those of a copy that reads the keys and values
("read_us") with the kernel's ratio to it (1.0 is the memory's limit).

Last, error feedback ("feed_s") and one sweep of refinement ("sweep_s") of a layer: seconds by Triton's kernels, by
torch's operations on the device, and by the CPU's kernels where they are built; and with moments of the gradients at
the outputs, a few rows at a time ("two_sided_s", Triton's alone). The error is by how much Triton's output error
differs from torch's, as a share of 1 % of it: sums come in another order.

Exits with 1 if bytes differ, or an error is above its limit.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ptqpipe.api.matrices import quantize
from ptqpipe.numerics.formats import Format, get_format
from ptqpipe.numerics.kernels import cpu, cuda_fp8, triton as kernels, triton_attention, triton_linear
from ptqpipe.numerics.kernels.cpu_attention import PagedSpans
from ptqpipe.numerics.qtensor import QTensor, encode
from ptqpipe.numerics.schemes import Activation
from ptqpipe.numerics.search import get_search
from ptqpipe.quantization import gptq, gptq_steps, kronecker
from ptqpipe.quantization.metric import Metric, descending, make_metric, output_error
from ptqpipe.quantization.refine import Blocks, block_metrics, refine
from ptqpipe.quantization.unit import kernel_for, quantize_rows
from ptqpipe.runtime import packed as runtime
from ptqpipe.runtime.input_quantizers import InputQuantizer
from ptqpipe.runtime.packed import PackedWeight, packed_linear
from ptqpipe.serving.engine.attention import fused_attention, load

BLOCK_FORMATS = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8")
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8_channel", "fp8_block")
SHAPES = ("4096x4096", "1024x4096", "14336x4096", "4096x14336")
BATCHES = (1, 2, 4, 8, 16, 64, 512, 2048)
LAYERS = ("4096x4096", "4096x14336")
ATTENTION = (32, 8, 128, 16)  # heads, of keys and values, their dim, tokens a page: a model of 8B has them
DECODES = ((1, 512), (1, 4096), (1, 32768), (16, 512), (16, 4096), (64, 512), (64, 4096))  # sequences, tokens of each
PROMPTS = ((1, 512), (1, 4096), (8, 512))
DEVICE = "cpu" if kernels.interpreting() else "cuda"
NAME = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
COPIES_BYTES = 512 << 20 if DEVICE == "cuda" else 0  # of weights that are gone through: more than the caches hold


def seconds(call: Callable[[], object], rounds: int) -> list[float]:
    """Device time of each of ``rounds`` calls, after three that are not counted."""
    for _ in range(3 if DEVICE == "cuda" else 0):
        call()
    return [elapsed(call) for _ in range(rounds)]


def elapsed(call: Callable[[], object]) -> float:
    """Device time of one call; the host's under the interpreter."""
    if DEVICE == "cpu":
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def equal(w: torch.Tensor, fmt: Format, rule: str, g: torch.Tensor | None, importance: torch.Tensor | None) -> bool:
    """Whether the kernel gives the reference's bytes on the first rows of ``w``."""
    part, h = w[:8, :1024].contiguous(), None if importance is None else importance[:1024]
    done = kernels.block_quantize(part, fmt, rule=rule, global_scale=g, importance=h)
    cpu, at, h = part.cpu(), None if g is None else g.cpu(), None if h is None else h.cpu()
    search = get_search("brute_force" if rule == "exact" else rule)
    scales = search.search(cpu, fmt, global_scale=at, importance=h)
    want = encode(cpu, scales, fmt=fmt, global_scale=at)
    return done is not None and torch.equal(done[1].cpu(), scales) and torch.equal(done[0].cpu(), want.data)


Case = tuple[str, float, bool | None, Callable[[], object]]
"""Kernel, bytes moved per weight, whether its bytes are the reference's (None: not compared here), and a call of it."""


def cases(w: torch.Tensor, formats: Sequence[str]) -> Iterator[Case]:
    """Every kernel on ``w``."""
    importance = torch.rand(w.shape[1], device=w.device)
    for name in formats:
        fmt = get_format(name)
        g = w.abs().amax().float() / fmt.max_product if fmt.has_global else None
        moved = 2 + fmt.bits_per_weight((w.shape[0], w.shape[1])) / 8
        for rule, h in (("exact", None), ("absmax", None), ("exact", importance)):
            words = f"{name} {rule}" + ("" if h is None else " weighted")
            yield words, moved, equal(w, fmt, rule, g, h), _quantize(w, fmt, rule, g, h)
        done = kernels.block_quantize(w, fmt, global_scale=g)
        if done is not None:
            yield f"{name} dequantize", moved, None, _dequantize(done, fmt, g)
            yield f"{name} decode_error", moved, None, _decode_error(done, fmt, w, g)
    scales = torch.full((w.shape[0], 1), 0.001, dtype=torch.bfloat16, device=w.device)
    yield "fp8_channel encode", 3, None, lambda: kernels.fp8_encode(w, scales, get_format("fp8_channel"))
    yield "amax", 2, None, lambda: kernels.amax(w)


def peers(w: torch.Tensor) -> Iterator[Case]:
    """ModelOpt's search of NVFP4's scales (no codes), where it is installed."""
    try:
        from modelopt.torch.kernels.quantization.gemm.nvfp4_fp8_sweep import nvfp4_fp8_scale_sweep
    except ImportError:
        return
    g = w.abs().amax().float()
    yield "modelopt nvfp4_fp8_scale_sweep", 2 + 4 / 16, None, lambda: nvfp4_fp8_scale_sweep(w, g, 16)


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
        "decoded": [partial(runtime._tiles, x, w, None) for w in weights],
    }
    if weights[0].scales is None and cuda_fp8.fits(x.device, weights[0].shape):
        token = InputQuantizer(Activation.FP8_TOKEN)
        found["fp8"] = [partial(packed_linear, x, w, quantizer=token) for w in weights]
    return found


def run_of(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """All the calls, one after the other, as one graph; under the interpreter as they are."""
    if DEVICE == "cpu":
        return lambda: [call() for call in calls]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay  # which keeps the graph


def share_of_limit(x: torch.Tensor, weight: PackedWeight) -> float:
    """The largest error of `packed_linear` against float64, as a share of what it may be.

    Two float32 roundings a product and sum, one of the bfloat16 result; of many rows a second one, by the factor.
    """
    y = packed_linear(x, weight)
    w = weight.dequantize().double()
    exact, sums = x.double() @ w.t(), x.double().abs() @ w.abs().t()
    roundings = 1 if len(x) <= triton_linear.MANY else 2
    limit = sums * (2 * w.shape[1] * 2.0**-24) + roundings * 2.0**-8 * exact.abs() + 1e-30
    return float(((y.double() - exact).abs() / limit).max())


def linear_line(fmt: str, shape: tuple[int, int], batch: int, *, rounds: int) -> dict[str, object]:
    """One line."""
    n, k = shape
    gen = torch.Generator(device=DEVICE).manual_seed(0)
    w = (torch.randn(n, k, device=DEVICE, generator=gen) * 0.02).bfloat16()
    first = PackedWeight.from_qtensor(quantize(w, fmt))
    x = torch.randn(batch, k, device=DEVICE, generator=gen).bfloat16()
    share = share_of_limit(x, first)
    copies = max(2, COPIES_BYTES // first.nbytes) if batch <= 64 else 2
    weights = [first, *(_copy(first) for _ in range(copies - 1))]
    floats = [w.clone() for _ in range(max(2, copies // 3))]
    theirs = run_of([partial(torch.nn.functional.linear, x, f) for f in floats])
    line: dict[str, object] = {
        "linear": fmt, "device": NAME, "shape": f"{n}x{k}", "batch": batch, "error": round(share, 4),
    }  # fmt: skip
    for name, calls in (ways(x, weights) | fp8_ways(x, floats)).items():
        ours = run_of(calls)
        pairs = [(elapsed(theirs), elapsed(ours)) for _ in range(rounds)]
        bf16_us, us = (statistics.median(pair[i] for pair in pairs) * 1e6 for i in (0, 1))
        bf16_us, us = bf16_us / len(floats), us / len(calls)
        line |= {f"{name}_us": round(us, 2), f"{name}_ratio": round(bf16_us / us, 3), "bf16_us": round(bf16_us, 2)}
    return line


def fp8_ways(x: torch.Tensor, floats: list[torch.Tensor]) -> dict[str, list[Callable[[], object]]]:
    """torch's own product of FP8 codes with one scale each, which others' kernels are compared with; its input is
    quantized already."""
    if not cuda_fp8.fits(x.device, (floats[0].shape[0], floats[0].shape[1])):
        return {}
    one, codes = torch.ones((), device=x.device), x.to(torch.float8_e4m3fn)
    others = [f.to(torch.float8_e4m3fn).t() for f in floats]
    call = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return {"scaled_mm": [partial(call, codes, other) for other in others]}


def _copy(weight: PackedWeight) -> PackedWeight:
    scales = None if weight.scales is None else weight.scales.clone()
    return replace(weight, data=weight.data.clone(), scales=scales)


def measure_linear(args: argparse.Namespace) -> bool:
    """Prints the lines of linear layers; whether all errors are within their limit."""
    good = True
    for batch in args.batches:
        for shape in args.shapes:
            n, k = (int(part) for part in shape.split("x"))
            for fmt in args.formats or FORMATS:
                line = linear_line(fmt, (n, k), batch, rounds=args.rounds)
                print(json.dumps(line), flush=True)
                good = good and float(str(line["error"])) <= 1
    return good


class Cache:
    """Pages of ``batch`` sequences of ``tokens`` tokens, in random order; several layers, more than the caches hold."""

    def __init__(self, batch: int, tokens: int, count: int, *, codes: bool) -> None:
        heads, kv_heads, dim, size = ATTENTION
        gen = torch.Generator(device=DEVICE).manual_seed(0)
        pages, dtype = -(-tokens // size), torch.float8_e4m3fn if codes else torch.bfloat16
        shape = (batch * pages, size, kv_heads, dim)
        first = [torch.randn(shape, device=DEVICE, generator=gen).to(dtype) for _ in "kv"]
        self.nbytes = 2 * batch * tokens * kv_heads * dim * first[0].element_size()
        copies = max(1, min(16, COPIES_BYTES // self.nbytes)) if count == 1 else 1
        self.layers = [first, *([page.clone() for page in first] for _ in range(copies - 1))]
        scale = torch.full((1, 1), 0.5, device=DEVICE)
        self.scales = (scale, scale) if codes else None
        self.query = torch.randn(batch * count, heads, dim, device=DEVICE, generator=gen).bfloat16()
        self.tables = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).view(batch, pages)
        starts, totals = torch.arange(batch + 1) * count, torch.full((batch,), tokens)
        nothing = torch.zeros(batch * count, dtype=torch.int64)
        self.where = triton_attention.place(PagedSpans(self.tables, totals, starts, 0), nothing, torch.device(DEVICE))
        self.there, self.count, self.tokens = self.tables.to(DEVICE), count, tokens

    def kernel(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The kernel's results."""
        assert self.where is not None
        found = triton_attention.attention(
            self.query, keys, values, self.where, scaling=ATTENTION[2] ** -0.5, scales=self.scales
        )
        assert found is not None
        return found

    def by_torch(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """torch's attention of each sequence, as the engine has it where there is no kernel."""
        scale = None if self.scales is None else self.scales[0]
        found = []
        for table, query in zip(self.there, self.query.split(self.count), strict=True):
            k, v = (load(pages, table, self.tokens, scale, query.dtype) for pages in (keys, values))
            found.append(fused_attention(query, k, v, None, ATTENTION[2] ** -0.5))
        return torch.cat(found)


def attention_line(batch: int, tokens: int, count: int, *, codes: bool, rounds: int) -> dict[str, object]:
    """One line. The error is the distance to torch's results, as a share of 2^-8 of the largest value and 2^-7 of the
    result: either way rounds weights and results to bfloat16."""
    cache = Cache(batch, tokens, count, codes=codes)
    keys, values = cache.layers[0]
    found, wanted = (call(keys, values).float() for call in (cache.kernel, cache.by_torch))
    limit = 2.0**-8 * float(values.float().abs().max()) * (0.5 if codes else 1.0) + 2.0**-7 * wanted.abs()
    line: dict[str, object] = {
        "attention": "fp8" if codes else "bfloat16", "device": NAME, "batch": batch, "tokens": tokens,
        "queries": count, "error": round(float(((found - wanted).abs() / limit).max()), 4),
    }  # fmt: skip
    ways = {"kernel": cache.kernel, "torch": cache.by_torch}
    runs = {name: run_of([partial(call, *layer) for layer in cache.layers]) for name, call in ways.items()}
    if count == 1:
        targets = [torch.empty_like(page) for page in cache.layers[0]]
        pairs = [pair for layer in cache.layers for pair in zip(targets, layer, strict=True)]
        runs["read"] = run_of([partial(target.copy_, page) for target, page in pairs])
    times = [{name: elapsed(run) for name, run in runs.items()} for _ in range(rounds)]
    us = {name: statistics.median(one[name] for one in times) * 1e6 / len(cache.layers) for name in runs}
    if count == 1:
        us["read"] /= 2  # a copy writes as much
        line["ratio_to_read"] = round(us["read"] / us["kernel"], 4)
    return line | {f"{name}_us": round(value, 2) for name, value in us.items()}


def measure_attention(args: argparse.Namespace) -> bool:
    """Prints the lines of attention; whether all errors are within their limit."""
    cases = [(*case, 1) for case in DECODES] + [(batch, tokens, tokens) for batch, tokens in PROMPTS]
    if DEVICE == "cpu":
        cases = [(2, 40, 1), (1, 40, 40)]
    good = True
    for batch, tokens, count in cases:
        for codes in (False, True):
            line = attention_line(batch, tokens, count, codes=codes, rounds=args.rounds)
            print(json.dumps(line), flush=True)
            good = good and float(str(line["error"])) <= 1
    return good


class Layer:
    """A weight and the metric of its input on one device."""

    def __init__(self, w: torch.Tensor, fmt: Format, metric: Metric, blocks: Blocks | None) -> None:
        self.w, self.fmt, self.metric, self.blocks = w, fmt, metric, blocks
        self.g = w.abs().amax() / fmt.max_product if fmt.has_global else None
        self.seconds: dict[str, float] = {}

    @classmethod
    def drawn(cls, n: int, k: int, fmt: Format) -> "Layer":
        """[n, k]; the columns of its input are correlated and differ in size."""
        gen = torch.Generator(device=DEVICE).manual_seed(0)
        w = 0.02 * torch.randn(n, k, device=DEVICE, generator=gen)
        x = torch.randn(2048, k, device=DEVICE, generator=gen) * torch.rand(k, device=DEVICE, generator=gen)
        x += torch.randn(2048, 1, device=DEVICE, generator=gen)
        moment = x.t() @ x / len(x)
        group = fmt.block[1] if gptq.at_entry("auto", fmt) else 1
        return cls(w, fmt, make_metric(moment, order=descending(moment, group=group)), block_metrics(moment, fmt))

    def on_cpu(self) -> "Layer":
        """A copy."""
        m, b = self.metric, self.blocks
        metric = Metric(m.moment.cpu(), m.order.cpu(), m.factor.t().cpu().t(), m.weight.cpu(), m.damping)
        blocks = None if b is None else Blocks(*(x.cpu() for x in (b.feedback, b.weight, b.inverse, b.usable)))
        return Layer(self.w.cpu(), self.fmt, metric, blocks)

    def timed(self, name: str, call: Callable[[], QTensor]) -> QTensor:
        """What a call gives; its seconds are kept."""
        synchronize()
        begun = time.perf_counter()
        found = call()
        synchronize()
        self.seconds[name] = time.perf_counter() - begun
        return found

    def fed(self, w: torch.Tensor) -> QTensor:
        """Rows by error feedback."""
        if gptq.at_entry("auto", self.fmt):
            return gptq.codes_at_entry(w, self.fmt, metric=self.metric, global_scale=self.g)
        scales = quantize_rows(w, self.fmt, search="exact").scales
        return gptq.codes_at(w, scales, self.fmt, metric=self.metric)

    def swept(self, q: QTensor, w: torch.Tensor) -> QTensor:
        """These, refined."""
        return refine(q, w, moment=self.metric.moment, sweeps=1, blocks=self.blocks)

    def run(self, rows: int, known: Callable[[torch.device, str], object]) -> float:
        """The output error of the first rows after both, by the kernels that are ``known``."""
        w = self.w[:rows]
        with mock.patch.object(gptq_steps, "kernel_for", known):
            q = self.timed("feed", lambda: self.fed(w))
            q = self.timed("sweep", lambda: self.swept(q, w))
        return output_error(w - q.dequantize(), self.metric.moment)

    def two_sided(self) -> None:
        """All rows, a few at a time."""
        runs = [len(rows) for rows in self.w.split(1024)]
        x = [torch.randn(2 * n, n, device=DEVICE) for n in runs]
        outputs = [one.t() @ one / len(one) for one in x]
        with mock.patch.object(gptq_steps, "kernel_for", by_triton):
            self.timed(
                "two_sided", lambda: kronecker.codes(self.w, outputs, lambda rows: self.swept(self.fed(rows), rows))
            )


def by_triton(device: torch.device, name: str) -> object:
    """The kernel of this name of Triton's."""
    return getattr(kernels, name, None)


def synchronize() -> None:
    """Waits for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def columns_line(fmt: str, shape: tuple[int, int]) -> dict[str, object]:
    """One line."""
    layer = Layer.drawn(*shape, get_format(fmt))
    here, found = layer.on_cpu(), dict[str, object]()
    layer.run(min(64, shape[0]), by_triton)  # compiles
    ways: Mapping[str, tuple[Layer, Callable[[torch.device, str], object]]] = {
        "triton": (layer, by_triton),
        "torch": (layer, lambda device, name: None),
        "cpu": (here, kernel_for),
    }
    errors = {}
    for name, (one, known) in ways.items():
        if name == "cpu" and not cpu.available():
            continue
        errors[name] = one.run(shape[0], known)
        found |= {f"{name}_{part}_s": round(one.seconds[part], 3) for part in ("feed", "sweep")}
    layer.two_sided()
    found["two_sided_s"] = round(layer.seconds["two_sided"], 3)
    error = abs(errors["triton"] / errors["torch"] - 1) / 0.01
    line = {"columns": fmt, "device": NAME, "shape": f"{shape[0]}x{shape[1]}", "error": round(error, 4)}
    return line | {"threads": torch.get_num_threads()} | found


def measure_columns(args: argparse.Namespace) -> bool:
    """Prints the lines of error feedback; whether all errors are within their limit."""
    good = True
    for shape in LAYERS if args.shapes is SHAPES else args.shapes:
        n, k = (int(part) for part in shape.split("x"))
        for fmt in args.formats or ("nvfp4", "mxfp4"):
            line = columns_line(fmt, (n, k))
            print(json.dumps(line), flush=True)
            good = good and float(str(line["error"])) <= 1
    return good


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=16384, help="a multiple of 128")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=("quantize", "linear", "attention", "columns"))
    parser.add_argument("--formats", nargs="+")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    args = parser.parse_args()
    if not kernels.available():
        sys.exit("bench_triton.py needs Triton and a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)")
    parts = {
        "quantize": measure_quantize, "linear": measure_linear, "attention": measure_attention,
        "columns": measure_columns,
    }  # fmt: skip
    good = [measure(args) for name, measure in parts.items() if args.only in (None, name)]
    sys.exit(0 if all(good) else 1)


def measure_quantize(args: argparse.Namespace) -> bool:
    """Prints the lines of the kernels that quantize, on one matrix; whether their bytes are the reference's."""
    gen = torch.Generator(device=DEVICE).manual_seed(0)
    w = (torch.randn(args.rows, args.columns, device=DEVICE, generator=gen) * 0.02).bfloat16()
    target = torch.empty_like(w)
    good = True
    for name, moved, same, call in chain(peers(w), cases(w, args.formats or BLOCK_FORMATS)):
        good = good and same is not False
        copy = statistics.median(seconds(lambda: target.copy_(w), args.rounds))
        median = statistics.median(seconds(call, args.rounds))
        bytes_per_second = 2 * w.nbytes / copy
        line = {
            "kernel": name,
            "device": NAME,
            "equal": same,
            "shape": [args.rows, args.columns],
            "gparam_per_s": round(w.numel() / median / 1e9, 2),
            "bytes_per_weight": round(moved, 4),
            "copy_gb_per_s": round(bytes_per_second / 1e9, 1),
            "ratio_to_copy": round(w.numel() / median / (bytes_per_second / moved), 4),
        }
        print(json.dumps(line), flush=True)
    return good


if __name__ == "__main__":
    main()
