"""Weights that a scale search gets wrong when it is wrong at all, and an oracle fast enough for millions of blocks."""

from collections.abc import Iterator

import torch

from ptqpipe.numerics.formats import Codec, Format
from ptqpipe.numerics.qtensor import scale_values
from ptqpipe.numerics.search.objective import SHORT, exact_weights, importance_blocks, lane_sum, magnitude_blocks

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
_AT_ONCE = 1 << 17  # numbers that are scored side by side, of as many blocks and scales as they are


def generator(seed: int) -> torch.Generator:
    """A seeded source of random numbers."""
    return torch.Generator().manual_seed(seed)


def families(rows: int, columns: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Named float32 weights of about unit size."""
    g = generator(seed)
    shape = (rows, columns)
    normal = torch.randn(shape, generator=g)
    uniform = torch.rand(shape, generator=g)
    yield "normal", normal
    yield "laplace", torch.sign(uniform - 0.5) * torch.log1p(-2 * (uniform - 0.5).abs().clamp(max=0.4999999))
    yield "student t4", normal / (torch.randn(4, *shape, generator=g).square().mean(0).sqrt() + 1e-3)
    yield (
        "lognormal mixture",
        normal * torch.exp(2 * torch.randn(rows, columns // 32, generator=g)).repeat_interleave(32, 1),
    )
    yield "sparse", normal * (torch.rand(shape, generator=g) < 0.07)
    yield "constant", torch.full(shape, 0.7)
    outlier = normal * 1e-3
    outlier[:, ::32] = 5.0 + uniform[:, ::32]
    yield "one outlier", outlier
    yield "uniform", uniform
    yield "rows far apart", normal * torch.exp2(-torch.arange(rows).float() * 2).unsqueeze(1)
    yield "elements far apart", normal * torch.exp2(torch.randint(-60, 1, shape, generator=g).float())
    yield "nearly negligible", torch.where(uniform < 0.2, normal, normal * 2.0**-31)
    yield "ties", tie_points(rows, columns, g)
    zeros = normal.clone()
    zeros[:, : columns // 2] = 0.0
    zeros[0] = -0.0
    yield "zero blocks", zeros


def tie_points(rows: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """Every element a midpoint or a value of E2M1, so that scales of powers of two meet exact ties."""
    points = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])
    picked = points[torch.randint(0, len(points), (rows, columns), generator=g)]
    return picked * torch.where(torch.rand(rows, columns, generator=g) < 0.5, -1.0, 1.0)


def weights_of_columns(columns: int, seed: int) -> dict[str, torch.Tensor]:
    """Importance from harmless to hostile, ``[columns]``."""
    g = generator(seed)
    uniform = torch.rand(columns, generator=g)
    zeros = uniform.clone()
    zeros[torch.rand(columns, generator=g) < 0.5] = 0.0
    zeros[0] = 1.0
    one = torch.zeros(columns)
    one[columns // 3] = 3.0
    return {
        "uniform": uniform,
        "zeros": zeros,
        "2^-20 .. 2^20": torch.exp2(torch.randint(-20, 21, (columns,), generator=g).float()),
        "one column alone": one,
        "all equal": torch.full((columns,), 5.0),
    }


def default_global(w: torch.Tensor, fmt: Format) -> torch.Tensor | None:
    """amax / (largest element times largest scale), None for a format without a global scale."""
    if not fmt.has_global:
        return None
    amax = float(w.float().abs().amax())
    return torch.tensor((amax or 1.0) / fmt.max_product, dtype=torch.float32)


def score_every_code(
    w: torch.Tensor, fmt: Format, *, global_scale: torch.Tensor | None = None, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 ``[N, K/B]``, float64 scores ``[blocks]``) of the objective over every scale code, without bounds.

    As ``search/brute_force.py``, but rounding by adding a magic number and with elements along the rows, in parts that
    stay in cache. Blocks without a finite score have the score inf and the smallest code.
    """
    x = magnitude_blocks(w, fmt).t().contiguous()
    h = importance_blocks(importance, w, fmt)
    h = None if h is None else h.t().contiguous()
    codes, scores = [], []
    step = max(1, _AT_ONCE // len(x))
    for start in range(0, x.shape[1], step):
        part = slice(start, start + step)
        code, score = _least(x[:, part].contiguous(), None if h is None else h[:, part].contiguous(), fmt, global_scale)
        codes.append(code)
        scores.append(score)
    grid = fmt.scale_shape((w.shape[0], w.shape[1]))
    return torch.cat(codes).reshape(grid), torch.cat(scores)


def _least(
    x: torch.Tensor, h: torch.Tensor | None, fmt: Format, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.arange(fmt.scale.first_scale_code, len(fmt.scale.magnitudes)).to(torch.uint8)
    best = torch.full((x.shape[1],), float("inf"), dtype=torch.float64)
    chosen = codes[:1].expand(x.shape[1])
    top = x.amax(dim=0)
    for some in torch.split(codes, max(1, _AT_ONCE // x.numel())):
        value = scale_values(some, fmt.scale).unsqueeze(1)
        r = 1.0 / (value if global_scale is None else value * global_scale)
        y = x.unsqueeze(1) * r
        d = y - _nearest(y, fmt.element)
        t = d * d
        if h is not None:
            t *= h.unsqueeze(1)
        acc = _sum(t.flatten(1)).reshape(len(some), -1)
        score = acc.double() * value.double().square() if exact_weights(fmt.scale) else (acc * (value * value)).double()
        score[top * r <= fmt.element.min_positive / 2] = float("inf")
        smallest = score.nan_to_num_(nan=float("inf"), posinf=float("inf")).argmin(dim=0)  # of codes of one score
        least = score.gather(0, smallest.unsqueeze(0))[0]
        better = least < best
        best = torch.where(better, least, best)
        chosen = torch.where(better, some[smallest], chosen)
    return chosen, best


def _sum(t: torch.Tensor) -> torch.Tensor:
    """``[elements, blocks]`` -> ``[blocks]``: in the order of the elements, of long blocks in float64 lanes."""
    if len(t) > SHORT:
        return lane_sum(t.t())
    acc = t[0].clone()
    for row in t[1:]:
        acc += row
    return acc


def _nearest(y: torch.Tensor, codec: Codec) -> torch.Tensor:
    """y rounded to a minifloat codec by a magic number (equal to ``round_to`` but for which way ties go)."""
    normal = next(i for i, m in enumerate(codec.magnitudes) if m != i * codec.magnitudes[1]) // 2  # 2^mantissa bits
    y = y.clamp(max=codec.max)
    power = (y.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=normal * codec.magnitudes[1])
    power *= 2.0**23 / normal
    return y.add_(power).sub_(power)
