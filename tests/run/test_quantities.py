"""Sizes and numbers as they are printed, and sizes as a user may type them again."""

import pytest

from ptqpipe.cli.parameters import Size
from ptqpipe.run.quantities import disk_size, memory_size, number, option_size, option_size_above, scientific


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (3882072, "3.88 MB"), (999_600, "1.00 MB"), (10**13, "10.0 TB")],
)
def test_sizes_on_disk_are_decimal(nbytes: int, text: str) -> None:
    assert disk_size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(65536, "64 KiB"), (245 << 20, "245 MiB"), (1010 << 20, "1010 MiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes_in_memory_are_binary(nbytes: int, text: str) -> None:
    assert memory_size(nbytes) == text


@pytest.mark.parametrize("text", ["2GiB", "100MB", "1.5GiB", "700MiB", "9GB", "1.25GB", "1234567B", "0B"])
def test_a_size_that_was_asked_for_is_printed_as_it_was_asked(text: str) -> None:
    assert option_size(Size().convert(text, None, None)) == text


@pytest.mark.parametrize("nbytes", [1, 10**9 - 1, 2**31 + 4096, 12_345_678_901_234, 995 << 20])
def test_a_printed_option_means_exactly_what_it_was_printed_for(nbytes: int) -> None:
    assert Size().convert(option_size(nbytes), None, None) == nbytes


@pytest.mark.parametrize(("nbytes", "text"), [(548 << 20, "548MiB"), ((548 << 20) + 1, "549MiB")])
def test_a_size_to_ask_for_is_rounded_up(nbytes: int, text: str) -> None:
    assert option_size_above(nbytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.071, "0.071"),
        (0.73512, "0.7351"),
        (12.0416, "12.04"),
        (28672.4, "28672"),
        (0.0065774, "6.577e-3"),
        (-0.0065774, "-6.577e-3"),
        (1.2e9, "1.200e9"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_have_four_digits_and_one_notation(value: float, text: str) -> None:
    assert number(value) == text


def test_small_numbers_have_an_exponent_without_zeros() -> None:
    assert [scientific(6.577e-3), scientific(1.6e-12, 2), scientific(float("inf"))] == ["6.58e-3", "1.6e-12", "inf"]
