"""Claims about packed bytes: their order is pinned by literals, and nothing is lost on the way."""

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import pack, packed_columns, unpack


def test_even_columns_go_to_the_low_nibble() -> None:
    codes = torch.tensor([[0x1, 0x2, 0xA, 0xF]], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [[0x21, 0xFA]]


def test_nibbles_are_those_of_the_published_example() -> None:
    # 0.5, -6, 1, 1.5, -0, 0, 3, -4 in E2M1: codes 1, 15, 2, 3, 8, 0, 5, 14; bytes as compressed-tensors packs them.
    codes = torch.tensor([[1, 15, 2, 3, 8, 0, 5, 14]], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [[241, 50, 8, 229]]


def test_six_bits_fill_three_bytes_from_the_lowest_bit_on() -> None:
    # 0b000001, 0b100000, 0b111111, 0b000010 -> 24 bits 000010_111111_100000_000001, low byte first.
    codes = torch.tensor([[0b000001, 0b100000, 0b111111, 0b000010]], dtype=torch.uint8)
    assert pack(codes, 6).tolist() == [[0b00000001, 0b11111000, 0b00001011]]


def test_six_bit_packing_is_that_of_compressed_tensors() -> None:
    peer = pytest.importorskip("compressed_tensors.compressors.mxfp6.helpers", reason="needs compressed-tensors 0.20")
    codes = torch.randint(0, 64, (5, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    magnitudes = peer.kE2M3ToFloat[(codes & 31).int()]
    values = torch.where(codes >= 32, -magnitudes, magnitudes)
    assert torch.equal(pack(codes, 6), peer.pack_fp6_to_uint8(values))


def test_eight_bits_are_stored_as_they_are() -> None:
    codes = torch.arange(256).to(torch.uint8).reshape(2, 128)
    assert torch.equal(pack(codes, 8), codes)
    assert torch.equal(unpack(codes, 8), codes)


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 7, 8])
def test_every_byte_survives_unpacking_and_packing(bits: int) -> None:
    data = torch.arange(256).to(torch.uint8).repeat(1, bits)
    assert torch.equal(pack(unpack(data, bits), bits), data)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 8), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_packing_is_one_little_endian_integer_a_row(bits: int, rows: int, words: int, seed: int) -> None:
    columns = 8 * words
    rng = random.Random(seed)
    codes = [[rng.randrange(1 << bits) for _ in range(columns)] for _ in range(rows)]
    packed = pack(torch.tensor(codes, dtype=torch.uint8), bits)
    for row, data in zip(codes, packed.tolist(), strict=True):
        whole = sum(code << (bits * k) for k, code in enumerate(row))
        assert bytes(data) == whole.to_bytes(columns * bits // 8, "little")
    assert torch.equal(unpack(packed, bits), torch.tensor(codes, dtype=torch.uint8))


def test_leading_dimensions_are_kept() -> None:
    codes = torch.randint(0, 16, (2, 3, 8), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    assert pack(codes, 4).shape == (2, 3, 4)
    assert torch.equal(pack(codes, 4)[1, 2], pack(codes[1, 2], 4))


@pytest.mark.parametrize(("columns", "bits"), [(3, 4), (2, 6), (7, 3)])
def test_codes_that_do_not_fill_bytes_are_refused(columns: int, bits: int) -> None:
    with pytest.raises(FormatError, match=f"{columns} codes of {bits} bits do not fill whole bytes"):
        packed_columns(columns, bits)
    with pytest.raises(FormatError):
        pack(torch.zeros(1, columns, dtype=torch.uint8), bits)
