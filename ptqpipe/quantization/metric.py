"""The output metric of a linear layer: the second moment H = E[x x^T] of its input, prepared for error feedback.

A weight error E = W - What costs tr(E H E^T) = E|E x|^2 at the layer's output. Damping adds a share of H's mean
diagonal to the diagonal: it stands for the directions that calibration has not seen.

Source: GPTQ (Frantar et al. 2022), section 3, in the form of LDLQ (Chee et al. 2023, theorem 1): with H = R R^T and R
upper triangular, tr(E H E^T) = sum over columns i of R_ii^2 |e_i + sum_{j<i} e_j R_ji / R_ii|^2; no inverse is needed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.calibration.inputs import Moments, is_finite
from ptqpipe.errors import FormatError, NumericsError, arg
from ptqpipe.recipe.options import DAMPING

DAMPING_STEP = 10.0  # what a damping that is too small is multiplied by
DAMPING_MAX = 10.0
_STRIPE = 512  # columns of a product of errors that are computed together


@dataclass(frozen=True, slots=True)
class Metric:
    """H of one input, damped and factored. float32, on the device of the weights.

    moment   [K, K] H + damping * mean(diag H) * I, columns in their own order
    order    int64 [K]: the columns as error feedback visits them
    factor   [K, K] R / diag(R) by column, in that order: feedback[j, i] = R_ji / R_ii for j < i, upper triangular
    weight   [K] R_ii^2 in that order: what an error that feedback leaves at column i costs
    damping  the share that was added: more than what was asked where the factorization needed more
    """

    moment: torch.Tensor
    order: torch.Tensor
    factor: torch.Tensor
    weight: torch.Tensor
    damping: float


def make_metric(
    moment: torch.Tensor, *, damping: float = DAMPING, order: torch.Tensor | None = None, name: str = "the input"
) -> Metric:
    """The metric of ``moment`` float32 [K, K], visited in ``order`` (default: as stored).

    A damping at which H is not positive definite is multiplied by 10 until it is; the result says which it became.
    Raises NumericsError for NaN, inf, an all-zero moment, and where even ``DAMPING_MAX`` does not help.
    """
    check_moment(moment, name)
    mean = float(moment.diagonal().double().mean())
    if not mean > 0:
        raise NumericsError(
            f"the second moment of {name} is zero: no data reached it, or its input is always zero; use "
            + arg("algorithm", "rtn")
        )
    order = torch.arange(moment.shape[0], device=moment.device) if order is None else order
    backwards = order.flip(0)  # of which a lower factor is, read backwards, the upper one of the order

    def damped(share: float) -> tuple[torch.Tensor, torch.Tensor]:
        h = moment.clone()
        h.diagonal().add_(share * mean)
        return h, h[backwards][:, backwards].double()

    h, lower, share = factored(damped, damping, name)
    upper = lower.flip(0, 1)
    del lower
    diagonal = upper.diagonal().clone()
    upper /= diagonal
    return Metric(h, order, upper.float(), diagonal.square().float(), share)


def factored(
    damped: Callable[[float], tuple[torch.Tensor, torch.Tensor]], damping: float, name: str
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(a damped moment, its lower Cholesky factor, the share) at the first share of ``damping``, then ten times as much
    at a time, at which the moment is positive definite.

    damped  share -> (what is returned, float64 [K, K] that is factored)

    Raises NumericsError where even ``DAMPING_MAX`` does not help.
    """
    while damping <= DAMPING_MAX:
        moment, h = damped(damping)
        lower, failed = torch.linalg.cholesky_ex(h)
        if not int(failed) and bool(torch.isfinite(lower).all()):
            return moment, lower, damping
        del moment, h, lower
        damping = max(damping, 1e-6) * DAMPING_STEP
    raise NumericsError(
        f"the second moment of {name} is not positive definite at damping {DAMPING_MAX:g}; calibrate on other "
        f"data, or use {arg('algorithm', 'rtn')}"
    )


def memory_bytes(columns: int) -> int:
    """What `make_metric` allocates at its peak, in addition to its argument: copies in float32 and float64."""
    return 28 * columns * columns


def check_moment(moment: torch.Tensor, name: str) -> None:
    """NumericsError unless ``moment`` [K, K] is square, finite and has no negative diagonal."""
    if moment.dim() != 2 or moment.shape[0] != moment.shape[1]:
        raise FormatError(f"the second moment of {name} is {list(moment.shape)}, expected a square matrix")
    if not is_finite(moment) or bool((moment.diagonal() < 0).any()):
        raise NumericsError(f"the second moment of {name} is not finite or negative; calibrate again")


def descending(moment: torch.Tensor, *, group: int = 1) -> torch.Tensor:
    """int64 [K]: columns by their second moment, the largest first; whole groups of ``group`` neighbours by their sum.

    Ties keep the order of the columns.
    """
    energy = moment.diagonal().double().reshape(-1, group).sum(dim=1)
    ranked = torch.argsort(energy, descending=True, stable=True)
    return (ranked.unsqueeze(1) * group + torch.arange(group, device=ranked.device)).reshape(-1)


def expected_error(error: torch.Tensor, moments: Moments, outputs: Sequence[torch.Tensor] | None = None) -> float:
    """tr(E H E^T) of an error [n, K] by the best moment there is: the full one, else the blocks, else the diagonal.

    outputs  moments G of runs of rows: then tr(G E H E^T)
    """
    moment = next((m for m in (moments.full_moment, moments.block_moment) if m is not None), moments.second_moment)
    if outputs is None:
        return output_error(error, moment)
    runs = zip(outputs, torch.split(error, [len(g) for g in outputs]), strict=True)
    return sum(_product(run, moment, g.to(error.device) @ run) for g, run in runs)


def output_error(error: torch.Tensor, moment: torch.Tensor) -> float:
    """tr(E H E^T) of an error [n, K]: the sum over its rows of E[(row x)^2]. Float32 products and a float64 sum.

    moment  H of the inputs x: all of it [K, K], blocks on its diagonal [K/b, b, b], or its diagonal [K]
    """
    return _product(error, moment, error)


def _product(error: torch.Tensor, moment: torch.Tensor, other: torch.Tensor) -> float:
    """tr(E H F^T) of errors E and F [n, K] of which E^T F is symmetric, as H is."""
    if moment.dim() == 1:
        return float(((error.double() * other.double()).sum(dim=0) * moment.double()).sum())
    if moment.dim() == 2:
        return math.fsum(_below(error, moment, other))
    one, two = (e.reshape(-1, *moment.shape[:2]).transpose(0, 1) for e in (error, other))  # [K/b, n, b]
    return float((torch.bmm(one, moment).double() * two.double()).sum())


def _below(error: torch.Tensor, moment: torch.Tensor, other: torch.Tensor) -> Iterator[float]:
    """The parts of tr(E H F^T) for H [K, K] by runs of its columns: what lies above the diagonal is what lies below."""
    for start in range(0, len(moment), _STRIPE):
        run, rest = slice(start, start + _STRIPE), slice(start + _STRIPE, None)
        product = error[:, run] @ moment[run, run]
        if len(moment) > start + _STRIPE:
            product.addmm_(error[:, rest], moment[rest, run], alpha=2.0)
        yield float((product.double() * other[:, run].double()).sum())
