"""The claims about Triton's error feedback and refinement. ``test_triton_columns.py`` runs this file in a process.

Once with TRITON_INTERPRET=1, which has to be set before Triton is imported, on CPU tensors; and once on a CUDA device
where there is one, with more rows. Expected values come from the torch references on the CPU.
"""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from ptqpipe.numerics.formats import FORMATS, Format, get_format
from ptqpipe.numerics.kernels import triton as kernels, triton_columns
from ptqpipe.numerics.qtensor import QTensor, code_values
from ptqpipe.quantization import gptq, gptq_steps, refine as refinement
from ptqpipe.quantization.gptq_steps import absmax_index, has_block_scales, scale_ladder
from ptqpipe.quantization.metric import Metric, descending, make_metric, output_error
from ptqpipe.quantization.unit import quantize_rows
from tests.numerics.kernels.cpu_cases import families, generator

INTERPRETED = kernels.interpreting()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
EACH = 4 if INTERPRETED else 300  # rows of each family
ELEMENTS = ("mxfp4", "mxfp8", "int8_channel", "int4_g32", "int8_signed_channel", "mxfp6_e2m3", "mxfp6_e3m2")


@pytest.fixture(autouse=True)
def _by_torch() -> Iterator[None]:
    """What is expected runs without kernels."""
    with mock.patch.object(gptq_steps, "kernel_for", return_value=None):
        yield


