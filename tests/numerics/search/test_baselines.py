"""Claims about the baseline searches: they are the rules that other tools follow, compared with those tools' bytes."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ptqpipe import quantize
from ptqpipe.errors import FormatError, NumericsError, UsageError
from ptqpipe.numerics.formats import CODECS, Format, get_format, unpack
from ptqpipe.numerics.qtensor import code_values, encode, scale_values, squared_error
from ptqpipe.numerics.search import SEARCHES, Search, baselines, exact, get_search
from ptqpipe.numerics.search.objective import magnitude_blocks, scores
from ptqpipe.recipe.formats_table import named
from tests.numerics.search import cases

PLAIN = get_format("e2m1/4/e4m3")
RULES = ("absmax", "absmax_pz", "four_over_six", "window", "ocp_floor", "ocp_even", "ocp_ceil")
OCP = (baselines.ocp_floor, baselines.ocp_even, baselines.ocp_ceil)


def block(amax: float, count: int = 4) -> torch.Tensor:
    w = torch.zeros(1, count)
    w[0, 0] = -amax
    return w


# The lookup


def test_the_names_are_the_rows() -> None:
    assert sorted(SEARCHES) == [
        "absmax", "absmax_pz", "brute_force", "enlarged", "exact", "four_over_six", "ocp_ceil", "ocp_even", "ocp_floor",
        "refit", "window",
    ]  # fmt: skip


def test_only_brute_force_exact_and_enlarged_which_is_exact_of_larger_weights_claim_a_proof() -> None:
    assert [name for name, row in SEARCHES.items() if row.proven] == ["brute_force", "enlarged", "exact"]


def test_dashes_and_case_do_not_matter() -> None:
    assert get_search("Four-Over-Six") is get_search("four_over_six")


def test_a_new_search_is_a_function_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def smallest(w, fmt, *, global_scale=None, importance=None):
        return torch.full(fmt.scale_shape(w.shape), fmt.scale.first_scale_code, dtype=torch.uint8)

    monkeypatch.setattr(baselines, "smallest", smallest, raising=False)
    monkeypatch.setitem(SEARCHES, "smallest", Search("baselines.smallest", "Always the smallest scale."))
    assert {"name": "smallest", "purpose": "Always the smallest scale."} in named("searches")
    assert quantize(torch.ones(2, 32), "nvfp4", scale_search="smallest").scales.unique().tolist() == [1]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown search 'best'; known are absmax, absmax_pz, brute_force"):
        get_search("best")
    with pytest.raises(UsageError, match="unknown search 'objective'"):
        get_search("objective")


@pytest.mark.parametrize(
    "name", ["absmax", "absmax_pz", "four_over_six", "window", "ocp_floor", "ocp_even", "ocp_ceil"]
)
def test_every_rule_refuses_nan(name: str) -> None:
    fmt = get_format("mxfp4" if name.startswith("ocp") else "e2m1/16/e4m3")
    w = torch.ones(1, 32)
    w[0, 5] = math.nan
    with pytest.raises(NumericsError, match="1 NaN"):
        get_search(name).search(w, fmt)


@pytest.mark.parametrize(
    "name", ["absmax", "absmax_pz", "four_over_six", "window", "ocp_floor", "ocp_even", "ocp_ceil"]
)
def test_no_rule_is_better_than_the_exact_search(name: str) -> None:
    for target in ("mxfp4", "mxfp6_e3m2") if name.startswith("ocp") else ("nvfp4", "e2m1/8/ue5m3"):
        fmt = get_format(target)
        w = torch.randn(16, 64, generator=cases.generator(40)) * 0.02
        g = cases.global_scale(w, fmt)
        x = magnitude_blocks(w, fmt)
        least = scores(x, exact.search(w, fmt, global_scale=g).flatten(), fmt=fmt, global_scale=g)
        found = get_search(name).search(w, fmt, global_scale=g).flatten()
        assert (least <= scores(x, found, fmt=fmt, global_scale=g)).all()


# Abs-max


def test_absmax_rounds_to_the_nearest_scale() -> None:
    for wanted, scale in ((1.0, 1.0), (1.06, 1.0), (1.0625, 1.0), (1.07, 1.125), (1.1875, 1.25), (500.0, 448.0)):
        found = scale_values(baselines.absmax(block(6 * wanted), PLAIN), CODECS["e4m3"])
        assert found.tolist() == [[scale]], wanted  # 1.0625 and 1.1875 are ties, to the even code


def test_absmax_loses_a_block_whose_scale_underflows_and_pz_keeps_it() -> None:
    w = block(6 * 2.0**-10)  # half of the smallest scale: a tie, to zero
    assert baselines.absmax(w, PLAIN).tolist() == [[0x20]]  # 0.125
    assert not encode(w, baselines.absmax(w, PLAIN), fmt=PLAIN).dequantize().any()
    assert baselines.absmax_pz(w, PLAIN).tolist() == [[1]]
    assert torch.equal(encode(w, baselines.absmax_pz(w, PLAIN), fmt=PLAIN).dequantize(), w)
    above = block(6 * 2.0**-10 * (1 + 2.0**-20))
    assert baselines.absmax(above, PLAIN).tolist() == [[1]]


@pytest.mark.parametrize("name", ["e2m1/16/e4m3", "e2m1/16/ue5m3", "e2m1/16/ue4m4", "e4m3/32/e4m3", "e2m1/16/e3m2"])
def test_a_lost_block_decodes_to_zeros_in_every_format(name: str) -> None:
    fmt = get_format(name)
    w = block(fmt.element.max * fmt.scale.min_positive / 2, fmt.block[1])
    assert not encode(w, baselines.absmax(w, fmt), fmt=fmt).dequantize().any()


def test_absmax_rounds_powers_of_two_up() -> None:
    fmt = get_format("e2m1/4/e8m0")
    for amax, exponent in ((6.0, 0), (6.1, 1), (11.9, 1), (12.0, 1), (12.1, 2), (3.0, -1), (2.9, -1)):
        assert baselines.absmax(block(amax), fmt).tolist() == [[127 + exponent]], amax


def test_absmax_rounds_bfloat16_scales_up_so_that_nothing_is_clipped() -> None:
    fmt = get_format("fp8_channel")
    w = torch.randn(200, 64, generator=cases.generator(41))
    scales = baselines.absmax(w, fmt)
    assert scales.dtype == torch.bfloat16
    fitted = w.abs().amax(dim=1, keepdim=True).double() / 448
    below = torch.nextafter(scales, torch.zeros_like(scales))
    # float32 division may put the quotient one rounding, 2^-24, below the true one.
    assert (scales.double() >= fitted * (1 - 2.0**-24)).all()
    assert (below.double() < fitted).all()
    assert baselines.absmax(torch.zeros(1, 8), fmt).tolist() == [[2.0**-126]]


def test_absmax_takes_float32_scales_as_they_are() -> None:
    assert baselines.absmax(block(1.0), get_format("e2m1/4/fp32")).tolist() == [[float(torch.tensor(1.0) / 6)]]


# The OCP rules: exponents for amax worked out by hand, E2M1 (emax 2, max 6) and E4M3 (emax 8, max 448)

EXPONENTS = [
    # amax, floor, even, ceil for E2M1; floor, even, ceil for E4M3
    (1.0, -2, -2, -2, -8, -8, -8),
    (1.5, -2, -2, -2, -8, -8, -8),
    (1.51, -2, -2, -1, -8, -8, -8),
    (1.74, -2, -2, -1, -8, -8, -8),
    (1.75, -2, -1, -1, -8, -7, -8),
    (1.76, -2, -1, -1, -8, -7, -7),
    (2.0, -1, -1, -1, -7, -7, -7),
    (6.0, 0, 0, 0, -6, -6, -6),
    (6.1, 0, 0, 1, -6, -6, -6),
    (7.0, 0, 1, 1, -6, -5, -6),
    (7.1, 0, 1, 1, -6, -5, -5),
    (448.0, 6, 7, 7, 0, 1, 0),
    (449.0, 6, 7, 7, 0, 1, 1),
]


@pytest.mark.parametrize("row", EXPONENTS, ids=lambda row: str(row[0]))
def test_the_ocp_rules_choose_the_exponent_worked_out_by_hand(row: tuple[float, ...]) -> None:
    w = block(row[0], 32)
    for fmt, expected in ((get_format("mxfp4"), row[1:4]), (get_format("mxfp8"), row[4:7])):
        found = [int(rule(w, fmt)) - 127 for rule in OCP]
        assert tuple(found) == expected


def test_the_ocp_rules_clamp_to_the_codec() -> None:
    for rule in OCP:
        assert rule(torch.zeros(1, 32), get_format("mxfp4")).tolist() == [[0]]
        assert rule(block(1e-44, 32), get_format("mxfp4")).tolist() == [[0]]
        assert int(rule(block(3e38, 32), get_format("mxfp4"))) >= 127 + 125


def test_rules_refuse_formats_that_they_are_not_about() -> None:
    w = torch.ones(1, 32)
    for rule in OCP:
        with pytest.raises(FormatError, match="powers of two, e2m1/16/e4m3 has e4m3 scales; use absmax"):
            rule(w, get_format("e2m1/16/e4m3"))
    with pytest.raises(FormatError, match="four_over_six is for e2m1 elements"):
        baselines.four_over_six(w, get_format("mxfp4"))
    with pytest.raises(FormatError, match="four_over_six is for e2m1 elements"):
        baselines.four_over_six(w, get_format("e2m3/16/e4m3"))
    with pytest.raises(FormatError, match="the window of codes is for minifloat scales"):
        baselines.window(w, get_format("mxfp4"))
    with pytest.raises(FormatError, match="refit is for float32 scales, mxfp4 has e8m0 scales; use exact"):
        baselines.refit(w, get_format("mxfp4"))


# Four over six


def test_four_wins_where_it_is_strictly_better() -> None:
    """{8, 6}: at 8/6 = 1.333 (1.375 in E4M3) six is 4.36, taken as 4; at 8/4 = 2 it is 3, and 8 is 4: no error."""
    assert scale_values(baselines.four_over_six(torch.tensor([[8.0, 6.0, 0, 0]]), PLAIN), CODECS["e4m3"]).tolist() == [
        [2.0]
    ]


def test_six_wins_a_tie() -> None:
    """{6}: exact both at 1 (as 6) and at 1.5 (as 4)."""
    assert scale_values(baselines.four_over_six(block(6.0), PLAIN), CODECS["e4m3"]).tolist() == [[1.0]]


def test_four_over_six_lies_between_abs_max_and_the_optimum() -> None:
    """Measured for normal weights with a global scale: .00757 against .00905 and .00660 at block 16."""
    fmt = get_format("nvfp4")
    w = torch.randn(256, 512, generator=cases.generator(42)) * 0.02
    g = cases.global_scale(w, fmt)
    mse = {
        rule: squared_error(encode(w, get_search(rule).search(w, fmt, global_scale=g), fmt=fmt, global_scale=g), w)
        for rule in ("absmax", "four_over_six", "exact")
    }
    assert mse["four_over_six"] / mse["absmax"] == pytest.approx(0.837, abs=0.01)
    assert mse["exact"] / mse["absmax"] == pytest.approx(0.729, abs=0.01)


# The window


def test_the_window_is_lossless_with_a_global_scale() -> None:
    fmt = get_format("nvfp4")
    w = torch.randn(64, 256, generator=cases.generator(43)) * 0.02
    g = cases.global_scale(w, fmt)
    assert torch.equal(baselines.window(w, fmt, global_scale=g), exact.search(w, fmt, global_scale=g))


# float32 scales


@pytest.mark.parametrize("weighted", [False, True])
def test_refit_is_at_least_as_good_as_a_dense_grid_up_to_a_thousandth(weighted: bool) -> None:
    """512 scales an octave; single blocks may end in another local minimum, all together may not be worse."""
    fmt = get_format("e2m1/16/fp32")
    w = torch.randn(4, 128, generator=cases.generator(44))
    h = cases.importances(128, 45)["uniform"] if weighted else None
    x = magnitude_blocks(w, fmt)
    spread = None if h is None else (h / torch.exp2(torch.floor(torch.log2(h.max())))).expand_as(w).reshape(x.shape)
    least = torch.full((len(x),), math.inf, dtype=torch.float64)
    for k in range(int(512 * 1.6)):
        scale = x.amax(dim=1) / 10.5 * 2.0 ** (k / 512)
        least = torch.minimum(least, scores(x, scale, fmt=fmt, h=spread))
    found = scores(x, baselines.refit(w, fmt, importance=h).flatten(), fmt=fmt, h=spread)
    assert float(found.sum()) <= float(least.sum()) * 1.001


def test_refit_is_below_every_other_scale_codec() -> None:
    """What E4M3 scales cost: unquantized scales leave about .92 of the error."""
    w = torch.randn(64, 512, generator=cases.generator(46)) * 0.02
    fine, nvfp4 = get_format("e2m1/16/fp32"), get_format("nvfp4")
    g = cases.global_scale(w, nvfp4)
    ratio = squared_error(encode(w, baselines.refit(w, fine), fmt=fine), w) / squared_error(
        encode(w, exact.search(w, nvfp4, global_scale=g), fmt=nvfp4, global_scale=g), w
    )
    assert 0.90 < ratio < 0.94


def test_refit_of_zeros_is_a_positive_scale() -> None:
    assert (baselines.refit(torch.zeros(1, 16), get_format("e2m1/16/fp32")) > 0).all()


# Bytes of other tools


def golden_layers(shared_dir: Path, name: str, suffix: str) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """(bf16 weight, the parts that the tool stored) of every quantized layer, parts by suffix."""
    source = load_file(shared_dir / "golden/bf16-llama/model.safetensors")
    stored = load_file(shared_dir / "golden" / name / "model.safetensors")
    layers = [key.removesuffix("." + suffix) for key in stored if key.endswith("." + suffix)]
    assert len(layers) == 14

    def parts(layer: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(layer + "."): t for key, t in stored.items() if key.startswith(layer + ".")}

    return [(source[f"{layer}.weight"], parts(layer)) for layer in layers]


def without_sign_of_zero(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    return torch.where(codes == 1 << (fmt.element.bits - 1), 0, codes)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "fmt_name", "data"),
    [("ct-mxfp4", "mxfp4", "weight_packed"), ("ct-mxfp8", "mxfp8", "weight"), ("quark-mxfp4", "mxfp4", "weight")],
)
def test_ocp_even_writes_the_bytes_of_compressed_tensors_and_quark(
    shared_dir: Path, name: str, fmt_name: str, data: str
) -> None:
    fmt = get_format(fmt_name)
    for w, stored in golden_layers(shared_dir, name, "weight_scale"):
        scales = baselines.ocp_even(w, fmt)
        assert torch.equal(scales, stored["weight_scale"])
        theirs = unpack(stored[data].view(torch.uint8), fmt.element.bits)
        ours = encode(w, scales, fmt=fmt).codes
        assert torch.equal(without_sign_of_zero(ours, fmt), without_sign_of_zero(theirs, fmt))


@pytest.mark.shared
def test_absmax_pz_writes_the_scales_of_modelopt_and_its_codes_but_for_ties(shared_dir: Path) -> None:
    """ModelOpt divides by the scale, the objective multiplies with its reciprocal: ties may fall the other way."""
    fmt = get_format("nvfp4")
    different = total = 0
    for w, stored in golden_layers(shared_dir, "mo-nvfp4", "weight_scale"):
        g = stored["weight_scale_2"]
        scales = stored["weight_scale"].view(torch.uint8)
        assert torch.equal(baselines.absmax_pz(w, fmt, global_scale=g), scales)
        q = encode(w, scales, fmt=fmt, global_scale=g)
        ours, theirs = q.codes & 7, unpack(stored["weight"], 4) & 7
        apart = (ours != theirs).nonzero(as_tuple=True)
        y = w.float().abs()[apart] / q.block_scales().repeat_interleave(16, 1)[apart]
        middle = (code_values(ours[apart], fmt.element) + code_values(theirs[apart], fmt.element)) / 2
        assert ((y / middle - 1).abs() <= 2.0**-22).all()
        different, total = different + len(y), total + w.numel()
    assert different < total / 1000


@pytest.mark.shared
def test_absmax_bytes_of_compressed_tensors_unit_vectors(shared_dir: Path) -> None:
    """float32 arithmetic on their side too, an outlier, and a block of zeros (0.125)."""
    case = json.loads((shared_dir / "golden/unit_vectors_compressed_tensors.json").read_text())["nvfp4_case_f32"]
    fmt = get_format("nvfp4")
    w = torch.tensor(case["weight"])
    g = 1.0 / torch.tensor(case["weight_global_scale"]).reshape(())
    scales = baselines.absmax(w, fmt, global_scale=g)
    assert scales.tolist() == case["weight_scale_e4m3_bytes"]
    q = encode(w, scales, fmt=fmt, global_scale=g)
    theirs = unpack(torch.tensor(case["weight_packed"], dtype=torch.uint8), 4)
    assert torch.equal(without_sign_of_zero(q.codes, fmt), without_sign_of_zero(theirs, fmt))


@pytest.mark.shared
def test_ocp_unit_vectors_of_compressed_tensors_and_modelopt(shared_dir: Path) -> None:
    vectors = json.loads((shared_dir / "golden/unit_vectors_compressed_tensors.json").read_text())
    for name in ("mxfp4", "mxfp8"):
        table = vectors[f"{name}_scale_exp_from_amax"]
        w = torch.zeros(len(table["amax"]), 32)
        w[:, 9] = torch.tensor(table["amax"])
        found = baselines.ocp_even(w, get_format(name)).flatten().int() - 127
        assert found.tolist() == table["log2_scale"]
    w = torch.tensor(vectors["nvfp4_case_f32"]["weight"])
    mxfp4 = json.loads((shared_dir / "golden/unit_vectors_modelopt.json").read_text())["mxfp4"]
    scales = baselines.ocp_ceil(w, get_format("mxfp4"))
    assert scales.tolist() == mxfp4["e8m0"]
    q = encode(w, scales, fmt=get_format("mxfp4"))
    ours, theirs = q.codes & 7, unpack(torch.tensor(mxfp4["packed"], dtype=torch.uint8), 4) & 7
    y = w.abs() / q.block_scales().repeat_interleave(32, 1)
    assert y[ours != theirs].tolist() == [0.75, 1.75]  # ModelOpt lets ties of negative numbers go to the odd code


@pytest.mark.shared
def test_absmax_scales_of_fp8_are_those_of_compressed_tensors_or_the_next_number_up(shared_dir: Path) -> None:
    """They round to the nearest bfloat16, which clips the largest weight of about every second row."""
    fmt = get_format("fp8_channel")
    for w, stored in golden_layers(shared_dir, "ct-fp8-dynamic", "weight_scale"):
        theirs = stored["weight_scale"].to(torch.bfloat16)
        ours = baselines.absmax(w, fmt)
        above = torch.nextafter(theirs, torch.full_like(theirs, math.inf))
        assert ((ours == theirs) | (ours == above)).all()
