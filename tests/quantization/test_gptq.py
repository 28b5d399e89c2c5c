"""Claims about error feedback and refinement: equal to a textbook, lower in output error, never worse, same bits."""

import pytest
import torch

from ptqpipe.calibration.inputs import Moments
from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import FORMATS, Format, get_format
from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization import gptq, gptq_steps, metric, quantizer, unit
from ptqpipe.quantization.refine import refine
from ptqpipe.quantization.unit import Task
from ptqpipe.recipe.options import ALGORITHMS, CodeOptions
from tests.quantization.inputs import correlated, second_moment

FORMATS_4 = ("nvfp4", "mxfp4", "mxfp8", "fp8_channel", "e2m1/8/ue5m3", "e2m3/32/e8m0", "int4_g32", "int8_channel")


def weights(n: int = 24, k: int = 64, *, seed: int = 1) -> torch.Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05).bfloat16()


def global_of(w: torch.Tensor, fmt: Format) -> torch.Tensor | None:
    return w.float().abs().amax() / fmt.max_product if fmt.has_global else None


def exact_rtn(w: torch.Tensor, fmt: Format, h: torch.Tensor | None = None) -> QTensor:
    return unit.quantize_rows(w, fmt, search="exact", global_scale=global_of(w, fmt), importance=h)


def output_error(q: QTensor, w: torch.Tensor, moment: torch.Tensor) -> float:
    error = w.double() - q.dequantize().double()
    return float(((error @ moment.double()) * error).sum())


def textbook(q: QTensor, w: torch.Tensor, moment: torch.Tensor, order: list[int], damping: float) -> torch.Tensor:
    """GPTQ as its paper writes it: float64, one column after the other, the inverse updated by elimination."""
    values = torch.tensor([value for value in q.fmt.element.values if value == value], dtype=torch.float64)
    scale = gptq_steps.column_scales(q.scales, q.fmt, shape=q.shape, global_scale=q.global_scale).double()
    h = moment.double().clone()
    h += damping * float(h.diagonal().mean()) * torch.eye(len(h), dtype=torch.float64)
    inverse = torch.linalg.inv(h)
    left = w.double().clone()
    done = torch.zeros_like(left)
    for i in order:
        grid = values * scale[:, i : i + 1]
        done[:, i] = grid.gather(1, (left[:, i : i + 1] - grid).abs().argmin(dim=1, keepdim=True))[:, 0]
        error = (left[:, i] - done[:, i]) / inverse[i, i]
        left -= error.unsqueeze(1) * inverse[i].unsqueeze(0)
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return done


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("name", FORMATS_4)
def test_error_feedback_is_the_textbooks(name: str, *, static: bool) -> None:
    w, moment, fmt = weights(), second_moment(correlated(400, 64)), get_format(name)
    order = metric.descending(moment) if static else None
    found = metric.make_metric(moment, order=order)
    scales = exact_rtn(w, fmt).scales
    q = gptq.codes_at(w, scales, fmt, metric=found, global_scale=global_of(w, fmt))
    wanted = textbook(q, w, moment, found.order.tolist(), metric.DAMPING)
    same = (q.dequantize().double() - wanted).abs() <= 1e-6 * wanted.abs().max()
    # float32 against float64: a tie broken otherwise changes all later codes of its row
    assert float(same.all(dim=1).float().mean()) > 0.8


@pytest.mark.parametrize("name", FORMATS_4)
def test_error_feedback_lowers_the_output_error_and_refinement_lowers_it_again(name: str) -> None:
    w, moment, fmt = weights(48, 128), second_moment(correlated(800, 128)), get_format(name)
    rtn = exact_rtn(w, fmt)
    found = metric.make_metric(moment, order=metric.descending(moment))
    q = gptq.codes_at(w, rtn.scales, fmt, metric=found, global_scale=rtn.global_scale)
    refined = refine(q, w, moment=found.moment, sweeps=2)
    errors = [output_error(x, w, found.moment) for x in (rtn, q, refined)]
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < errors[1]


