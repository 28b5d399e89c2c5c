"""Torch mirrors of the kernels whose results depend on an order of additions: the same bits without a compiler.

A sum over a matrix is kept in 16 float64 lanes, lane = column mod 16, rows in order; a sum over blocks likewise, lane =
index of the block mod 16. The lanes are then folded: halves onto each other until one is left.
"""

import numpy as np
import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import QTensor

LANES = 16
_CHUNK = 1 << 20  # elements in float64 at a time


def fold(lanes: torch.Tensor) -> float:
    """float64 ``[16]`` -> their sum: 8 sums of lanes i and i + 8, then 4, 2, 1."""
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def add_rows(lanes: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """float64 ``[16]``: ``lanes`` plus the rows of ``terms`` ``[n, 16]``, one after the other.

    numpy's accumulate adds in order by definition; torch and numpy sums may not.
    """
    rows = torch.cat((lanes.unsqueeze(0), terms))
    return torch.from_numpy(np.add.accumulate(rows.numpy(), axis=0)[-1])


def add_columns(lanes: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """:func:`add_rows` for a matrix ``[rows, columns]``: lane = column mod 16, missing columns add nothing."""
    padded = torch.nn.functional.pad(terms, (0, -terms.shape[1] % LANES))
    return add_rows(lanes, padded.reshape(-1, LANES))


def sum_blocks(terms: torch.Tensor) -> float:
    """The sum of float64 ``terms`` ``[blocks]`` of any device, on the CPU: how ``score_total`` adds its scores."""
    terms, lanes = terms.cpu(), torch.zeros(LANES, dtype=torch.float64)
    for start in range(0, len(terms), _CHUNK):
        lanes = add_columns(lanes, terms[start : start + _CHUNK].unsqueeze(0))
    return fold(lanes)


def decode_error(q: QTensor, w: torch.Tensor) -> tuple[float, float]:
    """(sum (decode - w)^2, sum w^2) in float64, from the float32 decode; the order of ``kernels.cpu.decode_error``.

    On a GPU, which 16 lanes would leave idle, the order is torch's, the same for the same inputs.
    """
    lanes, add = (LANES, add_columns) if w.device.type == "cpu" else (1, _add_all)
    error, energy = torch.zeros(2, lanes, dtype=torch.float64, device=w.device)
    for start, stop in _row_chunks(q.fmt, q.shape):
        value = w[start:stop].double()
        diff = q.narrow(0, start, stop - start).dequantize().double() - value
        error = add(error, diff * diff)
        energy = add(energy, value * value)
    return fold(error), fold(energy)


def _add_all(lanes: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """float64 ``[1]``: ``lanes`` plus all ``terms``."""
    return lanes + terms.sum()


def _row_chunks(fmt: Format, shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Runs of rows on block edges, about ``_CHUNK`` elements each; the sums do not depend on them."""
    block_rows = fmt.block_extent(shape)[0]
    step = max(1, _CHUNK // max(1, shape[1]) // block_rows) * block_rows
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
