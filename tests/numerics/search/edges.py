"""Blocks at the very edge of every bound, comparison and rounding of the scale searches, and a few of every kind.

Small on purpose: brute force takes a fraction of a second, so that every implementation can be held to all of them.
"""

import torch

from ptqpipe.numerics.formats import Format, get_format
from tests.numerics.search import cases

ULP = 2.0**-22  # of float32 in [2, 4)

# (format, the block's first elements, the code that must win): by hand, in units of the scale 1
BLOCKS: dict[str, tuple[str, list[float], int]] = {
    # 3.5 is as far from 4 as 7 is from 6 at half the scale: a tie, which the smaller scale wins.
    "a tie of a power of two with its half": ("mxfp4", [3.5, 1.0], 126),
    "a hair above the tie the larger power wins": ("mxfp4", [3.5 + ULP, 1.0], 127),
    "a hair below the tie the half wins": ("mxfp4", [3.5 - ULP, 1.0], 126),
    "all of one magnitude": ("mxfp4", [1.25] * 32, 125),
    # At 1 each small element is off by 0.25, 31/16 in all; at 1/2 they are exact and 4 is clipped to 3, which costs 1.
    "clipping the largest is cheaper than rounding the others": ("mxfp4", [4.0, *[0.75] * 31], 126),
    "the second smallest power": ("mxfp4", [6 * 2.0**-126, 2.0**-126], 1),
    "the largest power that can win": ("mxfp4", [3.3e38], 253),
    "a largest element that is exact at its half": ("mxfp4", [6.0, 2.0, 1.0], 127),
    "exact at two powers": ("mxfp4", [3.0, -1.0], 126),
    # Exact at 1 and 1/2 but for the largest, whose error is a hair smaller at 1.
    "a hair above the tie the larger scale wins": (
        "e2m1/16/e4m3", [3.5 + ULP, *[3.0, 2.0, 1.5, 1.0, 0.5] * 3], 56,
    ),
    "a hair below the tie the half of the scale wins": (
        "e2m1/16/e4m3", [3.5 - ULP, *[3.0, 2.0, 1.5, 1.0, 0.5] * 3], 48,
    ),
    # Exact at 1 and 1/2 but for the largest, which is off by 1/2 at both.
    "a tie of a scale with its half": ("e2m1/16/e4m3", [3.5, *[3.0, 2.0, 1.5, 1.0, 0.5] * 3], 48),
    # In units of 1.875: at 1 all but the largest are exact, and clipping it by 1.47 costs 2.16. At 2 it is off by 0.53
    # and each of the eight 0.5 by 0.5, 2.28 in all. 3.5 times 32/15, nine codes above 1, is just below the largest.
    "the tenth scale from the halving edge": (
        "e2m1/16/e4m3", [1.875 * y for y in (7.46875, *[6.0] * 6, 4.0, *[0.5] * 8)], 63,
    ),
    "the published window ends at 12": ("e2m1/16/e4m3", [30 / 512, 22.5 / 512, *[7.5 / 512] * 14], 15),
    "six and zeros are exact at seven scales": ("e2m1/16/e4m3", [6.0, 0.0, 0.0, -6.0], 56),
    # At 2.75 all but the largest are exact, and it is clipped; at 3 the errors of all have the same float32 sum.
    "a tie with a clipped scale": (
        "e2m1/16/e4m3", [float.fromhex("0x1.186aaap+4"), 5.5, 1.375, 5.5, 5.5, 2.75], 67,
    ),
    # At 1 only the seven is off, by 1; it is as near to what would follow the largest value, 8, as to that, 6.
    "half way between the largest value and none": ("e2m1/16/e4m3", [7.0, *[6.0] * 15], 56),
    # Exact at 1 but for the dust, and at 1.5 as well, where float32 makes the dust's score a rounding smaller.
    "dust just above 2^-32 counts": ("e2m1/16/e4m3", [6.0, float.fromhex("0x1.f6d6acp-30")], 60),
    "dust just below 2^-32 does not count": ("e2m1/16/e4m3", [6.0, float.fromhex("0x1.682142p-30")], 56),
    "dust of exactly 2^-32 counts": (
        "e2m1/16/e4m3", [6.0, 6.0 * 2.0**-32, float.fromhex("0x1.b32f46p-30"), 6.0 * 2.0**-40], 60,
    ),
    "the largest scale": ("e2m1/16/e4m3", [6 * 448.0, 3 * 448.0, 448.0, 0.5 * 448.0], 126),
    "far beyond the largest scale": ("e2m1/16/e4m3", [2.0**24, 2.0**24, 448.0], 126),
    "the smallest scale": ("e2m1/16/e4m3", [6 / 512, 4 / 512, 1 / 512, 0.5 / 512], 1),
    "hardly anything at the smallest scale": ("e2m1/16/e4m3", [0.2500001 / 512], 1),
    "the smallest magnitude alone is exact": ("e2m1/16/e4m3", [2.5 / 512], 5),
    # Twice the scale 384 is none, so clipping 3673 to 6 * 384 is best, where all others are exact.
    "clipping in the top octave": ("e2m1/16/e4m3", [3673.0, *[2304.0] * 15], 124),
    "nothing at the smallest scale": ("e2m1/16/e4m3", [0.25 / 512, 0.2 / 512], 1),
    "the halving edge of E4M3": ("mxfp8", [232.0, 1.0], 126),
    "a hair above the halving edge of E4M3": ("mxfp8", [232.0 + 2.0**-16, 1.0], 127),
    "the halving edge of E2M3": ("mxfp6_e2m3", [3.875, 0.125], 126),
    "a hair above the halving edge of E2M3": ("mxfp6_e2m3", [3.875 + ULP, 0.125], 127),
    # At 1 each small element is off by 1/16, 31/256 in all; at 1/2 they are exact and 4 is clipped to 3.75: 16/256.
    "clipping the largest of E2M3 is cheaper than rounding the others": (
        "mxfp6_e2m3", [4.0, *[15 / 16] * 31], 126,
    ),
    "the halving edge of E3M2": ("mxfp6_e3m2", [15.0, 0.125], 126),
    "a hair above the halving edge of E3M2": ("mxfp6_e3m2", [15.0 + 4 * ULP, 0.125], 127),
}  # fmt: skip


