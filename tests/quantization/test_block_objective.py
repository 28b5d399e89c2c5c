"""Claims about the block objective: the argmin over every scale of the format."""

import pytest
import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import FORMATS, Format, get_format
from ptqpipe.numerics.qtensor import encode
from ptqpipe.quantization.block_objective import moments_for, search
from tests.quantization.inputs import correlated, second_moment


def brute_force(w: torch.Tensor, fmt: Format, moments: torch.Tensor, g: torch.Tensor | None) -> torch.Tensor:
    """Every code of every block by the definition: encode, decode, float64 quadratic form, the first least one."""
    grid = fmt.scale_shape((w.shape[0], w.shape[1]))
    costs = []
    codes = range(fmt.scale.first_scale_code, len(fmt.scale.magnitudes))
    for code in codes:
        q = encode(w, torch.full(grid, code, dtype=torch.uint8), fmt=fmt, global_scale=g)
        r = (w.double() - q.dequantize().double()).reshape(*grid, -1)
        costs.append(torch.einsum("nbi,bij,nbj->nb", r, moments.double(), r))
    return torch.stack(costs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "e2m1/8/e4m3", "e2m1/16/ue5m3"])
@pytest.mark.parametrize("tokens", [4000, 40, 3])
def test_the_scale_is_the_argmin_over_every_code(name: str, tokens: int) -> None:
    fmt = get_format(name)
    w = (torch.randn(6, 64, generator=torch.Generator().manual_seed(tokens)) * 0.05).bfloat16()
    w[1] = 0.0
    w[2, 5] = 3.0
    w[3, :16] *= 2.0**-12
    g = w.float().abs().amax() / 2688.0 * 1.5 if fmt.has_global else None
    moments = moments_for(fmt, full=second_moment(correlated(tokens, 64)))
    costs = brute_force(w, fmt, moments, g)
    chosen = search(w, fmt, moments=moments, global_scale=g).long() - fmt.scale.first_scale_code
    found = costs.gather(0, chosen.unsqueeze(0))[0]
    least = costs.amin(dim=0)
    assert bool((found <= least * (1 + 1e-9) + 1e-30).all())
    assert bool((found <= costs[0]).all())


def test_without_correlation_it_is_the_weighted_search() -> None:
    from ptqpipe.numerics.search import get_search

    w = (torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
    h = torch.linspace(0.1, 4.0, 64)
    for name in ("nvfp4", "mxfp4"):
        fmt = FORMATS[name]
        g = w.float().abs().amax() / 2688.0 if fmt.has_global else None
        wanted = get_search("exact").search(w, fmt, global_scale=g, importance=h)
        found = search(w, fmt, moments=moments_for(fmt, full=torch.diag(h)), global_scale=g)
        assert float((found == wanted).float().mean()) > 0.999  # scores that differ by less than float32 rounding


def test_block_moments_are_cut_and_joined() -> None:
    full = second_moment(correlated(500, 64))
    corners = torch.stack([full[i : i + 16, i : i + 16] for i in range(0, 64, 16)])
    assert torch.equal(moments_for(FORMATS["nvfp4"], blocks=corners), corners)
    wide = moments_for(FORMATS["mxfp4"], blocks=corners)
    assert torch.equal(wide[1, :16, :16], corners[2])
    assert torch.equal(wide[1, 16:, 16:], corners[3])
    assert not bool(wide[1, :16, 16:].any())
    small = moments_for(get_format("e2m1/8/e4m3"), blocks=corners)
    assert torch.equal(small[3], full[24:32, 24:32])
    assert torch.equal(moments_for(get_format("e2m1/8/e4m3"), full=full), small)


def test_what_cannot_be_searched_is_refused() -> None:
    w = torch.ones(4, 64)
    moments = moments_for(FORMATS["nvfp4"], full=torch.eye(64))
    with pytest.raises(FormatError, match='use objective="diagonal"'):
        search(w, FORMATS["fp8_channel"], moments=moments)
    with pytest.raises(FormatError, match="are not those of 2 blocks of 16"):
        search(w[:, :32], FORMATS["nvfp4"], moments=moments, global_scale=torch.tensor(1.0))
    w[2, 3] = float("nan")
    with pytest.raises(NumericsError, match="1 NaN"):
        search(w, FORMATS["nvfp4"], moments=moments, global_scale=torch.tensor(1.0))
