"""Claims about weights of an MXFP4 checkpoint in NVFP4: what the global scale that loses nothing of them is worth."""

from collections import Counter

import pytest
import torch

from ptqpipe.numerics.formats import FORMATS
from ptqpipe.numerics.global_scale import absmax_global, sample_rows
from ptqpipe.numerics.qtensor import QTensor, encode, squared_error
from ptqpipe.numerics.search import exact
from ptqpipe.quantization import Task, UnitResult, rtn
from ptqpipe.quantization.unit import LoadedWeight

NVFP4 = FORMATS["nvfp4"]


def weights() -> torch.Tensor:
    """[2048, 128]: E2M1 numbers times powers of two that NVFP4's scales reach."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[torch.randint(8, (2048, 128), generator=generator)]
    signs = torch.randint(2, (2048, 128), generator=generator) * 2 - 1
    powers = torch.randint(-9, -3, (2048, 4), generator=generator).float().exp2().repeat_interleave(32, dim=1)
    return numbers * signs * powers


def quantized(w: torch.Tensor) -> tuple[UnitResult, Counter[int]]:
    """The result, and how often each run of rows was sent."""
    sent: Counter[int] = Counter()

    def sink(member: int, row: int, q: QTensor) -> None:
        sent[row] += 1

    return rtn.quantize(Task([LoadedWeight(w)], NVFP4, ["w"], sink)), sent


def error_at(w: torch.Tensor, g: torch.Tensor) -> float:
    return squared_error(encode(w, exact.search(w, NVFP4, global_scale=g), fmt=NVFP4, global_scale=g), w)


def test_a_global_scale_that_loses_nothing_beats_the_plain_one_by_all_of_its_error() -> None:
    w = weights()
    result, sent = quantized(w)
    assert result.errors[0].squared_error == 0
    assert error_at(w, absmax_global(float(w.abs().max()), NVFP4)) > 0
    assert result.versus_plain_global == 0
    assert set(sent.values()) == {1}


def test_weights_that_are_lossless_in_the_sampled_rows_alone_are_compared_as_a_whole() -> None:
    w = weights()
    inside = {row for start, stop in sample_rows((2048, 128), NVFP4) for row in range(start, stop)}
    outside = next(row for row in range(2048) if row not in inside)
    w[outside, :16] = torch.linspace(0.011, 0.3, 16)
    result, sent = quantized(w)
    assert result.global_scale is not None
    plain, g = absmax_global(float(w.abs().max()), NVFP4), torch.tensor(result.global_scale)
    assert not torch.equal(plain, g)
    assert 0 < result.errors[0].squared_error == pytest.approx(error_at(w, g), rel=1e-12)
    assert result.versus_plain_global == pytest.approx(error_at(w, g) / error_at(w, plain), rel=1e-5)
    assert set(sent.values()) == {2}
