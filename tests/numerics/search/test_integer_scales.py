"""Claims about scales of integer weights: the exact search, in torch and compiled, finds the least of all of them.

The scales that are compared are every bfloat16 number of 13 octaves around the largest weight of a block,
scored by the objective; beyond them it rounds to zero, or clipping alone costs more than the block has energy.
"""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.errors import NumericsError
from ptqpipe.numerics.formats import FORMATS, Format
from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.qtensor import QTensor, encode, squared_error
from ptqpipe.numerics.search import exact
from ptqpipe.numerics.search.least import best_scales, nearest_codes
from ptqpipe.numerics.search.objective import importance_blocks, magnitude_blocks, scores
from tests import tiny

NAMES = ("int4_g32", "int4_g128", "int8_channel", "int8_signed_channel")


def by_definition(w: torch.Tensor, fmt: Format, importance: torch.Tensor | None = None) -> torch.Tensor:
    """The smallest scale of the least score."""
    x, h = magnitude_blocks(w, fmt), importance_blocks(importance, w, fmt)
    found = torch.empty(len(x), dtype=torch.bfloat16)
    for i, row in enumerate(x):
        top = int(row.abs().max().view(torch.int32)) >> 16
        bits = torch.arange(max(0x80, top - 12 * 128), max(0x81, min(0x7F80, top + 128)))
        scales = bits.to(torch.int16).view(torch.bfloat16)
        weights = None if h is None else h[i].expand(len(scales), -1)
        score = scores(row.expand(len(scales), -1), scales, fmt=fmt, h=weights)
        found[i] = scales[int(score.argmin())]
    return found.reshape(fmt.scale_shape((w.shape[0], w.shape[1])))


