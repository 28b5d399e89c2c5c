"""Claims about the functions of the package's face: names of formats, matrices in memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import ptqpipe
from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import FORMATS
from ptqpipe.numerics.schemes import SCHEMES


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
    with pytest.raises(FormatError, match=r"unknown format 'nf4'; did you mean nvfp4\? known are .*mxfp4"):
        ptqpipe.quantize(weight(), "nf4")


def test_a_matrix_of_several_runs_of_rows_is_one_tensor() -> None:
    """More weights than one run has: the runs are joined, and each is what it is alone."""
    w = torch.randn(3000, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    q = ptqpipe.quantize(w, "mxfp4", scale_search="exact")
    assert q.shape == (3000, 2048)
    assert torch.equal(q.data[:16], ptqpipe.quantize(w[:16], "mxfp4", scale_search="exact").data)
    assert torch.equal(q.data[-16:], ptqpipe.quantize(w[-16:], "mxfp4", scale_search="exact").data)


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(16, 32)


NO_MATRICES: dict[str, Callable[[], Any]] = {
    "no rows": lambda: torch.zeros(0, 32),
    "no columns": lambda: torch.zeros(16, 0),
    "fp8": lambda: torch.zeros(16, 32).to(torch.float8_e4m3fn),
    "e8m0": lambda: torch.ones(16, 32).to(torch.float8_e8m0fnu),
    "meta": lambda: torch.zeros(16, 32, device="meta"),
    "fake": _fake,
    "coo": lambda: torch.eye(32).to_sparse(),
    "csr": lambda: torch.eye(32).to_sparse_csr(),
    "complex": lambda: torch.zeros(16, 32, dtype=torch.complex64),
    "int": lambda: torch.ones(16, 32, dtype=torch.int32),
    "stack": lambda: torch.zeros(2, 16, 32),
    "number": lambda: torch.tensor(1.0),
    "list": lambda: [[1.0] * 32],
    "None": lambda: None,
}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8_block", "fp8_tensor"])
@pytest.mark.parametrize("kind", NO_MATRICES)
def test_what_is_no_matrix_of_numbers_is_one_line(kind: str, format: str) -> None:
    """A tensor without memory would end the process in the kernel."""
    with pytest.raises(FormatError, match="quantize takes a") as error:
        ptqpipe.quantize(NO_MATRICES[kind](), format)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("kind", ["transposed", "parameter", "expanded", "sliced"])
def test_every_view_of_numbers_is_quantized_as_its_copy(kind: str) -> None:
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    views = {"transposed": w.t(), "parameter": torch.nn.Parameter(w), "expanded": w[:1].expand(32, 64)}
    view = views.get(kind, w[::2, 16:48])
    for format in ("nvfp4", "fp8_dynamic"):
        q, of_copy = ptqpipe.quantize(view, format), ptqpipe.quantize(view.detach().clone().contiguous(), format)
        assert torch.equal(q.data, of_copy.data)
        assert torch.equal(q.scales, of_copy.scales)


def test_a_number_that_a_format_rounds_to_infinity_is_named_as_such() -> None:
    """4 * 2^126 is the nearest of MXFP4 to 3e38, and 2^128 in float32 is inf; others have a nearer number."""
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    w[0, 0] = 3e38
    with pytest.raises(NumericsError, match=r"nearest in mxfp4 is beyond.*would be read as infinity"):
        ptqpipe.quantize(w, "mxfp4")
    for format in ("mxfp8", "fp8_dynamic"):
        assert bool(torch.isfinite(ptqpipe.quantize(w, format).dequantize()).all())
