"""Blocks that break the bounds of a scale search when they can be broken, and what a bound-free search makes of them.

Everything is drawn from a seed alone, so a case can be made again from the words that a failure prints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.kernels import cpu, triton
from ptqpipe.numerics.qtensor import from_blocks
from ptqpipe.numerics.search import exact
from ptqpipe.numerics.search.brute_force import all_scales
from ptqpipe.numerics.search.objective import importance_blocks, magnitude_blocks, scores
from tests.numerics.kernels.cpu_cases import score_every_code

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Search = Callable[[torch.Tensor, Format, torch.Tensor | None, torch.Tensor | None], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Case:
    """A weight and what its search is given besides."""

    fmt: Format
    w: torch.Tensor
    global_scale: torch.Tensor | None
    importance: torch.Tensor | None

    def expected(self) -> torch.Tensor:
        """The scales of least score, found by scoring all that do not zero or clip every element."""
        if self.fmt.scale.enumerable:
            return score_every_code(self.w, self.fmt, global_scale=self.global_scale, importance=self.importance)[0]
        return _least_number(self.w, self.fmt, self.global_scale, self.importance)

    def differing(self, found: torch.Tensor, expected: torch.Tensor) -> list[int]:
        """The numbers of the blocks whose scale is another one."""
        return [int(k) for k in (found != expected).flatten().nonzero()]

    def fault(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> str:
        """What is wrong with the scales that ``name`` found, with the first such block to paste; "" if nothing."""
        wrong = self.differing(found, expected)
        if not wrong:
            return ""
        k = wrong[0]
        return (
            f"{name}: {len(wrong)} of {expected.numel()} scales of {self.fmt.name} differ, the first is "
            f"{found.flatten()[k].item()} where brute force has {expected.flatten()[k].item()}; {self.block(k)}"
        )

    def block(self, number: int) -> str:
        """Python that makes the case of this one block again, to the bit."""
        rows, cols = self.fmt.block_extent((self.w.shape[0], self.w.shape[1]))
        across = -(-self.w.shape[1] // cols)
        row, col = number // across * rows, number % across * cols
        part = self.w[row : row + rows, col : col + cols]
        h = None if self.importance is None else _pasted(self.importance)  # whole: it is normalized by its largest
        g = None if self.global_scale is None else _pasted(self.global_scale.reshape(1)) + "[0]"
        return f"w = {_pasted(part)}; columns = slice({col}, {col + cols}); global_scale = {g}; importance = {h}"


def _pasted(x: torch.Tensor) -> str:
    raw = bytes(x.contiguous().flatten().view(torch.uint8).tolist()).hex()
    return f"torch.frombuffer(bytearray.fromhex('{raw}'), dtype={x.dtype}).reshape({list(x.shape)})"


# Blocks, float32 [n, B], the largest magnitude of each about 1


def _signs(shape: tuple[int, int], g: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(shape, generator=g) < 0.5, -1.0, 1.0)


def _significands(n: int, g: torch.Generator) -> torch.Tensor:
    """``[n, 1]``: all of bfloat16 in turn from a random one on, and random ones of float32 for every fourth block."""
    first = int(torch.randint(0, 128, (1,), generator=g))
    coarse = 1.0 + (torch.arange(n) + first).remainder(128) / 128
    return torch.where(torch.arange(n) % 4 == 3, 1.0 + torch.rand(n, generator=g), coarse).unsqueeze(1)


def _constant(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    return _significands(n, g).expand(n, b) * _signs((n, b), g)


def _two_valued(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    ratio = _significands(n, g) * torch.exp2(-torch.randint(1, 11, (n, 1), generator=g).float())
    small = torch.rand(n, b, generator=g) < torch.rand(n, 1, generator=g)
    return _constant(fmt, n, b, g) * torch.where(small, ratio, 1.0)


def _near(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    noise = 10.0 ** (torch.rand(n, 1, generator=g) * 2 - 3)
    return _constant(fmt, n, b, g) * (1.0 + noise * torch.randn(n, b, generator=g))


def _outlier(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    x = torch.randn(n, b, generator=g) * torch.exp2(-torch.rand(n, 1, generator=g) * 14)
    x[torch.arange(n), torch.randint(0, b, (n,), generator=g)] = -_significands(n, g)[:, 0] * 2
    return x


def _scale_values(fmt: Format, n: int, g: torch.Generator) -> torch.Tensor:
    """``[n, 1]``: scales of the format near 1, or significands where they are numbers."""
    legal = torch.tensor(
        [m for m in fmt.scale.magnitudes if 2.0**-12 < m < 2.0**12] or [1.0, 1.0078125, 1.5, 1.9921875]
    )
    return legal[torch.randint(0, len(legal), (n, 1), generator=g)]


def _ties(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    """Midpoints of the grid times a scale, exact and an ulp beside."""
    grid = torch.tensor(fmt.element.magnitudes)
    middles = (grid[1:] + grid[:-1]) / 2
    top = torch.randint(1, len(middles) + 1, (n, 1), generator=g)  # not every block reaches the largest magnitude
    x = middles[(torch.rand(n, b, generator=g) * top).long()] * _scale_values(fmt, n, g)
    beside = torch.nextafter(x, x + _signs((n, b), g))
    return torch.where(torch.rand(n, 1, generator=g) < 0.5, x, beside) * _signs((n, b), g)


def _on_grid(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    grid = torch.tensor(fmt.element.magnitudes)
    top = torch.randint(1, len(grid) + 1, (n, 1), generator=g)
    return grid[(torch.rand(n, b, generator=g) * top).long()] * _scale_values(fmt, n, g) * _signs((n, b), g)


def _at_the_edges(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    """The largest element at, or an ulp from, what starts a scan at the next scale or begins to clip."""
    grid = fmt.element.magnitudes
    known = set(grid)
    reach = next(i for i, m in enumerate(grid) if 2 * m not in known) - 1
    ends = [(grid[reach] + grid[reach + 1]) / 2, grid[-1], grid[-1] + (grid[-1] - grid[-2]) / 2, 2 * grid[-1]]
    if not fmt.element.symmetric:  # integers go one further below zero
        low = -min(fmt.element.grid)
        ends += [low // 2 + 0.5, low, low + 0.5, 2 * low]
    edges = torch.tensor(ends)
    x = torch.rand(n, b, generator=g) * 0.9
    x[torch.arange(n), torch.randint(0, b, (n,), generator=g)] = 1.0
    top = edges[torch.randint(0, len(edges), (n, 1), generator=g)] * _scale_values(fmt, n, g)
    top = torch.where(torch.rand(n, 1, generator=g) < 0.5, top, torch.nextafter(top, top + _signs((n, 1), g)))
    return x * top * _signs((n, b), g)


def _sorted(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    """Ascending, descending, or a geometric ladder."""
    x = torch.randn(n, b, generator=g).abs().sort(dim=1).values
    ladder = torch.exp2(-torch.arange(b) * torch.rand(n, 1, generator=g))
    kind = torch.randint(0, 3, (n, 1), generator=g)
    return torch.where(kind == 0, x, torch.where(kind == 1, x.flip(1), ladder)) * _signs((n, b), g)


def _sparse(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, b, generator=g) * (torch.rand(n, b, generator=g) < torch.rand(n, 1, generator=g) ** 3)


def _far_apart(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    """Elements down to beyond 2^-32 of the largest, where they begin to count as zero."""
    span = torch.randint(1, 40, (n, 1), generator=g)
    x = torch.exp2(-(torch.rand(n, b, generator=g) * span)) * _significands(n, g)
    edge = 2.0 ** (-32 + torch.randint(-1, 2, (n, b), generator=g).float())
    x = torch.where(torch.rand(n, b, generator=g) < 0.1, edge, x)
    x[torch.arange(n), torch.randint(0, b, (n,), generator=g)] = 1.0
    return x * _signs((n, b), g)


def _normal(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, b, generator=g)


def _uniform(fmt: Format, n: int, b: int, g: torch.Generator) -> torch.Tensor:
    return torch.rand(n, b, generator=g) * 2 - 1


KINDS: dict[str, Callable[[Format, int, int, torch.Generator], torch.Tensor]] = {
    "constant": _constant,
    "two-valued": _two_valued,
    "nearly constant": _near,
    "one outlier": _outlier,
    "ties": _ties,
    "on the grid": _on_grid,
    "at the edges": _at_the_edges,
    "sorted": _sorted,
    "sparse": _sparse,
    "far apart": _far_apart,
    "normal": _normal,
    "uniform": _uniform,
}
SIZES = ("alike", "spread", "2^-40 .. 2^20", "smallest of the dtype", "largest of the dtype")
IMPORTANCES = (
    "none",
    "uniform",
    "half of them zero",
    "2^-30 .. 2^30",
    "one column alone",
    "one column hardly",
    "equal",
)


def importance_of(name: str, columns: int, g: torch.Generator) -> torch.Tensor | None:
    """``[columns]`` weights from none to hostile, the largest anywhere in float32."""
    if name == "none":
        return None
    uniform = torch.rand(columns, generator=g)
    at = int(torch.randint(0, columns, (1,), generator=g))
    if name == "half of them zero":
        uniform[torch.rand(columns, generator=g) < 0.5] = 0.0
        uniform[at] = 1.0
    elif name == "2^-30 .. 2^30":
        uniform = torch.exp2(torch.randint(-30, 31, (columns,), generator=g).float())
    elif name == "one column alone":
        uniform = torch.zeros(columns)
        uniform[at] = 3.0
    elif name == "one column hardly":  # all weigh the same but one in eight
        uniform = torch.where(torch.rand(columns, generator=g) < 0.125, 2.0**-24, 1.0)
        uniform[at] = 1.0
    elif name == "equal":
        uniform = torch.full((columns,), 1.7)
    return uniform * 2.0 ** int(torch.randint(-90, 91, (1,), generator=g))


def _sized(x: torch.Tensor, size: str, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """The blocks ``x`` times powers of two, one a block, so that all are finite in ``dtype``."""
    n, info = len(x), torch.finfo(dtype)
    top = torch.frexp(x.abs().amax(dim=1, keepdim=True)).exponent  # largest element below 2^top
    low = int(torch.frexp(torch.tensor(info.smallest_normal)).exponent)
    high = int(torch.frexp(torch.tensor(info.max)).exponent)  # finfo.max is just below 2^high
    if size == "alike":
        power = -6 - top
    elif size == "spread":
        power = torch.randint(-14, 3, (n, 1), generator=g) - top
    elif size == "2^-40 .. 2^20":
        power = torch.randint(-40, 21, (n, 1), generator=g) - top
    elif size == "smallest of the dtype":
        power = low + torch.randint(-10, 12, (n, 1), generator=g) - top
    else:
        power = high - torch.randint(1, 12, (n, 1), generator=g) - top
    wide = torch.ldexp(x.double(), torch.minimum(power, high - 1 - top))
    return wide.clamp(-info.max, info.max).to(dtype)


def make(
    fmt: Format,
    shape: tuple[int, int],
    *,
    kinds: Sequence[str],
    size: str,
    dtype: torch.dtype,
    importance: str,
    seed: int,
) -> Case:
    """A weight of ``shape`` for each of ``kinds``, below each other, with one global scale and one importance."""
    g = torch.Generator().manual_seed(seed)
    rows, cols = fmt.block_extent(shape)
    grid = fmt.scale_shape(shape)
    parts = []
    for kind in kinds:
        x = KINDS[kind](fmt, grid[0] * grid[1], rows * cols, g)
        parts.append(from_blocks(_sized(x, size, dtype, g), fmt=fmt, shape=shape))
    w = torch.cat(parts)
    global_scale = None
    if fmt.has_global:
        factor = (1.0, 1.0, 1.37, 1.9, 2.0**-9, 2.0**-20, 2.0**9)[int(torch.randint(0, 7, (1,), generator=g))]
        amax = float(w.double().abs().max()) or 1.0
        global_scale = torch.tensor(amax / fmt.max_product * factor, dtype=torch.float32).clamp(2.0**-100, 2.0**100)
    return Case(fmt, w, global_scale, importance_of(importance, shape[1], g))


# Searches


def by_torch(w: torch.Tensor, fmt: Format, g: torch.Tensor | None, h: torch.Tensor | None) -> torch.Tensor | None:
    """``search/exact.py``."""
    return exact.search(w, fmt, global_scale=g, importance=h)


def by_triton(w: torch.Tensor, fmt: Format, g: torch.Tensor | None, h: torch.Tensor | None) -> torch.Tensor | None:
    """The kernels of a CUDA device, or those that Triton interprets."""
    where = "cpu" if triton.interpreting() else "cuda"
    done = triton.block_quantize(w.to(where), fmt, global_scale=g, importance=h)
    return None if done is None else done[1].cpu()


def compiled(isa: str) -> Search:
    """The compiled kernels of one instruction set."""

    def run(w: torch.Tensor, fmt: Format, g: torch.Tensor | None, h: torch.Tensor | None) -> torch.Tensor | None:
        cpu.force_isa(isa)
        try:
            done = cpu.block_quantize(w, fmt, global_scale=g, importance=h)
        finally:
            cpu.force_isa(None)
        return None if done is None else done[1]

    return run


def searches() -> dict[str, Search]:
    """Every path of this machine that claims the scales of brute force; they give None where they have no kernel."""
    on_gpu = {"triton": by_triton} if triton.available() else {}
    return {"torch": by_torch} | {isa: compiled(isa) for isa in cpu.isas()} | on_gpu


# The oracle for scales that are numbers


def _least_number(
    w: torch.Tensor, fmt: Format, global_scale: torch.Tensor | None, importance: torch.Tensor | None
) -> torch.Tensor:
    """The positive normal bfloat16 or float16 scale of least score, ties to the smaller one, for every block.

    All of them are scored but those where the largest element rounds to zero (their score is inf by definition) and
    those where each element that counts (2^-32 of the largest), or each but zeros, is more than twice the largest
    magnitude.
    """
    x = magnitude_blocks(w, fmt)
    h = importance_blocks(importance, w, fmt)
    legal = all_scales(fmt.scale)
    g = 1.0 if global_scale is None else float(global_scale)
    weights = [None] * len(x) if h is None else h.split(1)
    chosen = [_least_of(x[k : k + 1], weights[k], legal, g, fmt, global_scale) for k in range(len(x))]
    return torch.stack(chosen).reshape(fmt.scale_shape((w.shape[0], w.shape[1])))


def _least_of(
    x: torch.Tensor,
    h: torch.Tensor | None,
    legal: torch.Tensor,
    g: float,
    fmt: Format,
    global_scale: torch.Tensor | None,
) -> torch.Tensor:
    numbers, size = legal.double(), x.double().abs()
    amax = float(size.max())
    if amax == 0.0:
        return legal[0]
    largest = 2 * amax / (fmt.element.min_positive * g)
    smallest = max(amax * 2.0**-34, float(size[size > 0].min()) / 4) / (fmt.element.max * g)
    candidates = legal[(numbers <= largest) & (numbers >= smallest)]
    if len(candidates) == 0:
        return legal[0]
    end = int(x[0].nonzero()[-1]) + 1  # zeros behind it, such as the padding of a partial block, add nothing to a sum
    x, h = x[:, :end], None if h is None else h[:, :end]
    found = []
    for part in candidates.split(max(1, (1 << 19) // end)):
        n = len(part)
        weight = None if h is None else h.expand(n, -1)
        found.append(scores(x.expand(n, -1), part, fmt=fmt, global_scale=global_scale, h=weight))
    score = torch.cat(found).nan_to_num(nan=float("inf"), posinf=float("inf"))
    return candidates[int((score == score.min()).nonzero()[0])] if bool(score.isfinite().any()) else legal[0]