# (format, the block, weights of its columns, the code that must win): by hand
WEIGHTED: dict[str, tuple[str, list[float], list[float], int]] = {
    # At 1 the small elements are zeroed, which costs 31/16, and 48 is clipped to 6: 42^2 * 0.0007 = 1.23. At 1/2 they
    # are exact, and clipping costs 45^2 * 0.0007 = 1.42; at 1/4 46.5^2 * 0.0007 = 1.51. At 8 48 is exact: 31/16.
    "clipping one element that hardly counts": ("mxfp4", [48.0, *[0.25] * 31], [0.0007, *[1.0] * 31], 126),
    "the same with minifloat scales": ("e2m1/16/e4m3", [48.0, *[0.25] * 15], [0.0003, *[1.0] * 15], 48),
}

_BELOW_ONE = 1.0 - 2.0**-20
_SUBNORMAL_HALF = 2.0**-126 * (1 + 2.0**-23)

# (format, global scale, the block, weights of its columns or None, the code that must win): by hand
RARE: dict[str, tuple[str, float | None, list[float], list[float] | None, int]] = {
    # "a hair above the tie the larger scale wins" at a global scale that puts the halving edge, 3.5 - 14 ULP, between
    # the largest element and a hair below 3.5, where a table by the upper bits of the largest element has a step.
    "a hair above the halving edge just below a step of the table": (
        "nvfp4", _BELOW_ONE, [3.5 - 13 * ULP, *[y * _BELOW_ONE for y in [3.0, 2.0, 1.5, 1.0, 0.5] * 3]], None, 56,
    ),
    # The largest is 2^-24 of itself below the smallest magnitude, 2^-31, and at each smaller power as far below another
    # magnitude. Its weighted square is 2^-134 (1 + 2^-17) at 1, which float32 rounds down to 2^-134; four times that at
    # 1/2, and so on, are not rounded. At 2 the block is zero.
    "a square that underflows is smaller than at the half": (
        "e6m1/4/e8m0", None, [2.0**-31 * (1 - 2.0**-24), 0, 0, 0], [2.0**-24 * (1 + 2.0**-17), 1, 1, 1], 127,
    ),
    # 3 and 1 times the scale 2^-26 g, exact there; half of that scale is subnormal and rounds to 2^-127.
    "a scale whose half is subnormal": (
        "e2m1/4/ue7m1/global", 2.0**26 * _SUBNORMAL_HALF, [y * _SUBNORMAL_HALF for y in (3.0, 1.0, 1.0, 1.0)], None, 74,
    ),
}  # fmt: skip
_ODD = [8.0, 9.0, 11.0, 13.0, 15.0]  # exact together at powers of two alone
_LOW = 2.0**-126 * (1 + 120 / 128)

