"""Claims about the compiled passes over all columns: what the steps of ``gptq_steps.py`` give, one after the
other, with sums in the order of the columns."""

from collections.abc import Iterator

import pytest
import torch

from ptqpipe.numerics.formats import Format, get_format
from ptqpipe.numerics.kernels import cpu, cpu_columns
from ptqpipe.numerics.qtensor import code_values
from ptqpipe.quantization import gptq, gptq_steps, refine as refinement
from ptqpipe.quantization.gptq import codes_at, codes_at_entry
from ptqpipe.quantization.gptq_steps import absmax_index, choose_block, descend, feed_forward, scale_ladder
from ptqpipe.quantization.metric import Metric, descending, make_metric, output_error
from ptqpipe.quantization.refine import block_metrics, refine
from ptqpipe.quantization.unit import quantize_rows
from tests.numerics.kernels.cpu_cases import families, generator

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no compiled kernels here")

ROWS = (1, 16, 37)
GLOBAL = {"nvfp4": torch.tensor(3e-3)}


@pytest.fixture(params=cpu.isas() if cpu.available() else ())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.force_isa(request.param)
    yield request.param
    cpu.force_isa(None)


@pytest.fixture
def isas() -> Iterator[tuple[str, ...]]:
    """All of them, for a test that forces one after another."""
    yield cpu.isas()
    cpu.force_isa(None)


def metric_of(width: int, fmt: Format) -> Metric:
    x = torch.randn(3 * width, width, generator=generator(width)) @ torch.randn(width, width, generator=generator(1))
    moment = x.t() @ x / len(x)
    return make_metric(moment, order=descending(moment, group=max(fmt.block[1], 1)))


def cases(rows: int, width: int) -> Iterator[torch.Tensor]:
    for _, w in families(rows, width, seed=rows):
        yield w.t().contiguous()