def hostile(width: int, *, each: int = EACH) -> torch.Tensor:
    """Weights of every family, [width, rows], whose rows fill no whole program."""
    found = torch.cat([w for _, w in families(each, 32 * -(-width // 32), seed=width)])
    return found[:-1, :width].t().contiguous()


def matrix(width: int, seed: int) -> torch.Tensor:
    """[width, width] of both signs and many magnitudes."""
    drawn = torch.randn(width, width, generator=generator(seed))
    return drawn * torch.exp2(torch.randint(-12, 1, drawn.shape, generator=generator(seed + 1)).float())


def metric_of(width: int, fmt: Format) -> Metric:
    x = torch.randn(3 * width, width, generator=generator(width)) @ torch.randn(width, width, generator=generator(1))
    moment = x.t() @ x / len(x)
    return make_metric(moment, order=descending(moment, group=fmt.block[1]))


def there(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies on the device."""
    return [x.to(DEVICE, copy=True) for x in tensors]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit."""
    found = found.cpu()
    return (
        torch.equal(found.view(torch.int32), wanted.view(torch.int32))
        if found.is_floating_point()
        else torch.equal(found, wanted)
    )


def exponents(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randint(-9, 2, shape, generator=generator(seed)).float()


@pytest.mark.parametrize("name", ELEMENTS[:4] if INTERPRETED else ELEMENTS)
@pytest.mark.parametrize("width", [1, 21] if INTERPRETED else [1, 37, 128, 200])
def test_feed_forward(name: str, width: int) -> None:
    exact, element = hostile(width), get_format(name).element
    s = torch.exp2(exponents(exact.shape, 1)) * (1 + torch.rand(exact.shape, generator=generator(2)))
    target = exact + 0.1 * torch.randn(exact.shape, generator=generator(3)) * exact.abs()
    feedback = matrix(width, 4)
    done = kernels.feed_forward(*there(exact, target, s, feedback), element)
    codes, error = gptq_steps.feed_forward(exact, target, s, feedback=feedback, element=element)
    assert same(done[0], codes)
    assert same(done[1], error)


@pytest.mark.parametrize("name", ELEMENTS[:4] if INTERPRETED else ELEMENTS)
@pytest.mark.parametrize("width", [1, 21] if INTERPRETED else [1, 37, 128, 200])
def test_descend(name: str, width: int) -> None:
    exact, element = hostile(width), get_format(name).element
    s = torch.exp2(exponents(exact.shape, 1)) * (1 + torch.rand(exact.shape, generator=generator(2)))
    error = 0.3 * torch.randn(exact.shape, generator=generator(3)) * s
    codes = torch.zeros(exact.shape, dtype=torch.uint8)
    moment = matrix(width, 4)
    moment.diagonal().abs_()
    if width > 1:
        moment[1, 1] = 0.0  # a column of no moment
        moment[2, 2] = 2.0**-130  # subnormal
    slope = torch.randn(exact.shape, generator=generator(5)) * s
    slope[2:3] *= 2.0**-120
    given = there(exact, error, codes, slope, s, moment)
    assert kernels.descend(*given, element)
    gptq_steps.descend(exact, error, codes, slope, s, moment=moment, element=element)
    assert same(given[2], codes)
    assert same(given[1], error)
    assert same(given[3], slope)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "e2m1/8/ue5m3"])
@pytest.mark.parametrize("count", [13] if INTERPRETED else [5, 13, 15])
def test_choose_block(name: str, count: int) -> None:
    fmt = get_format(name)
    width = fmt.block[1]
    ladder = scale_ladder(fmt, torch.tensor(3e-3) if fmt.has_global else None, torch.device("cpu"))
    target, feedback = hostile(width), matrix(width, 6)
    weight = torch.rand(width, generator=generator(7))
    first = absmax_index(target, ladder, fmt.element) - torch.randint(0, 9, (target.shape[1],), generator=generator(8))
    found = kernels.choose_block(*there(target, ladder, first), count, *there(feedback, weight), fmt.element)
    wanted = gptq_steps.choose_block(
        target, ladder, first, count=count, feedback=feedback, weight=weight, element=fmt.element
    )
    for one, other in zip(found, wanted, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("name", ["nvfp4"] if INTERPRETED else ["nvfp4", "mxfp4"])
def test_blocks_are_entered_in_order(name: str) -> None:
    """Within a run the sums come in the order of the columns, so that they can be written out."""
    fmt = get_format(name)
    width = 3 * fmt.block[1]
    metric, exact = metric_of(width, fmt), hostile(width, each=2 if INTERPRETED else EACH)
    size, error = fmt.block[1], torch.zeros_like(exact)
    ladder = scale_ladder(fmt, torch.tensor(3e-3) if fmt.has_global else None, torch.device("cpu"))
    codes, scales = torch.empty(exact.shape, dtype=torch.uint8), torch.empty(width // size, exact.shape[1]).long()
    for block in range(width // size):
        run = slice(block * size, (block + 1) * size)
        target = exact[run]
        for j in range(run.start):
            target = target + metric.factor[j, run].unsqueeze(1) * error[j]
        first = (absmax_index(target, ladder, fmt.element) - gptq.BELOW).clamp(min=0)
        codes[run], scales[block], _ = gptq_steps.choose_block(
            target, ladder, first, count=15, feedback=metric.factor[run, run], weight=metric.weight[run],
            element=fmt.element,
        )  # fmt: skip
        error[run] = exact[run] - code_values(codes[run], fmt.element) * ladder[scales[block]]
    found = kernels.enter_rows(*there(exact, ladder, metric.factor, metric.weight), size, gptq.BELOW, 15, fmt.element)
    assert same(found[1], scales)
    assert same(found[0], codes)


def test_a_block_that_is_left_alone_and_one_that_is_not() -> None:
    """One sweep: a block that is not usable keeps its scales; what is left of every weight is what its code leaves."""
    fmt, width = FORMATS["nvfp4"], 48 if INTERPRETED else 160
    moment, exact = metric_of(width, fmt).moment, 0.02 * torch.randn(width, 5, generator=generator(1))
    blocks, ladder = refinement.block_metrics(moment, fmt), scale_ladder(fmt, torch.tensor(1e-4), torch.device("cpu"))
    assert blocks is not None
    blocks.usable[1] = 0
    scales = absmax_index(exact.view(width // 16, 16, 5).transpose(0, 1).reshape(16, -1), ladder, fmt.element)
    scales = scales.view(width // 16, 5) - 20
    before, codes = scales.clone(), torch.zeros(exact.shape, dtype=torch.uint8)
    given = there(exact, exact, codes, scales, ladder, moment)
    of_blocks = tuple(there(blocks.feedback, blocks.weight, blocks.inverse, blocks.usable))
    assert kernels.sweep_block_rows(*given, of_blocks, (6, 1 - refinement.ENOUGH, 1), fmt.element)
    _, error, codes, scales = (x.cpu() for x in given[:4])
    same_scales = (scales == before).all(dim=1)
    assert same_scales.nonzero().flatten().tolist() == [1]
    decoded = code_values(codes, fmt.element) * ladder[scales].repeat_interleave(16, 0)
    assert same(error, exact - decoded)
    assert output_error((exact - decoded).t(), moment) < 0.5 * output_error(exact.t(), moment)


@pytest.mark.parametrize("name", ["nvfp4"] if INTERPRETED else ["nvfp4", "mxfp4", "fp8_channel"])
def test_a_weight_loses_no_more_than_by_torch(name: str) -> None:
    fmt, width = get_format(name), 80 if INTERPRETED else 288  # more than one run
    w = 0.02 * torch.randn(5 if INTERPRETED else 300, width, generator=generator(5))
    metric = metric_of(width, fmt if has_block_scales(fmt) else FORMATS["mxfp4"])
    g = w.abs().amax() / fmt.max_product if fmt.has_global else None
    scales = quantize_rows(w, fmt, search="absmax", global_scale=g).scales

    def made(device: torch.device) -> list[float]:
        moved = Metric(*(x.to(device) for x in (metric.moment, metric.order, metric.factor, metric.weight)), 0.01)
        rows, at = w.to(device), None if g is None else g.to(device)
        if has_block_scales(fmt):
            q = gptq.codes_at_entry(rows, fmt, metric=moved, global_scale=at)
        else:
            q = gptq.codes_at(rows, scales.to(device), fmt, metric=moved, global_scale=at)
        better: QTensor = refinement.refine(q, rows, moment=moved.moment, sweeps=1)
        return [output_error(rows - one.dequantize(), moved.moment) for one in (q, better)]

    by_torch = made(torch.device("cpu"))
    of_triton = mock.patch.object(gptq_steps, "kernel_for", lambda device, name: getattr(kernels, name, None))
    shorter = mock.patch.object(triton_columns, "RUN", 32 if INTERPRETED else triton_columns.RUN)
    with of_triton, shorter:
        found = made(DEVICE)
    assert found == pytest.approx(by_torch, rel=5e-3)
    assert found[1] < found[0]


def test_what_has_no_kernel_gives_none() -> None:
    x = torch.randn(16, 32, device=DEVICE)
    e2m1, ones = FORMATS["nvfp4"].element, torch.ones(16, device=DEVICE)
    square = torch.eye(16, device=DEVICE)
    first = torch.zeros(32, dtype=torch.int64, device=DEVICE)
    whole = get_format("int4_g32").element  # whose scales are no list
    assert kernels.choose_block(x, ones, first, 5, square, ones, whole) is None
    assert kernels.enter_rows(x, ones, square, ones, 16, 6, 15, whole) is None
    assert kernels.feed_forward(x.double(), x.double(), x.double(), square.double(), e2m1) is None
    assert kernels.feed_forward(x.t(), x.t(), x.t(), square, e2m1) is None
    assert not kernels.descend(x, x, x.to(torch.uint8).t(), x, x, square, e2m1)
    assert kernels.choose_block(x[:12], ones, first, 5, square[:12, :12].contiguous(), ones, e2m1) is None
    assert kernels.enter_rows(x, ones, square, ones, 64, 6, 15, e2m1) is None
    of_blocks = (square[:12], ones[:12].view(1, 12), square[:12], ones[:1].to(torch.uint8))
    assert not kernels.sweep_block_rows(x, x, x.to(torch.uint8), first, ones, square, of_blocks, (2, 1.0, 1), e2m1)
