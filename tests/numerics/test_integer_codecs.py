"""Claims about elements without a sign bit: two's complement and zero points have a place, from the codec to verify.

The package has no row for such a format yet. The codecs and formats here are made for the tests; the expected codes
come from numpy and from trying every code.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.check.inspect import inspect
from ptqpipe.check.verify.command import verify
from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import CODECS, FORMATS, Codec, Format, get_format, integers, unpack
from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.qtensor import (
    QTensor,
    code_places,
    code_values,
    encode,
    illegal_numbers,
    scale_values,
    squared_error,
    used_blocks,
)
from ptqpipe.numerics.schemes import SCHEMES, Activation, Scheme
from ptqpipe.numerics.search import SEARCHES, baselines, brute_force, exact, get_search
from ptqpipe.numerics.search.objective import magnitude_blocks, scores
from tests import tiny

INT4 = integers("int4", 4)
ZERO_8 = integers("uint4 minus 8", 4, zero=8)
ZERO_3 = integers("uint4 minus 3", 4, zero=3)
GRIDS = [INT4, ZERO_8, ZERO_3]


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.03


def fmt_of(codec: Codec, *, zeros: bool = False, block: int = 16) -> Format:
    return Format(f"{codec.name} test", codec, (1, block), CODECS["e4m3"], has_zeros=zeros)


def by_hand(y: np.ndarray, codec: Codec) -> np.ndarray:
    """The nearest code of every y, the even one of two at the same distance, by trying all of them."""
    distance = np.abs(y[..., None].astype(np.float64) - np.array(codec.values))
    order = np.lexsort((np.broadcast_to(np.arange(16) % 2, distance.shape), distance), axis=-1)
    return order[..., 0].astype(np.uint8)


def test_the_numbers_of_the_codes() -> None:
    assert INT4.values == (0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)
    assert ZERO_8.values == tuple(range(-8, 8))
    assert ZERO_3.values == tuple(range(-3, 13))
    assert [codec.max for codec in GRIDS] == [7, 7, 3]
    assert CODECS["e2m1"].values == (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
    assert CODECS["e2m1"].symmetric
    assert not INT4.symmetric


@pytest.mark.parametrize("zero", [0, 15])
def test_a_zero_point_that_leaves_one_sign_no_number_is_refused(zero: int) -> None:
    with pytest.raises(FormatError, match="use 1 to 14"):
        integers("x", 4, zero=zero)


@pytest.mark.parametrize("codec", GRIDS)
def test_codes_are_the_nearest_and_decode_to_their_numbers(codec: Codec) -> None:
    fmt = fmt_of(codec)
    w = torch.cat([weights(6, 64), torch.arange(-32, 32).float().div(4).expand(2, 64)])  # ties between all numbers
    scales = torch.randint(30, 60, fmt.scale_shape((8, 64)), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    scales[6:] = 0x38  # 1.0
    q = encode(w, scales, fmt=fmt)
    s = scale_values(scales, fmt.scale).repeat_interleave(16, dim=1)
    y = (w * (1.0 / s)).numpy()
    assert np.array_equal(q.codes.numpy(), by_hand(y, codec))
    assert torch.equal(q.dequantize(), torch.tensor(codec.values)[q.codes.int()] * s)
    assert torch.equal(encode(q.dequantize(), scales, fmt=fmt).codes, q.codes)
    assert int(q.codes.max()) < 16
    assert illegal_numbers(q) == (0, 0, 0, 0)


@pytest.mark.parametrize("codec", GRIDS)
def test_places_are_those_on_the_number_line(codec: Codec) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert code_places(codes, codec).tolist() == [int(value) for value in codec.values]
    minifloat = code_places(codes, CODECS["e2m1"])
    assert minifloat.tolist() == [*range(8), *(-place for place in range(8))]


@pytest.mark.parametrize("codec", GRIDS)
def test_the_search_finds_the_best_of_all_scales(codec: Codec) -> None:
    fmt = fmt_of(codec)
    w = weights(4, 64, seed=2)
    w[0, :16] = 0
    w[1, :16] = torch.tensor([-8.0] + [0.0] * 15) * 0.01  # only the negative end reaches it
    found = exact.search(w, fmt)
    assert torch.equal(found, brute_force.search(w, fmt))
    x, stored = magnitude_blocks(w, fmt), found.reshape(-1)
    at_found = scores(x, stored, fmt=fmt)
    errors = np.empty((127, len(stored)))
    for code in range(1, 127):
        every = torch.full_like(found, code)
        diff = (encode(w, every, fmt=fmt).dequantize().double() - w.double()).square()
        errors[code] = diff.reshape(-1, 16).sum(dim=1).numpy()
        assert bool((at_found <= scores(x, every.reshape(-1), fmt=fmt)).all())
    own = (encode(w, found, fmt=fmt).dequantize().double() - w.double()).square().reshape(-1, 16).sum(dim=1).numpy()
    assert bool((own <= errors[1:].min(axis=0) * (1 + 1e-5)).all())  # float32 scores rank what float64 measures


def test_both_ends_of_the_grid_are_used() -> None:
    """-8 has no positive twin: a search that looked at magnitudes would clip it to -7 or spend a scale on it."""
    fmt = fmt_of(INT4)
    w = torch.zeros(1, 16)
    w[0, :3] = torch.tensor([-8.0, 7.0, 3.0])
    scales = exact.search(w, fmt)
    assert squared_error(encode(w, scales, fmt=fmt), w) == 0.0
    assert squared_error(encode(-w, exact.search(-w, fmt), fmt=fmt), -w) > 0.0


@pytest.mark.parametrize("name", [name for name in SEARCHES if name.startswith(("absmax", "window"))])
def test_rules_clip_neither_sign(name: str) -> None:
    fmt = fmt_of(INT4)
    w = weights(4, 64, seed=3)
    q = encode(w, get_search(name).search(w, fmt), fmt=fmt)
    assert squared_error(q, w) < 0.02 * float(w.double().square().sum())


def test_kernels_leave_elements_that_they_do_not_know_to_torch() -> None:
    fmt, w = fmt_of(INT4), weights(4, 64)
    if cpu.available():
        assert cpu.block_quantize(w, fmt, rule="exact") is None
        assert cpu.score_total(w, fmt) is None
    with pytest.raises(FormatError, match="with a sign bit"):
        baselines.refit(w, Format("int4/fp32", INT4, (1, 16), CODECS["fp32"]))


@pytest.mark.parametrize("codec", [ZERO_8, CODECS["e2m1"]])
def test_zero_points_shift_every_block(codec: Codec) -> None:
    fmt = fmt_of(codec, zeros=True)
    w = weights(3, 48, seed=4) + 0.05
    scales = baselines.absmax(w, fmt)
    zeros = torch.randint(0, 16, scales.shape, generator=torch.Generator().manual_seed(5)).to(torch.uint8)
    q = encode(w, scales, fmt=fmt, zeros=zeros)
    s = scale_values(scales, fmt.scale).repeat_interleave(16, dim=1)
    z = code_values(zeros, codec).repeat_interleave(16, dim=1)
    y = (w * (1.0 / s) + z).numpy()
    values = np.array(codec.values)
    assert np.array_equal(values[q.codes.numpy()], values[by_hand(y, codec)])
    assert torch.equal(q.dequantize(), (code_values(q.codes, codec) - z) * s)
    assert torch.equal(q.narrow(1, 16, 16).dequantize(), q.dequantize()[:, 16:32])
    assert q.nbytes == 3 * 24 + 9 + 9
    assert fmt.bits_per_weight((3, 48)) == 4 + (8 + 4) / 16


def test_a_block_of_zero_points_is_empty() -> None:
    fmt = fmt_of(ZERO_8, zeros=True)
    zeros = torch.tensor([[8, 3]], dtype=torch.uint8)
    codes = torch.cat([torch.full((1, 16), 8), torch.full((1, 16), 8)], dim=1).to(torch.uint8)
    q = QTensor(
        fmt, (1, 32), codes[:, 0::2] | (codes[:, 1::2] << 4), torch.full((1, 2), 0x38).to(torch.uint8), zeros=zeros
    )
    assert used_blocks(q).tolist() == [[False, True]]
    assert torch.equal(unpack(q.data, 4), codes)


@pytest.mark.slow
def test_the_best_scale_and_zero_point_are_those_of_all_pairs() -> None:
    """The objective takes zero points: the pair with the least score has the least decoded error of all 126 x 16."""
    fmt, codec = fmt_of(ZERO_8, zeros=True), ZERO_8
    w = weights(1, 16, seed=6) + 0.04
    x = magnitude_blocks(w, fmt)
    best: tuple[float, float] | None = None
    least = float("inf")
    for scale, zero in itertools.product(range(1, 127), range(16)):
        scales, zeros = torch.tensor([[scale]], dtype=torch.uint8), torch.tensor([[zero]], dtype=torch.uint8)
        error = squared_error(encode(w, scales, fmt=fmt, zeros=zeros), w)
        score = float(scores(x, scales[0], fmt=fmt, zeros=code_values(zeros[0], codec)))
        best = min(best or (score, error), (score, error))
        least = min(least, error)
    assert best is not None
    assert best[1] == pytest.approx(least, rel=1e-5)
    plain = Format("plain", codec, (1, 16), CODECS["e4m3"])
    assert least < 0.7 * squared_error(encode(w, exact.search(w, plain), fmt=plain), w)  # what a zero point is for


def test_zero_points_belong_to_formats_that_have_them() -> None:
    w, scales = weights(1, 16), torch.full((1, 1), 0x38, dtype=torch.uint8)
    with pytest.raises(FormatError, match="needs uint8 zero points"):
        encode(w, scales, fmt=fmt_of(ZERO_8, zeros=True))
    with pytest.raises(FormatError, match="has no zero points"):
        encode(w, scales, fmt=fmt_of(ZERO_8), zeros=scales)


def test_a_checkpoint_of_integers_is_converted_proven_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A row in each of the tables is all that convert, verify --optimal and inspect need."""
    fmt = Format("int4_16", INT4, (1, 16), CODECS["e4m3"], has_global=True)
    monkeypatch.setitem(CODECS, "int4", INT4)
    monkeypatch.setitem(FORMATS, fmt.name, fmt)
    monkeypatch.setitem(SCHEMES, fmt.name, Scheme(fmt.name, fmt, Activation.NONE, "INT4", container="ptqpipe"))
    config = {**tiny.LLAMA_CONFIG, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    model = tiny.save(tmp_path / "model", tiny.llama(layers=1, hidden=32, inner=64), config=config)
    out = tmp_path / "out"
    ptqpipe.convert(model, out=out, format=fmt.name, global_scale="absmax")
    request.addfinalizer(get_format.cache_clear)  # it has seen the row
    report = verify(out, source=model, optimal=True, all_blocks=True)
    assert report.faults == ()
    proofs = [weight.optimality for weight in report.weights]
    assert all(proof is not None and proof.blocks == proof.total and not proof.worse + proof.tied for proof in proofs)
    assert inspect(out).suspicious == ()
    name = "model.layers.0.mlp.up_proj.weight"
    stored = {key: t for file in out.glob("*.safetensors") for key, t in load_file(file).items()}
    nibbles = stored[f"{name}_packed"].numpy()
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(nibbles.shape[0], -1).astype(np.int64)
    scale = stored[f"{name}_scale"].float() * stored[f"{name}_global_scale"]
    decoded = torch.from_numpy(np.where(codes < 8, codes, codes - 16)).float() * scale.repeat_interleave(16, dim=1)
    assert torch.equal(ptqpipe.load_tensors(out)[name].dequantize(), decoded)
    assert bool((codes == 8).any())  # -8, which sign and magnitude do not have