def added(base: torch.Tensor, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """base [c, n] + the sum over j of matrix[j, c] * rows[j, n], in the order of j."""
    for coefficients, row in zip(matrix, rows, strict=True):
        base = base + coefficients.unsqueeze(1) * row
    return base


INTEGERS = ("int4_g32", "int8_channel", "int8_signed_channel")


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", *INTEGERS])
@pytest.mark.parametrize("rows", ROWS)
def test_codes_at_fixed_scales(isa: str, name: str, rows: int) -> None:
    fmt, width = get_format(name), 160  # more than one run of 128 columns
    factor = metric_of(width, fmt).factor
    for exact in cases(rows, width):
        s = torch.exp2(torch.randint(-8, 1, exact.shape, generator=generator(rows)).float())
        codes, error = torch.empty(exact.shape, dtype=torch.uint8), torch.zeros_like(exact)
        for start in (0, 128):
            run = slice(start, min(start + 128, width))
            target = added(exact[run], factor[:start, run], error[:start])
            feedback = factor[run, run].contiguous()
            codes[run], error[run] = feed_forward(exact[run], target, s[run], feedback=feedback, element=fmt.element)
        found = cpu_columns.feed_rows(exact, s, factor, fmt.element)
        assert found is not None
        assert torch.equal(found, codes)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("rows", ROWS)
def test_codes_and_scales_chosen_block_by_block(isa: str, name: str, rows: int) -> None:
    fmt, width = get_format(name), 96
    metric, size = metric_of(width, fmt), fmt.block[1]
    ladder = scale_ladder(fmt, GLOBAL.get(name), torch.device("cpu"))
    for exact in cases(rows, width):
        codes, error = torch.empty(exact.shape, dtype=torch.uint8), torch.zeros_like(exact)
        scales = torch.empty((width // size, rows), dtype=torch.int64)
        for block in range(width // size):
            run = slice(block * size, (block + 1) * size)
            target = added(exact[run], metric.factor[: run.start, run], error[: run.start])
            codes[run], scales[block], _ = choose_block(
                target,
                ladder,
                (absmax_index(target, ladder, fmt.element) - 6).clamp(min=0),
                count=15,
                feedback=metric.factor[run, run].contiguous(),
                weight=metric.weight[run],
                element=fmt.element,
            )
            error[run] = exact[run] - code_values(codes[run], fmt.element) * ladder[scales[block]]
        found = cpu_columns.enter_rows(exact, ladder, metric.factor, metric.weight, size, 6, 15, fmt.element)
        assert found is not None
        assert torch.equal(found[1], scales)
        assert torch.equal(found[0], codes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("rows", ROWS)
def test_sweeps(isas: tuple[str, ...], name: str, rows: int) -> None:
    """On every instruction set; what they are held to is computed once."""
    fmt, width = get_format(name), 160  # more than one run of 128 columns
    moment, size = metric_of(width, fmt).moment, fmt.block[1]
    blocks = block_metrics(moment, fmt)
    assert blocks is not None
    blocks.usable[1] = 0  # that of one block may stay as it is
    ladder = scale_ladder(fmt, GLOBAL.get(name), torch.device("cpu"))
    for exact in cases(rows, width):
        chosen = torch.randint(len(ladder) // 3, len(ladder) // 2, (width // size, rows), generator=generator(3))
        s = ladder[chosen].repeat_interleave(size, 0)
        codes = torch.randint(0, 1 << fmt.element.bits, exact.shape, generator=generator(4)).to(torch.uint8)
        codes = torch.where(codes.int() % 128 == 127, 0, codes).to(torch.uint8)  # NaN of E4M3
        error = exact - code_values(codes, fmt.element) * s
        steps = swept(exact, error.clone(), codes.clone(), chosen.clone(), ladder, moment, fmt, window=2)
        by_columns = codes.clone()
        sweep_columns(exact, error.clone(), by_columns, slope_of(moment, error), s.contiguous(), moment, fmt)
        of_blocks = (blocks.feedback, blocks.weight, blocks.inverse, blocks.usable)
        for isa in isas:
            cpu.force_isa(isa)
            left, found, scales, fixed = error.clone(), codes.clone(), chosen.clone(), codes.clone()
            assert cpu_columns.sweep_block_rows(
                exact, left, found, scales, ladder, moment, of_blocks, (2, 1 - 1e-6, 2), fmt.element
            )
            assert torch.equal(scales, steps[1]), isa
            assert torch.equal(found, steps[0]), isa
            assert cpu_columns.sweep_rows(exact, error.clone(), fixed, s.contiguous(), moment, 1, fmt.element)
            assert torch.equal(fixed, by_columns), isa


@pytest.mark.slow
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("rows", ROWS)
def test_integers_are_rounded_as_torch_rounds_them(
    isas: tuple[str, ...], name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step, and sweeps, on every instruction set: to all codes, ties among them, and beyond the largest."""
    element, width = get_format(name).element, 160
    moment = metric_of(width, get_format(name)).moment
    factor, corner = 0.1 * torch.randn(128, 128, generator=generator(2)), moment[:128, :128].contiguous()
    codes = torch.randint(0, 1 << element.bits, (width, rows), generator=generator(4)).to(torch.uint8)
    for exact in (*cases(rows, width), torch.arange(-320, 320).repeat(rows)[: width * rows].view(width, rows) / 2.0):
        s = torch.exp2(torch.randint(-8, 1, exact.shape, generator=generator(rows)).float())
        error = exact - code_values(codes, element) * s
        slope = slope_of(moment, error)
        found: list[list[torch.Tensor]] = []
        for at in (None, *isas):  # torch's own first
            with monkeypatch.context() as patched:
                if at is None:
                    patched.setattr(gptq_steps, "kernel_for", lambda *_: None)
                cpu.force_isa(at)
                run = slice(0, 128)
                fed = feed_forward(exact[run], exact[run].clone(), s[run], feedback=factor, element=element)
                left, made, near = error[run].clone(), codes[run].clone(), slope[run].clone()
                descend(exact[run], left, made, near, s[run], moment=corner, element=element)
                swept_codes = codes.clone()
                if at is None:
                    sweep_columns(exact, error.clone(), swept_codes, slope, s, moment, get_format(name))
                else:
                    assert cpu_columns.sweep_rows(exact, error.clone(), swept_codes, s, moment, 1, element)
            found.append([*fed, left, made, near, swept_codes])
        for of_isa in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(of_isa, found[0], strict=True))
    assert (
        cpu_columns.choose_block(exact[:16], s[0], codes[0].long(), 1, corner[:16, :16].contiguous(), s[0], element)
        is None
    )


@pytest.mark.parametrize("rows", [128, 150])
def test_sweeps_of_many_rows_are_those_of_each_few(isa: str, rows: int) -> None:
    """A row's codes do not depend on the rows that are swept with it."""
    fmt, width = get_format("nvfp4"), 160
    metric, w = metric_of(width, fmt), 0.02 * torch.randn(rows, width, generator=generator(rows))
    g = w.abs().amax() / fmt.max_product
    q = codes_at_entry(w, fmt, metric=metric, global_scale=g)
    whole = refine(q, w, moment=metric.moment, sweeps=2)
    assert not torch.equal(whole.data, q.data)
    for start in range(0, rows, 5):
        count = min(5, rows - start)
        part = refine(q.narrow(0, start, count), w[start : start + count], moment=metric.moment, sweeps=2)
        assert torch.equal(part.data, whole.data[start : start + count])
        assert torch.equal(part.scales, whole.scales[start : start + count])


def slope_of(moment: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    return added(torch.zeros_like(error), moment, error)


def swept(
    exact: torch.Tensor, error: torch.Tensor, codes: torch.Tensor, chosen: torch.Tensor, ladder: torch.Tensor,
    moment: torch.Tensor, fmt: Format, *, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Two sweeps over blocks (but the second block) and columns, sums in the order of the columns."""
    size, slope = fmt.block[1], slope_of(moment, error)
    blocks = block_metrics(moment, fmt)
    assert blocks is not None
    for _ in range(2):
        for block in (i for i in range(len(chosen)) if i != 1):
            run = slice(block * size, (block + 1) * size)
            decoded = exact[run] - error[run]
            target = decoded + added(torch.zeros_like(decoded), blocks.inverse[block].t(), slope[run])
            made, scales, cost = choose_block(
                target,
                ladder,
                (chosen[block] - window).clamp(min=0),
                count=2 * window + 1,
                feedback=blocks.feedback[block],
                weight=blocks.weight[block],
                element=fmt.element,
            )
            left, before = target - decoded, torch.zeros_like(cost)
            for i in range(size):
                r = added(torch.zeros(1, len(cost)), blocks.feedback[block][: i + 1, i : i + 1], left[: i + 1])[0]
                before = before + r * r * blocks.weight[block][i]
            better = cost < before * torch.tensor(1 - 1e-6)
            codes[run] = torch.where(better, made, codes[run])
            chosen[block] = torch.where(better, scales, chosen[block])
            new = exact[run] - code_values(codes[run], fmt.element) * ladder[chosen[block]]
            slope = added(slope, moment[run], new - error[run])
            error[run] = new
        s = ladder[chosen].repeat_interleave(size, 0)
        slope = sweep_columns(exact, error, codes, slope, s.contiguous(), moment, fmt)
    return codes, chosen


def sweep_columns(
    exact: torch.Tensor, error: torch.Tensor, codes: torch.Tensor, slope: torch.Tensor, s: torch.Tensor,
    moment: torch.Tensor, fmt: Format,
) -> torch.Tensor:  # fmt: skip
    for start in range(0, len(exact), 32):
        run = slice(start, start + 32)
        before, near = error[run].clone(), slope[run].clone()
        corner = moment[run, run].contiguous()
        descend(exact[run], error[run], codes[run], near, s[run], moment=corner, element=fmt.element)
        slope = added(slope, moment[run], error[run] - before)
    return slope


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8_channel", "int4_g32"])
def test_a_pass_loses_no_more_than_torchs_products(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fmt, width = get_format(name), 192
    w = 0.02 * torch.randn(16, width, generator=generator(5))
    entry = fmt.has_global
    metric = metric_of(width, fmt) if entry else make_metric(metric_of(width, get_format("mxfp4")).moment)
    g = w.abs().amax() / fmt.max_product if fmt.has_global else None
    errors = []
    for by_torch in (False, True):
        if by_torch:
            for module in (gptq, refinement):
                monkeypatch.setattr(module, "in_one", lambda *_: None)
        if entry:
            q = codes_at_entry(w, fmt, metric=metric, global_scale=g)
        else:
            q = codes_at(w, quantize_rows(w, fmt, search="exact").scales, fmt, metric=metric)
        better = refine(q, w, moment=metric.moment, sweeps=2)
        errors.append([output_error(w - found.dequantize(), metric.moment) for found in (q, better)])
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    assert errors[0][1] < errors[0][0]
