"""Low-rank compensation: the product of two thin matrices that corrects the quantization error of a weight best.

With E = W - What and H = E[x x^T] of the layer's input x, the factors minimize

    || (E - L R) H^1/2 ||_F^2  =  E |(E - L R) x|^2        over L [N, r], R [r, K]

exactly, by Eckart and Young: keep the r largest singular directions of E H^1/2. Without a moment H is the identity,
and the factors are those of the plain SVD. They come from an eigendecomposition in float64 on the shorter side, so that
only a square matrix of that side is needed, and are then rounded to what is stored. After LoRC (Yao et al., arXiv
2303.08302), which takes H = I; LQER (Zhang et al., arXiv 2402.02446) weights by a diagonal, QERA (arXiv 2410.06040) by
the full moment.

Knows tensors and moments; must not know recipes, statistics files or containers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ptqpipe.numerics.formats import FORMATS
from ptqpipe.numerics.qtensor import Factors, QTensor
from ptqpipe.numerics.schemes import LowRank
from ptqpipe.quantization.metric import check_moment, factored
from ptqpipe.quantization.unit import CHUNK_ELEMENTS, Weight, measure

RUN_ELEMENTS = 1 << 21  # of a matrix in float64 at a time
_FP8 = torch.float8_e4m3fn
_FP8_MAX = FORMATS["fp8_channel"].element.max


@dataclass(frozen=True, slots=True)
class Weighting:
    """H of one input in float64 with a square root C, H = C C^T; for the identity both are None.

    moment, root  [K, K] with ``root`` lower triangular, or [K] for a diagonal H
    """

    moment: torch.Tensor | None = None
    root: torch.Tensor | None = None

    @classmethod
    def of(
        cls, second: torch.Tensor | None, full: torch.Tensor | None, *, damping: float, name: str = "the input"
    ) -> "Weighting":
        """From the best moment at hand: ``full`` [K, K], else ``second`` [K], else none; the share ``damping`` of its
        mean diagonal is added, and more by tens where the full one is not positive definite.

        An input that calibration saw only zeros of says nothing: then H is the identity. NumericsError for NaN, inf.
        """
        if second is None and full is None:
            return cls()
        if full is None:
            assert second is not None
            check_moment(torch.diag(second), name)
            h = second.double()
            mean = float(h.mean())
            h = h + damping * mean
            return cls(h, h.sqrt()) if mean > 0 else cls()
        check_moment(full, name)
        mean = float(full.diagonal().double().mean())
        if not mean > 0:
            return cls()

        def damped(share: float) -> tuple[torch.Tensor, torch.Tensor]:
            h = full.double()
            h.diagonal().add_(share * mean)
            return h, h

        h, root, _ = factored(damped, damping, name)
        return cls(h, root)

    @property
    def kind(self) -> str:
        """ "none", "diagonal" or "full"."""
        return "none" if self.moment is None else "diagonal" if self.moment.dim() == 1 else "full"

    def times(self, e: torch.Tensor) -> torch.Tensor:
        """e H of float64 rows [n, K]."""
        if self.moment is None:
            return e
        return e * self.moment if self.moment.dim() == 1 else e @ self.moment

    def energy(self, e: torch.Tensor) -> float:
        """tr(e H e^T) of float64 rows [n, K]."""
        return float((self.times(e) * e).sum())

    def into(self, m: torch.Tensor) -> torch.Tensor:
        """C m of [K, n]."""
        if self.root is None:
            return m
        return self.root.unsqueeze(1) * m if self.root.dim() == 1 else self.root @ m

    def around(self, g: torch.Tensor) -> torch.Tensor:
        """C^T g C of [K, K]."""
        if self.root is None:
            return g
        return self.root.unsqueeze(1) * g * self.root if self.root.dim() == 1 else self.root.t() @ g @ self.root

    def out_of(self, m: torch.Tensor) -> torch.Tensor:
        """C^-T m of [K, n]."""
        if self.root is None:
            return m
        if self.root.dim() == 1:
            return torch.where(self.root > 0, 1.0 / self.root.clamp(min=1e-300), 0.0).unsqueeze(1) * m
        found: torch.Tensor = torch.linalg.solve_triangular(self.root.t(), m, upper=True)
        return found


@dataclass(frozen=True, slots=True)
class Corrected:
    """A weight with its low-rank part.

    rows           the runs that were given, each with its part of the factors
    squared_error  sum (decode - w)^2 of the whole decode
    versus_codes   error as the judge sees it beside that of the codes alone; 1 where the factors are zero
    dropped        True if the factors did not reduce the error (rounding them, or other samples, can do that); they
                   are then set to zero
    """

    rows: tuple[tuple[int, QTensor], ...]
    squared_error: float
    versus_codes: float
    dropped: bool


def correct(
    weight: Weight,
    runs: Sequence[tuple[int, QTensor]],
    low: LowRank,
    *,
    weighting: Weighting,
    judge: Weighting | None = None,
) -> Corrected:
    """The best low-rank part for ``weight`` [N, K], whose codes are ``runs`` of rows in order.

    judge  what decides whether it is kept: the moment of samples that ``weighting`` has not seen, or None for that

    CPU arithmetic in float64, in an order that depends on the shape alone.
    """
    error = torch.empty(weight.shape, dtype=torch.float32)
    for start, q in runs:
        stop = start + q.shape[0]
        error[start:stop] = weight.rows(start, stop).float().cpu() - q.dequantize().cpu()
    left, right = best_factors(error, low.of(weight.shape), weighting=weighting)
    factors = stored_factors(left, right, low.dtype)
    judge = weighting if judge is None else judge
    before = sum(judge.energy(e) for _, e in _runs(error))
    error -= factors.product()
    after = sum(judge.energy(e) for _, e in _runs(error))
    dropped = not after < before
    if dropped:
        factors = replace(factors, left=torch.zeros_like(factors.left))
    made = []
    squared = 0.0
    for start, q in runs:
        part = _on(factors.narrow(0, start, q.shape[0]), q.data.device)
        made.append((start, replace(q, low_rank=part)))
        squared += measure(made[-1][1], weight.rows(start, start + q.shape[0]).to(q.data.device))[0]
    return Corrected(tuple(made), squared, after / before if before and not dropped else 1.0, dropped)


def best_factors(error: torch.Tensor, rank: int, *, weighting: Weighting) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 (L [N, rank], R [rank, K]) that minimize ||(error - L R) H^1/2||_F for ``error`` float32 [N, K].

    The first components are the largest; signs are such that the largest entry of each column of L is positive.
    """
    n, k = error.shape
    if n <= k:  # eigenvectors of E H E^T are the left singular vectors, and R = U^T E
        gram = torch.zeros(n, n, dtype=torch.float64)
        for start, e in _runs(error):
            weighted = weighting.times(e)
            for first, other in _runs(error[: start + len(e)]):  # the lower triangle
                gram[start : start + len(e), first : first + len(other)] = weighted @ other.t()
        left = _leading(gram, rank)
        right = torch.zeros(rank, k, dtype=torch.float64)
        for start, e in _runs(error):
            right += left[start : start + len(e)].t() @ e
    else:  # eigenvectors V of C^T E^T E C are the right ones: L = E C V, R = V^T C^-1
        gram = torch.zeros(k, k, dtype=torch.float64)
        for _, e in _runs(error):
            gram += e.t() @ e
        basis = _leading(weighting.around(gram), rank)
        right = weighting.out_of(basis).t().contiguous()
        inner = weighting.into(basis)
        left = torch.cat([e @ inner for _, e in _runs(error)])
    top = left.gather(0, left.abs().argmax(dim=0, keepdim=True))
    sign = torch.where(top < 0, -1.0, 1.0).to(torch.float64)
    return left * sign, right * sign.t()