# (columns, the scale that must win): rows and tensors of FP8 by hand
ROWS: dict[str, tuple[list[float], float]] = {
    # Exact at 2^-6, where y is 384, and at 1.5 times that: a tie, which the smaller scale wins.
    "one magnitude is exact at two scales": ([6.0] * 40, 2.0**-6),
    "the same beyond a look half way": ([6.0] * 70000, 2.0**-6),
    # The same with dust, which would cost a rounding less at the larger scale if it counted.
    **{
        f"dust of {dust} does not count": ([6.0, float.fromhex(dust)], 2.0**-6)
        for dust in ("0x1.535c64p-30", "0x1.3ebaf6p-30", "0x1.a17350p-31")
    },
    "the smallest scale": ([2.0**-126 * y for y in (448.0, *_ODD)], 2.0**-126),
    "a scale of the lowest octave, which has no half": ([_LOW * y for y in (208.0, *_ODD)], _LOW),
}


def edge(name: str) -> tuple[str, torch.Tensor, int]:
    """(format, one block float32 ``[1, B]``, the code that wins) of an edge of BLOCKS."""
    fmt, values, code = BLOCKS[name]
    block = 32 if fmt.startswith("mx") else 16
    return fmt, torch.tensor([values + [0.0] * (block - len(values))]), code


def rare(name: str) -> tuple[Format, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]:
    """(format, one block float32 ``[1, B]``, global scale, weights ``[B]``, the code that wins) of an edge of RARE."""
    fmt, scale, values, weights, code = RARE[name]
    g = None if scale is None else torch.tensor(scale)
    return get_format(fmt), torch.tensor([values]), g, None if weights is None else torch.tensor(weights), code


def mixed(fmt: Format, seed: int) -> torch.Tensor:
    """float32 ``[1, blocks * B]``: blocks of every kind in one row, magnitudes 2^-149 to the largest."""
    g, block = cases.generator(seed), fmt.block[1]
    blocks = [w[:, :block] for w in cases.weights(fmt, 2, 1, seed).values()]
    largest = torch.tensor([[2.0**-31.5], [2.0**-32], [2.0**-32.5], [2.0**-33], [2.0**-34]])
    dust = torch.zeros(5, block)
    dust[:, 0], dust[:, 1] = 6.0, 6.0 * largest[:, 0]
    points = torch.tensor(fmt.element.magnitudes)
    grid = points[torch.randint(0, len(points), (4, block), generator=g)]
    grid[:, 0] = fmt.element.max * torch.tensor([1.0, 1.0625, 1.25, 1.4375])
    far = torch.randn(8, block, generator=g) * torch.tensor(
        [[2.0**e] for e in (-147, -133, -127, -70, -20, -9, 60, 100)]
    )
    alike = 1.25 * (1 + 0.02 * torch.randn(4, block, generator=g))
    return torch.cat([*blocks, dust, dust * 1.4375, grid, grid * 0.0625, far, alike]).reshape(1, -1)


def edges_of(fmt_name: str) -> tuple[torch.Tensor, list[int]]:
    """(the blocks of BLOCKS of this format, float32 ``[blocks, B]``, the code that wins of each)."""
    found = [edge(name) for name, block in BLOCKS.items() if block[0] == fmt_name]
    return torch.cat([w for _, w, _ in found]), [code for _, _, code in found]