def hostile(columns: int, seed: int) -> torch.Tensor:
    """Blocks with outliers, of one sign, on the grid, nearly on it, empty, tiny, huge, and with both ends in use."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(12, columns, generator=draw) * 0.02
    w[1] *= torch.exp(3 * torch.randn(columns, generator=draw))
    w[2:4] = torch.stack((w[2].abs(), -w[3].abs()))
    w[4] = torch.randint(-8, 8, (columns,), generator=draw) * 0.25
    w[5] = w[4] * (1 + 2.0**-9 * torch.randn(columns, generator=draw))
    w[6] = 0
    w[7, :31], w[7, 31] = 0, -1e-3
    w[8:10] *= torch.tensor([[1e-36], [1e36]])
    w[10] = torch.where(torch.arange(columns) % 3 == 0, -8.0, 7.0)
    w[11] = 2.0 ** torch.randint(-9, 1, (columns,), generator=draw)
    return w


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_every_way_finds_the_least_of_all_scales(name: str, dtype: torch.dtype, weighted: bool) -> None:
    fmt, columns = FORMATS[name], 128 if name == "int4_g128" else 96
    w = hostile(columns, seed=len(name)).to(dtype)
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(1)) if weighted else None
    if weighted and dtype == torch.float32:  # an outlier that hardly counts is clipped by thousands of scales
        importance = importance.pow(9)
    best = by_definition(w, fmt, importance)
    assert torch.equal(exact.search(w, fmt, importance=importance), best)
    x, h = magnitude_blocks(w, fmt), importance_blocks(importance, w, fmt)
    codes = encode(w, best, fmt=fmt)
    for claimed in (best, best * 1.25, best * 0.5):  # what brute force finds does not hang on what it judges
        again = best_scales(x.numpy(), claimed.reshape(-1), fmt=fmt, h=None if h is None else h.numpy())
        assert torch.equal(again, best.reshape(-1))
    nearest = nearest_codes(w.float().reshape(x.shape).numpy(), best.reshape(-1), fmt=fmt)
    assert torch.equal(torch.from_numpy(nearest).reshape(w.shape), codes.codes)
    for isa in cpu.isas():
        cpu.force_isa(isa)
        try:
            done = cpu.block_quantize(w, fmt, importance=importance)
        finally:
            cpu.force_isa(None)
        assert done is not None
        assert torch.equal(done[1], best)
        assert torch.equal(done[0], codes.data)


def assert_least(w: torch.Tensor, name: str, importance: torch.Tensor | None = None) -> torch.Tensor:
    """Every way finds the scales of the definition; those."""
    best = by_definition(w, FORMATS[name], importance)
    assert torch.equal(exact.search(w, FORMATS[name], importance=importance), best)
    for isa in cpu.isas():
        cpu.force_isa(isa)
        try:
            done = cpu.block_quantize(w, FORMATS[name], importance=importance)
        finally:
            cpu.force_isa(None)
        assert done is not None
        assert torch.equal(done[1], best), isa
    return best


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("int4_g32", 48), ("int8_channel", 150)])
def test_scales_whose_inverse_is_subnormal_are_searched(name: str, rows: int) -> None:
    """Above 2^126 the inverse of a scale rounds another way than that of its half, so the half may be worse."""
    draw = torch.Generator().manual_seed(3)
    size = 2.0 ** (126 + 2 * torch.rand(rows, 1, generator=draw, dtype=torch.float64))
    best = assert_least(size.clamp(max=3.4e38).float().expand(rows, 32).contiguous(), name)
    assert int((best.double() > 2.0**126).sum()) > 1


def test_an_element_above_2_32nd_of_the_largest_counts() -> None:
    """The largest is exact at many scales; how the other one rounds decides between them."""
    w = torch.zeros(64, 32)
    w[:, 0] = torch.arange(64, 128)
    w[:, 1] = w[:, 0] * 1.37 * 2.0**-28
    best = assert_least(w, "int8_channel")
    w[:, 1] = 0
    assert not torch.equal(best, assert_least(w, "int8_channel"))


def test_an_outlier_that_hardly_counts_is_clipped_once_in_the_bound() -> None:
    """It is the largest and the heaviest element, and clipping it costs more than half of the least score."""
    w = torch.randn(24, 128, generator=torch.Generator().manual_seed(6))
    w[:, 5] = torch.linspace(9.0, 16.0, 24)
    importance = torch.ones(128)
    importance[5] = 0.12
    assert_least(w, "int4_g128", importance)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 4.0]))
def test_compiled_scales_are_those_of_torch(name: str, seed: int, spread: float) -> None:
    if not cpu.available():
        pytest.skip("no kernels here")
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 128, generator=draw) * torch.exp(spread * torch.randn(16, 128, generator=draw))
    done = cpu.block_quantize(w, FORMATS[name])
    assert done is not None
    assert torch.equal(done[1], exact.search(w, FORMATS[name]))


def test_the_least_integer_is_used() -> None:
    """-8 has no positive twin: a symmetric search would clip it, or spend a larger scale on it."""
    w = torch.zeros(2, 32)
    w[0, :3] = torch.tensor([-8.0, 7.0, 3.0])
    w[1] = -w[0]
    fmt = FORMATS["int4_g32"]
    q = encode(w, exact.search(w, fmt), fmt=fmt)
    assert squared_error(q.narrow(0, 0, 1), w[:1]) == 0.0
    assert squared_error(q.narrow(0, 1, 1), w[1:]) > 0.0


@pytest.mark.parametrize("name", ["int4_g32", "int4_g128", "int8", "int8_w8a8"])
def test_what_is_written_is_what_compressed_tensors_writes_and_reads(tmp_path: Path, name: str) -> None:
    """Its words from our numbers are our words, and its numbers from our words are ours, rounded to bfloat16."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = tiny.save(tmp_path / "model", tiny.llama(layers=1, hidden=128, inner=128))
    out = ptqpipe.convert(model, out=tmp_path / "out", format=name, workers=1).out
    weight = "model.layers.0.mlp.up_proj"
    tensors = load_file(out / "model.safetensors")
    stored = {key.removeprefix(f"{weight}."): t for key, t in tensors.items() if key.startswith(f"{weight}.")}
    config = json.loads((out / "config.json").read_text())
    described = QuantizationConfig.model_validate(config["quantization_config"])
    scheme = described.config_groups["group_0"]
    peer = BaseCompressor.get_value_from_registry(scheme.format)
    ours: QTensor = ptqpipe.load_tensors(out)[f"{weight}.weight"]
    numbers = {"weight": ours.dequantize(), "weight_scale": stored["weight_scale"].float()}
    packed = peer.compress(numbers, scheme)
    assert packed.keys() == stored.keys()
    assert all(torch.equal(packed[key], t) for key, t in stored.items() if key != "weight_scale")
    assert torch.equal(peer.decompress(dict(stored), scheme)["weight"], ours.dequantize().bfloat16())
    assert (name == "int8_w8a8") is (scheme.input_activations is not None)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_nan_and_inf_are_refused(bad: float) -> None:
    w = torch.ones(2, 64)
    w[1, 63] = bad
    with pytest.raises(NumericsError):
        exact.search(w, FORMATS["int4_g32"])
    for isa in cpu.isas():
        cpu.force_isa(isa)
        try:
            with pytest.raises(NumericsError):
                cpu.block_quantize(w, FORMATS["int4_g32"])
        finally:
            cpu.force_isa(None)