@pytest.mark.parametrize(("size", "columns_"), [(48, 480), (256, 512)])
def test_blocks_that_do_not_divide_the_columns_that_are_refined_together(
    size: int, columns_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptq_steps, "kernel_for", lambda *_: None)
    w, moment = weights(48, columns_), second_moment(correlated(2000, columns_))
    q = exact_rtn(w, get_format(f"e2m1/{size}/e8m0"))
    refined = refine(q, w, moment=moment, sweeps=1)
    moved = (refined.data != q.data).reshape(48, columns_ // size, -1).any(-1).any(0)
    assert bool(moved.all())
    assert output_error(refined, w, moment) < 0.9 * output_error(q, w, moment)


def test_refinement_never_raises_the_output_error() -> None:
    w, moment, fmt = weights(48, 128), second_moment(correlated(800, 128)), FORMATS["nvfp4"]
    q = exact_rtn(w, fmt)
    before = output_error(q, w, moment)
    for _ in range(4):
        q = refine(q, w, moment=moment, sweeps=1)
        after = output_error(q, w, moment)
        assert after <= before * (1 + 1e-6)
        before = after


def test_refinement_without_correlation_is_round_to_nearest() -> None:
    w, fmt = weights(48, 128), FORMATS["fp8_channel"]
    moment = torch.diag(torch.linspace(0.5, 2.0, 128))
    rtn = exact_rtn(w, fmt)
    moved = gptq.codes_at(w, rtn.scales, fmt, metric=metric.make_metric(moment))
    assert torch.equal(moved.dequantize(), rtn.dequantize())
    assert torch.equal(refine(rtn, w, moment=moment, sweeps=2).dequantize(), rtn.dequantize())


def test_scales_at_block_entry_beat_scales_of_plain_search() -> None:
    w, moment, fmt = weights(64, 256), second_moment(correlated(2000, 256)), FORMATS["nvfp4"]
    g = global_of(w, fmt)
    whole = metric.make_metric(moment, order=metric.descending(moment, group=16))
    entered = gptq.codes_at_entry(w, fmt, metric=whole, global_scale=g)
    fixed = gptq.codes_at(w, exact_rtn(w, fmt).scales, fmt, metric=whole, global_scale=g)
    assert output_error(entered, w, whole.moment) < output_error(fixed, w, whole.moment)


def test_rows_are_independent() -> None:
    w, moment, fmt = weights(48, 128), second_moment(correlated(800, 128)), FORMATS["nvfp4"]
    g = global_of(w, fmt)
    found = metric.make_metric(moment, order=metric.descending(moment, group=16))
    whole = gptq.codes_at_entry(w, fmt, metric=found, global_scale=g)
    part = gptq.codes_at_entry(w[16:32], fmt, metric=found, global_scale=g)
    assert torch.equal(whole.narrow(0, 16, 16).dequantize(), part.dequantize())


@pytest.mark.skipif(not cpu.available(), reason="the kernels are not built")
@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize(
    "name",
    ["nvfp4", "mxfp4", "mxfp8", "fp8_channel", "e2m3/32/e8m0", "e3m2/16/e4m3", "int4_g32", "int8_signed_channel"],
)
def test_kernels_and_reference_give_the_same_bits(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, moment, fmt = weights(37, 160), second_moment(correlated(800, 160)), get_format(name)
    w[3] = 0.0
    w[4, :32] *= 2.0**-60
    found = metric.make_metric(moment, order=metric.descending(moment, group=max(fmt.block[1], 1)))

    def made() -> list[QTensor]:
        rtn = exact_rtn(w, fmt)
        q = gptq.codes_at(w, rtn.scales, fmt, metric=found, global_scale=rtn.global_scale)
        done = [q, refine(q, w, moment=found.moment, sweeps=2)]
        if gptq_steps.has_block_scales(fmt):
            done.append(gptq.codes_at_entry(w, fmt, metric=found, global_scale=rtn.global_scale))
        return done

    cpu.force_isa(isa)
    try:
        fast = made()
    finally:
        cpu.force_isa(None)
    monkeypatch.setattr(gptq_steps, "kernel_for", lambda *_: None)
    for a, b in zip(fast, made(), strict=True):
        assert torch.equal(a.data, b.data)
        assert torch.equal(a.scales.float(), b.scales.float())


def test_damping_grows_until_the_moment_can_be_factored_and_is_told() -> None:
    x = correlated(4, 64)  # four tokens: rank four
    moment = second_moment(x)
    assert metric.make_metric(moment, damping=0.01).damping == 0.01
    indefinite = moment - 0.5 * moment.diagonal().amin() * torch.eye(64)
    found = metric.make_metric(indefinite, damping=0.0)
    assert found.damping > 0.0
    factor = found.factor.double() * found.weight.double().sqrt()
    added = found.damping * float(indefinite.diagonal().mean()) * torch.eye(64)
    assert torch.allclose(factor @ factor.t(), (indefinite + added).double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", ["nan", "inf", "zero", "negative"])
def test_unusable_moments_are_one_clear_error(bad: str) -> None:
    moment = second_moment(correlated(100, 32))
    moment[3, 3] = {"nan": float("nan"), "inf": float("inf"), "negative": -1.0, "zero": 1.0}[bad]
    if bad == "zero":
        moment.zero_()
    with pytest.raises(NumericsError, match="second moment of 'a'"):
        metric.make_metric(moment, name="'a'")


def test_formats_without_block_scales_are_refused_at_entry() -> None:
    with pytest.raises(FormatError, match="fix them first"):
        gptq.codes_at_entry(
            weights(), FORMATS["fp8_channel"], metric=metric.make_metric(second_moment(correlated(100, 64)))
        )


class _Rows:
    """A weight in memory, as algorithms read it."""

    def __init__(self, w: torch.Tensor) -> None:
        self.w = w
        self.shape = (w.shape[0], w.shape[1])

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.w[start:stop]


def quantized(w: torch.Tensor, known: Moments, options: CodeOptions) -> tuple[QTensor, dict[str, object]]:
    sent: list[QTensor] = []
    task = Task([_Rows(w)], FORMATS["nvfp4"], ["a"], lambda member, row, q: sent.append(q), options, [known])
    result = quantizer(ALGORITHMS[options.algorithm])(task)
    return sent[0], dict(result.record_fields[0])


def test_the_gate_goes_back_to_round_to_nearest() -> None:
    """Scales that weigh columns by a second moment which the full moment contradicts lose to plain ones."""
    w = weights(32, 64)
    full = torch.diag(torch.linspace(0.1, 1.0, 64))
    misled = Moments(full.diagonal().flip(0) ** 4, full_moment=full)
    _, told = quantized(w, misled, CodeOptions(algorithm="rtn", objective="diagonal"))
    assert told["reverted"] is True
    assert told["versus_rtn"] == 1.0
    _, told = quantized(
        w, Moments(full.diagonal(), full_moment=full), CodeOptions(algorithm="rtn", objective="diagonal")
    )
    assert told["reverted"] is False
    assert float(str(told["versus_rtn"])) <= 1.0


def test_reported_errors_are_those_of_the_decode() -> None:
    w, moment = weights(32, 64), second_moment(correlated(400, 64))
    q, told = quantized(
        w, Moments(moment.diagonal(), full_moment=moment), CodeOptions(algorithm="gptq", objective="diagonal")
    )
    assert told["output_error"] == pytest.approx(output_error(q, w, moment), rel=1e-4)
    weighted = float(((w.double() - q.dequantize().double()).square() * moment.diagonal().double()).sum())
    assert told["weighted_error"] == pytest.approx(weighted, rel=1e-9)


def test_moments_of_another_width_are_refused() -> None:
    with pytest.raises(FormatError, match="of 32 columns, the weight has 64"):
        quantized(weights(), Moments(torch.ones(32)), CodeOptions(objective="diagonal"))


@pytest.mark.parametrize("stripe", [512, 40, 1])
def test_the_output_error_is_the_trace_however_many_columns_are_computed_together(
    stripe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric, "_STRIPE", stripe)
    error, moment = weights().float(), second_moment(correlated(400, 64))
    assert metric.output_error(error, moment) == pytest.approx(float(torch.trace(error @ moment @ error.t())), rel=1e-5)
    outputs = [second_moment(correlated(100, n, seed=n)) for n in (16, 8)]
    told = metric.expected_error(error, Moments(moment.diagonal(), full_moment=moment), outputs)
    wanted = torch.trace(torch.block_diag(*outputs) @ error @ moment @ error.t())
    assert told == pytest.approx(float(wanted), rel=1e-5)
