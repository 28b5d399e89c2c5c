"""Few rows times a packed weight on a CPU: the compiled kernel behind ``runtime/packed.py``.

Reads every packed byte once for up to eight rows of x. Sums are float32, in an order that depends on K alone: neither
threads nor the number of rows nor the other rows of a call change a bit of a result. On CPUs with AVX512-BF16 products
are those of VDPBF16PS (float32, subnormal inputs taken as zero), elsewhere float32 products and sums.

Knows addresses and formats; must not know modules.
"""

import ctypes

import torch

from ptqpipe.formats import WHOLE, Format
from ptqpipe.kernels import cpu_library as lib

_ELEMENTS = {"e2m1": 0, "e4m3": 1}
_DTYPES = {torch.float32: 0, torch.bfloat16: 2}
_NO_SCALES, _E4M3, _E8M0, _FLOAT = 0, 1, 2, 3
_SCALES = {("e4m3", 16): _E4M3, ("e8m0", 32): _E8M0, ("bf16", 128): _FLOAT}
_WORTH_A_THREAD = 1 << 18  # weights, below which waking another thread costs more than it brings


def linear(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    factor: torch.Tensor | None,
    fmt: Format,
    bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """``[M, N]`` bfloat16: ``x [M, K]`` bfloat16 times a weight as `PackedWeight` describes it, plus ``bias [N]``.

    None for what has no kernel: other dtypes and formats, strided bytes, no compiler.
    """
    kind = _kind(fmt, scales)
    plain = all(part.device.type == "cpu" for part in (x, data))
    if kind is None or not plain or x.dtype != torch.bfloat16 or not lib.known_isas() or data.stride(-1) != 1:
        return None
    x = x.contiguous()
    n, k = data.shape[0], x.shape[1]
    numbers = scales.float().contiguous() if kind == _FLOAT and scales is not None else scales
    added = None if bias is None else bias.float().contiguous()
    out = torch.empty(x.shape[0], n, dtype=x.dtype)
    job = lib.Linear(
        data=data.data_ptr(), data_stride=data.stride(0), n=n, k=k,
        scales=None if numbers is None else numbers.data_ptr(),
        scale_stride=0 if numbers is None else numbers.shape[1],
        scale_rows=fmt.block[0] if kind == _FLOAT else 1,
        element=_ELEMENTS[fmt.element.name], scale_kind=kind,
        factor=None if factor is None else factor.data_ptr(),
        factor_step=int(factor is not None and len(factor) > 1),
        x=x.data_ptr(), m=x.shape[0], bias=None if added is None else added.data_ptr(), out=out.data_ptr(),
        threads=min(torch.get_num_threads(), 1 + n * k // _WORTH_A_THREAD),
    )  # fmt: skip
    return out if lib.call("ptq_linear_rows", ctypes.byref(job)) == lib.OK else None


def _kind(fmt: Format, scales: torch.Tensor | None) -> int | None:
    """How the kernel reads the scales; None where it does not."""
    if fmt.element.name not in _ELEMENTS:
        return None
    if scales is None:
        return _NO_SCALES if fmt.block[1] == WHOLE else None
    return _SCALES.get((fmt.scale.name, fmt.block[1]))
