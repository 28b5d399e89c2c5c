"""Claims about the functions of the package's face: names of formats, matrices in memory."""

import pytest
import torch

import ptqpipe
from ptqpipe.errors import FormatError
from ptqpipe.formats import FORMATS
from ptqpipe.schemes import SCHEMES


def weight() -> torch.Tensor:
    return torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("name", [*SCHEMES, *(alias for scheme in SCHEMES.values() for alias in scheme.aliases)])
def test_every_name_that_convert_takes_is_a_weight_format_here(name: str) -> None:
    fmt = next(scheme.fmt for scheme in SCHEMES.values() if name in (scheme.name, *scheme.aliases))
    q = ptqpipe.quantize(weight(), name)
    assert q.fmt == fmt
    same = ptqpipe.quantize(weight(), fmt)
    assert torch.equal(q.data, same.data)
    assert torch.equal(q.scales, same.scales)


@pytest.mark.parametrize(("name", "meant"), [("fp8", "fp8_channel"), ("FP8", "fp8_channel"), ("nvfp4-w4a4", "nvfp4")])
def test_a_scheme_means_its_weights(name: str, meant: str) -> None:
    assert ptqpipe.quantize(weight(), name).fmt == FORMATS[meant]


def test_research_formats_and_names_of_formats_alone_are_taken_too() -> None:
    assert ptqpipe.quantize(weight(), "e2m1/8/ue5m3").fmt.block == (1, 8)
    assert ptqpipe.quantize(weight(), "fp8_tensor").scales.shape == (1, 1)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(FormatError, match=r"unknown format 'nf4'; known are .*nvfp4"):
        ptqpipe.quantize(weight(), "nf4")


def test_a_matrix_of_several_runs_of_rows_is_one_tensor() -> None:
    """More weights than one run has: the runs are joined, and each is what it is alone."""
    w = torch.randn(3000, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    q = ptqpipe.quantize(w, "mxfp4")
    assert q.shape == (3000, 2048)
    assert torch.equal(q.data[:16], ptqpipe.quantize(w[:16], "mxfp4").data)
    assert torch.equal(q.data[-16:], ptqpipe.quantize(w[-16:], "mxfp4").data)
