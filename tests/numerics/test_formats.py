"""Claims about the number formats: every code has the value that its specification gives it."""

import math

import pytest
import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import CODECS, FORMATS, get_codec, get_format, minifloat

# Written from the text of the specifications (OCP MX v1.0, tables 3 and 5; section 5.3.3), not computed.
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
E2M3 = (
    0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875,
    1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875,
    2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75,
    4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5,
)  # fmt: skip
E3M2 = (
    0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375,
    0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 1.75,
    2, 2.5, 3, 3.5, 4, 5, 6, 7,
    8, 10, 12, 14, 16, 20, 24, 28,
)  # fmt: skip


@pytest.mark.parametrize(("name", "table"), [("e2m1", E2M1), ("e2m3", E2M3), ("e3m2", E3M2)])
def test_small_codecs_are_the_tables_of_the_specification(name: str, table: tuple[float, ...]) -> None:
    assert CODECS[name].magnitudes == table


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [("e4m3", torch.float8_e4m3fn, 127), ("e5m2", torch.float8_e5m2, 124), ("e8m0", torch.float8_e8m0fnu, 255)],
)
def test_eight_bit_codecs_are_those_of_torch(name: str, dtype: torch.dtype, count: int) -> None:
    codec = CODECS[name]
    codes = torch.arange(count).to(torch.uint8)
    assert len(codec.magnitudes) == count
    assert torch.equal(torch.tensor(codec.magnitudes, dtype=torch.float32), codes.view(dtype).float())
    reserved = torch.arange(count, 128 if codec.signed else 256).to(torch.uint8).view(dtype).float()
    assert not torch.isfinite(reserved).any()


def test_unsigned_research_scales_span_what_their_authors_state() -> None:
    ue5m3, ue4m4 = CODECS["ue5m3"], CODECS["ue4m4"]
    assert (ue5m3.min_positive, ue5m3.max, len(ue5m3.magnitudes)) == (2.0**-17, 122880.0, 256)
    assert (ue4m4.min_positive, ue4m4.max, len(ue4m4.magnitudes)) == (2.0**-10, 496.0, 256)


@pytest.mark.parametrize("name", [*CODECS, "e1m6", "e3m0", "ue7m1", "e5m1", "ue2m2"])
def test_magnitudes_ascend_and_fill_the_code_space(name: str) -> None:
    codec = get_codec(name)
    if not codec.enumerable:
        assert codec.magnitudes == ()
        assert codec.max == torch.finfo(codec.dtype).max
        assert codec.min_positive == torch.finfo(codec.dtype).smallest_normal
        return
    assert all(a < b for a, b in zip(codec.magnitudes, codec.magnitudes[1:], strict=False))
    assert len(codec.magnitudes) <= 2 ** (codec.bits - codec.signed)
    assert codec.max == codec.magnitudes[-1]
    assert codec.min_positive == codec.magnitudes[codec.first_scale_code] > 0
    assert codec.first_scale_code == (0 if name == "e8m0" else 1)


def test_only_exponents_without_mantissa_are_powers_of_two() -> None:
    assert [name for name, codec in CODECS.items() if codec.power_of_two] == ["e8m0"]
    assert get_codec("e3m0").power_of_two
    assert not get_codec("e3m1").power_of_two


def test_a_minifloat_follows_its_formula_for_every_code() -> None:
    codec = minifloat("e3m3", 3, 3, bias=5)
    for code, value in enumerate(codec.magnitudes):
        e, m = divmod(code, 8)
        assert value == (m / 8 * 2.0**-4 if e == 0 else (1 + m / 8) * 2.0 ** (e - 5))


