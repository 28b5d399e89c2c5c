"""GPTQ on both sides of a weight: errors in rows are compensated by later rows, as those in columns by later columns.

Where it is known how much the model minds an error at each output (G = E[g g^T], g the gradient of the model's loss at
the outputs), an error E of the weight costs tr(G E H E^T), H the moment of the inputs. With G = U U^T, U upper
triangular, that is the sum over groups of rows r, in order, of

    | U_rr^T (E_r + U_rr^-T sum_{k<r} U_kr^T E_k) |^2 in the metric H

so a group of rows is quantized as GPTQ would quantize it, after what the rows before it have left is added to it. The
rows that cost most come first. Within a group rows are taken as independent.

Source: the same step on columns is LDLQ (``metric.py``); on both sides YAQA (Tseng et al. 2025, arXiv 2505.22988).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization.metric import factored

GROUP = 16  # rows that are quantized together
OUTPUT_DAMPING = 0.1  # of G: share of its mean diagonal

Quantize = Callable[[torch.Tensor], QTensor]


def possible(fmt: Format) -> bool:
    """Whether rows can be quantized group by group: every row has scales of its own."""
    return fmt.block[0] == 1 and not fmt.one_scale


def codes(w: torch.Tensor, outputs: Sequence[torch.Tensor], quantize: Quantize) -> QTensor:
    """The codes of ``w`` [n, K].

    outputs   float32 [b, b] G of every run of rows, one run after the other; no run depends on another, so a group of
              each is quantized at once
    quantize  rows [b, K] -> their codes in the metric of the inputs, each row by itself
    """
    parts = torch.split(w.float(), [len(g) for g in outputs])
    runs = [_Run.of(rows, g.to(w.device)) for rows, g in zip(parts, outputs, strict=True)]
    firsts = [0, *itertools.accumulate(len(g) for g in outputs)]
    groups, places = [], []
    for start in range(0, max(len(g) for g in outputs), GROUP):
        targets = [run.target(start) for run in runs]
        groups.append(quantize(torch.cat(targets)))
        values = torch.split(decoded(groups[-1]), [len(t) for t in targets])
        for run, of_run in zip(runs, values, strict=True):
            run.rest[start : start + GROUP] -= of_run
        places += [first + run.order[start : start + GROUP] for first, run in zip(firsts, runs, strict=False)]
    return _placed(groups, torch.argsort(torch.cat(places)))


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows whose gradients are known together.

    order  int64 [b]: as they are quantized
    upper  float64 [b, b]: U, damped, in that order
    rest   float32 [b, K], in that order: the rows, and the errors of those that have codes
    """

    order: torch.Tensor
    upper: torch.Tensor
    rest: torch.Tensor

    @classmethod
    def of(cls, w: torch.Tensor, g: torch.Tensor) -> "_Run":
        """Of rows [b, K] without codes and G [b, b]."""
        mean = float(g.diagonal().double().mean())
        if not mean > 0:  # the model does not mind: any error will do, the least one of each row is known
            g, mean = torch.eye(len(g), device=g.device), 1.0
        order = torch.argsort(g.diagonal(), descending=True, stable=True)
        backwards = order.flip(0)  # of which a lower factor is, read backwards, the upper one of the order

        def damped(share: float) -> tuple[torch.Tensor, torch.Tensor]:
            h = g[backwards][:, backwards].double()
            h.diagonal().add_(share * mean)
            return g, h

        _, lower, _ = factored(damped, OUTPUT_DAMPING, "the gradients at the outputs")
        return cls(order, lower.flip(0, 1), w[order])

    def target(self, start: int) -> torch.Tensor:
        """The group of rows from ``start`` on with what those before it have left; none behind the last row."""
        group = slice(start, start + GROUP)
        exact = self.rest[group]
        if not len(exact):
            return exact
        above = self.upper[:start, group].t()
        pull = torch.linalg.solve_triangular(self.upper[group, group].t(), above, upper=False)
        return torch.addmm(exact, pull.float(), self.rest[:start])


def _placed(parts: Sequence[QTensor], places: torch.Tensor) -> QTensor:
    """The rows of all, one after the other, that are at ``places`` int64."""
    first = parts[0]
    data, scales = (torch.cat([getattr(q, name) for q in parts])[places] for name in ("data", "scales"))
    return QTensor(first.fmt, (len(data), first.shape[1]), data, scales, first.global_scale)
