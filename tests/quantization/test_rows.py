"""Claims about runs of rows: with and without the compiled kernels, the same bytes and the same sums."""

import pytest
import torch

from ptqpipe.errors import NumericsError
from ptqpipe.numerics.formats import FORMATS, get_format
from ptqpipe.numerics.kernels import cpu
from ptqpipe.quantization import unit

SEARCHES = ("exact", "absmax")
RESEARCH = ("e2m1/8/ue5m3", "e2m1/32/e4m3/global", "e3m2/16/e4m3", "e2m1/16/fp16")


def weights() -> torch.Tensor:
    w = torch.randn(300, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    w[3] = 0  # blocks of zeros
    w[5] *= 1e-6  # blocks far below the tensor's largest
    w[7, 5] = 3.0  # an outlier
    return w.bfloat16()


def test_chunks_cover_every_row_once_on_block_edges() -> None:
    for name, shape in (
        ("nvfp4", (10_000, 4096)),
        ("fp8_block", (12_800, 8192)),
        ("fp8_tensor", (512, 512)),
        ("mxfp4", (1, 32)),
    ):
        fmt = FORMATS[name]
        runs = unit.chunks(shape, fmt)
        assert [start for start, _ in runs] == [0, *[stop for _, stop in runs[:-1]]]
        assert runs[-1][1] == shape[0]
        assert all(start % fmt.block_extent(shape)[0] == 0 for start, _ in runs)


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="the kernels are not built")
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", [*FORMATS, *RESEARCH])
def test_kernels_and_reference_give_the_same_bits(name: str, search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, w = get_format(name), weights()
    if name == "fp8_block":
        w = w[:256]
    g = w.abs().amax().float() / fmt.max_product if fmt.has_global else None

    def everything() -> tuple[torch.Tensor, torch.Tensor, tuple[float, float], list[float], float]:
        q = unit.quantize_rows(w, fmt, search=search, global_scale=g)
        totals = [unit.total_error(w, fmt, search=search, global_scale=g)]
        if g is not None:
            totals += unit.total_errors(w, fmt, search=search, global_scales=[1.7 * g, g])
            assert totals[-1] == totals[0]
        return q.data, q.scales, unit.measure(q, w), totals, unit.checked_amax(w, "w")

    fast = everything()
    monkeypatch.setattr(cpu, "available", lambda: False)
    slow = everything()
    assert torch.equal(fast[0], slow[0])
    assert torch.equal(fast[1], slow[1])
    assert fast[2:] == slow[2:]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_named_with_their_place(bad: float) -> None:
    w = weights()
    w[17, 100] = bad
    with pytest.raises(NumericsError, match=r"'w' has [01] NaN and [01] inf, the first at \[17, 100\]"):
        unit.checked_amax(w, "w")


def test_totals_agree_with_the_measured_error_to_float32_rounding() -> None:
    fmt, w = FORMATS["nvfp4"], weights()
    g = w.abs().amax().float() / 2688
    q = unit.quantize_rows(w, fmt, search="exact", global_scale=g)
    assert unit.total_error(w, fmt, search="exact", global_scale=g) == pytest.approx(unit.measure(q, w)[0], rel=1e-6)
