"""Streamed moments of the rows of one linear input: exact maxima, sums in float64, quantiles from a histogram.

Sums over the tokens of one call of `RunningMoments.add` are in float64 (mean, second moment) or in one float32 matrix
product (outer products), and calls are added in float64: the error of an outer product is that of a float32 dot product
of as many tokens as one batch has. Rows of bfloat16 have a compiled product, which is as exact for
products above 2^-126, and its diagonal is their second moment.

The first token of a window counts FIRST_WEIGHT times in second moments. Most models send much of every token's
attention to it (an attention sink): its error is in all that follow, and its activations are up to a thousand times as
large.

Quantiles: |x| is counted in 32768 bins, those of its float32 bits without the lower 16 (eight bits of exponent, seven
of mantissa). A bin is at most 1/128 of its value wide, which bounds the relative error of a quantile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ptqpipe.calibration.statistics import BLOCK, QUANTILES
from ptqpipe.numerics.kernels.cpu_gram import add_gram

BINS = 1 << 15
QUANTILE_ERROR = 2.0**-7  # relative, half of it on average
MAX_ROWS = 8192  # rows that one float32 product may sum
FIRST_WEIGHT = 16.0  # labs/first_token; its root scales numbers exactly
LARGEST = 2.0**55  # of |x|: the squares of so many rows, first tokens all, have a sum that float32 holds
Rows = slice | torch.Tensor  # which of the rows of a tensor
NO_ROWS = slice(0)
_SHORT = 64  # rows of few bits whose float32 sum is as good as exact
_STRIPE = 256  # columns of sums, and rows of a symmetric product, that are computed together


@dataclass(slots=True)
class RunningMoments:
    """Moments of the rows x [tokens, K] of one linear input that were seen so far. Tensors on the device of the rows.

    weight      [1] float64, sum over the rows of what each counts in second moments
    amax        [K] float32, max |x|
    total       [K] float64, sum of x
    squares     [K] float64, sum of x^2
    histogram   [BINS] int64, elements by bin of |x|; [0] where no quantiles are wanted
    block_gram  [K/16, 16, 16] float64, sum of x x^T in blocks of 16 columns, or None
    gram        [K, K] float64, sum of x x^T above the diagonal and on it, or None; the blocks are cut from it where it
                is there
    """

    tokens: int
    weight: torch.Tensor
    amax: torch.Tensor
    total: torch.Tensor
    squares: torch.Tensor
    histogram: torch.Tensor
    block_gram: torch.Tensor | None
    gram: torch.Tensor | None

    @classmethod
    def empty(
        cls, columns: int, *, block: bool, full: bool, device: torch.device, quantiles: bool = True
    ) -> "RunningMoments":
        """No rows yet. Blocks are left out where 16 does not divide the columns, the histogram without quantiles."""
        f64 = torch.float64
        blocks = columns // BLOCK if block and not full and columns % BLOCK == 0 else 0
        return cls(
            tokens=0,
            weight=torch.zeros(1, dtype=f64, device=device),
            amax=torch.zeros(columns, device=device),
            total=torch.zeros(columns, dtype=f64, device=device),
            squares=torch.zeros(columns, dtype=f64, device=device),
            histogram=torch.zeros(BINS if quantiles else 0, dtype=torch.int64, device=device),
            block_gram=torch.zeros(blocks, BLOCK, BLOCK, dtype=f64, device=device) if blocks else None,
            gram=torch.zeros(columns, columns, dtype=f64, device=device) if full else None,
        )

    @staticmethod
    def nbytes(columns: int, *, block: bool, full: bool) -> int:
        """What the moments of an input of K columns take."""
        outer = columns * (columns if full else BLOCK if block else 0)
        return 8 * (1 + BINS + 2 * columns + outer) + 4 * columns

    def add(self, x: torch.Tensor, first: Rows = NO_ROWS) -> bool:
        """Adds rows [tokens, K] of any float dtype, of which ``first`` are the first tokens of windows; False, and then
        the sums are of no use, where one is not below `LARGEST`."""
        x = x.detach()
        self.weight += weight_of(x, first)
        parts = zip(torch.split(x, MAX_ROWS), torch.split(weighted(x, first), MAX_ROWS), strict=True)
        return all(self._add(rows, weighted_rows) for rows, weighted_rows in parts)

    def _add(self, rows: torch.Tensor, weighted_rows: torch.Tensor) -> bool:
        x = rows if rows.dtype == torch.float64 else rows.float()
        magnitude = x.abs()
        amax = magnitude.amax(0)
        if not bool((amax < LARGEST).all()):
            return False
        self.tokens += x.shape[0]
        self.amax = torch.maximum(self.amax, amax.float())
        self._count(magnitude)
        if self.gram is not None and rows.dtype == torch.bfloat16:  # numbers of few bits, whose squares the product has
            add_outer(self.gram, weighted_rows)
            self.total += torch.stack([part.sum(0) for part in torch.split(x, _SHORT)]).double().sum(0)
            self.squares = self.gram.diagonal().clone()
            return True
        for start in range(0, x.shape[1], _STRIPE):  # norms with a dtype of their own take five times as long
            columns = slice(start, start + _STRIPE)
            self.total[columns] += x[:, columns].sum(0, dtype=torch.float64)
            self.squares[columns] += weighted_rows[:, columns].to(torch.float64, copy=True).square_().sum(0)
        if self.gram is not None:
            add_outer(self.gram, weighted_rows)
        elif self.block_gram is not None:
            blocks = weighted_rows.to(x.dtype).view(x.shape[0], -1, BLOCK).transpose(0, 1)  # [K/16, tokens, 16]
            self.block_gram += blocks.transpose(1, 2) @ blocks
        return True

    def _count(self, magnitude: torch.Tensor) -> None:
        if self.histogram.numel():
            bins = magnitude.float().view(torch.int32).bitwise_right_shift_(16)
            self.histogram += torch.bincount(bins.flatten(), minlength=BINS)

    def sums(self) -> list[torch.Tensor]:
        """What adds over processes, beside the tokens; ``amax`` is the one that does not."""
        tensors = [self.weight, self.total, self.squares, self.histogram, self.block_gram, self.gram]
        return [tensor for tensor in tensors if tensor is not None]

    def merge(self, other: "RunningMoments") -> None:
        self.tokens += other.tokens
        self.amax = torch.maximum(self.amax, other.amax)
        for mine, theirs in zip(self.sums(), other.sums(), strict=True):
            mine += theirs

    def on(self, device: torch.device) -> "RunningMoments":
        outer = (None if tensor is None else tensor.to(device) for tensor in (self.block_gram, self.gram))
        sums = (tensor.to(device) for tensor in (self.weight, self.amax, self.total, self.squares, self.histogram))
        return RunningMoments(self.tokens, *sums, *outer)

    def quantiles(self) -> dict[float, float]:
        """p -> the p-quantile of |x| over all elements, within QUANTILE_ERROR of itself; none without a histogram."""
        ranks = self.histogram.cumsum(0).tolist()
        top = float(self.amax.max()) if self.amax.numel() else 0.0
        return {p: _quantile(ranks, p, top) for p in QUANTILES if ranks}

    def tensors(self, *, block: bool) -> dict[str, torch.Tensor]:
        """The means over tokens by their names in a statistics folder: float32 on the CPU, outer products symmetric."""
        count = max(1.0, float(self.weight))
        mean = self.total / max(1, self.tokens)
        means = {"amax": self.amax, "mean": mean, "second_moment": self.squares / count}
        columns = self.amax.numel()
        if self.gram is not None:
            mirror(self.gram)
            if block and columns % BLOCK == 0:
                means["block_moment"] = _diagonal_blocks(self.gram) / count
            # In place: this is the largest tensor of all. Rounding each half alone keeps it symmetric.
            means["full_moment"] = self.gram.div_(count)
            self.gram = None
        elif self.block_gram is not None:
            means["block_moment"] = self.block_gram / count
        return {name: tensor.to("cpu", torch.float32).contiguous() for name, tensor in means.items()}


def first_tokens(windows: Sequence[int], rows: int) -> Rows:
    """Which rows of an input are of the first tokens of windows [samples, tokens]; none unless it has one a token."""
    samples, tokens = windows
    return slice(None, None, tokens) if rows == samples * tokens else NO_ROWS


def weighted(x: torch.Tensor, first: Rows) -> torch.Tensor:
    """``x`` [tokens, K], whose outer products then count the rows ``first`` FIRST_WEIGHT times."""
    if not len(x[first]):
        return x
    x = x.float() if x.dtype == torch.float16 else x.clone()  # whose largest number is 65504
    x[first] *= FIRST_WEIGHT**0.5
    return x


def weight_of(x: torch.Tensor, first: Rows) -> float:
    """The sum of what the rows of ``x`` count in `weighted`."""
    return len(x) + (FIRST_WEIGHT - 1) * len(x[first])


def symmetric(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x^T y [K, K] of rows [tokens, K] of which it is symmetric: what lies below the diagonal is not computed, but for
    a stripe beside it."""
    columns = x.shape[1]
    product = x.new_empty(columns, columns)
    for start in range(0, columns, _STRIPE):
        stop = min(start + _STRIPE, columns)
        product[start:stop, start:] = x[:, start:stop].t() @ y[:, start:]
        product[stop:, start:stop] = product[start:stop, stop:].t()
    return product


