"""Weights and importances that a scale search gets wrong when it is wrong at all, for any format."""

import torch

from ptqpipe.numerics.formats import Format


def generator(seed: int) -> torch.Generator:
    """A seeded source of random numbers."""
    return torch.Generator().manual_seed(seed)


def global_scale(w: torch.Tensor, fmt: Format, *, factor: float = 1.0) -> torch.Tensor | None:
    """amax / (largest element times largest scale) times ``factor``; None for a format without a global scale.

    Kept within 2^-100 .. 2^100, as ``global_scale.py`` does.
    """
    if not fmt.has_global:
        return None
    g = (float(w.abs().max()) or 1.0) / fmt.max_product * factor
    return torch.tensor(g, dtype=torch.float32).clamp(2.0**-100, 2.0**100)


def weights(fmt: Format, rows: int, blocks: int, seed: int) -> dict[str, torch.Tensor]:
    """float32 ``[rows, blocks * B]`` by name: random and adversarial, magnitudes 2^-40 .. 2^20 and beyond."""
    g = generator(seed)
    shape = (rows, blocks * fmt.block[1])
    normal = torch.randn(shape, generator=g)
    uniform = torch.rand(shape, generator=g)
    far = torch.exp2(torch.randint(-40, 21, (rows, 1), generator=g).float())
    legal = torch.tensor([m for m in fmt.scale.magnitudes if 2.0**-20 < m < 2.0**20] or [1.0])
    scale = legal[torch.randint(0, len(legal), (rows, 1), generator=g)]
    magnitudes = torch.tensor(fmt.element.magnitudes)
    points = magnitudes[torch.randint(0, len(magnitudes), shape, generator=g)] * scale
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    ties = middles[torch.randint(0, len(middles), shape, generator=g)] * scale
    outlier = normal * 1e-3
    outlier[:, :: fmt.block[1]] = 5.0 + uniform[:, :: fmt.block[1]]
    dust = points.clone()
    dust[:, 1::3] = torch.exp2(torch.randint(-140, -20, dust[:, 1::3].shape, generator=g).float())
    zeros = normal.clone()
    zeros[:, : fmt.block[1]] = 0.0
    zeros[0] = -0.0
    return {
        "normal": normal * 0.02,
        "rows far apart": normal * far,
        "elements far apart": normal * torch.exp2(torch.randint(-60, 1, shape, generator=g).float()),
        "heavy tails": normal / (uniform + 1e-3),
        "exactly representable": points,
        "ties": ties,
        "just below ties": torch.nextafter(ties, torch.zeros(shape)),
        "just above ties": torch.nextafter(ties, torch.full(shape, 1e30)),
        "one outlier": outlier,
        "dust beside exact values": dust,
        "constant": torch.full(shape, 1.37) * far,
        "sparse": normal * (uniform < 0.06),
        "zero blocks": zeros,
        "subnormal": normal * 2.0**-135,
        "huge": normal * 2.0**60,
    }


def importances(columns: int, seed: int) -> dict[str, torch.Tensor | None]:
    """``[columns]`` weights by name, from none to hostile."""
    g = generator(seed)
    uniform = torch.rand(columns, generator=g)
    some = uniform * (torch.rand(columns, generator=g) < 0.5)
    some[0] = 1.0
    alone = torch.zeros(columns)
    alone[columns // 3] = 3.0
    return {
        "none": None,
        "uniform": uniform,
        "half of them zero": some,
        "2^-30 .. 2^30": torch.exp2(torch.randint(-30, 31, (columns,), generator=g).float()),
        "one column alone": alone,
    }


def stacked(fmt: Format, rows: int, blocks: int, seed: int) -> dict[str, torch.Tensor]:
    """The :func:`weights` as two tensors: as they are, and each brought to a largest magnitude in [1, 2)."""
    kinds = weights(fmt, rows, blocks, seed).values()
    alike = [torch.ldexp(w, 1 - torch.frexp(w.abs().max()).exponent) for w in kinds if w.abs().max() > 2.0**-100]
    return {"as they are": torch.cat([w for w in kinds if w.abs().max() < 2.0**40]), "alike": torch.cat(alike)}