def test_known_formats_have_the_published_bits_per_weight() -> None:
    shape = (4096, 4096)
    bits = {name: fmt.bits_per_weight(shape) for name, fmt in FORMATS.items()}
    assert bits["nvfp4"] == 4.5 + 32 / 4096**2
    assert (bits["mxfp4"], bits["mxfp6_e2m3"], bits["mxfp6_e3m2"], bits["mxfp8"]) == (4.25, 6.25, 6.25, 8.25)
    assert bits["fp8_channel"] == 8 + 16 / 4096
    assert bits["fp8_block"] == 8 + 16 / 128**2


def test_nvfp4_reaches_2688() -> None:
    assert get_format("nvfp4").max_product == 2688.0


def test_a_format_knows_its_scale_grid() -> None:
    assert get_format("nvfp4").scale_shape((8, 64)) == (8, 4)
    assert get_format("fp8_channel").scale_shape((8, 60)) == (8, 1)
    assert get_format("fp8_tensor").scale_shape((8, 60)) == (1, 1)
    assert get_format("fp8_block").scale_shape((129, 300)) == (2, 3)


def test_a_shape_that_does_not_divide_is_refused_with_the_remedy() -> None:
    with pytest.raises(FormatError, match=r"nvfp4 needs shapes in multiples of 1x16, got 8x60; keep this tensor"):
        get_format("nvfp4").scale_shape((8, 60))


@pytest.mark.parametrize(
    ("name", "shape", "fits"),
    [
        ("nvfp4", (3, 48), True),
        ("nvfp4", (3, 40), False),
        ("mxfp4", (3, 48), False),
        ("fp8_block", (128, 256), True),
        ("fp8_block", (130, 256), True),  # the last block of rows may be short
        ("fp8_block", (256, 130), False),
        ("fp8_channel", (3, 5), True),
        ("e3m2/4/e8m0", (2, 4), True),
        ("e3m1/4/e8m0", (2, 4), False),  # 20 bits a row
        ("nvfp4", (0, 16), False),
    ],
)
def test_fits_asks_for_whole_blocks_and_whole_bytes(name: str, shape: tuple[int, int], fits: bool) -> None:
    assert get_format(name).fits(shape) is fits


def test_research_formats_are_spelled_element_block_scale() -> None:
    fmt = get_format("E2M1/8/UE5M3")
    assert (fmt.element, fmt.block, fmt.scale, fmt.has_global) == (CODECS["e2m1"], (1, 8), CODECS["ue5m3"], False)
    nv = get_format("e2m1/16/e4m3/global")
    assert (nv.element, nv.block, nv.scale, nv.has_global) == (CODECS["e2m1"], (1, 16), CODECS["e4m3"], True)
    assert get_format("MXFP6-E2M3") is FORMATS["mxfp6_e2m3"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvfp5", "unknown format 'nvfp5'; known are nvfp4, mxfp4"),
        ("e2m1/3/e4m3", "block size 3 of 'e2m1/3/e4m3' is out of range; use 4 to 256"),
        ("e2m1/257/e4m3", "block size 257"),
        ("ue4m4/16/e4m3", "ue4m4 of 'ue4m4/16/e4m3' has no sign"),
        ("e8m7/16/e4m3", "unknown codec 'e8m7'"),
        ("e1m0/16/e4m3", "unknown codec 'e1m0'"),
        ("e2m1/16/ue8m0", "unknown codec 'ue8m0'"),  # its largest number is no float32
        ("e0m3/16/e4m3", "unknown codec 'e0m3'"),
        ("e2m1/16/bf8", "unknown format"),
    ],
)
def test_an_unknown_name_is_one_line_with_what_is_known(name: str, message: str) -> None:
    with pytest.raises(FormatError) as error:
        get_format(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_codec_beyond_float32_has_no_scales() -> None:
    """Magnitudes of all codecs are float32 numbers, since every search and every decode computes in float32."""
    for name in [*CODECS, "e1m6", "e2m5", "e6m1", "e7m0", "ue7m1"]:
        for magnitude in get_codec(name).magnitudes:
            assert float(torch.tensor(magnitude, dtype=torch.float32)) == magnitude
            assert math.isfinite(magnitude)