def add_outer(sums: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None = None) -> None:
    """Adds x^T y to ``sums`` float64 [K, L], of rows [tokens, K] and [tokens, L]. Without ``y`` adds x^T x, and what is
    below the diagonal has no meaning until `mirror` has been called."""
    if not add_gram(sums, x, y):
        x = x if x.dtype == torch.float64 else x.float()
        sums += symmetric(x, x) if y is None else x.t() @ y.to(x.dtype)


def mirror(sums: torch.Tensor) -> None:
    """Copies what a square matrix has above its diagonal to what is below, in place."""
    for start in range(0, len(sums), _STRIPE):
        stop = start + _STRIPE
        sums[stop:, start:stop] = sums[start:stop, stop:].t()
        beside = sums[start:stop, start:stop]
        beside.copy_(beside.triu() + beside.triu(1).t())


def _diagonal_blocks(gram: torch.Tensor) -> torch.Tensor:
    """[K/16, 16, 16] of [K, K]."""
    count = gram.shape[0] // BLOCK
    parts = gram.view(count, BLOCK, count, BLOCK)
    return torch.diagonal(parts, dim1=0, dim2=2).permute(2, 0, 1)


def _quantile(ranks: Sequence[int], p: float, top: float) -> float:
    """Linear inside the bin, at most ``top``; 0.0 of no elements."""
    target = p * ranks[-1] if ranks else 0.0
    low, high = 0, len(ranks)
    while low < high:  # the first bin whose elements reach the rank
        middle = (low + high) // 2
        low, high = (middle + 1, high) if ranks[middle] < target else (low, middle)
    if not target or low >= len(ranks):
        return 0.0
    before = ranks[low - 1] if low else 0
    edges = torch.tensor([low << 16, (low + 1) << 16], dtype=torch.int32).view(torch.float32)
    lower, upper = float(edges[0]), float(edges[1])
    part = (target - before) / (ranks[low] - before)
    return min(lower + part * (upper - lower) if math.isfinite(upper) else lower, top)


def stand_in(measured: Sequence[RunningMoments]) -> tuple[RunningMoments, dict[float, float]]:
    """What an expert without data gets from its group: the largest amax and quantiles, the means over all tokens."""
    first = measured[0]
    whole = RunningMoments.empty(
        first.amax.numel(),
        block=first.block_gram is not None,
        full=first.gram is not None,
        device=first.amax.device,
        quantiles=bool(first.histogram.numel()),
    )
    for moments in measured:
        whole.merge(moments)
    quantiles_of_each = [moments.quantiles() for moments in measured]
    return whole, {p: max(quantiles[p] for quantiles in quantiles_of_each) for p in quantiles_of_each[0]}
