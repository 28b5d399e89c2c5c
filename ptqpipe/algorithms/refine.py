"""Refinement: coordinate descent over codes, which lowers the output error of any quantized weight and never raises it.

With all other codes fixed, tr(E H E^T) is a parabola in one decoded value, so the code nearest to its minimum is the
best one. A sweep visits every column once; the scales stay. Knows tensors and formats; must not know statistics files.
"""

import torch

from ptqpipe.algorithms.gptq import BLOCK, column_scales, nearest
from ptqpipe.formats import Format
from ptqpipe.qtensor import QTensor


def refine(q: QTensor, w: torch.Tensor, *, moment: torch.Tensor, sweeps: int) -> QTensor:
    """``q`` with codes that fit ``w`` [n, K] better in the metric ``moment`` [K, K], after at most ``sweeps`` sweeps.

    Stops early where a sweep changes nothing: no single code can then be improved.
    """
    fmt: Format = q.fmt
    exact = w.float().t().contiguous()
    s = column_scales(q.scales, fmt, shape=q.shape, global_scale=q.global_scale).t().contiguous()
    codes = q.codes.t().contiguous()
    error = exact - q.dequantize().t()
    slope = moment @ error  # [K, n]: half of the derivative by each decoded value, negated
    curvature = moment.diagonal().clamp(min=torch.finfo(torch.float32).tiny)
    for _ in range(sweeps):
        changed = 0
        for start in range(0, len(exact), BLOCK):
            stop = min(start + BLOCK, len(exact))
            before = error[start:stop].clone()
            near = slope[start:stop]
            for i in range(start, stop):
                target = exact[i] - error[i] + near[i - start] / curvature[i]
                codes[i], decoded = nearest(target, s[i], fmt.element)
                moved = exact[i] - decoded - error[i]
                error[i] += moved
                near = near.addr(moment[start:stop, i], moved)
            step = error[start:stop] - before
            changed += int((step != 0).sum())
            slope.addmm_(moment[:, start:stop], step)
        if not changed:
            break
    return QTensor.from_codes(codes.t().contiguous(), q.scales, fmt=fmt, global_scale=q.global_scale)
