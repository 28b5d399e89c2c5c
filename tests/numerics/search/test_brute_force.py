"""Claims about the oracle: it looks at every scale, takes the least score, and is right by an independent count."""

import numpy as np
import pytest
import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import CODECS, Format, get_format
from ptqpipe.numerics.qtensor import scale_values
from ptqpipe.numerics.search import brute_force
from ptqpipe.numerics.search.brute_force import all_scales
from ptqpipe.numerics.search.objective import importance_blocks, magnitude_blocks, scores
from tests.numerics.search import cases


def by_hand(block: np.ndarray, fmt: Format, g: float | None, h: np.ndarray) -> int:
    """The chosen code of one block, in numpy float32 scalars, straight from the definition of the objective."""
    f = np.float32
    x = np.abs(block.astype(f))
    x = np.where(x < x.max() * f(2.0**-32), f(0), x)
    grid = np.array(fmt.element.magnitudes, dtype=f)
    best, chosen = np.inf, fmt.scale.first_scale_code
    for code in range(fmt.scale.first_scale_code, len(fmt.scale.magnitudes)):
        value = f(fmt.scale.magnitudes[code])
        r = f(1) / (value if g is None else value * f(g))
        y = x * r
        if y.max() <= grid[1] / 2:
            continue
        d = np.abs(y[:, None] - grid).min(axis=1)
        acc = f(0)
        for t in d * d * h:
            acc += t
        score = float(acc) * float(value) ** 2 if fmt.scale.power_of_two else float(acc * (value * value))
        if score < best:
            best, chosen = score, code
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "e2m1/16/e4m3", "mxfp4", "mxfp6_e2m3", "e2m1/8/ue5m3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_oracle_is_what_a_second_hand_computes(name: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many scales side by side, with a few and one by one."""
    fmt = get_format(name)
    for kind in ("normal", "ties", "one outlier", "zero blocks", "dust beside exact values"):
        w = cases.weights(fmt, 2, 2, seed=1)[kind]
        g = cases.global_scale(w, fmt)
        h = cases.importances(w.shape[1], 2)["uniform"] if weighted else None
        spread = importance_blocks(h, w, fmt)
        blocks = w.reshape(-1, fmt.block[1]).numpy()
        weights = np.ones_like(blocks) if spread is None else spread.numpy()
        with np.errstate(over="ignore"):  # at the smallest scales y and its square leave float32, as they should
            gs = None if g is None else float(g)
            expected = [by_hand(b, fmt, gs, k) for b, k in zip(blocks, weights, strict=True)]
        for at_once in (1 << 17, 7 * w.numel(), 1):
            monkeypatch.setattr(brute_force, "_AT_ONCE", at_once)
            found = brute_force.search(w, fmt, global_scale=g, importance=h)
            assert found.flatten().tolist() == expected, (kind, at_once)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "e2m1/16/e4m3", "mxfp8", "e3m2/8/ue4m4/global"])
def test_no_single_scale_is_better(name: str) -> None:
    fmt = get_format(name)
    for kind, w in cases.weights(fmt, 3, 2, seed=3).items():
        g = cases.global_scale(w, fmt, factor=1.7)
        x = magnitude_blocks(w, fmt)
        chosen = brute_force.search(w, fmt, global_scale=g).flatten()
        least = scores(x, chosen, fmt=fmt, global_scale=g)
        for code in all_scales(fmt.scale):
            score = scores(x, code.expand(len(x)), fmt=fmt, global_scale=g)
            assert (least <= score).all(), kind
            assert ((least < score) | (chosen <= code) | torch.isinf(score)).all(), kind  # ties: the smaller code


def test_the_chosen_scale_is_best_in_float64_up_to_rounding() -> None:
    """float32 scores are within (16 + 8) * 2^-24 + 6 * 2^-24 y/|d| of the truth; 2^-14 covers normal weights."""
    fmt = get_format("nvfp4")
    w = cases.weights(fmt, 16, 8, seed=4)["normal"]
    g = cases.global_scale(w, fmt)
    assert g is not None
    x = w.reshape(-1, 16).abs().double()
    values = torch.tensor(fmt.scale.magnitudes, dtype=torch.float64)[1:] * g.double()
    grid = torch.tensor(fmt.element.magnitudes, dtype=torch.float64)
    y = x.unsqueeze(1) / values.view(1, -1, 1)
    errors = ((y.unsqueeze(-1) - grid).abs().amin(dim=-1) * values.view(1, -1, 1)).square().sum(dim=-1)
    chosen = brute_force.search(w, fmt, global_scale=g).flatten().long() - 1
    taken = errors.gather(1, chosen.unsqueeze(1))[:, 0]
    assert (taken <= errors.amin(dim=1) * (1 + 2.0**-14)).all()


@pytest.mark.parametrize(
    ("name", "count"), [("e4m3", 126), ("e8m0", 255), ("ue5m3", 255), ("bf16", 32512), ("fp16", 30720)]
)
def test_every_positive_finite_scale_is_a_candidate(name: str, count: int) -> None:
    """bfloat16 and float16: the normal ones, 254 and 30 binades."""
    scales = all_scales(CODECS[name])
    values = scale_values(scales, CODECS[name])
    assert len(scales) == count
    assert (values > 0).all()
    assert torch.isfinite(values).all()
    assert (values[1:] > values[:-1]).all()


def test_float32_scales_cannot_be_enumerated() -> None:
    with pytest.raises(FormatError, match="fp32 scales cannot be enumerated"):
        brute_force.search(torch.ones(1, 16), get_format("e2m1/16/fp32"))


def test_zero_blocks_get_the_smallest_scale() -> None:
    assert brute_force.search(torch.zeros(2, 32), get_format("e2m1/16/e4m3")).tolist() == [[1, 1], [1, 1]]
    assert brute_force.search(torch.zeros(1, 32), get_format("mxfp4")).tolist() == [[0]]


def test_nan_raises() -> None:
    with pytest.raises(NumericsError, match="1 NaN"):
        brute_force.search(torch.full((1, 1), float("nan")).expand(1, 1).repeat(1, 1), get_format("fp8_channel"))
