"""GPTQ on both sides of a weight: errors in rows are compensated by later rows, as those in columns by later columns.

Where it is known how much the model minds an error at each output (G = E[g g^T], g the gradient of the model's loss at
the outputs), an error E of the weight costs tr(G E H E^T), H the moment of the inputs. With G = U U^T, U upper
triangular, that is the sum over groups of rows r, in order, of

    | U_rr^T (E_r + U_rr^-T sum_{k<r} U_kr^T E_k) |^2 in the metric H

so a group of rows is quantized as GPTQ would quantize it, after what the rows before it have left is added to it. The
rows that cost most come first. Within a group rows are taken as independent.

Source: the same step on columns is LDLQ (``metric.py``); on both sides YAQA (Tseng et al. 2025, arXiv 2505.22988).
Knows tensors and moments; must not know how a group of rows is quantized, statistics files or models.
"""

from collections.abc import Callable, Sequence

import torch

from ptqpipe.algorithms.metric import factored
from ptqpipe.formats import Format
from ptqpipe.inputs import OUT_ROWS
from ptqpipe.qtensor import QTensor

GROUP = 16  # rows that are quantized together
DAMPING = 0.1  # of G: share of its mean diagonal

Quantize = Callable[[torch.Tensor], QTensor]


def possible(fmt: Format) -> bool:
    """Whether rows can be quantized group by group: every row has scales of its own."""
    return fmt.block[0] == 1 and not fmt.one_scale


def codes(w: torch.Tensor, outputs: Sequence[torch.Tensor], quantize: Quantize) -> QTensor:
    """The codes of ``w`` [n, K].

    outputs   float32 [b, b] G of every run of OUT_ROWS rows
    quantize  rows [b, K] -> their codes in the metric of the inputs
    """
    runs = zip(torch.split(w.float(), OUT_ROWS), outputs, strict=True)
    return _joined([_of_run(rows, g.to(w.device), quantize) for rows, g in runs])


def _of_run(w: torch.Tensor, g: torch.Tensor, quantize: Quantize) -> QTensor:
    mean = float(g.diagonal().double().mean())
    if not mean > 0:  # the model does not mind: any error will do, the least one is known
        return quantize(w)
    order = torch.argsort(g.diagonal(), descending=True, stable=True)
    backwards = order.flip(0)  # of which a lower factor is, read backwards, the upper one of the order

    def damped(share: float) -> tuple[torch.Tensor, torch.Tensor]:
        h = g[backwards][:, backwards].double()
        h.diagonal().add_(share * mean)
        return g, h

    _, lower, _ = factored(damped, DAMPING, "the gradients at the outputs")
    upper = lower.flip(0, 1)
    error = torch.zeros_like(w)  # in the order
    found: list[QTensor] = []
    for start in range(0, len(w), GROUP):
        group = slice(start, start + GROUP)
        exact = w[order[group]]
        pull = torch.linalg.solve_triangular(upper[group, group].t(), upper[:start, group].t(), upper=False)
        found.append(quantize(torch.addmm(exact, pull.float(), error[:start])))
        error[group] = exact - found[-1].dequantize()
    return _joined(found, torch.argsort(order))


def _joined(parts: Sequence[QTensor], places: torch.Tensor | None = None) -> QTensor:
    """The rows of all, one after the other, or those at ``places`` int64 of them."""
    first = parts[0]
    codes, scales = torch.cat([q.data for q in parts]), torch.cat([q.scales for q in parts])
    if places is not None:
        codes, scales = codes[places], scales[places]
    return QTensor(first.fmt, (len(codes), first.shape[1]), codes, scales, first.global_scale)
