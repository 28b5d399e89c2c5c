"""Claims about the quick brute force: the scales of the slow one, whatever was stored."""

from collections.abc import Iterator

import pytest
import torch

from ptqpipe.numerics.formats import Format, get_format
from ptqpipe.numerics.search import brute_force
from ptqpipe.numerics.search.brute_force import all_scales
from ptqpipe.numerics.search.least import best_scales
from ptqpipe.numerics.search.objective import importance_blocks, magnitude_blocks, scores


def matrices(rows: int, columns: int) -> Iterator[torch.Tensor]:
    """Weights that break bounds: one magnitude, zeros, an outlier, the ends of the range, the codec's own numbers."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, columns, generator=g)
    yield normal * 0.02
    yield (torch.arange(rows)[:, None] * 0.01 + 0.25).expand(rows, columns).contiguous()
    yield torch.zeros(rows, columns)
    yield torch.where(torch.arange(columns) == 3, 50.0, normal * 0.02)
    yield normal * 2.0**-40
    yield normal * 2.0**20
    yield torch.randint(-6, 7, (rows, columns), generator=g).float()
    yield torch.exp(normal * 6)


def weights(columns: int) -> list[torch.Tensor | None]:
    return [None, torch.rand(columns, generator=torch.Generator().manual_seed(1)) ** 4]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "e2m1/8/ue5m3", "e2m1/16/e4m3", "e2m1/128/e8m0"])
def test_codes_are_those_of_brute_force_whatever_was_stored(name: str) -> None:
    fmt = get_format(name)
    g = torch.tensor(0.00037) if fmt.has_global else None
    for w in matrices(8, 128):
        for importance in weights(128):
            want = brute_force.search(w, fmt, global_scale=g, importance=importance).reshape(-1)
            x, h = magnitude_blocks(w, fmt), importance_blocks(importance, w, fmt)
            for stored in (want, torch.zeros_like(want), torch.full_like(want, 90), torch.full_like(want, 255)):
                assert torch.equal(
                    best_scales(x.numpy(), stored, fmt=fmt, global_scale=g, h=None if h is None else h.numpy()), want
                )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_channel", "e2m1/64/bf16", "e2m1/64/fp16/global"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_those_of_least_score_among_all(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    g = torch.tensor(0.37) if fmt.has_global else None
    for w in matrices(1, 64):
        w = w.to(dtype)
        for importance in weights(64):
            x, h = magnitude_blocks(w, fmt), importance_blocks(importance, w, fmt)
            want = _least_of_all(x, fmt, g, h)
            for stored in (want, want * 1.25, want * 0, want / 64):
                assert torch.equal(
                    best_scales(x.numpy(), stored, fmt=fmt, global_scale=g, h=None if h is None else h.numpy()), want
                )


def _least_of_all(x: torch.Tensor, fmt: Format, g: torch.Tensor | None, h: torch.Tensor | None) -> torch.Tensor:
    codes = all_scales(fmt.scale)
    spread = None if h is None else h.expand(len(codes), -1)
    found = scores(x.expand(len(codes), -1), codes, fmt=fmt, global_scale=g, h=spread)
    return codes[found.argmin()].reshape(1)  # the first where all are infinite


def test_a_part_of_the_numbers_is_enough_to_refuse_a_wrong_one() -> None:
    fmt = get_format("fp8_channel")
    x = magnitude_blocks(torch.randn(1, 512, generator=torch.Generator().manual_seed(0)), fmt)
    right = best_scales(x.numpy(), torch.ones(1, dtype=torch.bfloat16), fmt=fmt)
    for first in range(16):
        assert torch.equal(best_scales(x.numpy(), right, fmt=fmt, every=16, first=first), right)
        beside = torch.nextafter(right, torch.full_like(right, 1e9))
        for wrong in (beside, right * 2, right * 1.5, right / 2):
            assert not torch.equal(best_scales(x.numpy(), wrong, fmt=fmt, every=16, first=first), wrong)
