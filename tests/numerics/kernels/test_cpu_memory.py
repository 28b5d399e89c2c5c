"""Claims about the memory of weights: tensors of their own that begin cache lines, and are given back."""

import re
from pathlib import Path

import pytest
import torch

from ptqpipe.numerics.kernels import cpu_linear


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, 5_000_001, (64 << 20) - 1, 64 << 20, (64 << 20) + 1])
def test_a_tensor_has_its_size_and_begins_a_line(nbytes: int) -> None:
    found = cpu_linear.empty_bytes(nbytes)
    assert (found.dtype, found.shape, found.stride()) == (torch.uint8, (nbytes,), (1,))
    assert nbytes < 64 or found.data_ptr() % 64 == 0


def test_no_tensor_shares_a_byte_with_another() -> None:
    made = [
        cpu_linear.empty_bytes(nbytes).fill_(at)
        for at, nbytes in enumerate([70, 64, 1, 30 << 20, 40 << 20, 100, 90 << 20])
    ]
    for at, found in enumerate(made):
        assert bool((found == at).all())


def test_inference_mode_ends_with_it() -> None:
    with torch.inference_mode():
        cpu_linear.empty_bytes(100)
    found = cpu_linear.empty_bytes(100)
    assert not found.is_inference()
    found.fill_(3)


def test_memory_that_nothing_refers_to_is_given_back() -> None:
    def resident() -> int:
        found = re.search(r"^Rss:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    before = resident()
    some = [cpu_linear.empty_bytes(80 << 20).fill_(1) for _ in range(4)]
    assert resident() > before + (250 << 20)
    del some
    assert resident() < before + (50 << 20)


def test_a_tensor_is_one_of_torchs(tmp_path: Path) -> None:
    found = cpu_linear.empty_bytes(256).fill_(7)
    torch.save(found, tmp_path / "saved")
    assert torch.equal(torch.load(tmp_path / "saved"), found)
    assert torch.equal(found.view(torch.int32), torch.full((64,), 0x07070707, dtype=torch.int32))


def test_a_size_that_the_system_has_not_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="for weights"):
        cpu_linear.empty_bytes(1 << 60)
