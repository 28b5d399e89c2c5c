"""Claims about weights that are enlarged before they are rounded: how much, that it is proven, when it is not done."""

import json
from pathlib import Path

import pytest
import torch

import ptqpipe
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.search.enlarged import MOST, SHARE, enlarge, factor_for
from ptqpipe.quantization import LoadedWeight, Task, joined, rtn
from ptqpipe.recipe.options import SEARCHES, CodeOptions
from tests import tiny


def weight(rows: int = 64, columns: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).mul_(0.02).bfloat16()


def size(q: QTensor, w: torch.Tensor) -> float:
    """Of the decoded weights along the weights: 1 is their own."""
    return float((q.dequantize().double() * w.double()).sum() / w.double().square().sum())


@pytest.mark.parametrize(
    ("error", "energy", "factor"),
    [
        (0.0, 1.0, 1.0),
        (0.0, 0.0, 1.0),
        (1.0, 1.0, MOST),  # everything is lost
        (2.0, 1.0, MOST),
        (0.3, 1.0, MOST),
        (1e-5, 1.0, 1.0),  # less than half a step
        (0.0125, 1.0, 1 + 41 / 4096),
    ],
)
def test_the_factor_is_a_share_of_what_rounding_takes(error: float, energy: float, factor: float) -> None:
    assert factor_for(error, energy) == factor


def test_the_decoded_weights_are_nearer_to_their_size() -> None:
    w = weight()
    exact, enlarged = (ptqpipe.quantize(w, "mxfp4", scale_search=name) for name in ("exact", "enlarged"))
    lost = 1 - size(exact, w)
    assert 0.01 < lost < 0.015  # what the exact scales lose: the relative squared error
    assert abs(1 - size(enlarged, w) - (1 - SHARE) * lost) < 0.1 * lost


def test_scales_and_codes_are_the_exact_ones_of_the_enlarged_weights() -> None:
    w, runs = weight(), {}
    task = Task(
        [LoadedWeight(w)], get_format("mxfp4"), ["w"], lambda i, row, q: runs.__setitem__((i, row), q),
        options=CodeOptions(scale_search="enlarged"),
    )  # fmt: skip
    result = rtn.quantize(task)
    factor = result.record_fields[0]["enlarged"]
    assert 1.008 < factor < 1.012
    assert result.proven
    assert result.promises[0].factor == factor
    alone = ptqpipe.quantize(enlarge(w, factor), "mxfp4", scale_search="exact")
    assert torch.equal(alone.data, joined(runs, 0).data)
    assert torch.equal(alone.scales, joined(runs, 0).scales)
    found = (joined(runs, 0).dequantize().double() - w.double()).square().sum()
    assert result.errors[0].squared_error == pytest.approx(float(found), rel=1e-12)  # of the weights, not the enlarged


def test_weights_that_the_format_holds_stay_as_they_are() -> None:
    held = ptqpipe.quantize(weight(), "mxfp4", scale_search="exact").dequantize()
    assert torch.equal(ptqpipe.quantize(held, "mxfp4", scale_search="enlarged").dequantize(), held)


def test_weights_next_to_the_largest_float_are_not_enlarged_beyond_it() -> None:
    w = weight().float()
    w = w / w.abs().max() * 2e38
    assert torch.equal(*(ptqpipe.quantize(w, "mxfp4", scale_search=name).data for name in ("exact", "enlarged")))


@pytest.mark.parametrize("scheme", ["mxfp4a16", "nvfp4", "fp8_dynamic"])
def test_convert_takes_what_the_table_says_and_verify_proves_it(tmp_path: Path, scheme: str) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama(layers=1))
    ptqpipe.convert(model, out=tmp_path / "out", format=scheme, workers=1)
    record = json.loads((tmp_path / "out" / "ptqpipe.json").read_text())
    entries = record["weights"].values()
    expected = SEARCHES.get(next(iter(entries))["format"], "exact")
    assert {entry["search"] for entry in entries} == {expected}
    assert {"enlarged" in entry for entry in entries} == {expected == "enlarged"}
    assert all(entry["proven"] for entry in entries)
    assert ptqpipe.verify(tmp_path / "out", source=model, optimal=True).ok


def test_another_factor_in_the_record_is_a_fault(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama(layers=1))
    ptqpipe.convert(model, out=tmp_path / "out", format="mxfp4a16", workers=1)
    file = tmp_path / "out" / "ptqpipe.json"
    record = json.loads(file.read_text())
    for entry in record["weights"].values():
        entry["enlarged"] = 1.002
    file.write_text(json.dumps(record))
    faults = ptqpipe.verify(tmp_path / "out", source=model).faults
    assert any("enlarged" in fault.message for fault in faults)