def stored_factors(left: torch.Tensor, right: torch.Tensor, dtype: str) -> Factors:
    """The factors as they are stored: rounded to bfloat16, or to E4M3 with one scale a component.

    A factor of a component is free to move from one side to the other: in bfloat16 both sides get about one magnitude,
    in FP8 the largest entry of each is the largest code.
    """
    high, low = left.abs().amax(dim=0), right.abs().amax(dim=1)
    high, low = torch.where(high > 0, high, 1.0), torch.where(low > 0, low, 1.0)
    if dtype == "fp8":
        codes = (left / high * _FP8_MAX).float().to(_FP8), (right / low.unsqueeze(1) * _FP8_MAX).float().to(_FP8)
        return Factors(*codes, (high * low / _FP8_MAX**2).float())
    even = torch.exp2(torch.round(torch.log2(low / high) / 2))
    return Factors((left * even).bfloat16(), (right / even.unsqueeze(1)).bfloat16())


def memory_bytes(shape: tuple[int, int], *, full: bool) -> int:
    """About what `correct` takes: the error, a run of it in float64 with what comes of it, squares of the side."""
    n, k = shape
    squares = 6 * min(n, k) ** 2 + (2 * k * k if full else 0)  # of the eigendecomposition; H and its root
    return 8 * squares + 4 * n * k + 4 * 8 * min(n * k, RUN_ELEMENTS) + 16 * min(n * k, CHUNK_ELEMENTS)


def _leading(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """float64 [K, rank]: eigenvectors of the largest eigenvalues, the largest first; the lower triangle is read."""
    vectors: torch.Tensor = torch.linalg.eigh(gram)[1]
    return vectors[:, -rank:].flip(1).contiguous()


def _runs(error: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, float64 rows) of a matrix, in runs whose length depends on its columns alone."""
    step = max(1, RUN_ELEMENTS // max(1, error.shape[1]))
    for start in range(0, len(error), step):
        yield start, error[start : start + step].double()


def _on(factors: Factors, device: torch.device) -> Factors:
    scale = None if factors.scale is None else factors.scale.to(device)
    return Factors(factors.left.to(device), factors.right.to(device), scale)
